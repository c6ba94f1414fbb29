"""``openelm evaluate --checkpoints``: what a run left, each scored as if it stood alone."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_tokenizer as tiny
from command_line import run_here
from folder_makers import small_folder
from pretrain_runs import RECIPE, write_text
from tuning_makers import write

from convert.average import average
from convert.corenet import to_corenet
from openelm_mlx import cli
from openelm_mlx.checkpoint import load_model
from openelm_mlx.checkpoint_finder import find_checkpoints
from openelm_mlx.checkpoint_scores import draw_scores
from openelm_mlx.training_state import load_best


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_text(tmp_path_factory.mktemp("text"))
    valid = folder / "valid.jsonl"
    valid.write_text("".join(valid.read_text().splitlines(keepends=True)[:5]))
    return folder


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, text: Path, tiny_tokenizer: tiny.TinyTokenizer
) -> Path:
    """A pretraining run of 12 updates with states at 4, 8 and 12, the best weights and a result."""
    folder = tmp_path_factory.mktemp("runs")
    recipe = folder / "tiny.yaml"
    recipe.write_text(json.dumps(RECIPE))
    arguments = ["--recipe", recipe, "--data", text / "train.jsonl", "--output", folder / "run"]
    arguments += ["--valid-data", text / "valid.jsonl", "--tokenizer", tiny_tokenizer.path]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("openelm_mlx.run_folder.try_plot_losses", lambda *_, **__: None)
        assert cli.main(["pretrain", *map(str, arguments)]) == 0
    return folder / "run"


def scores(
    capsys: pytest.CaptureFixture[str], output: Path, *arguments: object
) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        if output.name != "drawn.json":
            patch.setattr("openelm_mlx.checkpoint_scores.have_matplotlib", lambda: False)
        outcome = run_here(capsys, "evaluate", *arguments, "--output", output)
    assert outcome.code == 0, outcome.err
    rows: list[dict[str, Any]] = json.loads(output.read_text())["checkpoints"]
    return rows


def perplexity_of(
    capsys: pytest.CaptureFixture[str], folder: Path, text: Path, output: Path
) -> float:
    outcome = run_here(
        *(capsys, "evaluate", "--model", folder, "--data", text / "valid.jsonl"),
        *("--output", output, "--overwrite"),
    )
    assert outcome.code == 0, outcome.err
    return float(json.loads(output.read_text())["perplexity"])


@pytest.mark.slow
def test_each_state_of_a_run_is_scored_with_its_own_weights(
    capsys: pytest.CaptureFixture[str], run: Path, text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "drawn.json"
    rows = scores(capsys, output, "--checkpoints", run, "--data", text / "valid.jsonl")
    found = {row["name"]: row for row in rows}
    assert [row["step"] for row in rows if row["kind"] == "state"] == [4, 8, 12]
    assert found["step-00000012"]["perplexity"] < found["step-00000004"]["perplexity"]
    assert output.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    alone = perplexity_of(capsys, run, text, tmp_path / "alone.json")
    assert found["step-00000012"]["perplexity"] == pytest.approx(alone, rel=1e-6)
    model = load_model(run)
    best = load_best(run, model)
    assert (found["best"]["kind"], found["best"]["step"]) == ("best", best.step)


@pytest.mark.slow
def test_the_mean_of_neighbouring_states_is_scored_and_marked(
    capsys: pytest.CaptureFixture[str], run: Path, text: Path, tmp_path: Path
) -> None:
    flags = ["--checkpoints", run, "--data", text / "valid.jsonl", "--average-last", 2]
    rows = [r for r in scores(capsys, tmp_path / "o.json", *flags) if r["kind"] == "average"]
    assert [row["step"] for row in rows] == [8, 12]
    with find_checkpoints(run, average_last=2) as found:
        last = [c for c in found.checkpoints if c.kind == "average"][-1]
        mean = dict(last.model().parameters()["transformer"]["norm"])["weight"]
    states = [
        mx.load(str(run / "states" / name / "weights.safetensors"))
        for name in ("step-00000008", "step-00000012")
    ]
    expected = sum(state["transformer.norm.weight"] for state in states) / 2  # type: ignore
    assert mx.allclose(mean, expected, atol=1e-7).item()


def test_a_run_without_enough_states_to_average_is_refused(
    capsys: pytest.CaptureFixture[str], run: Path, text: Path
) -> None:
    flags = ["--checkpoints", run, "--data", text / "valid.jsonl"]
    outcome = run_here(capsys, "evaluate", *flags, "--average-last", 4)
    assert "needs as many states, and the run has 3" in outcome.error


def test_model_folders_and_their_average_are_found_by_step(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: Path,
    run: Path,
    tiny_tokenizer: tiny.TinyTokenizer,
) -> None:
    """As CoreNet's release: checkpoints by iteration, and the mean of the last ones."""
    folder = tmp_path / "release"
    folder.mkdir()
    for step in (100, 50):
        small_folder(folder / f"iter_{step}", tiny_tokenizer.tokenizer)
    average([folder / "iter_50", folder / "iter_100"], folder / "mean")
    rows = scores(
        *(capsys, tmp_path / "o.json", "--checkpoints", folder),
        *("--data", text / "valid.jsonl"),
    )
    kinds = [(row["name"], row["kind"], row["step"]) for row in rows]
    assert kinds == [
        ("iter_50", "folder", 50),
        ("iter_100", "folder", 100),
        ("mean", "average", 100),
    ]


def test_corenet_files_are_scored_as_their_folders_are(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: Path,
    tiny_tokenizer: tiny.TinyTokenizer,
) -> None:
    folder = tmp_path / "corenet"
    folder.mkdir()
    base = small_folder(tmp_path / "base", tiny_tokenizer.tokenizer)
    to_corenet(base, folder / "checkpoint_epoch_0_iter_7.pt")
    to_corenet(base, folder / "checkpoint_average.pt")
    rows = scores(
        *(capsys, tmp_path / "o.json", "--checkpoints", folder),
        *("--data", text / "valid.jsonl", "--model", base),
    )
    assert [(row["kind"], row["step"]) for row in rows] == [("folder", 7), ("average", None)]
    alone = perplexity_of(capsys, base, text, tmp_path / "alone.json")
    assert [row["perplexity"] for row in rows] == pytest.approx([alone, alone], rel=1e-6)


@pytest.mark.slow
def test_adapters_of_a_run_are_scored_on_their_base(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: Path,
    tiny_tokenizer: tiny.TinyTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("openelm_mlx.run_folder.try_plot_losses", lambda *_, **__: None)
    base = small_folder(tmp_path / "base", tiny_tokenizer.tokenizer)
    data = tmp_path / "data"
    write(data, *[{"prompt": s, "completion": "the wolf."} for s in tiny.sentences(8)])
    tuned = tmp_path / "tuned"
    outcome = run_here(
        *(capsys, "finetune", "--model", base, "--data", data, "--output", tuned),
        *("--iters", 4, "--save-every", 2, "--batch-size", 4, "--max-seq-length", 64),
        *("--warmup-steps", 0, "--learning-rate", 0.01, "--steps-per-eval", 0),
    )
    assert outcome.code == 0, outcome.err
    rows = scores(
        *(capsys, tmp_path / "o.json", "--checkpoints", tuned),
        *("--data", text / "valid.jsonl"),
    )
    assert [row["step"] for row in rows] == [2, 4]
    assert rows[0]["perplexity"] != rows[1]["perplexity"]
    outcome = run_here(
        *(capsys, "evaluate", "--model", base, "--adapter-path", tuned),
        *("--data", text / "valid.jsonl", "--output", tmp_path / "alone.json"),
    )
    alone = json.loads((tmp_path / "alone.json").read_text())["perplexity"]
    assert rows[1]["perplexity"] == pytest.approx(alone, rel=1e-6)
    (tuned / "adapter_config.json").unlink()  # as in a run under way: the recipe says it all
    (tuned / "adapters.safetensors").unlink()
    under_way = scores(
        *(capsys, tmp_path / "p.json", "--checkpoints", tuned),
        *("--data", text / "valid.jsonl"),
    )
    assert [r["perplexity"] for r in under_way] == [r["perplexity"] for r in rows]


def test_a_run_under_way_is_scored_from_its_recipe(
    capsys: pytest.CaptureFixture[str], run: Path, text: Path, tmp_path: Path
) -> None:
    """Only what is there before the end: the recipe and the states."""
    going = tmp_path / "going"
    going.mkdir()
    (going / "states").symlink_to(run / "states")
    (going / "recipe.yaml").symlink_to(run / "recipe.yaml")
    rows = scores(
        *(capsys, tmp_path / "o.json", "--checkpoints", going),
        *("--data", text / "valid.jsonl"),
    )
    whole = scores(
        *(capsys, tmp_path / "p.json", "--checkpoints", run),
        *("--data", text / "valid.jsonl"),
    )
    states = [row["perplexity"] for row in whole if row["kind"] == "state"]
    assert [row["perplexity"] for row in rows] == pytest.approx(states, rel=1e-6)


def test_a_folder_with_nothing_to_score_is_refused(
    capsys: pytest.CaptureFixture[str], text: Path, tmp_path: Path
) -> None:
    flags = ["--data", text / "valid.jsonl", "--checkpoints"]
    assert "nor .pt files" in run_here(capsys, "evaluate", *flags, tmp_path).error
    missing = tmp_path / "missing"
    assert "does not exist" in run_here(capsys, "evaluate", *flags, missing).error


@pytest.mark.slow
def test_a_chart_shows_tasks_and_perplexity_and_names_averages(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    rows: list[dict[str, Any]] = [
        {
            "kind": kind,
            "step": step,
            "perplexity": 9.0 - i,
            "bits_per_byte": 1.0,
            "results": {"arc_easy": {"acc": 0.25 + i / 10}, "piqa": {"acc": 0.5}},
        }
        for i, (kind, step) in enumerate([("state", 5), ("state", 10), ("average", None)])
    ]
    drawn: list[Figure] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("openelm_mlx.checkpoint_scores.save_figure", lambda f, _: drawn.append(f))
        assert draw_scores(rows, tmp_path / "x.png", title="run")
    axes = drawn[0].axes
    assert [ax.get_ylabel() for ax in axes] == ["perplexity", "accuracy"]
    lines = {str(line.get_label()): line for line in axes[0].lines}
    assert list(lines["perplexity"].get_xydata()[:, 0]) == [5, 10]  # type: ignore[index]
    assert list(lines["average"].get_xydata()[0]) == [10, 7.0]  # type: ignore[index]
    assert {str(line.get_label()) for line in axes[1].lines} >= {"arc_easy", "piqa", "average"}

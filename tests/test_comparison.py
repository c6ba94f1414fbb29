"""``openelm evaluate --compare``: one table of all kinds of models, scored as each is alone."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_tokenizer as tiny
from command_line import Outcome, run_here
from folder_makers import small_folder, small_model
from mlx.utils import tree_flatten

from convert.quantize import quantize
from openelm_mlx.adapter_args import AdapterArgs
from openelm_mlx.adapter_fuse import fuse_model
from openelm_mlx.checkpoint import load_model, save_model
from openelm_mlx.comparison_report import render_markdown, short_names
from openelm_mlx.lora import add_adapters, save_adapters
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import Tokenizer

FORMATS = (".json", ".md", ".png")


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: tiny.TinyTokenizer) -> Tokenizer:
    return tiny_tokenizer.tokenizer


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A base, adapters for it, the two fused, and the fused one in 4 bit."""
    folder = tmp_path_factory.mktemp("road")
    base = small_folder(folder / "base", tokenizer, small_model())
    model = load_model(base)
    args = AdapterArgs(rank=4, scale=2.0, target_modules=("qkv_proj", "proj_1"))
    add_adapters(model, args)
    _move(model)
    save_adapters(model, folder / "adapters", args)
    fuse_model(model)
    save_model(model, folder / "fused", tokenizer=tokenizer)
    quantize(folder / "fused", folder / "fused-4bit", bits=4, group_size=32)
    return folder


def _move(model: Model) -> None:
    """Adapters as after a training."""
    mx.random.seed(4)
    moved: Any = [
        (name, mx.random.normal(array.shape, scale=0.1))
        for name, array in tree_flatten(model.trainable_parameters())
    ]
    model.load_weights(moved, strict=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "docs.jsonl"
    texts = tiny.sentences(3, seed=4)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def compared(
    capsys: pytest.CaptureFixture[str], output: Path, *arguments: object
) -> tuple[dict[str, Any], Outcome]:
    with pytest.MonkeyPatch.context() as patch:
        if output.name != "road.json":  # one chart is enough: drawing takes longer than scoring
            patch.setattr("openelm_mlx.comparison.render_chart", lambda *_: False)
        outcome = run_here(capsys, "evaluate", "--compare", *arguments, "--output", output)
    assert outcome.code == 0, outcome.err
    return json.loads(output.read_text()), outcome


def perplexity(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, data: Path, *model: object
) -> float:
    output = tmp_path / "alone.json"
    flags = ["--data", data, "--output", output, "--overwrite"]
    outcome = run_here(capsys, "evaluate", "--model", *model, *flags)
    assert outcome.code == 0, outcome.err
    return float(json.loads(output.read_text())["perplexity"])


@pytest.mark.slow
def test_every_step_of_the_road_scores_as_it_does_alone(
    capsys: pytest.CaptureFixture[str], road: Path, data: Path, tmp_path: Path
) -> None:
    names = [road / name for name in ("base", "adapters", "fused", "fused-4bit")]
    result, outcome = compared(
        *(capsys, tmp_path / "road.json", *names, "--data", data, "--sample-tokens", 4)
    )
    rows = result["models"]
    assert list(rows) == [str(name) for name in names]
    assert [row["kind"] for row in rows.values()] == ["model", "adapters", "model", "model"]
    base, adapters, fused, four = (row["perplexity"] for row in rows.values())
    assert base == pytest.approx(perplexity(capsys, tmp_path, data, road / "base"), rel=1e-6)
    with_adapters = [road / "base", "--adapter-path", road / "adapters"]
    assert adapters == pytest.approx(perplexity(capsys, tmp_path, data, *with_adapters), rel=1e-6)
    assert fused == pytest.approx(adapters, rel=1e-4)  # fusing rounds once
    assert len({base, adapters, four}) == 3
    sizes = [row["size"] for row in rows.values()]
    assert sizes[3] < sizes[0] / 4 < sizes[0] < sizes[1]  # adapters count with their base
    files = [tmp_path / f"road{suffix}" for suffix in FORMATS]
    assert all(file.stat().st_size > 500 for file in files)
    assert "fused-4bit" in outcome.out
    assert len(result["samples"]) == 2
    assert all(len(sample["continuations"]) == 4 for sample in result["samples"])


@pytest.mark.slow
def test_samples_are_the_likeliest_continuations_of_the_prompts_asked_for(
    capsys: pytest.CaptureFixture[str], road: Path, data: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    flags = ["--data", data, "--prompt", "The wolf saw", "--sample-tokens", 5]
    names = [road / "base", road / "fused"]
    result, _ = compared(capsys, tmp_path / "o.json", *names, *flags)
    (sample,) = result["samples"]
    ids = tokenizer.encode("The wolf saw")
    model = load_model(road / "base")
    start = len(tokenizer.decode(ids))
    for _ in range(5):  # without a cache, the whole text each time
        ids.append(int(mx.argmax(model(mx.array([ids]))[0, -1]).item()))
    expected = tokenizer.decode(ids)[start:]
    assert sample["prompt"] == "The wolf saw"
    assert sample["continuations"][str(road / "base")] == expected


@pytest.mark.slow
def test_all_models_get_windows_that_the_smallest_context_holds(
    capsys: pytest.CaptureFixture[str], road: Path, data: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    short = small_folder(tmp_path / "short", tokenizer, small_model(max_context_length=16))
    flags = ["--data", data, "--sample-tokens", 0]
    result, _ = compared(capsys, tmp_path / "o.json", road / "base", short, *flags)
    windows = {row["window"] for row in result["models"].values()}
    assert windows == {16}
    longer = [*flags, "--max-seq-length", 32]
    _, outcome = compared(capsys, tmp_path / "p.json", road / "base", short, *longer)
    assert "holds 16 tokens only, so all get windows of those" in outcome.err


@pytest.mark.slow
def test_an_interrupted_comparison_goes_on_with_the_next_model(
    capsys: pytest.CaptureFixture[str],
    road: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = tmp_path / "o.json"
    arguments = ["--compare", road / "base", road / "fused", "--data", data, "--output", output]
    import openelm_mlx.comparison as module

    row, done = module._row, list[str]()

    def interrupted(model: Any, *rest: Any) -> dict[str, Any]:
        if done:
            raise KeyboardInterrupt
        done.append(model.name)
        return row(model, *rest)

    monkeypatch.setattr(module, "_row", interrupted)
    assert run_here(capsys, "evaluate", *arguments).code == 130
    scored = list[str]()
    monkeypatch.setattr(module, "_row", lambda m, *rest: scored.append(m.name) or row(m, *rest))
    monkeypatch.setattr(module, "render_chart", lambda *_: False)
    assert run_here(capsys, "evaluate", *arguments).code == 0
    assert (done, scored) == ([str(road / "base")], [str(road / "fused")])
    assert len(json.loads(output.read_text())["models"]) == 2


def test_other_tokens_are_told(
    capsys: pytest.CaptureFixture[str], road: Path, data: Path, tmp_path: Path
) -> None:
    other = tiny.train(tmp_path / "tokenizer.model", model_type="unigram", vocab_size=310)
    short = small_folder(tmp_path / "other", Tokenizer.from_path(other), small_model())
    flags = ["--data", data, "--sample-tokens", 0]
    result, outcome = compared(capsys, tmp_path / "o.json", road / "base", short, *flags)
    assert len(result["notes"]) == 1
    assert "compare bits per byte, not perplexity" in outcome.err
    assert result["notes"][0] in render_markdown(result, None)


def test_adapters_without_a_base_are_refused(
    capsys: pytest.CaptureFixture[str], road: Path, data: Path, tmp_path: Path
) -> None:
    alone = [road / "adapters", tmp_path / "x.mlpackage"]
    outcome = run_here(capsys, "evaluate", "--compare", *alone, "--data", data)
    assert "does not say which model its adapters belong to" in outcome.error


def test_a_model_named_twice_is_refused(
    capsys: pytest.CaptureFixture[str], road: Path, data: Path
) -> None:
    twice = [road / "base", road / "base"]
    assert "named twice" in run_here(capsys, "evaluate", "--compare", *twice, "--data", data).error


def test_a_table_or_chart_that_is_there_is_kept(
    capsys: pytest.CaptureFixture[str], road: Path, data: Path, tmp_path: Path
) -> None:
    (tmp_path / "o.md").write_text("precious")
    names = [road / "base", road / "fused"]
    flags = ["--data", data, "--output", tmp_path / "o.json"]
    outcome = run_here(capsys, "evaluate", "--compare", *names, *flags)
    assert "add --overwrite" in outcome.error
    assert (tmp_path / "o.md").read_text() == "precious"


def test_short_names_stay_apart() -> None:
    assert short_names(["a/x", "b/y"]) == ["x", "y"]
    assert short_names(["a/x", "b/x", "c/z"]) == ["a/x", "b/x", "z"]

"""``openelm pretrain`` on a little text: what it learns, writes, shows and refuses."""

import json
import time
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import tiny_tokenizer as tiny
from command_line import run_here
from finetune_runs import losses, without_plots
from folder_makers import bits, files, weights_of
from pretrain_runs import RECIPE, SMALL, Pretrainer, write_text

from openelm_mlx.checkpoint import load, load_model
from openelm_mlx.data_sources import find_sources
from openelm_mlx.generate import generate
from openelm_mlx.metrics import read_metrics
from openelm_mlx.pretrain_settings import entries

APPLES = ["pretrain_270m", "pretrain_450m", "pretrain_1_1b", "pretrain_3b"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def pretrain(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    text: Path,
    tiny_tokenizer: tiny.TinyTokenizer,
) -> Pretrainer:
    return Pretrainer(capsys, tmp_path, text, tiny_tokenizer.path)


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    without_plots(monkeypatch)


@pytest.mark.slow
def test_the_loss_falls_and_every_step_has_a_line(pretrain: Pretrainer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    out = pretrain.run(run, "--iters", 40, "--learning-rate", 0.02, "--steps-per-eval", 20)
    found = losses(run)
    # a new model's logits are small, so its loss is about that of a uniform guess
    assert found[0] == pytest.approx(np.log(tiny.VOCAB_SIZE), abs=0.6)
    assert np.mean(found[-5:]) < 0.7 * found[0]
    lines = read_metrics(run)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 41))
    assert {"learning_rate", "grad_norm", "tokens", "seconds", "peak_memory_gb"} <= set(steps[0])
    assert [line["step"] for line in lines if "val_loss" in line] == [20, 40]
    assert lines[-1]["val_loss"] < 0.75 * found[0]
    assert f"finished at step 40, {steps[-1]['tokens']} targets" in out


def test_the_folder_is_a_model_that_generates(
    pretrain: Pretrainer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    pretrain.run(run, "--iters", 2)
    model = {"config.json", "generation_config.json", "model.safetensors", "openelm.json"}
    tokenizer = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json"}
    found = set(files(run)) - {"special_tokens_map.json"}
    assert found == model | tokenizer | {"metrics.jsonl", "recipe.yaml", "states", "best"}
    assert json.loads((run / "openelm.json").read_text())["stage"] == "pretrain"
    loaded, own = load(run)
    assert own is not None
    written = generate(loaded, own, "The old king", max_tokens=8)
    command = ["generate", "--model", run, "--prompt", "The old king", "--max-tokens", 8]
    assert written
    assert written in run_here(capsys, *command).out
    last = mx.load(str(run / "states" / "step-00000002" / "weights.safetensors"))
    assert isinstance(last, Mapping)
    saved = weights_of(loaded)
    assert {name: bits(array) for name, array in last.items()} == {
        name: bits(array) for name, array in saved.items()
    }


@pytest.mark.slow
def test_the_seed_decides_weights_and_order(pretrain: Pretrainer, tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pretrain.run(tmp_path / name, "--iters", 2, "--seed", seed)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a")[0] != losses(tmp_path / "c")[0]


@pytest.mark.slow
def test_corenet_mode_trains_on_one_piece_a_sequence(pretrain: Pretrainer, tmp_path: Path) -> None:
    flags = ["--data-mode", "corenet", "--iters", 30, "--max-seq-length", 64]
    pretrain.run(tmp_path / "run", *flags)
    found = losses(tmp_path / "run")
    assert np.mean(found[-5:]) < 0.8 * found[0]
    # of 64 positions a sentence fills some 30; the rest is padding
    assert read_metrics(tmp_path / "run")[0]["tokens"] < 0.9 * 4 * 64


def test_one_epoch_ends_with_the_text(pretrain: Pretrainer, tmp_path: Path) -> None:
    out = pretrain.run(tmp_path / "run", "--epochs", 1, "--iters", 500, "--batch-size", 32)
    assert "the data ended at step" in out
    assert 1 < len(losses(tmp_path / "run")) < 20


def test_without_validation_text_the_run_says_so(pretrain: Pretrainer, tmp_path: Path) -> None:
    argv = ["--data", pretrain.text / "train.jsonl", "--tokenizer", pretrain.tokenizer]
    argv += ["--recipe", pretrain.recipe, "--iters", 2, "--output", tmp_path / "run"]
    outcome = run_here(pretrain.capsys, "pretrain", *argv)
    assert outcome.code == 0
    assert "no valid_data: the run goes without validation" in outcome.err
    assert not any("val_loss" in line for line in read_metrics(tmp_path / "run"))


def test_the_plan_shows_every_setting(pretrain: Pretrainer, tmp_path: Path) -> None:
    outcome = pretrain("--iters", 3, "--grad-accumulation-steps", 2, "--output", tmp_path / "run")
    words = " ".join((outcome.out + outcome.err).split())
    for part in ("updates 3", f"tokens {4 * 24 * 2} an update, {4 * 24 * 2 * 3} in all"):
        assert part in words
    for part in ("2 layers of width 32", "memory a step", "batch_size: 4", "learning_rate: 0.01"):
        assert part in words


def test_a_dry_run_writes_nothing_and_shows_files_and_a_row(
    pretrain: Pretrainer, tmp_path: Path
) -> None:
    outcome = pretrain("--dry-run", "--output", tmp_path / "run", "--no-shuffle")
    assert outcome.code == 0
    assert not (tmp_path / "run").exists()
    assert "2 of 2 files are there, 0 are missing" in outcome.out
    first = tiny.sentences(140, seed=9)[0]
    row = outcome.out.partition("first row:\n")[2]
    assert row.startswith(first[:20])


def test_a_dry_run_counts_what_is_missing(pretrain: Pretrainer, tmp_path: Path) -> None:
    listing = tmp_path / "mix.yaml"
    there = pretrain.text / "train.jsonl"
    (tmp_path / "part-0.jsonl").write_bytes(there.read_bytes())
    entry = {"file_name": "part-{file_id}.jsonl", "text_key": "text", "file_id_range": [0, 3]}
    listing.write_text(json.dumps([entry]))
    flags = ["--data", listing, "--data-root", tmp_path, "--output", tmp_path / "run"]
    outcome = pretrain(*flags, "--dry-run")
    assert outcome.code == 1
    assert "part-{file_id}.jsonl: 1 of 3 files" in outcome.out
    assert f"2 missing: {tmp_path / 'part-1.jsonl'}" in outcome.out
    assert "2 of 4 files are there, 2 are missing" in outcome.out
    assert "first row" not in outcome.out
    refused = pretrain(*flags)
    assert "2 missing" in refused.error
    assert not (tmp_path / "run").exists()


def test_a_dry_run_without_a_tokenizer_still_counts(pretrain: Pretrainer, tmp_path: Path) -> None:
    flags = ["--tokenizer", tmp_path / "none.model", "--output", tmp_path / "run"]
    outcome = pretrain(*flags, "--dry-run")
    assert outcome.code == 1
    assert "2 of 2 files are there" in outcome.out
    assert "none.model is no file, folder or Hub id" in outcome.err
    assert "none.model is no file, folder or Hub id" in pretrain(*flags).error


@pytest.mark.slow
def test_apples_mixture_is_counted_at_once(pretrain: Pretrainer, tmp_path: Path) -> None:
    flags = ["--data", "data_openelm", "--data-root", tmp_path / "nowhere"]
    start = time.process_time()
    outcome = pretrain(*flags, "--dry-run", "--output", tmp_path / "run")
    assert time.process_time() - start < 2  # 8,667 names are looked for, none is opened
    assert outcome.code == 1
    (total,) = [line for line in outcome.out.splitlines() if "files are there" in line]
    there, _, files_in_all = total.split()[:3]
    assert there == "1"  # the validation text
    assert int(files_in_all) > 5000
    assert len(outcome.out) < 10_000  # not a line a file
    with pytest.raises(FileNotFoundError, match="5534 missing"):
        find_sources(entries(["data_openelm"]), root=tmp_path / "nowhere")


@pytest.mark.parametrize("recipe", APPLES)
def test_apples_recipes_resolve(recipe: str, pretrain: Pretrainer, tmp_path: Path) -> None:
    small = [*SMALL, "--num-transformer-layers", 2, "--model-dim", 32, "--head-dim", 8]
    flags = ["--preset", "none", *small, "--vocab-size", 320, "--num-gqa-groups", 2]
    outcome = pretrain(*flags, "--dry-run", "--output", tmp_path / "run", recipe=recipe)
    assert outcome.code == 0, outcome.err
    words = " ".join(outcome.out.split())
    for part in ("iters: 350000", "z_loss: 0.0001", "data_mode: corenet", "first row:"):
        assert part in words


def test_a_size_of_apples_can_be_tried(pretrain: Pretrainer, tmp_path: Path) -> None:
    flags = [*SMALL, "--dry-run", "--output", tmp_path / "run"]
    outcome = pretrain(*flags, recipe="pretrain_270m")
    assert outcome.code == 0, outcome.err
    assert "16 layers of width 1280, heads 12 to 20" in outcome.out


def test_a_run_in_the_way_is_refused_or_thrown_away(pretrain: Pretrainer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pretrain.run(run, "--iters", 2)
    before = (run / "metrics.jsonl").read_text()
    refused = pretrain("--iters", 2, "--output", run)
    assert "is not empty; add --resume to continue its run or --overwrite" in refused.error
    lost = pretrain("--overwrite", "--data", tmp_path / "none.jsonl", "--output", run)
    assert "none.jsonl" in lost.error
    assert (run / "metrics.jsonl").read_text() == before
    pretrain.run(run, "--iters", 3, "--overwrite")
    assert len(losses(run)) == 3
    assert files(run / "states") == ["step-00000003"]
    assert load_model(run).args.num_transformer_layers == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--preset", "270M"], "preset already says num_transformer_layers and model_dim"),
        (["--vocab-size", "300"], "vocab_size 300 is smaller than the tokenizer's 320 pieces"),
        (["--head-dim", "7"], "7"),
        (["--preset", "271M", "--num-transformer-layers", "none", "--model-dim", "none"], "271M"),
        (["--data-mode", "corenet", "--epochs", "2"], "epochs has no effect in corenet mode"),
        (["--resume", "--overwrite"], "contradict each other"),
        (["--recipe", "pretrain_270"], "did you mean pretrain_270m"),
        (["--data", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (["--min-tokens", "500"], "no document passed the filters"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], message: str, pretrain: Pretrainer, tmp_path: Path
) -> None:
    outcome = pretrain("--output", tmp_path / "run", *argv)
    assert message in outcome.error.splitlines()[-1]


def test_an_unknown_key_names_the_nearest(pretrain: Pretrainer, tmp_path: Path) -> None:
    recipe = tmp_path / "typo.yaml"
    recipe.write_text(json.dumps({**RECIPE, "bach_size": 4}))
    outcome = pretrain("--output", tmp_path / "run", recipe=recipe)
    assert "unknown key 'bach_size' (did you mean batch_size?)" in outcome.error


def test_all_mistakes_of_a_configuration_are_told_at_once(
    pretrain: Pretrainer, tmp_path: Path
) -> None:
    recipe = tmp_path / "bad.yaml"
    values = {"lr_schedule": "square", "optimizer": "adamx", "max_grad_norm": -1, "ters": 3}
    recipe.write_text(json.dumps({**RECIPE, "min_tokens": "many", **values}))
    flags = ["--data-mode", "boxed", "--batch-size", 0, "--dtype", "int8", "--z-loss", -1]
    told = pretrain(*flags, "--output", tmp_path / "run", recipe=recipe).error
    for part in ("square", "adamx", "max_grad_norm", "'ters'", "min_tokens", "boxed", "batch_size"):
        assert part in told
    assert "dtype 'int8' is not one of" in told
    assert not (tmp_path / "run").exists()

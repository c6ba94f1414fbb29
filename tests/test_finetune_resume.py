"""Tuning runs that were broken off go on as if nothing had happened."""

import json
import shutil
from pathlib import Path

import pytest
import tiny_tokenizer as tiny
from finetune_runs import Tuner, adapters, comparable, losses, make_base, make_data, without_plots
from folder_makers import assert_same_weights, bits, weights_of

from openelm_mlx.checkpoint import load_model
from openelm_mlx.training_state import STATES


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: tiny.TinyTokenizer) -> Path:
    return make_base(tmp_path_factory.mktemp("base"), tiny_tokenizer.tokenizer)


@pytest.fixture
def tuner(capsys: pytest.CaptureFixture[str], base: Path, tmp_path: Path) -> Tuner:
    return Tuner(capsys, base, make_data(tmp_path / "data"))


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    without_plots(monkeypatch)


def break_off(run: Path, copy: Path, at: int) -> Path:
    """A copy of a run as it was when the process died soon after the state of a step."""
    shutil.copytree(run, copy)
    for state in (copy / STATES).iterdir():
        if int(state.name.removeprefix("step-")) > at:
            shutil.rmtree(state)
    for name in ("adapters.safetensors", "adapter_config.json", "model.safetensors", "config.json"):
        (copy / name).unlink(missing_ok=True)
    return copy


ITERS, EPOCHS = ["--iters", "10"], ["--epochs", "5"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "length"),
    [
        ("lora", ITERS),
        pytest.param("lora", EPOCHS, marks=pytest.mark.slow),
        pytest.param("dora", ITERS, marks=pytest.mark.slow),
        pytest.param("full", EPOCHS, marks=pytest.mark.slow),
    ],
)
def test_b9_a_resumed_run_equals_an_uninterrupted_one(
    kind: str, length: list[str], tuner: Tuner, tmp_path: Path
) -> None:
    flags = ["--fine-tune-type", kind, *length, "--save-every", 3, "--steps-per-eval", 2]
    tuner.run(tmp_path / "whole", *flags, "--keep-states", 9, "--grad-accumulation-steps", 2)
    broken = break_off(tmp_path / "whole", tmp_path / "broken", at=6)
    tuner.run(broken, "--resume")  # the folder's own recipe holds the rest
    assert comparable(broken) == comparable(tmp_path / "whole")
    if kind == "full":
        found, expected = (weights_of(load_model(f)) for f in (broken, tmp_path / "whole"))
    else:
        found, expected = adapters(broken), adapters(tmp_path / "whole")
    assert_same_weights(found, expected)


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is(tuner: Tuner, tmp_path: Path) -> None:
    run = tmp_path / "run"
    tuner.run(run, "--iters", 3)
    before = adapters(run)
    lines = (run / "metrics.jsonl").read_text()
    tuner.run(run, "--iters", 3, "--resume")
    assert (run / "metrics.jsonl").read_text() == lines
    assert {k: bits(v) for k, v in adapters(run).items()} == {k: bits(v) for k, v in before.items()}


@pytest.mark.slow
def test_a_finished_run_can_be_made_longer(tuner: Tuner, tmp_path: Path) -> None:
    tuner.run(tmp_path / "run", "--iters", 3)
    tuner.run(tmp_path / "run", "--iters", 5, "--resume")
    assert len(losses(tmp_path / "run")) == 5
    recipe = (tmp_path / "run" / "recipe.yaml").read_text().split()
    assert recipe[recipe.index("iters:") + 1] == "5"


def test_resuming_without_a_state_starts_anew_and_says_so(tuner: Tuner, tmp_path: Path) -> None:
    outcome = tuner("--iters", 2, "--resume", "--output", tmp_path / "run")
    assert outcome.code == 0
    assert "holds no state to resume from: starting anew" in outcome.err
    assert len(losses(tmp_path / "run")) == 2


def test_changed_data_and_other_adapters_are_refused(tuner: Tuner, tmp_path: Path) -> None:
    tuner.run(tmp_path / "run", "--iters", 2)
    other = tuner("--iters", 4, "--resume", "--rank", 2, "--output", tmp_path / "run")
    assert "other trainable parameters" in other.error
    with (tuner.data / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    changed = tuner("--iters", 4, "--resume", "--output", tmp_path / "run")
    assert "data set (or how it is encoded) has changed" in changed.error

"""Pretraining that was broken off goes on as if nothing had happened."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_tokenizer as tiny
from command_line import run_here
from finetune_runs import comparable, losses, without_plots
from folder_makers import assert_same_weights, weights_of
from pretrain_runs import Pretrainer, write_text
from slow_params import slow

from openelm_mlx.checkpoint import load_model
from openelm_mlx.objectives import language_model_loss


@pytest.fixture
def pretrain(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_tokenizer: tiny.TinyTokenizer
) -> Pretrainer:
    return Pretrainer(capsys, tmp_path, write_text(tmp_path / "text"), tiny_tokenizer.path)


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    without_plots(monkeypatch)


def fail_in_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """The disk gives out in the loss of that update."""

    def make(*args: Any) -> Any:
        loss, calls = language_model_loss(*args), [0]

        def failing(model: Any, batch: Any) -> Any:
            calls[0] += model.training
            if calls[0] == step:
                raise OSError("no space left on device")
            return loss(model, batch)

        return failing

    monkeypatch.setattr("openelm_mlx.pretrain_run.language_model_loss", make)


def assert_same_run(found: Path, expected: Path) -> None:
    """Metric lines but for the clock, and all weights bit for bit."""
    assert comparable(found) == comparable(expected)
    assert_same_weights(*(weights_of(load_model(folder)) for folder in (found, expected)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["packed", *slow("corenet")])
def test_a_run_that_failed_resumes_bit_for_bit(
    mode: str, pretrain: Pretrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--data-mode", mode, "--warmup-steps", 3]
    pretrain.run(tmp_path / "whole", *flags)
    with monkeypatch.context() as broken:
        fail_in_step(broken, 11)
        failed = pretrain(*flags, "--output", tmp_path / "run")
    assert failed.error == "no space left on device"
    assert [line["step"] for line in comparable(tmp_path / "run")][-1] == 10  # the last state: 8
    assert not (tmp_path / "run" / "model.safetensors").exists()
    pretrain.run(tmp_path / "run", *flags, "--resume")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_a_damaged_state_gives_way_to_the_one_before(pretrain: Pretrainer, tmp_path: Path) -> None:
    pretrain.run(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    newest = tmp_path / "run" / "states" / "step-00000012" / "weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    outcome = pretrain("--resume", "--output", tmp_path / "run")
    assert outcome.code == 0
    assert "going back to the state before" in outcome.err
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_finished_run_is_left_as_it_is(pretrain: Pretrainer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pretrain.run(run, "--iters", 3)
    before = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "model.safetensors")}
    states = sorted((run / "states").iterdir())
    assert "finished at step 3" in pretrain.run(run, "--iters", 3, "--resume")
    assert {name: (run / name).read_bytes() for name in before} == before
    assert sorted((run / "states").iterdir()) == states


def test_resuming_an_empty_folder_starts_anew_and_says_so(
    pretrain: Pretrainer, tmp_path: Path
) -> None:
    outcome = pretrain("--iters", 2, "--resume", "--output", tmp_path / "run")
    assert outcome.code == 0
    assert "holds no state to resume from: starting anew" in outcome.err


def test_another_architecture_or_text_is_refused(pretrain: Pretrainer, tmp_path: Path) -> None:
    pretrain.run(tmp_path / "run", "--iters", 4)
    other = pretrain("--iters", 8, "--resume", "--model-dim", 64, "--output", tmp_path / "run")
    assert "other trainable parameters" in other.error
    flags = ["--data", pretrain.text / "valid.jsonl", "--output", tmp_path / "run"]
    assert "belongs to other data" in pretrain("--iters", 8, "--resume", *flags).error


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_and_the_run_resumes_bit_for_bit(
    pretrain: Pretrainer, tmp_path: Path
) -> None:
    flags = ["--iters", 150, "--steps-per-eval", 40, "--save-every", 0]
    pretrain.run(tmp_path / "whole", *flags)
    command = [sys.executable, "-m", "openelm_mlx.cli", "pretrain", "--recipe", pretrain.recipe]
    command += ["--data", pretrain.text / "train.jsonl", "--tokenizer", pretrain.tokenizer]
    command += ["--valid-data", pretrain.text / "valid.jsonl", "--output", tmp_path / "run"]
    process = subprocess.Popen(
        [str(word) for word in [*command, *flags]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        end = time.monotonic() + 60
        while len(comparable(tmp_path / "run")) < 5 and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "interrupted; --resume continues at step" in out
    assert "stopping after this step" in err
    assert 5 <= len(comparable(tmp_path / "run")) < 150
    assert len(list((tmp_path / "run" / "states").iterdir())) == 1
    pretrain.run(tmp_path / "run", *flags, "--resume")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_run_keeps_its_recipe_so_that_resuming_needs_the_folder_alone(
    pretrain: Pretrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    pretrain.run(run, "--iters", 3)
    before = load_model(run)
    outcome = run_here(capsys, "pretrain", "--output", run, "--resume")
    assert outcome.code == 0, outcome.err
    after = weights_of(load_model(run))
    assert all(mx.array_equal(a, after[name]).item() for name, a in weights_of(before).items())
    longer = run_here(capsys, "pretrain", "--output", run, "--resume", "--iters", 4)
    assert longer.code == 0, longer.err
    assert len(losses(run)) == 4


@pytest.mark.slow
def test_an_early_stop_saves_the_best_weights(pretrain: Pretrainer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    rising = ["--learning-rate", 3.0, "--iters", 40, "--steps-per-eval", 1, "--early-stopping", 2]
    out = pretrain.run(run, *rising, "--warmup-steps", 0)
    assert "stopped early" in out
    best = mx.load(str(run / "best" / "weights.safetensors"))
    final = mx.load(str(run / "model.safetensors"))
    assert all(mx.array_equal(best[name], final[name]).item() for name in best)

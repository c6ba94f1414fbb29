"""Settings of tuning stages: epochs, warm-up, kinds of tuning."""

import argparse
from pathlib import Path

import pytest

from openelm_mlx.losses import LossArgs
from openelm_mlx.recipe import render_settings
from openelm_mlx.tuning_data import TuningArgs
from openelm_mlx.tuning_settings import (
    RECIPE_FILE,
    TuningSettings,
    add_tuning_flags,
    resolve_tuning,
)

OWN = (TuningArgs, LossArgs)


def settings(*argv: str, recipe: Path | str | None = None) -> TuningSettings:
    parser = argparse.ArgumentParser()
    add_tuning_flags(parser, *OWN)
    namespace = parser.parse_args(["--model", "m", "--data", "d", *argv])
    namespace.recipe, namespace.resume, namespace.output = recipe, False, "-"
    return resolve_tuning(namespace, *OWN, default_recipe="finetune_{}")


def test_without_a_recipe_the_packages_own_for_the_kind_counts() -> None:
    assert settings().adapters is not None
    assert settings().schedule.learning_rate == 3e-4
    dora = settings("--fine-tune-type", "dora").adapters
    assert dora is not None
    assert dora.kind == "dora"
    full = settings("--fine-tune-type", "full")
    assert full.adapters is None
    assert full.schedule.learning_rate == 2e-5


def test_b32_epochs_become_updates_and_the_last_one_may_be_smaller() -> None:
    run = settings("--epochs", "3", "--grad-accumulation-steps", "4")
    assert run.for_updates(7).schedule.iters == 6  # 21 micro-batches, 4 an update
    assert run.for_updates(7).as_dict()["iters"] == 6


def test_iters_on_the_command_line_win_over_the_recipes_epochs() -> None:
    run = settings("--iters", "20").for_updates(7)
    assert run.schedule.iters == 20
    assert run.schedule.warmup_steps == 1  # 5 % of 20
    assert run.as_dict()["epochs"] is None


def test_warmup_steps_win_over_the_recipes_ratio() -> None:
    run = settings("--iters", "100", "--warmup-steps", "17").for_updates(7)
    assert run.schedule.warmup_steps == 17
    assert run.as_dict()["warmup_ratio"] is None


def test_iters_and_epochs_together_are_refused() -> None:
    with pytest.raises(ValueError, match="iters and epochs exclude each other"):
        settings("--iters", "5", "--epochs", "1")


def test_adapter_settings_under_full_tuning_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--rank has no effect: fine_tune_type full"):
        settings("--fine-tune-type", "full", "--rank", "4")
    recipe = tmp_path / "r.yaml"
    recipe.write_text("fine_tune_type: full\nscale: 2\n")
    with pytest.raises(ValueError, match="line 2: scale has no effect"):
        settings(recipe=recipe)


def test_problems_of_all_parts_are_said_at_once() -> None:
    with pytest.raises(ValueError, match="batch_size") as caught:
        settings(
            *("--batch-size", "0", "--rank", "0", "--max-seq-length", "1", "--beta1", "3"),
            *("--grad-accumulation-steps", "0", "--warmup-ratio", "2"),
        )
    for name in ("adapter rank", "max_seq_length", "beta1", "grad_accumulation_steps"):
        assert name in str(caught.value)


@pytest.mark.parametrize("argv", [["--epochs", "2"], ["--iters", "9", "--warmup-steps", "3"]])
def test_a_runs_settings_are_a_recipe_of_the_same_run(argv: list[str], tmp_path: Path) -> None:
    run = settings("--fine-tune-type", "dora", "--rank", "5", *argv)
    path = tmp_path / "again.yaml"
    path.write_text(render_settings(run.as_recipe()))
    again = settings(recipe=path)
    assert again == run
    assert again.for_updates(9).as_dict() == run.for_updates(9).as_dict()


def test_a_resumed_run_keeps_the_recipe_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / RECIPE_FILE).write_text("model: x\ndata: y\nrank: 3\nwarmup_ratio: 0.5\n")
    namespace = argparse.Namespace(recipe=None, resume=True, output=str(tmp_path), iters=10)
    run = resolve_tuning(namespace, *OWN, default_recipe="finetune_{}").for_updates(7)
    assert run.adapters is not None
    assert (run.tune.model, run.adapters.rank, run.schedule.warmup_steps) == ("x", 3, 5)

"""The recipes of the package: every key is known, and Apple's numbers are Apple's."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openelm_mlx.losses import LossArgs
from openelm_mlx.optim import OptimizerArgs, ScheduleArgs
from openelm_mlx.preference import PreferenceArgs
from openelm_mlx.pretrain_settings import ArchitectureArgs, TextArgs
from openelm_mlx.recipe import Recipe, load_recipe, recipe_names, resolve
from openelm_mlx.text_filters import CORENET_FILTERS, TextFilters
from openelm_mlx.training_args import TrainArgs
from openelm_mlx.tuning_data import TuningArgs
from openelm_mlx.tuning_pairs import PairArgs
from openelm_mlx.tuning_settings import TuningSettings, resolve_tuning

NAMES = [name for name in recipe_names() if not name.startswith("data_")]
SIZES = {"270m": "270M", "450m": "450M", "1_1b": "1_1B", "3b": "3B"}  # ours -> CoreNet's
GIVEN = {"model": "m", "data": "d"}


def pretraining(recipe: Recipe) -> tuple[Any, ...]:
    namespace = argparse.Namespace(data=["d"], tokenizer="t")
    return resolve(
        namespace,
        recipe,
        *(
            TextArgs,
            ArchitectureArgs,
            TextFilters,
            TrainArgs,
            ScheduleArgs,
            OptimizerArgs,
            LossArgs,
        ),
    )


def tuning(name: str) -> TuningSettings:
    namespace = argparse.Namespace(recipe=name, resume=False, output="-", **GIVEN)
    own = (PairArgs, PreferenceArgs) if name.startswith("dpo") else (TuningArgs, LossArgs)
    return resolve_tuning(namespace, *own, default_recipe="-")


def schedules(golden: Callable[[str], Path]) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(golden("schedules.json").read_text())
    return read


def test_the_recipes_that_are_promised_are_there() -> None:
    promised = {f"{stage}_{size}" for stage in ("pretrain", "dpo") for size in SIZES}
    promised |= {f"finetune_{kind}" for kind in ("lora", "dora", "full")}
    promised |= {f"commonsense_{kind}" for kind in ("lora", "dora")}
    assert promised <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_a_recipe_is_known_and_every_line_says_where_it_is_from(name: str) -> None:
    recipe = load_recipe(name)
    if name.startswith("pretrain"):
        pretraining(recipe)
    else:
        tuning(name)
    folder = Path(__file__).parent.parent / "openelm_mlx" / "recipes"
    lines = (folder / f"{name}.yaml").read_text().splitlines()
    assert [line for line in lines if line and "# " not in line] == []


@pytest.mark.parametrize(("size", "corenet"), SIZES.items())
def test_pretraining_recipes_have_apples_numbers(
    size: str, corenet: str, golden: Callable[[str], Path]
) -> None:
    expected = schedules(golden)[f"pretrain_{corenet}"]
    text, architecture, filters, train, schedule, optimizer, loss = pretraining(
        load_recipe(f"pretrain_{size}")
    )
    for step, rates in expected["lr"].items():
        assert schedule.at(int(step)) == pytest.approx(rates["applied_lr"], abs=1e-12)
    assert schedule.iters == expected["max_iterations"]
    check_optimizer(optimizer, expected)
    assert loss.z_loss == expected["z_loss_eps"]
    assert loss.label_smoothing == expected["label_smoothing"]
    assert train.max_grad_norm == expected["grad_clip"]
    assert text.batch_size * train.grad_accumulation_steps == 16 * 8 * 16  # GPUs, nodes
    assert filters == CORENET_FILTERS
    assert architecture.build(32000).vocab_size == 32128
    assert (train.grad_checkpoint == "layer") == (size != "270m")


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("corenet", SIZES.values())
def test_commonsense_recipes_have_apples_numbers(
    kind: str, corenet: str, golden: Callable[[str], Path]
) -> None:
    expected = schedules(golden)[f"lora_{corenet}"]
    settings = tuning(f"commonsense_{kind}")
    for step, rates in expected["lr"].items():
        assert settings.schedule.at(int(step)) == pytest.approx(rates["applied_lr"], abs=1e-12)
    assert settings.schedule.iters == expected["max_iterations"]
    check_optimizer(settings.optimizer, expected)
    tuned, loss = settings.own
    assert loss.z_loss == expected["z_loss_eps"]
    assert settings.train.grad_accumulation_steps == expected["accum_freq"]
    assert settings.tune.batch_size == expected["batch_size0"]
    assert (tuned.format, tuned.mask_prompt, tuned.max_seq_length) == ("commonsense", False, 2048)
    adapters = settings.adapters
    assert adapters is not None
    assert (adapters.kind, adapters.rank, adapters.alpha, adapters.dropout) == (kind, 32, 32, 0.1)
    assert adapters.adapts_embedding


@pytest.mark.parametrize(
    ("size", "epochs", "rate", "loss"),
    [  # README-instruct.md
        ("270m", 5, 2e-5, "hinge"),
        ("450m", 8, 3e-5, "hinge"),
        ("1_1b", 5, 5e-5, "sigmoid"),
        ("3b", 10, 1e-4, "hinge"),
    ],
)
def test_dpo_recipes_have_apples_numbers(size: str, epochs: int, rate: float, loss: str) -> None:
    settings = tuning(f"dpo_{size}")
    pairs, preference = settings.own
    assert (settings.tune.epochs, settings.schedule.learning_rate) == (epochs, rate)
    assert (preference.loss, preference.beta) == (loss, 0.01)
    assert (pairs.max_seq_length, pairs.max_prompt_length) == (1024, 512)
    assert (settings.tune.batch_size, settings.train.grad_accumulation_steps) == (8, 2)
    assert (settings.tune.fine_tune_type, settings.train.seed) == ("full", 42)
    whole = settings.for_updates(100)
    assert whole.schedule.iters == epochs * 50
    assert whole.schedule.warmup_steps == epochs * 5  # a tenth


def check_optimizer(optimizer: OptimizerArgs, expected: dict[str, Any]) -> None:
    theirs = expected["optim"]
    assert optimizer.optimizer == theirs["name"]
    assert optimizer.weight_decay == theirs["weight_decay"]
    assert (optimizer.beta1, optimizer.beta2) == (theirs["adamw.beta1"], theirs["adamw.beta2"])
    assert optimizer.eps == theirs["adamw.eps"]

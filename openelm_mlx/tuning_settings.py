"""Settings that supervised and preference tuning share: what is tuned, and for how long.

Resolves all dataclasses of a tuning stage at once; without ``--recipe`` the package's own recipe
for the kind of tuning counts.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from openelm_mlx.adapter_args import AdapterArgs
from openelm_mlx.atomic import atomic_file
from openelm_mlx.optim import OptimizerArgs, ScheduleArgs
from openelm_mlx.recipe import (
    Recipe,
    add_flags,
    chosen,
    load_recipe,
    pick_one,
    render_settings,
    resolve,
    settings_of,
)
from openelm_mlx.run_flags import RECIPE_FILE
from openelm_mlx.training_args import TrainArgs


@dataclass(frozen=True, kw_only=True)
class TuneArgs:
    """What is tuned, on what, and for how long.

    Raises:
        ValueError: listing what is out of range.
    """

    model: str  # folder or Hub id
    data: str  # .jsonl or .json file, or a folder with train, valid and test
    tokenizer: str | None = None  # file, folder or Hub id in place of the model's own
    fine_tune_type: Literal["lora", "dora", "full"] = "lora"  # adapters, or all parameters
    batch_size: int = 8  # samples of a micro-batch, over all ranks
    epochs: int | None = None  # passes over the data, in place of iters
    warmup_ratio: float | None = None  # share of the updates that warm up, for warmup_steps

    def __post_init__(self) -> None:
        problems = []
        if self.batch_size < 1:
            problems.append(f"batch_size must be at least 1, got {self.batch_size}")
        if self.epochs is not None and self.epochs < 1:
            problems.append(f"epochs must be at least 1, got {self.epochs}")
        if self.warmup_ratio is not None and not 0 <= self.warmup_ratio < 1:
            problems.append(f"warmup_ratio must be in [0, 1), got {self.warmup_ratio}")
        if problems:
            raise ValueError("tuning: " + "; ".join(problems))


SHARED = (TuneArgs, TrainArgs, ScheduleArgs, OptimizerArgs)


@dataclass(frozen=True, kw_only=True)
class TuningSettings:
    """All settings of a tuning run.

    Attributes:
        tune: model, data, length; ``epochs`` and ``warmup_ratio`` only where they decide.
        train: of the loop.
        schedule: of the learning rate; complete after :meth:`for_updates`.
        optimizer: which, and its settings.
        adapters: None where all parameters train.
        own: the stage's own dataclasses, in order.
    """

    tune: TuneArgs
    train: TrainArgs
    schedule: ScheduleArgs
    optimizer: OptimizerArgs
    adapters: AdapterArgs | None
    own: tuple[Any, ...]

    def for_updates(self, batches_per_epoch: int) -> "TuningSettings":
        """The settings with the number of updates and of warm-up steps that the data gives.

        Args:
            batches_per_epoch: micro-batches of a pass over the data.
        """
        tune, schedule = self.tune, self.schedule
        iters = schedule.iters
        if tune.epochs is not None:
            accumulation = self.train.grad_accumulation_steps
            iters = math.ceil(tune.epochs * batches_per_epoch / accumulation)
        warmup = schedule.warmup_steps
        if tune.warmup_ratio is not None:
            warmup = int(iters * tune.warmup_ratio)
        return replace(self, schedule=replace(schedule, iters=iters, warmup_steps=warmup))

    def as_dict(self) -> dict[str, Any]:
        """Every setting, the length of the run in updates; see :meth:`for_updates`."""
        return self._values() | {"epochs": None, "warmup_ratio": None}

    def as_recipe(self) -> dict[str, Any]:
        """What was chosen, ready to be a recipe: ``epochs`` where they decide, else ``iters``."""
        values = self._values()
        for name, other in (("iters", "epochs"), ("warmup_steps", "warmup_ratio")):
            del values[other if values[other] is None else name]
        return values

    def _values(self) -> dict[str, Any]:
        parts = [self.tune, self.train, self.schedule, self.optimizer, *self.own]
        settings = settings_of(*parts, *filter(None, [self.adapters]))
        settings.pop("kind", None)  # says what fine_tune_type says
        return settings


def add_tuning_flags(
    parser: argparse.ArgumentParser, *own: type, defaults: Mapping[str, Any] | None = None
) -> None:
    """Add the flags of a tuning stage, one a key.

    Args:
        parser: of a command.
        own: the stage's own settings dataclasses.
        defaults: of the recipe that counts without ``--recipe``, for the help.
    """
    add_flags(parser, *SHARED, *own, AdapterArgs, without=("kind",), defaults=defaults)


def resolve_tuning(
    namespace: argparse.Namespace, *own: type, default_recipe: str
) -> TuningSettings:
    """Settings from flags, recipe and defaults.

    Args:
        namespace: of the flags of :func:`add_tuning_flags` and ``add_run_arguments``; a run that
            is resumed without ``--recipe`` keeps the one in its folder.
        own: the stage's own settings dataclasses.
        default_recipe: the recipe that counts without ``--recipe``; ``{}`` stands for the kind of
            tuning.

    Raises:
        FileNotFoundError: if there is no such recipe.
        ValueError: one line with all that is wrong.
    """
    recipe = _recipe(namespace)
    kind = chosen(namespace, recipe, "fine_tune_type", TuneArgs)
    if recipe is None:
        recipe = load_recipe(default_recipe.format(kind))
    kind = chosen(namespace, recipe, "fine_tune_type", TuneArgs)
    lengths = pick_one(namespace, recipe, "iters", "epochs")
    warm_ups = pick_one(namespace, recipe, "warmup_steps", "warmup_ratio")
    classes = (*SHARED, *own)
    adapters: AdapterArgs | None = None
    if kind == "full":
        reason = "fine_tune_type full trains the whole model, without adapters"
        unused = {item.name: reason for item in fields(AdapterArgs)}
        values = list(resolve(namespace, recipe, *classes, unused=unused))
    else:
        *values, adapters = resolve(namespace, recipe, *classes, AdapterArgs, fixed={"kind": kind})
    tune, train, schedule, optimizer, *rest = values
    if lengths != "epochs":
        tune = replace(tune, epochs=None)
    if warm_ups != "warmup_ratio":
        tune = replace(tune, warmup_ratio=None)
    return TuningSettings(
        tune=tune,
        train=train,
        schedule=schedule,
        optimizer=optimizer,
        adapters=adapters,
        own=tuple(rest),
    )


def keep_recipe(folder: Path, settings: TuningSettings, *, replace: bool) -> None:
    """Write the recipe of a run into its folder.

    Args:
        folder: of the run.
        settings: of the run.
        replace: whether one that is there is replaced: only once the run is known to go on.
    """
    path = folder / RECIPE_FILE
    if replace or not path.exists():
        with atomic_file(path) as file:
            file.write_text(render_settings(settings.as_recipe()), encoding="utf-8")


def _recipe(namespace: argparse.Namespace) -> Recipe | None:
    if namespace.recipe:
        return load_recipe(namespace.recipe)
    kept = Path(namespace.output) / RECIPE_FILE
    return load_recipe(kept) if namespace.resume and kept.is_file() else None

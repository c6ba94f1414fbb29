"""Stage: ``openelm pretrain``: a model from scratch on text.

The flags are here, the work is in ``pretrain_run``, so that help is quick.
"""

import argparse
from pathlib import Path

from openelm_mlx.losses import LossArgs
from openelm_mlx.optim import OptimizerArgs, ScheduleArgs
from openelm_mlx.pretrain_settings import ArchitectureArgs, TextArgs
from openelm_mlx.recipe import add_flags, load_recipe, resolve
from openelm_mlx.run_flags import RECIPE_FILE, add_run_arguments
from openelm_mlx.text_filters import TextFilters
from openelm_mlx.training_args import TrainArgs

_SETTINGS = (
    *(TextArgs, ArchitectureArgs, TextFilters),
    *(TrainArgs, ScheduleArgs, OptimizerArgs, LossArgs),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``openelm pretrain``: those of a run, and one a recipe key."""
    add_run_arguments(parser)
    add_flags(parser, *_SETTINGS)


def run(args: argparse.Namespace) -> int:
    """Run ``openelm pretrain``."""
    kept = Path(args.output) / RECIPE_FILE
    name = args.recipe or (kept if args.resume and kept.is_file() else None)
    recipe = load_recipe(name) if name else None
    text, architecture, filters, train, schedule, optimizer, loss = resolve(
        args, recipe, *_SETTINGS
    )
    from openelm_mlx.pretrain_run import PretrainSettings, pretrain  # NumPy and the loop

    settings = PretrainSettings(
        text=text,
        architecture=architecture,
        filters=filters,
        train=train,
        schedule=schedule,
        optimizer=optimizer,
        loss=loss,
    )
    return pretrain(args, settings)

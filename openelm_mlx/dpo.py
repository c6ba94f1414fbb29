"""Stage: ``openelm dpo``: preference tuning of a model on pairs of a better and a worse answer.

The flags are here, the work is in ``dpo_run``, so that help is quick.
"""

import argparse

from openelm_mlx.preference_args import PreferenceArgs
from openelm_mlx.recipe import load_recipe
from openelm_mlx.run_flags import add_run_arguments
from openelm_mlx.tuning_args import PairArgs
from openelm_mlx.tuning_settings import add_tuning_flags, resolve_tuning

_DEFAULT_RECIPE = "dpo_270m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``openelm dpo``: those of a run, and one a recipe key."""
    parser.epilog = (
        "Without --recipe, the package's dpo_270m counts; dpo_450m, dpo_1_1b and dpo_3b are "
        "Apple's for the other sizes. The reference is --model: fuse adapters into it first."
    )
    add_run_arguments(parser)
    defaults = load_recipe(_DEFAULT_RECIPE).values
    add_tuning_flags(parser, PairArgs, PreferenceArgs, defaults=defaults)


def run(args: argparse.Namespace) -> int:
    """Run ``openelm dpo``."""
    settings = resolve_tuning(args, PairArgs, PreferenceArgs, default_recipe=_DEFAULT_RECIPE)
    from openelm_mlx.dpo_run import tune_preferences  # NumPy and the loop

    return tune_preferences(args, settings)

"""Stage: ``openelm finetune``: supervised tuning of adapters or of all parameters.

The flags are here, the work is in ``tuning_run``, so that help is quick.
"""

import argparse

from openelm_mlx.losses import LossArgs
from openelm_mlx.recipe import load_recipe
from openelm_mlx.run_flags import add_run_arguments
from openelm_mlx.tuning_args import TuningArgs
from openelm_mlx.tuning_settings import add_tuning_flags, resolve_tuning

_DEFAULT_RECIPE = "finetune_{}"  # of the kind of tuning


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``openelm finetune``: those of a run, and one a recipe key."""
    parser.epilog = "Without --recipe, the package's finetune_lora, _dora or _full counts."
    add_run_arguments(parser)
    parser.add_argument("--test", action="store_true", help="measure the test split at the end")
    defaults = load_recipe(_DEFAULT_RECIPE.format("lora")).values
    add_tuning_flags(parser, TuningArgs, LossArgs, defaults=defaults)


def run(args: argparse.Namespace) -> int:
    """Run ``openelm finetune``."""
    settings = resolve_tuning(args, TuningArgs, LossArgs, default_recipe=_DEFAULT_RECIPE)
    from openelm_mlx.tuning_run import tune  # NumPy and the loop, for which help need not wait

    return tune(args, settings)

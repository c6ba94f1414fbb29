"""Flags that every training command has beside its settings; light, so that help is quick."""

import argparse

RECIPE_FILE = "recipe.yaml"  # in the folder of a run


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every training command has beside its settings."""
    add = parser.add_argument
    add("--recipe", metavar="R", help="YAML file, or a recipe of the package; flags win over it")
    add("--output", required=True, metavar="DIR", help="folder of the run")
    add("--resume", action="store_true", help="continue the run in DIR from its newest state")
    add("--overwrite", action="store_true", help="throw away the run that is in DIR")
    add("--dry-run", action="store_true", help="show the plan and the first samples, then stop")
    add("--report-to", choices=["wandb"], help="send metrics to Weights & Biases too")
    add("--project", default="openelm-mlx", metavar="P", help="name of the project there")

"""The folder and the plan of a training run: what all stages check, say and leave behind."""

import argparse
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from openelm_mlx.atomic import refuse_existing_folder
from openelm_mlx.checkpoint import save_model
from openelm_mlx.config import ModelArgs
from openelm_mlx.distributed import together, world
from openelm_mlx.memory import machine_memory, training_memory
from openelm_mlx.metrics import read_metrics
from openelm_mlx.model import Model
from openelm_mlx.plots import try_plot_losses
from openelm_mlx.progress import WandbReporter
from openelm_mlx.recipe import render_settings
from openelm_mlx.run_flags import add_run_arguments as add_run_arguments
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.trainer import Outcome

logger = logging.getLogger(__name__)


def prepare_run_folder(output: str | Path, *, resume: bool, overwrite: bool) -> Path:
    """Make the folder of a run, or check that an existing one may be used; rank 0 does it for all.

    Args:
        output: the folder.
        resume: continue what is there.
        overwrite: throw away what is there.

    Raises:
        FileExistsError: if it holds anything and neither was asked for, or what it holds is not
            from a run or a model.
        ValueError: if both were asked for.
    """
    group, folder = world(), Path(output)
    together(
        lambda: _prepare(folder, resume, overwrite) if group.rank() == 0 else None,
        group,
    )
    return folder


def _prepare(folder: Path, resume: bool, overwrite: bool) -> None:
    if resume and overwrite:
        raise ValueError("--resume and --overwrite contradict each other; give one")
    if resume:
        if folder.is_file():
            raise FileExistsError(f"{folder} is a file; give the name of a folder")
    else:
        if folder.is_dir() and any(folder.iterdir()) and not overwrite:
            raise FileExistsError(
                f"{folder} is not empty; add --resume to continue its run or --overwrite to "
                "start anew"
            )
        refuse_existing_folder(folder, overwrite=overwrite)
        if folder.is_dir():
            shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)


def reporters(args: argparse.Namespace, settings: Mapping[str, Any]) -> list[WandbReporter]:
    """What else the metrics of rank 0 go to, as the flags say."""
    wanted = args.report_to == "wandb" and world().rank() == 0
    return [WandbReporter(args.project, settings)] if wanted else []


def save_model_into(
    folder: Path,
    model: Model,
    *,
    tokenizer: Tokenizer | None,
    instruct: bool = False,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Put a complete model folder's files into a run's folder, each replaced whole.

    Args:
        folder: of the run.
        model: to save.
        tokenizer: saved beside it.
        instruct: with the chat template.
        provenance: for ``openelm.json``.
    """
    with tempfile.TemporaryDirectory(prefix=".model-", dir=folder) as temporary:
        made = Path(temporary) / "model"
        save_model(model, made, tokenizer=tokenizer, instruct=instruct, provenance=provenance)
        for stale in folder.glob("model*.safetensors*"):
            stale.unlink()
        for file in made.iterdir():
            os.replace(file, folder / file.name)


def plan_text(
    title: str,
    settings: Mapping[str, Any],
    facts: Mapping[str, str],
    memory: int,
) -> str:
    """What a run is going to do, for a person to read before it starts.

    Args:
        title: one line.
        settings: every resolved setting.
        facts: name -> words: parameters, samples, updates, tokens.
        memory: estimated bytes of one step.
    """
    machine = machine_memory()
    lines = [title, "", *(f"{name:22} {words}" for name, words in facts.items())]
    share = f"{memory / 1e9:.2f} GB estimated, this machine has {machine / 1e9:.1f} GB"
    lines.append(f"{'memory a step':22} {share}")
    if memory > machine:
        lines.append(
            "warning: a step probably does not fit; try --grad-checkpoint layer, a smaller "
            "--batch-size with more --grad-accumulation-steps, or a shorter --max-seq-length"
        )
    return "\n".join([*lines, "", render_settings(settings)]) + "\n"


def step_memory(
    args: ModelArgs, model: nn.Module, *, batch_size: int, max_seq_length: int, checkpoint: str
) -> int:
    """Estimated bytes of one step of this model as it is now, its frozen parts included."""
    leaves: Any = tree_flatten(model.parameters())
    weight_bytes = 4 if any(array.dtype == mx.float32 for _, array in leaves) else 2
    estimate = training_memory(
        args,
        batch_size=batch_size,
        max_seq_length=max_seq_length,
        trainable=trainable_parameters(model),
        weight_bytes=weight_bytes,
        checkpoint=checkpoint,
    )
    return estimate.total - estimate.weights + sum(array.nbytes for _, array in leaves)


def trainable_parameters(model: nn.Module) -> int:
    """Number of parameters that move."""
    leaves: Any = tree_flatten(model.trainable_parameters())
    return sum(array.size for _, array in leaves)


def finish_run(folder: Path, outcome: Outcome, *, unit: str = "targets") -> int:
    """Draw the loss, say how the run ended, and give the exit code (130 after Ctrl-C).

    Args:
        folder: of the run.
        outcome: of the training.
        unit: what the objective counts: "targets" or "pairs".
    """
    try_plot_losses(read_metrics(folder), folder / "loss.png", title=folder.resolve().name)
    state = outcome.state
    words = {
        "finished": "finished",
        "data": "the data ended",
        "early": "stopped early: validation got no better",
        "time": "its time is up",
        "interrupted": "interrupted; --resume continues",
    }[outcome.reason]
    best = "" if state.best_loss is None else f", best validation loss {state.best_loss:.4f}"
    best += "" if state.best_step is None else f" at step {state.best_step}"
    sys.stdout.write(f"{folder}: {words} at step {state.step}, {state.tokens} {unit}{best}\n")
    return 130 if outcome.reason == "interrupted" else 0

"""Resumable states on disk: weights, optimizer, random numbers and data position of one step.

A state is a folder that appears whole or not at all, with checksums that are verified on load; a
damaged newest one gives way to the one before.
"""

import hashlib
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as mlx_optim
from mlx.utils import tree_flatten, tree_unflatten

from openelm_mlx.atomic import atomic_folder
from openelm_mlx.weight_files import one_line, read_json, read_tensor_file, write_json

logger = logging.getLogger(__name__)

STATES, BEST = "states", "best"
_WEIGHTS, _OPTIMIZER, _FACTS = "weights.safetensors", "optimizer.safetensors", "state.json"


@dataclass
class TrainState:
    """Where a run stands; everything but the arrays.

    Attributes:
        step: updates made.
        tokens: targets trained on.
        data: position of the batch source.
        best_step: step of the best validation loss, None before the first.
        best_loss: that loss.
        stale_evals: validations since then that were no better.
    """

    step: int = 0
    tokens: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    best_step: int | None = None
    best_loss: float | None = None
    stale_evals: int = 0


def save_state(
    run: Path,
    state: TrainState,
    model: nn.Module,
    optimizer: mlx_optim.Optimizer,
    *,
    keep: int,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write the state of a step and drop all but the last ``keep``.

    Args:
        run: the run's folder.
        state: where it stands.
        model: whose trainable parameters are saved.
        optimizer: whose state is saved.
        keep: how many states stay.
        settings: kept beside, to be compared on resume.

    Returns:
        The state's folder.

    Raises:
        OSError: if it cannot be written; states that are there stay as they are.
    """
    folder = run / STATES / f"step-{state.step:08d}"
    _write(folder, state, _weights(model), _optimizer_arrays(optimizer), settings)
    for old in sorted((run / STATES).glob("step-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def save_best(run: Path, state: TrainState, model: nn.Module) -> None:
    """Keep the weights of the best validation loss, in ``best``."""
    _write(run / BEST, state, _weights(model), {}, None)


def load_latest(
    run: Path, model: nn.Module, optimizer: mlx_optim.Optimizer
) -> tuple[TrainState, dict[str, Any]] | None:
    """Restore the newest state that is whole.

    Args:
        run: the run's folder.
        model: with the same trainable parameters; filled.
        optimizer: of the same kind; filled.

    Returns:
        The state and the settings that were saved with it; None if there is no state at all.

    Raises:
        ValueError: if there are states and none can be read, or the weights do not fit.
    """
    folders = sorted((run / STATES).glob("step-*"), reverse=True)
    problems = []
    for folder in folders:
        try:
            facts = verify(folder)
        except (ValueError, OSError) as error:
            problems.append(one_line(error))
            logger.warning("%s; going back to the state before", one_line(error))
            continue
        _fill(folder, model, optimizer)
        return TrainState(**facts["state"]), facts.get("settings") or {}
    if problems:
        raise ValueError(f"{run}: none of {len(problems)} saved states can be read: {problems[0]}")
    return None


def load_best(run: Path, model: nn.Module) -> TrainState:
    """Fill ``model`` with the weights of the best validation loss.

    Raises:
        FileNotFoundError: if none was kept.
        ValueError: if it is damaged.
    """
    facts = verify(run / BEST)
    model.load_weights(list(read_tensor_file(run / BEST / _WEIGHTS).items()), strict=False)
    return TrainState(**facts["state"])


def verify(folder: Path) -> dict[str, Any]:
    """Check the files of a state against their checksums; returns its facts.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if one differs from what was written.
    """
    facts = read_json(folder / _FACTS)
    for name, digest in facts.get("checksums", {}).items():
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} lacks {name}")
        if _checksum(folder / name) != digest:
            raise ValueError(f"{folder / name} is torn or damaged: its checksum differs")
    return facts


def _write(
    folder: Path,
    state: TrainState,
    weights: dict[str, mx.array],
    optimizer: dict[str, mx.array],
    settings: Mapping[str, Any] | None,
) -> None:
    with atomic_folder(folder, overwrite=True) as temporary:
        checksums = {}
        for name, arrays in ((_WEIGHTS, weights), (_OPTIMIZER, optimizer)):
            if arrays:
                _save(temporary / name, arrays)
                checksums[name] = _checksum(temporary / name)
        facts = {"state": vars(state), "settings": settings, "checksums": checksums}
        write_json(temporary / _FACTS, facts)


def _save(path: Path, arrays: dict[str, mx.array]) -> None:
    try:
        mx.save_safetensors(str(path), arrays)
    except RuntimeError as error:
        raise OSError(f"{path.parent} cannot be written: {one_line(error)}") from error


def _weights(model: nn.Module) -> dict[str, mx.array]:
    leaves: Any = tree_flatten(model.trainable_parameters())
    return dict(leaves)


def _optimizer_arrays(optimizer: mlx_optim.Optimizer) -> dict[str, mx.array]:
    leaves: Any = tree_flatten(optimizer.state)
    random: Any = mx.random.state
    return {**{f"optimizer.{k}": v for k, v in leaves}, "random": random[0]}


def _fill(folder: Path, model: nn.Module, optimizer: mlx_optim.Optimizer) -> None:
    weights = read_tensor_file(folder / _WEIGHTS)
    current = _weights(model)
    shapes = {k: v.shape for k, v in current.items()}
    if {k: v.shape for k, v in weights.items()} != shapes:
        raise ValueError(
            f"{folder} holds other trainable parameters than this run has; give the same model and "
            "adapter settings, or another --output"
        )
    model.load_weights(list(weights.items()), strict=False)
    arrays = read_tensor_file(folder / _OPTIMIZER)
    key: Any = arrays.pop("random").tolist()  # two uint32, the seed that makes this key
    mx.random.seed(key[0] << 32 | key[1])
    restored: Any = tree_unflatten([(k.removeprefix("optimizer."), v) for k, v in arrays.items()])
    optimizer.state = restored
    mx.eval(model.parameters(), optimizer.state)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()

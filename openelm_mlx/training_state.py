"""Resumable states on disk: weights, optimizer, random numbers and data position of one step.

A state is a folder that appears whole or not at all, with checksums that are verified on load; a
damaged newest one gives way to the one before. Rank 0 alone reads and writes, and a state knows
nothing of ranks: another number of them may continue it.
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
from openelm_mlx.distributed import json_of_rank_0, together, world
from openelm_mlx.sharding import gather, plain_name, scatter, whole_shape
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
        seconds: wall time of a run that is bounded by it, over all its parts; else 0.
    """

    step: int = 0
    tokens: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    best_step: int | None = None
    best_loss: float | None = None
    stale_evals: int = 0
    seconds: float = 0.0


def save_state(
    run: Path | None,
    state: TrainState,
    model: nn.Module,
    optimizer: mlx_optim.Optimizer,
    *,
    keep: int,
    settings: Mapping[str, Any] | None = None,
) -> Path | None:
    """Write the state of a step and drop all but the last ``keep``; called on all ranks.

    Args:
        run: the run's folder; None on ranks other than 0.
        state: where it stands.
        model: whose trainable parameters are saved.
        optimizer: whose state is saved.
        keep: how many states stay.
        settings: kept beside, to be compared on resume.

    Returns:
        The state's folder, where it was written.

    Raises:
        OSError: if it cannot be written; states that are there stay as they are.
    """
    weights = gather(_weights(model), world())
    arrays = gather(_optimizer_arrays(optimizer), world())
    if run is None:
        return None
    folder = run / STATES / f"step-{state.step:08d}"
    _write(folder, state, weights, arrays, settings)
    for old in sorted((run / STATES).glob("step-*"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def save_best(run: Path | None, state: TrainState, model: nn.Module) -> None:
    """Keep the weights of the best validation loss, in ``best``; None on ranks other than 0."""
    weights = gather(_weights(model), world())
    if run is not None:
        _write(run / BEST, state, weights, {}, None)


def load_latest(
    run: Path, model: nn.Module, optimizer: mlx_optim.Optimizer
) -> tuple[TrainState, dict[str, Any]] | None:
    """Restore the newest state that is whole; called on all ranks.

    Args:
        run: the run's folder, of which only rank 0's is read: the others need not have it.
        model: with the same trainable parameters; filled.
        optimizer: of the same kind, initialised; filled.

    Returns:
        The state and the settings that were saved with it; None if there is no state at all.

    Raises:
        ValueError: if there are states and none can be read, or the weights do not fit.
    """
    group = world()
    found = together(
        lambda: _newest(run, model, optimizer) if group.rank() == 0 else None, group
    ) or (None, {}, {})
    facts, weights, arrays = found
    facts = json_of_rank_0(facts, group)
    if facts is None:
        return None
    _fill(model, optimizer, weights, arrays)
    return TrainState(**facts["state"]), facts.get("settings") or {}


def load_best(run: Path, model: nn.Module) -> TrainState:
    """Fill ``model`` with the weights of the best validation loss, rank 0's; called on all ranks.

    Raises:
        FileNotFoundError: if none was kept.
        ValueError: if it is damaged, or of another model.
    """
    group = world()
    facts, weights = together(lambda: _best(run, model) if group.rank() == 0 else ({}, {}), group)
    weights = scatter(weights, _weights(model), group)
    model.load_weights(list(weights.items()), strict=False)
    return TrainState(**json_of_rank_0(facts, group)["state"])


def _best(run: Path, model: nn.Module) -> tuple[dict[str, Any], dict[str, mx.array]]:
    facts, weights = verify(run / BEST), read_tensor_file(run / BEST / _WEIGHTS)
    _require_same_parameters(run / BEST, weights, model)
    return facts, weights


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


def _newest(
    run: Path, model: nn.Module, optimizer: mlx_optim.Optimizer
) -> tuple[dict[str, Any], dict[str, mx.array], dict[str, mx.array]] | None:
    """Facts, weights and optimizer arrays of the newest state that is whole and fits."""
    folders = sorted((run / STATES).glob("step-*"), reverse=True)
    problems = []
    for folder in folders:
        try:
            facts = verify(folder)
        except (ValueError, OSError) as error:
            problems.append(one_line(error))
            logger.warning("%s; going back to the state before", one_line(error))
            continue
        return facts, *_read(folder, model, optimizer)
    if problems:
        raise ValueError(f"{run}: none of {len(problems)} saved states can be read: {problems[0]}")
    return None


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


def _read(
    folder: Path, model: nn.Module, optimizer: mlx_optim.Optimizer
) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Weights and optimizer arrays of a state, under plain names, checked against this run's."""
    weights = read_tensor_file(folder / _WEIGHTS)
    arrays = read_tensor_file(folder / _OPTIMIZER)
    _require_same_parameters(folder, weights, model)
    if _shapes(arrays) != _shapes(_optimizer_arrays(optimizer)):
        raise ValueError(
            f"{folder} holds the state of another optimizer than this run has; give the same "
            "optimizer settings, or another --output"
        )
    return weights, arrays


def _require_same_parameters(
    folder: Path, weights: Mapping[str, mx.array], model: nn.Module
) -> None:
    if _shapes(weights) != _shapes(_weights(model)):
        raise ValueError(
            f"{folder} holds other trainable parameters than this run has; give the same model and "
            "adapter settings, or another --output"
        )


def _shapes(arrays: Mapping[str, mx.array]) -> dict[str, tuple[int, ...]]:
    """Plain name -> shape of the whole array."""
    return {plain_name(name): whole_shape(name, a, world()) for name, a in arrays.items()}


def _fill(
    model: nn.Module,
    optimizer: mlx_optim.Optimizer,
    weights: dict[str, mx.array],
    arrays: dict[str, mx.array],
) -> None:
    """Put rank 0's arrays into the model and optimizer of all ranks."""
    weights = scatter(weights, _weights(model), world())
    model.load_weights(list(weights.items()), strict=False)
    arrays = scatter(arrays, _optimizer_arrays(optimizer), world())
    key: Any = arrays.pop("random").tolist()  # two uint32, the seed that makes this key
    mx.random.seed(key[0] << 32 | key[1])
    restored: Any = tree_unflatten([(k.removeprefix("optimizer."), v) for k, v in arrays.items()])
    optimizer.state = restored
    mx.eval(model.parameters(), optimizer.state)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()

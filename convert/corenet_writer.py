"""Model folder -> CoreNet's model-only ``.pt``; the work behind ``corenet.to_corenet``."""

import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from convert.corenet_rows import corenet_tables, read_rows
from convert.names import TABLES, corenet_order, to_corenet
from convert.pt_file import write
from openelm_mlx.atomic import atomic_file, refuse_existing_file
from openelm_mlx.checkpoint import load_args, load_model
from openelm_mlx.fitting import quantization_of

logger = logging.getLogger(__name__)


def write_checkpoint(
    folder: Path, output: Path, *, vocab_size: int | None, overwrite: bool
) -> None:
    """Write a folder's weights under CoreNet's names, in CoreNet's order, with its rows."""
    refuse_existing_file(output, overwrite=overwrite)
    args = load_args(folder)
    if quantization_of(args) is not None:
        raise ValueError(
            f"{folder} is quantised, which CoreNet cannot read; give the folder it was made from"
        )
    if (folder / "adapters").is_dir():
        logger.warning("%s: its adapters are not written; `openelm fuse` adds them first", folder)
    parameters: Any = tree_flatten(load_model(folder, lazy=True).parameters())
    weights: dict[str, mx.array] = dict(parameters)
    del parameters  # else the tables without their rows would stay in memory beside those with
    tables = {name: weights[name] for name in TABLES if name in weights}
    weights |= corenet_tables(tables, read_rows(folder, args), vocab_size, str(folder))
    del tables
    state = {to_corenet(name): array for name, array in weights.items()}
    ordered = OrderedDict((name, state[name]) for name in sorted(state, key=corenet_order))
    del weights, state
    with atomic_file(output, overwrite=overwrite) as temporary:
        write(temporary, ordered)

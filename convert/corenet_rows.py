"""Vocabulary rows that CoreNet has beyond a model folder's: kept in a file, put back, or zero."""

import logging
from collections.abc import Mapping
from pathlib import Path

import mlx.core as mx

from convert.names import CORENET_ROWS, HUB_ROWS, ROWS_FILE, TABLES, join_rows
from openelm_mlx.config import ModelArgs
from openelm_mlx.mismatch import check_tensors
from openelm_mlx.weight_files import read_tensor_file

logger = logging.getLogger(__name__)


def read_rows(folder: Path, args: ModelArgs) -> dict[str, mx.array]:
    """The rows kept beside a model: table's name -> (R, D); none where there is no such file.

    Raises:
        ValueError: if the file is damaged or of another model.
    """
    file = folder / ROWS_FILE
    if not file.is_file():
        return {}
    rows = read_tensor_file(file)
    count = next(iter(rows.values())).shape[0] if rows else 0
    names = TABLES[:1] if args.share_input_output_layers else TABLES
    try:
        check_tensors(
            dict.fromkeys(names, (count, args.model_dim)),
            {name: array.shape for name, array in rows.items()},
            source=str(file),
        )
    except ValueError as error:
        raise ValueError(
            f"{error}; these are rows of another model: delete the file to go without them"
        ) from error
    return rows


def corenet_tables(
    tables: Mapping[str, mx.array],
    kept: Mapping[str, mx.array],
    vocab_size: int | None,
    source: str,
) -> dict[str, mx.array]:
    """The tables as CoreNet gets them; says what was done.

    Args:
        tables: (V, D) each, unevaluated or not.
        kept: (R, D) each, from :func:`read_rows`.
        vocab_size: rows wanted: V, V + R or more; None for V + R.
        source: the folder, for messages.

    Raises:
        ValueError: for a number of rows that would lose some.
    """
    own = next(iter(tables.values())).shape[0]
    spare = next(iter(kept.values())).shape[0] if kept else 0
    wanted = own + spare if vocab_size is None else vocab_size
    if wanted != own and wanted < own + spare:
        choices = f"{own}, {own + spare}" if spare else str(own)
        raise ValueError(
            f"--vocab-size {wanted} would lose rows of {source}, which has {own}"
            f"{f' and {spare} kept in {ROWS_FILE}' if spare else ''}; give {choices} or more"
        )
    zeros = wanted - own - spare if wanted != own else 0
    _say(own, spare if wanted != own else 0, zeros, source, left_out=spare if wanted == own else 0)
    if wanted == own:
        return dict(tables)
    joined = {}
    for name, table in tables.items():
        table = join_rows(table, kept[name]) if spare else table
        if zeros:
            table = join_rows(table, mx.zeros((zeros, table.shape[1]), dtype=table.dtype))
        joined[name] = table
    return joined


def _say(own: int, put_back: int, zeros: int, source: str, *, left_out: int) -> None:
    if put_back:
        logger.info("%s: %d rows from %s put back", source, put_back, ROWS_FILE)
    if zeros:
        logger.warning(
            "%s: %d vocabulary rows of zeros added to its %d", source, zeros, own + put_back
        )
    if left_out:
        logger.warning("%s: the %d rows kept in %s are left out", source, left_out, ROWS_FILE)
    elif own == HUB_ROWS and not put_back and not zeros:
        logger.warning(
            "%s: no %s, so the vocabulary is written as it is, %d rows; CoreNet's own configs "
            "expect %d: --vocab-size %d adds rows of zeros",
            *(source, ROWS_FILE, own, CORENET_ROWS, CORENET_ROWS),
        )

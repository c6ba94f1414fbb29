"""Operations of MIL that expand compressed constants, in NumPy.

Each takes ``rounded`` first, what is done to a float result: nothing, or rounding to float16.
Source of the formulas: coremltools/converters/mil/mil/ops/defs/iOS18/compression.py, docstrings.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from convert.mil_types import Array

Rounding = Callable[[Array], Array]
_AT_ONCE = 1 << 16  # numbers


def _blockwise(rounded: Rounding, data: Array, scale: Array, offset: Array | None = None) -> Array:
    """Give scale * (data - offset), one scale and offset a block along every axis."""
    split, spread = [], []
    for size, blocks in zip(data.shape, scale.shape, strict=True):
        if blocks == 0 or size % blocks:
            raise ValueError(f"data of {list(data.shape)} for scales of {list(scale.shape)}")
        split += [blocks, size // blocks]
        spread += [blocks, 1]
    codes, scales = data.reshape(split), scale.astype(np.float32).reshape(spread)
    offsets = None if offset is None else offset.reshape(spread)
    result = np.empty(split, np.float32)

    def expand(part: slice) -> None:
        values = codes[part].astype(np.float32)
        if offsets is not None:
            values -= offsets[part].astype(np.float32)
            if offsets.dtype.kind == "f":
                values = rounded(values)  # integers this small are exact
        values *= scales[part]
        result[part] = rounded(values)

    _in_parts(expand, len(codes), codes.size)
    return result.reshape(data.shape)


def _in_parts(work: Callable[[slice], None], rows: int, numbers: int) -> None:
    """Do ``work`` on slices of rows that stay in a core's cache, on all cores."""
    some = max(1, _AT_ONCE * rows // max(1, numbers))
    parts = [slice(first, first + some) for first in range(0, rows, some)]
    if len(parts) == 1:
        work(parts[0])
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy lets other threads run meanwhile
        for _ in pool.map(work, parts):
            pass


def _lut(rounded: Rounding, indices: Array, lut: Array, vector_axis: Array | None = None) -> Array:
    """Palette entries by index; one palette a block of indices, an entry may be a vector.

    Nothing to round: the result is of the palettes' own type.
    """
    rank = indices.ndim
    groups, width = lut.shape[:rank], lut.shape[-1]
    if any(size % count for size, count in zip(indices.shape, groups, strict=True)):
        raise ValueError(f"indices of {list(indices.shape)} for palettes of {list(lut.shape)}")
    if indices.size and int(indices.max()) >= lut.shape[-2]:
        raise ValueError(f"index {indices.max()} in a palette of {lut.shape[-2]}")
    split = [
        n for size, count in zip(indices.shape, groups, strict=True) for n in (count, size // count)
    ]
    spread = [n for count in groups for n in (count, 1)]
    table = lut.reshape(-1, width).astype(np.float32 if lut.dtype.kind == "f" else lut.dtype)
    first = np.arange(0, len(table), lut.shape[-2], dtype=np.int32).reshape(spread)  # of a palette
    values = _look_up(table, indices.reshape(split), first).reshape(*indices.shape, width)
    if width == 1:
        return values[..., 0]
    axis = (0 if vector_axis is None else int(vector_axis)) % rank
    shape = [n * width if i == axis else n for i, n in enumerate(indices.shape)]
    return np.moveaxis(values, -1, axis + 1).reshape(shape)


def _look_up(table: Array, indices: Array, first: Array) -> Array:
    result = np.empty((*indices.shape, table.shape[-1]), table.dtype)

    def take(part: slice) -> None:
        np.take(table, indices[part] + first[part], 0, result[part], mode="clip")

    _in_parts(take, len(indices), indices.size)
    return result


def _affine(
    rounded: Rounding, quantized_data: Array, zero_point: Array, scale: Array, axis: Array
) -> Array:
    """Give scale * (data - zero_point) along one axis (iOS 16)."""
    shape = [1] * quantized_data.ndim
    shape[int(axis)] = -1
    offset = zero_point.astype(np.float32).reshape(shape if zero_point.ndim else ())
    factor = scale.astype(np.float32).reshape(shape if scale.ndim else ())
    return rounded((quantized_data.astype(np.float32) - offset) * factor)


def _cast(rounded: Rounding, source_val: Array, output_dtype: str) -> Array:
    return rounded(source_val.astype(np.float32))


def _sparse(rounded: Rounding, nonzero_data: Array, mask: Array) -> Array:
    dtype = np.float32 if nonzero_data.dtype.kind == "f" else nonzero_data.dtype
    values = np.zeros(mask.shape, dtype)
    values[mask == 1] = nonzero_data
    return values


COMPRESSED: dict[str, Callable[..., Array]] = {
    "constexpr_blockwise_shift_scale": _blockwise,
    "constexpr_lut_to_dense": _lut,
    "constexpr_affine_dequantize": _affine,
    "constexpr_cast": _cast,
    "constexpr_sparse_to_dense": _sparse,
}

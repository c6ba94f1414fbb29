"""Operations of MIL that make, join and rearrange tensors, in NumPy."""

from collections.abc import Callable, Sequence

import numpy as np

from convert.mil_types import Array

Result = Array | list[Array]


def _reshape(x: Array, shape: Array) -> Array:
    # 0 keeps the dimension at its place, -1 is whatever remains
    return x.reshape([x.shape[i] if n == 0 else int(n) for i, n in enumerate(shape)])


def _transpose(x: Array, perm: Array) -> Array:
    return np.transpose(x, [int(axis) for axis in perm])


def _expand_dims(x: Array, axes: Array) -> Array:
    return np.expand_dims(x, tuple(int(axis) for axis in axes))


def _squeeze(x: Array, axes: Array | None = None) -> Array:
    chosen = None if axes is None else tuple(int(axis) for axis in axes)
    return np.squeeze(x, chosen)


def _concat(values: Sequence[Array], axis: Array, interleave: Array | bool = False) -> Array:
    if interleave:
        stacked = np.stack(values, int(axis) % values[0].ndim + 1)
        shape = list(values[0].shape)
        shape[int(axis)] *= len(values)
        return stacked.reshape(shape)
    return np.concatenate(values, int(axis))


def _stack(values: Sequence[Array], axis: Array) -> Array:
    return np.stack(values, int(axis))


def _split(
    x: Array, axis: Array, num_splits: Array | None = None, split_sizes: Array | None = None
) -> Result:
    length = x.shape[int(axis)]
    if split_sizes is None:
        parts = 1 if num_splits is None else int(num_splits)
        sizes = np.full(parts, length // parts)
    else:
        sizes = split_sizes
    if int(np.sum(sizes)) != length:
        raise ValueError(f"parts of {sizes.tolist()} do not make up a dimension of {length}")
    return list(np.split(x, np.cumsum(sizes)[:-1], int(axis)))


def _tile(x: Array, reps: Array) -> Array:
    return np.tile(x, [int(n) for n in reps])


def _fill(shape: Array, value: Array | float = 0.0) -> Array:
    array = np.asarray(value)
    return np.full([int(n) for n in shape], array, array.dtype)


def _fill_like(ref_tensor: Array, value: Array | float = 0.0) -> Array:
    return _fill(np.array(ref_tensor.shape), value)


def _shape(x: Array) -> Array:
    return np.array(x.shape, np.int32)


def _range_1d(start: Array, end: Array, step: Array) -> Array:
    return np.arange(start.item(), end.item(), step.item(), dtype=start.dtype)


def _pad(x: Array, pad: Array, mode: str = "constant", constant_val: Array | float = 0.0) -> Array:
    pairs = [(int(a), int(b)) for a, b in np.reshape(pad, (-1, 2))]
    widths = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    if mode == "constant":
        return np.pad(x, widths, constant_values=np.asarray(constant_val, x.dtype))
    if mode == "reflect":
        return np.pad(x, widths, mode="reflect")
    if mode == "replicate":
        return np.pad(x, widths, mode="edge")
    raise ValueError(f"pad mode {mode}")


def _band_part(x: Array, lower: Array | int = -1, upper: Array | int = -1) -> Array:
    rows, columns = np.indices(x.shape[-2:])
    keep = np.ones(x.shape[-2:], bool)
    if int(lower) >= 0:
        keep &= rows - columns <= int(lower)
    if int(upper) >= 0:
        keep &= columns - rows <= int(upper)
    return np.where(keep, x, np.zeros((), x.dtype))


def _reverse(x: Array, axes: Array | None = None) -> Array:
    return np.flip(x, None if axes is None else tuple(int(axis) for axis in axes))


def _cumsum(
    x: Array,
    axis: Array | int = 0,
    exclusive: Array | bool = False,
    reverse: Array | bool = False,
) -> Array:
    values = np.flip(x, int(axis)) if reverse else x
    sums = np.cumsum(values, int(axis), dtype=x.dtype)
    if exclusive:
        sums = sums - values
    return np.flip(sums, int(axis)) if reverse else sums


def _one_hot(
    indices: Array,
    one_hot_vector_size: Array,
    axis: Array | int = -1,
    on_value: Array | int = 1,
    off_value: Array | int = 0,
) -> Array:
    hits = indices[..., None] == np.arange(int(one_hot_vector_size))
    return np.moveaxis(np.where(hits, on_value, off_value), -1, int(axis))


SHAPES: dict[str, Callable[..., Result]] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "expand_dims": _expand_dims,
    "squeeze": _squeeze,
    "concat": _concat,
    "stack": _stack,
    "split": _split,
    "tile": _tile,
    "fill": _fill,
    "fill_like": _fill_like,
    "shape": _shape,
    "range_1d": _range_1d,
    "pad": _pad,
    "band_part": _band_part,
    "reverse": _reverse,
    "cumsum": _cumsum,
    "one_hot": _one_hot,
}

"""Operations of MIL that read or write parts of a tensor, in NumPy, all bounds checked."""

from collections.abc import Callable

import numpy as np

from convert.mil_types import Array

_Index = tuple[int | slice, ...]


def _slice_by_index(
    x: Array,
    begin: Array,
    end: Array,
    stride: Array | None = None,
    begin_mask: Array | None = None,
    end_mask: Array | None = None,
    squeeze_mask: Array | None = None,
) -> Array:
    return x[_index(x, begin, end, stride, begin_mask, end_mask, squeeze_mask)]


def _slice_update(
    x: Array,
    update: Array,
    begin: Array,
    end: Array,
    stride: Array | None = None,
    begin_mask: Array | None = None,
    end_mask: Array | None = None,
    squeeze_mask: Array | None = None,
    reuse: bool = False,
) -> Array:
    """A copy of ``x`` with a slice replaced; ``x`` itself, overwritten, where it may be reused."""
    index = _index(x, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    room = x[index].shape
    if update.shape != room:
        raise ValueError(f"an update of {list(update.shape)} into a slice of {list(room)}")
    result = x if reuse else x.copy()
    result[index] = update
    return result


def _index(
    x: Array,
    begin: Array,
    end: Array,
    stride: Array | None,
    begin_mask: Array | None,
    end_mask: Array | None,
    squeeze_mask: Array | None,
) -> _Index:
    if not len(begin) == len(end) == x.ndim:
        raise ValueError(f"begin {begin.tolist()} and end {end.tolist()} for rank {x.ndim}")
    off = np.zeros(x.ndim, bool)
    steps = np.ones(x.ndim, int) if stride is None else stride
    masks = [off if mask is None else mask for mask in (begin_mask, end_mask, squeeze_mask)]
    found: list[int | slice] = []
    for axis, length in enumerate(x.shape):
        first = None if masks[0][axis] else int(begin[axis])
        last = None if masks[1][axis] else int(end[axis])
        if masks[2][axis]:
            found.append(_position(first or 0, length, axis))
        else:
            found.append(_range(first, last, int(steps[axis]), length, axis))
    return tuple(found)


def _position(place: int, length: int, axis: int) -> int:
    if not -length <= place < length:
        raise ValueError(f"index {place} is outside dimension {axis} of {length}")
    return place


def _range(first: int | None, last: int | None, step: int, length: int, axis: int) -> slice:
    if step < 0:
        return slice(first, last, step)
    start = 0 if first is None else first + length * (first < 0)
    stop = length if last is None else last + length * (last < 0)
    if not 0 <= start < stop <= length:
        raise ValueError(f"slice {first}:{last} is outside dimension {axis} of {length} or empty")
    return slice(start, stop, step)


def _slice_by_size(x: Array, begin: Array, size: Array) -> Array:
    stops = [
        length if n == -1 else int(first + n)
        for first, n, length in zip(begin, size, x.shape, strict=True)
    ]
    return x[
        tuple(
            _range(int(first), stop, 1, length, axis)
            for axis, (first, stop, length) in enumerate(zip(begin, stops, x.shape, strict=True))
        )
    ]


def _inside(indices: Array, length: int) -> Array:
    if indices.size and (indices.min() < 0 or indices.max() >= length):
        bad = indices[(indices < 0) | (indices >= length)].ravel()[0]
        raise ValueError(f"index {bad} is outside 0..{length - 1}")
    return indices


def _gather(
    x: Array,
    indices: Array,
    axis: Array | int = 0,
    batch_dims: Array | int = 0,
    validate_indices: Array | bool = False,
) -> Array:
    """Bounds are checked whatever ``validate_indices`` says: beyond them Core ML is undefined."""
    place, batch = int(axis) % x.ndim, int(batch_dims)
    _inside(indices, x.shape[place])
    if not batch:
        return np.take(x, indices, place)
    rows = x.reshape(-1, *x.shape[batch:])
    chosen = indices.reshape(-1, *indices.shape[batch:])
    taken = [np.take(row, one, place - batch) for row, one in zip(rows, chosen, strict=True)]
    return np.stack(taken).reshape(*x.shape[:batch], *taken[0].shape)


def _gather_along_axis(
    x: Array, indices: Array, axis: Array | int = 0, validate_indices: Array | bool = False
) -> Array:
    return np.take_along_axis(x, _inside(indices, x.shape[int(axis)]).astype(np.int64), int(axis))


def _gather_nd(
    x: Array,
    indices: Array,
    batch_dims: Array | int = 0,
    validate_indices: Array | bool = False,
) -> Array:
    if int(batch_dims):
        raise ValueError("gather_nd with batch_dims is not evaluated here")
    places = [_inside(indices[..., k], x.shape[k]) for k in range(indices.shape[-1])]
    return x[tuple(places)]


_MODES: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.maximum,
    "min": np.minimum,
}


def _put(result: Array, index: tuple[Array | slice, ...], updates: Array, mode: str) -> Array:
    if mode == "update":
        result[index] = updates
    elif mode in _MODES:
        getattr(_MODES[mode], "at")(result, index, updates)  # noqa: B009  a ufunc's own method
    else:
        raise ValueError(f"scatter mode {mode}")
    return result


def _scatter(
    data: Array,
    indices: Array,
    updates: Array,
    axis: Array | int = 0,
    mode: str = "add",
    validate_indices: Array | bool = False,
) -> Array:
    place = int(axis) % data.ndim
    before: list[Array | slice] = [slice(None)] * place
    index = (*before, _inside(indices, data.shape[place]))
    return _put(data.copy(), index, updates, mode)


def _scatter_along_axis(
    data: Array,
    indices: Array,
    updates: Array,
    axis: Array | int = 0,
    mode: str = "add",
    validate_indices: Array | bool = False,
) -> Array:
    place = int(axis) % data.ndim
    grid: list[Array] = list(np.indices(indices.shape, sparse=True))
    grid[place] = _inside(indices, data.shape[place])
    return _put(data.copy(), tuple(grid), updates, mode)


def _scatter_nd(
    data: Array,
    indices: Array,
    updates: Array,
    mode: str = "add",
    validate_indices: Array | bool = False,
) -> Array:
    places = [_inside(indices[..., k], data.shape[k]) for k in range(indices.shape[-1])]
    return _put(data.copy(), tuple(places), updates, mode)


INDEXING: dict[str, Callable[..., Array]] = {
    "slice_by_index": _slice_by_index,
    "slice_by_size": _slice_by_size,
    "slice_update": _slice_update,
    "gather": _gather,
    "gather_along_axis": _gather_along_axis,
    "gather_nd": _gather_nd,
    "scatter": _scatter,
    "scatter_along_axis": _scatter_along_axis,
    "scatter_nd": _scatter_nd,
}

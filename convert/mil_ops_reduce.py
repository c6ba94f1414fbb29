"""Operations of MIL that reduce or order along axes, and norms, in NumPy."""

from collections.abc import Callable

import numpy as np

from convert.mil_types import Array

Result = Array | list[Array]
_Axes = tuple[int, ...] | None


def _axes(axes: Array | None) -> _Axes:
    return None if axes is None else tuple(int(axis) for axis in np.ravel(axes))


def _reduction(function: Callable[[Array, _Axes, bool], Array]) -> Callable[..., Array]:
    def apply(x: Array, axes: Array | None = None, keep_dims: Array | bool = False) -> Array:
        return np.asarray(function(x, _axes(axes), bool(keep_dims)))

    return apply


def _sum(x: Array, axes: _Axes, keep: bool) -> Array:
    return np.asarray(np.sum(x, axes, x.dtype, keepdims=keep))


def _log_sum_exp(x: Array, axes: _Axes, keep: bool) -> Array:
    top = np.max(x, axes, keepdims=True)
    sums = np.log(np.sum(np.exp(x - top), axes, keepdims=True)) + top
    return sums if keep else np.squeeze(sums, axes)


_REDUCTIONS: dict[str, Callable[[Array, _Axes, bool], Array]] = {
    "reduce_sum": _sum,
    "reduce_mean": lambda x, axes, keep: np.mean(x, axes, keepdims=keep),
    "reduce_max": lambda x, axes, keep: np.max(x, axes, keepdims=keep),
    "reduce_min": lambda x, axes, keep: np.min(x, axes, keepdims=keep),
    "reduce_prod": lambda x, axes, keep: np.prod(x, axes, x.dtype, keepdims=keep),
    "reduce_sum_square": lambda x, axes, keep: _sum(np.square(x), axes, keep),
    "reduce_l1_norm": lambda x, axes, keep: _sum(np.abs(x), axes, keep),
    "reduce_l2_norm": lambda x, axes, keep: np.sqrt(_sum(np.square(x), axes, keep)),
    "reduce_log_sum": lambda x, axes, keep: np.log(_sum(x, axes, keep)),
    "reduce_log_sum_exp": _log_sum_exp,
}


def _arg(function: Callable[..., Array]) -> Callable[..., Array]:
    def apply(
        x: Array,
        axis: Array | int = -1,
        keep_dims: Array | bool = False,
        output_dtype: str = "int32",
    ) -> Array:
        return np.asarray(function(x, int(axis), keepdims=bool(keep_dims))).astype(output_dtype)

    return apply


def _argsort(x: Array, axis: Array | int = -1, ascending: Array | bool = False) -> Array:
    keys = x if ascending else -x
    return np.argsort(keys, int(axis), stable=True).astype(np.int32)


def _topk(
    x: Array,
    k: Array | int = 1,
    axis: Array | int = -1,
    ascending: Array | bool = False,
    sort: Array | bool = True,
    return_indices: Array | bool = True,
    output_indices_dtype: str = "int32",
) -> Result:
    order = np.take(_argsort(x, axis, ascending), np.arange(int(k)), int(axis))
    values = np.take_along_axis(x, order.astype(np.int64), int(axis))
    return [values, order.astype(output_indices_dtype)] if return_indices else values


def _softmax(x: Array, axis: Array | int = -1) -> Array:
    shifted = np.exp(x - np.max(x, int(axis), keepdims=True))
    shifted /= np.sum(shifted, int(axis), keepdims=True)
    return shifted


def _layer_norm(
    x: Array,
    axes: Array | None = None,
    gamma: Array | None = None,
    beta: Array | None = None,
    epsilon: Array | float = 1e-5,
) -> Array:
    chosen = _axes(axes) or (-1,)
    shape = [n if i in {a % x.ndim for a in chosen} else 1 for i, n in enumerate(x.shape)]
    centred = x - np.mean(x, chosen, keepdims=True)
    variance = np.mean(np.square(centred), chosen, keepdims=True)
    result = centred / np.sqrt(variance + np.float32(epsilon))
    if gamma is not None:
        result = result * gamma.reshape(shape)
    return result if beta is None else result + beta.reshape(shape)


def _l2_norm(x: Array, epsilon: Array | float = 1e-6) -> Array:
    # over the last three dimensions together, whatever the rank
    return x / np.sqrt(np.sum(np.square(x), (-3, -2, -1), keepdims=True) + np.float32(epsilon))


REDUCTIONS: dict[str, Callable[..., Result]] = {
    **{name: _reduction(function) for name, function in _REDUCTIONS.items()},
    "reduce_argmax": _arg(np.argmax),
    "reduce_argmin": _arg(np.argmin),
    "argsort": _argsort,
    "topk": _topk,
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "l2_norm": _l2_norm,
}

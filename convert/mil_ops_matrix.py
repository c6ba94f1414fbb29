"""Matrix products, attention and convolution of MIL in NumPy, float32 sums by BLAS."""

from collections.abc import Callable

import numpy as np

from convert.mil_ops_reduce import REDUCTIONS
from convert.mil_types import Array


def _linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"input of {list(x.shape)} for a weight of {list(weight.shape)}")
    rows = x.reshape(-1, x.shape[-1])
    result = (rows @ weight.T).reshape(*x.shape[:-1], weight.shape[0])
    return result if bias is None else result + bias


def _matmul(
    x: Array,
    y: Array,
    transpose_x: Array | bool = False,
    transpose_y: Array | bool = False,
) -> Array:
    left = np.swapaxes(x, -1, -2) if transpose_x else x
    right = np.swapaxes(y, -1, -2) if transpose_y else y
    return np.matmul(left, right)


def _attention(query: Array, key: Array, value: Array, attn_mask: Array | None = None) -> Array:
    """softmax(Q K^T / sqrt(E) + mask) V; a boolean mask is True where it may look."""
    if not query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        shapes = [list(array.shape) for array in (query, key, value)]
        raise ValueError(f"leading dimensions of query, key and value differ: {shapes}")
    scores = _matmul(query, key, transpose_y=True) / np.float32(np.sqrt(query.shape[-1]))
    if attn_mask is not None and attn_mask.dtype == np.bool_:
        scores = np.where(attn_mask, scores, np.float32(-np.inf))
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = REDUCTIONS["softmax"](scores)
    return np.matmul(np.asarray(weights), value)


def _conv(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    strides: Array | None = None,
    pad_type: str = "valid",
    pad: Array | None = None,
    dilations: Array | None = None,
    groups: Array | int = 1,
) -> Array:
    """(B, C, spatial...) with a weight (C_out, C / groups, spatial...)."""
    rank = x.ndim - 2
    steps = [1] * rank if strides is None else [int(n) for n in strides]
    gaps = [1] * rank if dilations is None else [int(n) for n in dilations]
    reach = [gap * (n - 1) + 1 for gap, n in zip(gaps, weight.shape[2:], strict=True)]
    padded = np.pad(x, [(0, 0), (0, 0), *_padding(pad_type, pad, x.shape[2:], reach, steps)])
    windows = np.lib.stride_tricks.sliding_window_view(
        padded, reach, axis=tuple(range(2, x.ndim))
    )  # (B, C, out..., reach...)
    outer = [slice(None), slice(None), *(slice(None, None, n) for n in steps)]
    windows = windows[(*outer, *(slice(None, None, gap) for gap in gaps))]
    result = _grouped_product(windows, weight, int(groups))
    return result if bias is None else result + bias.reshape(-1, *[1] * rank)


def _grouped_product(windows: Array, weight: Array, groups: int) -> Array:
    spatial = weight.ndim - 2
    inside = list(range(-spatial, 0))
    parts = [
        np.tensordot(w, k, axes=([1, *inside], [1, *range(2, k.ndim)]))
        for w, k in zip(np.split(windows, groups, 1), np.split(weight, groups, 0), strict=True)
    ]
    return np.moveaxis(np.concatenate(parts, -1), -1, 1)


def _padding(
    kind: str, pad: Array | None, sizes: tuple[int, ...], reach: list[int], steps: list[int]
) -> list[tuple[int, int]]:
    if kind == "valid":
        return [(0, 0)] * len(sizes)
    if kind == "custom" and pad is not None:
        return [(int(a), int(b)) for a, b in np.reshape(pad, (-1, 2))]
    if kind in ("same", "same_lower"):
        pairs = []
        for size, span, step in zip(sizes, reach, steps, strict=True):
            total = max(0, (-(-size // step) - 1) * step + span - size)
            small, large = total // 2, total - total // 2
            pairs.append((small, large) if kind == "same" else (large, small))
        return pairs
    raise ValueError(f"conv pad_type {kind}")


MATRICES: dict[str, Callable[..., Array]] = {
    "linear": _linear,
    "matmul": _matmul,
    "scaled_dot_product_attention": _attention,
    "conv": _conv,
}

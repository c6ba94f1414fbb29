"""Cases of `mil_cases`: matrix products, convolution, and operations that move or pick values."""

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
from mil_cases_elementwise import Cases

_rng = np.random.default_rng(5)
WEIGHT = _rng.standard_normal((6, 4)).astype(np.float32)
BIAS = _rng.standard_normal(6).astype(np.float32)
KERNEL = _rng.standard_normal((6, 2, 3, 2)).astype(np.float32)
POINT = _rng.standard_normal((6, 4, 1, 1)).astype(np.float32)
MASK = np.where(_rng.random((3, 5)) < 0.4, -1e4, 0).astype(np.float32) * (
    np.arange(5) > 0
)  # each row sees the first


def _conv(image: np.ndarray, weight: np.ndarray, **settings: Any) -> np.ndarray:
    """MLX's convolution, which keeps channels last."""
    made = mx.conv2d(
        mx.array(image.transpose(0, 2, 3, 1)), mx.array(weight.transpose(0, 2, 3, 1)), **settings
    )
    return np.array(made).transpose(0, 3, 1, 2)


def _attention(v: SimpleNamespace, mask: np.ndarray | None = None) -> np.ndarray:
    made = mx.fast.scaled_dot_product_attention(
        mx.array(v.q),
        mx.array(v.k),
        mx.array(v.k * 2),
        scale=v.q.shape[-1] ** -0.5,
        mask=None if mask is None else mx.array(mask),
    )
    return np.array(made)


def _updated(target: np.ndarray, index: Any, values: Any) -> np.ndarray:
    copy = target.copy()
    copy[index] = values
    return copy


def _added(target: np.ndarray, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    copy = target.copy()
    for row, value in zip(rows, values, strict=True):
        copy[row] += value
    return copy


TENSOR_CASES: Cases = {
    "linear": (
        lambda mb, v: mb.linear(x=v.x, weight=WEIGHT, bias=BIAS),
        lambda v: np.einsum("abc,dc->abd", v.x, WEIGHT) + BIAS,
    ),
    "matmul": (
        lambda mb, v: mb.matmul(x=v.x, y=v.y, transpose_y=True),
        lambda v: np.einsum("abc,adc->abd", v.x, v.y),
    ),
    "matmul of a transposed": (
        lambda mb, v: mb.matmul(x=v.x, y=v.m, transpose_x=True),
        lambda v: np.einsum("abc,bd->acd", v.x, v.m),
    ),
    "scaled_dot_product_attention": (
        lambda mb, v: mb.scaled_dot_product_attention(
            query=v.q, key=v.k, value=mb.mul(x=v.k, y=2.0), attn_mask=MASK
        ),
        lambda v: _attention(v, MASK),
    ),
    "scaled_dot_product_attention without a mask": (
        lambda mb, v: mb.scaled_dot_product_attention(
            query=v.q, key=v.k, value=mb.mul(x=v.k, y=2.0)
        ),
        lambda v: _attention(v),
    ),
    "scaled_dot_product_attention with a boolean mask": (
        lambda mb, v: mb.scaled_dot_product_attention(
            query=v.q, key=v.k, value=mb.mul(x=v.k, y=2.0), attn_mask=MASK == 0
        ),
        lambda v: _attention(v, MASK == 0),
    ),
    "conv": (
        lambda mb, v: mb.conv(x=v.image, weight=POINT, bias=BIAS),
        lambda v: _conv(v.image, POINT) + BIAS[:, None, None],
    ),
    "conv in groups": (
        lambda mb, v: mb.conv(
            x=v.image,
            weight=KERNEL,
            strides=[2, 1],
            dilations=[1, 2],
            pad_type="custom",
            pad=[1, 1, 2, 2],
            groups=2,
        ),
        lambda v: _conv(v.image, KERNEL, stride=(2, 1), dilation=(1, 2), padding=(1, 2), groups=2),
    ),
    "conv of the same size": (
        lambda mb, v: mb.conv(x=v.image, weight=KERNEL[:, :, :, :1], groups=2, pad_type="same"),
        lambda v: _conv(v.image, KERNEL[:, :, :, :1], padding=(1, 0), groups=2),
    ),
    "reshape": (
        lambda mb, v: mb.reshape(x=v.x, shape=[4, -1, 2]),
        lambda v: v.x.ravel().reshape(4, 3, 2),
    ),
    "transpose": (
        lambda mb, v: mb.transpose(x=v.x, perm=[2, 0, 1]),
        lambda v: np.einsum("abc->cab", v.x),
    ),
    "expand_dims": (
        lambda mb, v: mb.expand_dims(x=v.x, axes=[0, -1]),
        lambda v: v.x.reshape(1, 2, 3, 4, 1),
    ),
    "squeeze": (
        lambda mb, v: mb.squeeze(x=mb.expand_dims(x=v.x, axes=[0, 3]), axes=[0]),
        lambda v: v.x.reshape(2, 3, 1, 4),
    ),
    "concat": (
        lambda mb, v: mb.concat(values=[v.x, v.y, v.x], axis=-2),
        lambda v: np.hstack([v.x, v.y, v.x]),
    ),
    "concat in turns": (
        lambda mb, v: mb.concat(values=[v.x, v.y], axis=1, interleave=True),
        lambda v: np.hstack([a[:, r : r + 1] for r in range(3) for a in (v.x, v.y)]),
    ),
    "stack": (
        lambda mb, v: mb.stack(values=[v.x, v.y], axis=1),
        lambda v: np.array([[a, b] for a, b in zip(v.x, v.y, strict=True)]),
    ),
    "split": (
        lambda mb, v: mb.split(x=v.x, split_sizes=[1, 3], axis=2)[1],
        lambda v: v.x[..., 1:],
    ),
    "split in equal parts": (
        lambda mb, v: mb.split(x=v.x, num_splits=2, axis=-1)[0],
        lambda v: v.x[..., :2],
    ),
    "tile": (
        lambda mb, v: mb.tile(x=v.x, reps=[1, 2, 3]),
        lambda v: np.concatenate([np.concatenate([v.x] * 3, 2)] * 2, 1),
    ),
    "fill": (
        lambda mb, v: mb.add(x=mb.fill(shape=[2, 3, 4], value=2.5), y=v.x),
        lambda v: v.x + 2.5,
    ),
    "fill_like": (
        lambda mb, v: mb.add(x=mb.fill_like(ref_tensor=v.x, value=2.5), y=v.x),
        lambda v: v.x + 2.5,
    ),
    "shape": (lambda mb, v: mb.add(x=mb.shape(x=v.x), y=[0, 0, 1]), lambda v: [2, 3, 5]),
    "range_1d": (
        lambda mb, v: mb.range_1d(start=1, end=mb.reduce_max(x=mb.add(x=v.i, y=8)), step=3),
        lambda v: np.arange(1, v.i.max() + 8, 3),
    ),
    "pad": (
        lambda mb, v: mb.pad(x=v.x, pad=[1, 2, 0, 1], mode="constant", constant_val=7.0),
        lambda v: _updated(np.full((2, 6, 5), 7.0), np.s_[:, 1:4, :4], v.x),
    ),
    "pad by reflection": (
        lambda mb, v: mb.pad(x=v.x, pad=[1, 1], mode="reflect"),
        lambda v: v.x[..., [1, 0, 1, 2, 3, 2]],
    ),
    "pad with the edge": (
        lambda mb, v: mb.pad(x=v.x, pad=[1, 1], mode="replicate"),
        lambda v: v.x[..., [0, 0, 1, 2, 3, 3]],
    ),
    "band_part": (
        lambda mb, v: mb.band_part(x=v.m, lower=-1, upper=0),
        lambda v: np.tril(v.m),
    ),
    "reverse": (lambda mb, v: mb.reverse(x=v.x, axes=[1]), lambda v: v.x[:, [2, 1, 0]]),
    "one_hot": (
        lambda mb, v: mb.one_hot(indices=v.i, one_hot_vector_size=3, on_value=5, off_value=2),
        lambda v: 2 + 3 * np.eye(3)[v.i],
    ),
    "slice_by_index": (
        lambda mb, v: mb.slice_by_index(
            x=v.x,
            begin=[1, 0, -3],
            end=[0, 9, -1],
            stride=[1, 2, 1],
            begin_mask=[False, True, False],
            end_mask=[False, True, False],
            squeeze_mask=[True, False, False],
        ),
        lambda v: v.x[1, ::2, 1:3],
    ),
    "slice_by_index backwards": (
        lambda mb, v: mb.slice_by_index(
            x=v.x,
            begin=[0, 0, 0],
            end=[2, 3, 0],
            stride=[1, 1, -1],
            begin_mask=[False, False, True],
            end_mask=[False, False, True],
        ),
        lambda v: v.x[..., [3, 2, 1, 0]],
    ),
    "slice_by_size": (
        lambda mb, v: mb.slice_by_size(x=v.x, begin=[0, 1, 2], size=[2, 1, -1]),
        lambda v: v.x[:, 1:2, 2:],
    ),
    "slice_update": (
        lambda mb, v: mb.slice_update(
            x=v.x,
            update=v.m,
            begin=[1, 0, 1],
            end=[0, 0, 4],
            squeeze_mask=[True, False, False],
            begin_mask=[False, True, False],
            end_mask=[False, True, False],
        ),
        lambda v: _updated(v.x, np.s_[1, :, 1:4], v.m),
    ),
    "gather": (
        lambda mb, v: mb.gather(x=v.x, indices=v.i, axis=1),
        lambda v: np.array([[row[list(ids)] for ids in v.i] for row in v.x]),
    ),
    "gather in batches": (
        lambda mb, v: mb.gather(x=v.x, indices=v.i, axis=2, batch_dims=1),
        lambda v: np.array([row[:, ids] for row, ids in zip(v.x, v.i, strict=True)]),
    ),
    "gather_along_axis": (
        lambda mb, v: mb.gather_along_axis(x=v.m, indices=v.i, axis=0),
        lambda v: [[v.m[n, c] for c, n in enumerate(row)] for row in v.i],
    ),
    "gather_nd": (
        lambda mb, v: mb.gather_nd(x=v.m, indices=mb.transpose(x=v.i, perm=[1, 0])),
        lambda v: [v.m[a, b] for a, b in v.i.T],
    ),
    "scatter": (
        lambda mb, v: mb.scatter(data=v.m, indices=[2, 0, 2], updates=v.m, axis=0, mode="add"),
        lambda v: _added(v.m, np.array([2, 0, 2]), v.m),
    ),
    "scatter that overwrites": (
        lambda mb, v: mb.scatter(data=v.m, indices=[2, 0, 1], updates=v.m, axis=1, mode="update"),
        lambda v: _updated(v.m, np.s_[:, [2, 0, 1]], v.m),
    ),
    "scatter_along_axis": (
        lambda mb, v: mb.scatter_along_axis(
            data=v.m, indices=[[2, 0, 1]], updates=[[1.0, 2.0, 3.0]], axis=0, mode="update"
        ),
        lambda v: _updated(v.m, ([2, 0, 1], [0, 1, 2]), [1, 2, 3]),
    ),
    "scatter_nd": (
        lambda mb, v: mb.scatter_nd(
            data=v.m, indices=[[2, 0], [0, 1]], updates=[5.0, 6.0], mode="update"
        ),
        lambda v: _updated(v.m, ([2, 0], [0, 1]), [5, 6]),
    ),
}

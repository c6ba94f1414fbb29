"""Operations of MIL as the builder makes them, each with what NumPy or MLX says it should give.

x, y (2, 3, 4) float32, p (2, 3, 4) positive, i (2, 3) int32 in 0..2, m (3, 3) float32,
image (1, 4, 6, 5), q (1, 2, 3, 8), k (1, 2, 5, 8) float32.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

SHAPES = {
    "x": ((2, 3, 4), "fp32"),
    "y": ((2, 3, 4), "fp32"),
    "p": ((2, 3, 4), "fp32"),
    "i": ((2, 3), "int32"),
    "m": ((3, 3), "fp32"),
    "image": ((1, 4, 6, 5), "fp32"),
    "q": ((1, 2, 3, 8), "fp32"),
    "k": ((1, 2, 5, 8), "fp32"),
}
Build = Callable[[Any, SimpleNamespace], Any]
Expect = Callable[[SimpleNamespace], Any]

_rng = np.random.default_rng(5)
WEIGHT = _rng.standard_normal((6, 4)).astype(np.float32)
BIAS = _rng.standard_normal(6).astype(np.float32)
KERNEL = _rng.standard_normal((6, 2, 3, 2)).astype(np.float32)
POINT = _rng.standard_normal((6, 4, 1, 1)).astype(np.float32)
MASK = np.where(_rng.random((3, 5)) < 0.4, -1e4, 0).astype(np.float32) * (
    np.arange(5) > 0
)  # each row sees the first
GAMMA = _rng.standard_normal(4).astype(np.float32)


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(6)
    made = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, (shape, _) in SHAPES.items()
        if name != "i"
    }
    made["p"] = np.abs(made["p"]) + np.float32(0.1)
    made["i"] = rng.integers(0, 3, (2, 3)).astype(np.int32)
    return made


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf)(x.astype(np.float64))


def _silu(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))


def _tanh_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


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


def _layer_norm(x: np.ndarray) -> np.ndarray:
    return np.array(mx.fast.layer_norm(mx.array(x), mx.array(GAMMA), mx.array(GAMMA), 1e-5))


BINARY: dict[str, Expect] = {
    "add": lambda v: v.x + v.y,
    "sub": lambda v: v.x - v.y,
    "mul": lambda v: v.x * v.y,
    "real_div": lambda v: v.x / v.y,
    "floor_div": lambda v: np.floor(v.x / v.y),
    "mod": lambda v: v.x - np.floor(v.x / v.y) * v.y,
    "maximum": lambda v: np.where(v.x > v.y, v.x, v.y),
    "minimum": lambda v: np.where(v.x < v.y, v.x, v.y),
}
COMPARISONS: dict[str, Expect] = {
    "equal": lambda v: v.x == v.y,
    "not_equal": lambda v: v.x != v.y,
    "greater": lambda v: v.x > v.y,
    "greater_equal": lambda v: v.x >= v.y,
    "less": lambda v: v.x < v.y,
    "less_equal": lambda v: v.x <= v.y,
}
LOGICAL: dict[str, Expect] = {
    "logical_and": lambda v: (v.x > 0) & (v.y > 0),
    "logical_or": lambda v: (v.x > 0) | (v.y > 0),
    "logical_xor": lambda v: (v.x > 0) ^ (v.y > 0),
}
UNARY: dict[str, Expect] = {
    "abs": lambda v: np.where(v.x < 0, -v.x, v.x),
    "ceil": lambda v: -np.floor(-v.x),
    "cos": lambda v: np.sin(v.x.astype(np.float64) + math.pi / 2),
    "erf": lambda v: _erf(v.x),
    "exp": lambda v: math.e ** v.x.astype(np.float64),
    "exp2": lambda v: 2.0**v.x,
    "floor": lambda v: np.floor(v.x),
    "identity": lambda v: v.x,
    "relu": lambda v: v.x * (v.x > 0),
    "relu6": lambda v: np.minimum(v.x * (v.x > 0), 6),
    "round": lambda v: np.floor(v.x + 0.5),
    "sigmoid": lambda v: (1 + np.tanh(v.x.astype(np.float64) / 2)) / 2,
    "sign": lambda v: (v.x > 0) * 1.0 - (v.x < 0),
    "silu": lambda v: _silu(v.x),
    "sin": lambda v: np.sin(v.x),
    "softplus": lambda v: np.log(1 + np.exp(v.x.astype(np.float64))),
    "softsign": lambda v: v.x / (1 + np.abs(v.x)),
    "square": lambda v: v.x * v.x,
    "tanh": lambda v: np.tanh(v.x),
}
OF_POSITIVE: dict[str, Expect] = {
    "sqrt": lambda v: v.p.astype(np.float64) ** 0.5,
    "rsqrt": lambda v: v.p.astype(np.float64) ** -0.5,
}
REDUCED: dict[str, Expect] = {
    "reduce_sum": lambda v: v.x.sum((0, 2)),
    "reduce_mean": lambda v: v.x.sum((0, 2)) / 8,
    "reduce_max": lambda v: np.sort(v.x.transpose(1, 0, 2).reshape(3, 8))[:, -1],
    "reduce_min": lambda v: np.sort(v.x.transpose(1, 0, 2).reshape(3, 8))[:, 0],
    "reduce_prod": lambda v: np.cumprod(v.x.transpose(1, 0, 2).reshape(3, 8), 1)[:, -1],
    "reduce_sum_square": lambda v: np.einsum("abc,abc->b", v.x, v.x),
    "reduce_l1_norm": lambda v: np.linalg.norm(v.x.transpose(1, 0, 2).reshape(3, 8), 1, axis=1),
    "reduce_l2_norm": lambda v: np.linalg.norm(v.x.transpose(1, 0, 2).reshape(3, 8), axis=1),
    "reduce_log_sum_exp": lambda v: np.log(np.exp(v.x.astype(np.float64)).sum((0, 2))),
}


def _cases() -> dict[str, tuple[Build, Expect]]:
    made: dict[str, tuple[Build, Expect]] = {}
    for op, expect in BINARY.items():
        made[op] = (lambda mb, v, op=op: getattr(mb, op)(x=v.x, y=v.y), expect)
    for op, expect in COMPARISONS.items():
        made[op] = (lambda mb, v, op=op: _int(mb, getattr(mb, op)(x=v.x, y=v.y)), expect)
    for op, expect in LOGICAL.items():
        made[op] = (
            lambda mb, v, op=op: _int(
                mb, getattr(mb, op)(x=mb.greater(x=v.x, y=0.0), y=mb.greater(x=v.y, y=0.0))
            ),
            expect,
        )
    for op, expect in UNARY.items():
        made[op] = (lambda mb, v, op=op: getattr(mb, op)(x=v.x), expect)
    for op, expect in OF_POSITIVE.items():
        made[op] = (lambda mb, v, op=op: getattr(mb, op)(x=v.p), expect)
    for op, expect in REDUCED.items():
        made[op] = (lambda mb, v, op=op: getattr(mb, op)(x=v.x, axes=[0, 2]), expect)
    return made | ONES_OF_A_KIND


def _int(mb: Any, flags: Any) -> Any:
    return mb.cast(x=flags, dtype="int32")


ONES_OF_A_KIND: dict[str, tuple[Build, Expect]] = {
    "pow": (lambda mb, v: mb.pow(x=v.p, y=v.y), lambda v: np.exp(v.y * np.log(v.p))),
    "real_div of integers": (
        lambda mb, v: mb.real_div(x=mb.sub(x=v.i, y=7), y=2),
        lambda v: np.trunc((v.i - 7) / 2),
    ),
    "floor_div of integers": (
        lambda mb, v: mb.floor_div(x=mb.sub(x=v.i, y=7), y=2),
        lambda v: np.floor((v.i - 7) / 2),
    ),
    "mod of integers": (
        lambda mb, v: mb.mod(x=mb.sub(x=v.i, y=7), y=3),
        lambda v: [[(int(n) - 7) % 3 for n in row] for row in v.i],
    ),
    "inverse": (lambda mb, v: mb.inverse(x=v.p, epsilon=0.1), lambda v: 1 / (v.p + 0.1)),
    "log": (lambda mb, v: mb.log(x=v.p, epsilon=0.1), lambda v: np.log(v.p + 0.1)),
    "clip": (
        lambda mb, v: mb.clip(x=v.x, alpha=-0.5, beta=0.3),
        lambda v: np.minimum(np.maximum(v.x, -0.5), 0.3),
    ),
    "threshold": (lambda mb, v: mb.threshold(x=v.x, alpha=0.2), lambda v: np.maximum(v.x, 0.2)),
    "leaky_relu": (
        lambda mb, v: mb.leaky_relu(x=v.x, alpha=0.1),
        lambda v: np.maximum(v.x, v.x * 0.1),
    ),
    "logical_not": (
        lambda mb, v: _int(mb, mb.logical_not(x=mb.greater(x=v.x, y=0.0))),
        lambda v: v.x <= 0,
    ),
    "select": (
        lambda mb, v: mb.select(cond=mb.greater(x=v.x, y=0.0), a=v.x, b=v.y),
        lambda v: v.x * (v.x > 0) + v.y * (v.x <= 0),
    ),
    "cast": (lambda mb, v: mb.cast(x=v.x, dtype="int32"), lambda v: np.trunc(v.x)),
    "gelu": (
        lambda mb, v: mb.gelu(x=v.x, mode="EXACT"),
        lambda v: 0.5 * v.x * (1 + _erf(v.x / math.sqrt(2))),
    ),
    "gelu by tanh": (
        lambda mb, v: mb.gelu(x=v.x, mode="TANH_APPROXIMATION"),
        lambda v: _tanh_gelu(v.x),
    ),
    "gelu by sigmoid": (
        lambda mb, v: mb.gelu(x=v.x, mode="SIGMOID_APPROXIMATION"),
        lambda v: _silu(1.702 * v.x) / 1.702,
    ),
    "softmax": (
        lambda mb, v: mb.softmax(x=v.x, axis=1),
        lambda v: np.array(mx.softmax(mx.array(v.x), 1)),
    ),
    "layer_norm": (
        lambda mb, v: mb.layer_norm(x=v.x, axes=[-1], gamma=GAMMA, beta=GAMMA, epsilon=1e-5),
        lambda v: _layer_norm(v.x),
    ),
    "l2_norm": (
        lambda mb, v: mb.l2_norm(x=v.x, epsilon=1e-6),
        lambda v: v.x / np.linalg.norm(v.x.astype(np.float64)),
    ),
    "reduce_log_sum": (
        lambda mb, v: mb.reduce_log_sum(x=v.p, axes=[1], keep_dims=True),
        lambda v: np.log(v.p[:, :1] + v.p[:, 1:2] + v.p[:, 2:]),
    ),
    "reduce_argmax": (
        lambda mb, v: mb.reduce_argmax(x=v.x, axis=1, keep_dims=True),
        lambda v: np.argsort(v.x, 1)[:, -1:],
    ),
    "reduce_argmin": (
        lambda mb, v: mb.reduce_argmin(x=v.x, axis=2),
        lambda v: np.argsort(v.x, 2)[..., 0],
    ),
    "argsort": (
        lambda mb, v: mb.argsort(x=v.x, axis=-1, ascending=True),
        lambda v: np.argsort(v.x, -1),
    ),
    "topk": (
        lambda mb, v: mb.topk(x=v.x, k=2, axis=2)[0],
        lambda v: np.sort(v.x, 2)[..., :-3:-1],
    ),
    "topk's indices": (
        lambda mb, v: mb.topk(x=v.x, k=2, axis=2)[1],
        lambda v: np.argsort(v.x, 2)[..., :-3:-1],
    ),
    "cumsum": (
        lambda mb, v: mb.cumsum(x=v.x, axis=2, exclusive=True),
        lambda v: np.einsum("abc,cd->abd", v.x, np.triu(np.ones((4, 4)), 1)),
    ),
    "cumsum from the end": (
        lambda mb, v: mb.cumsum(x=v.x, axis=2, reverse=True),
        lambda v: np.einsum("abc,cd->abd", v.x, np.tril(np.ones((4, 4)))),
    ),
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
CASES = _cases()

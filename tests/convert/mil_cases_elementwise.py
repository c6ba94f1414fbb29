"""Cases of `mil_cases`: element-wise operations, reductions and norms."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

Build = Callable[[Any, SimpleNamespace], Any]
Expect = Callable[[SimpleNamespace], Any]
Cases = dict[str, tuple[Build, Expect]]

GAMMA = np.random.default_rng(5).standard_normal(4).astype(np.float32)


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf)(x.astype(np.float64))


def _silu(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))


def _tanh_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


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


ONES_OF_A_KIND: Cases = {
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
}
ELEMENTWISE_CASES = _cases()

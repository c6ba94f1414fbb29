"""Element-wise operations of MIL in NumPy: arithmetic, comparison, activation, cast.

Floats arrive and leave as float32, whatever their declared type: `mil_eval` rounds results.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from convert.mil_types import Array

_CASTS: dict[str, npt.DTypeLike] = {
    "fp16": np.float32,  # rounded by the caller, where rounding is asked for
    "fp32": np.float32,
    "int32": np.int32,
    "int16": np.int16,
    "int8": np.int8,
    "uint16": np.uint16,
    "uint8": np.uint8,
    "bool": np.bool_,
}


def _binary(function: Callable[[Array, Array], Array]) -> Callable[..., Array]:
    def apply(x: Array, y: Array) -> Array:
        return function(x, y)

    return apply


def _unary(function: Callable[[Array], Array]) -> Callable[..., Array]:
    def apply(x: Array) -> Array:
        return function(x)

    return apply


def _real_div(x: Array, y: Array) -> Array:
    return np.divide(x, y) if x.dtype.kind == "f" else np.trunc(np.divide(x, y)).astype(x.dtype)


def _inverse(x: Array, epsilon: Array | float = 1e-4) -> Array:
    return 1 / (x + np.float32(epsilon))


def _rsqrt(x: Array, epsilon: Array | float = 1e-12) -> Array:
    return 1 / np.sqrt(x + np.float32(epsilon))


def _log(x: Array, epsilon: Array | float = 1e-45) -> Array:
    return np.log(x + np.float32(epsilon))


def _clip(x: Array, alpha: Array, beta: Array) -> Array:
    return np.clip(x, alpha, beta)


def _threshold(x: Array, alpha: Array) -> Array:
    return np.maximum(x, alpha)


def _cast(x: Array, dtype: str) -> Array:
    if dtype not in _CASTS:
        raise ValueError(f"cast to {dtype}, expected one of {', '.join(_CASTS)}")
    return x.astype(_CASTS[dtype])


def _select(cond: Array, a: Array, b: Array) -> Array:
    return np.where(cond, a, b)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _leaky_relu(x: Array, alpha: Array) -> Array:
    return np.where(x >= 0, x, x * alpha)


def _gelu(x: Array, mode: str = "EXACT") -> Array:
    """0.5 x (1 + erf(x / sqrt 2)) or one of its two usual approximations."""
    if mode == "EXACT":
        return (0.5 * x.astype(np.float64) * _erfc(-x / np.sqrt(2.0))).astype(np.float32)
    if mode == "TANH_APPROXIMATION":
        inner = np.float32(np.sqrt(2 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
        return np.float32(0.5) * x * (1 + np.tanh(inner))
    if mode == "SIGMOID_APPROXIMATION":
        return x * _sigmoid(np.float32(1.702) * x)
    raise ValueError(f"gelu mode {mode}")


def _erf(x: Array) -> Array:
    return (1 - _erfc(x)).astype(np.float32)


# Chebyshev fit of log(erfc(z) exp(z^2) / t), t = 2 / (2 + z): relative error below 1.2e-7
# everywhere (Press et al., Numerical Recipes, 2nd ed., section 6.2).
_ERFC = (
    0.17087277,
    -0.82215223,
    1.48851587,
    -1.13520398,
    0.27886807,
    -0.18628806,
    0.09678418,
    0.37409196,
    1.00002368,
    -1.26551223,
)


def _erfc(x: Array) -> Array:
    z = np.abs(x, dtype=np.float64)
    t = 1 / (1 + 0.5 * z)
    tail = t * np.exp(-z * z + np.polyval(_ERFC, t))
    return np.where(x >= 0, tail, 2 - tail)


ELEMENTWISE: dict[str, Callable[..., Array]] = {
    "add": _binary(np.add),
    "sub": _binary(np.subtract),
    "mul": _binary(np.multiply),
    "real_div": _real_div,
    "floor_div": _binary(np.floor_divide),
    "mod": _binary(np.mod),
    "pow": _binary(np.power),
    "maximum": _binary(np.maximum),
    "minimum": _binary(np.minimum),
    "equal": _binary(np.equal),
    "not_equal": _binary(np.not_equal),
    "greater": _binary(np.greater),
    "greater_equal": _binary(np.greater_equal),
    "less": _binary(np.less),
    "less_equal": _binary(np.less_equal),
    "logical_and": _binary(np.logical_and),
    "logical_or": _binary(np.logical_or),
    "logical_xor": _binary(np.logical_xor),
    "logical_not": _unary(np.logical_not),
    "abs": _unary(np.abs),
    "ceil": _unary(np.ceil),
    "cos": _unary(np.cos),
    "erf": _erf,
    "exp": _unary(np.exp),
    "exp2": _unary(np.exp2),
    "floor": _unary(np.floor),
    "identity": _unary(np.asarray),
    "round": _unary(np.rint),
    "sign": _unary(np.sign),
    "sin": _unary(np.sin),
    "sqrt": _unary(np.sqrt),
    "square": _unary(np.square),
    "tanh": _unary(np.tanh),
    "inverse": _inverse,
    "rsqrt": _rsqrt,
    "log": _log,
    "clip": _clip,
    "threshold": _threshold,
    "cast": _cast,
    "select": _select,
    "gelu": _gelu,
    "leaky_relu": _leaky_relu,
    "relu": _unary(partial(np.maximum, np.float32(0))),
    "relu6": _unary(lambda x: np.clip(x, 0, 6)),
    "sigmoid": _unary(_sigmoid),
    "silu": _unary(lambda x: x * _sigmoid(x)),
    "softplus": _unary(partial(np.logaddexp, np.float32(0))),
    "softsign": _unary(lambda x: x / (1 + np.abs(x))),
}

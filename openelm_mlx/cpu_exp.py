"""exp, sigmoid and log-sum-exp for x86 CPUs, where MLX computes exp as a chain of calls.

MLX 0.32 is built for any x86 and so without FMA, for which its exp then calls the C library several
times a number (``nm -D libmlx.so``: fmaf, powf, no expf): 25 ns, where its power calls it once: 10.
In a small model exp takes as long as the products. Other devices and types get MLX's own functions.
"""

import math
import platform
from typing import Any

import mlx.core as mx

_X86 = platform.machine() in ("x86_64", "AMD64")
_MANY = 1 << 14


def helps(x: mx.array) -> bool:
    """Whether MLX's own exp of ``x`` is slow: float32 on an x86 CPU."""
    return _X86 and x.dtype == mx.float32 and mx.default_device().type != mx.gpu


def pays(x: mx.array) -> bool:
    """Whether ``x`` is also large enough for a few operations more."""
    return x.size >= _MANY and helps(x)


def exp(x: mx.array) -> mx.array:
    """e^x; its relative error is at most 1e-7 (1 + |x|)."""
    return mx.power(math.e, x) if helps(x) else mx.exp(x)


def sigmoid(x: mx.array) -> mx.array:
    """1 / (1 + e^-x), differentiable once."""
    share: Any = _sigmoid(x) if pays(x) else mx.sigmoid(x)  # small ones alike everywhere
    array: mx.array = share
    return array


@mx.custom_function
def _sigmoid(x: mx.array) -> mx.array:
    return 1 / (1 + mx.power(1 / math.e, x))


@_sigmoid.vjp
def _sigmoid_vjp(_: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    # that of the terms one by one would be 0 times infinity where e^-x overflows
    return cotangent * output * (1 - output)


def log_sum_exp(x: mx.array) -> mx.array:
    """Logarithm of the sum of exponentials of each row, differentiable once.

    Args:
        x: (..., V), no row all -inf.

    Returns:
        (..., 1).
    """
    if not helps(x):
        return mx.logsumexp(x, axis=-1, keepdims=True)

    @mx.custom_function
    def forward(x: mx.array) -> mx.array:
        highest = x.max(axis=-1, keepdims=True)
        return highest + mx.log(exp(x - highest).sum(axis=-1, keepdims=True))

    @forward.vjp
    def backward(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        return exp(x - output) * cotangent

    result: Any = forward(x)
    array: mx.array = result
    return array

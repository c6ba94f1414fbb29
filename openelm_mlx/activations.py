"""Activations of OpenELM's feed-forward networks, plain and gated. F feed-forward width."""

from collections.abc import Callable

import mlx.core as mx

from openelm_mlx import cpu_exp


def _swish(x: mx.array) -> mx.array:
    return x * cpu_exp.sigmoid(x)


def _fusible_swish(x: mx.array) -> mx.array:
    return x * mx.sigmoid(x)  # a function with an own gradient cannot be fused without shapes


def _gelu(x: mx.array) -> mx.array:
    return x * (1 + mx.erf(x * 2**-0.5)) / 2


def _relu(x: mx.array) -> mx.array:
    return mx.maximum(x, 0)


def gated(name: str) -> tuple[Callable[[mx.array], mx.array], Callable[[mx.array], mx.array]]:
    """``activation(gate) * value`` over the two halves of the last axis (Shazeer 2020).

    Args:
        name: of the activation, as in the config.

    Returns:
        Two functions (..., 2F) -> (..., F): the plain one, and one fused kernel for inference. In
        training the plain one needs less memory; a compiled step fuses it anyway.
    """
    activation = ACTIVATIONS[name]
    to_compile = _fusible_swish if name == "swish" else activation
    compiled = mx.compile(lambda gate, value: to_compile(gate) * value, shapeless=True)

    def glu(gate: mx.array, value: mx.array) -> mx.array:
        return activation(gate) * value

    def fused(gate: mx.array, value: mx.array) -> mx.array:
        # what MLX compiles for a CPU computes one number at a time
        return (glu if cpu_exp.pays(gate) else compiled)(gate, value)

    return (lambda x: glu(*mx.split(x, 2, axis=-1))), (lambda x: fused(*mx.split(x, 2, axis=-1)))


ACTIVATIONS = {"swish": _swish, "gelu": _gelu, "relu": _relu}

"""The matrices of a model as Core AI keeps them: float16, float32, or MLX's own affine codes.

I / O input / output features, T tokens, D model_dim.
Knows layers of MLX and constants of a graph, not the transformer.
"""

from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from convert.coreai_api import Value
from convert.coreai_ops import Ops
from convert.dtypes import CastReport, cast
from openelm_mlx.adapter_fuse import fuse_model
from openelm_mlx.adapter_layers import is_quantized
from openelm_mlx.checkpoint import load_model
from openelm_mlx.lora import get_module, load_adapters, module_paths
from openelm_mlx.model import Model

KINDS = {
    "fp16": mx.float16,
    "fp32": mx.float32,
    "mlx": mx.float16,  # the codes as they are, their scales in float16
    "mlx-fp32": mx.float32,
}
CODE_BITS = (4, 8)
_STRIP = 64  # rows


class Matrix(Protocol):
    """A weight in a graph."""

    def multiply(self, x: Value) -> Value:
        """(1, T, I) -> (1, T, O)."""

    def rows(self, ids: Value) -> Value:
        """(1, T) int32 -> (1, T, D): rows of an embedding table."""


def load_fused(folder: Path, adapter_path: str | Path | None) -> Model:
    """The model of a folder, adapters folded into its weights."""
    model = load_model(folder)
    if adapter_path is not None:
        load_adapters(model, adapter_path)
        fuse_model(model)
        model.eval()
    return model


def settle(model: Model, weights: str | None) -> str:
    """Bring a model's matrices to the type in which they will be stored, in place.

    Args:
        model: plain or quantised, without adapters.
        weights: a key of ``KINDS``; None takes ``mlx`` for a quantised model and else ``fp16``.

    Returns:
        The key.

    Raises:
        ValueError: if there is no such kind, the model is quantised and should not be, or the
            other way round, or in a form that cannot be carried, or values overflow float16.
    """
    layers = {path: get_module(model, path) for path in module_paths(model)}
    quantized = {path: layer for path, layer in layers.items() if is_quantized(layer)}
    kind = weights or ("mlx" if quantized else "fp16")
    _check(kind, quantized)
    report = CastReport()
    for path, layer in layers.items():
        for name in ("weight", "scales", "biases"):
            if name in layer:
                layer[name] = cast(f"{path}.{name}", layer[name], KINDS[kind], report)
    if report.overflows:
        raise ValueError(
            f"{sum(report.overflows.values())} values in {len(report.overflows)} tensors overflow "
            f"float16, first in {next(iter(report.overflows))}; use --weights fp32"
        )
    return kind


def _check(kind: str, quantized: dict[str, nn.Module]) -> None:
    if kind not in KINDS:
        raise ValueError(f"weights {kind!r} is not one of {', '.join(KINDS)}")
    if quantized and not kind.startswith("mlx"):
        raise ValueError(
            f"the model is quantised, so its weights cannot be stored as {kind}: use --weights "
            "mlx, or give the folder it was quantised from"
        )
    if not quantized and kind.startswith("mlx"):
        raise ValueError(
            f"--weights {kind} carries MLX's codes, and the model is not quantised: run `openelm "
            "convert quantize` first"
        )
    for path, layer in quantized.items():
        if layer.mode != "affine" or layer.bits not in CODE_BITS:
            raise ValueError(
                f"{path} is quantised to {layer.bits} bits, mode {layer.mode}; Core AI takes "
                f"affine codes of {' or '.join(map(str, CODE_BITS))} bits: run `openelm convert "
                "quantize` with such"
            )


def widen(model: Model) -> None:
    """Make all floating-point parameters float32, in place: the values stay those stored."""

    def wide(array: mx.array) -> mx.array:
        floating = mx.issubdtype(array.dtype, mx.floating)
        return array.astype(mx.float32) if floating else array

    model.update(tree_map(wide, model.parameters()))


def matrix(ops: Ops, layer: nn.Module, name: str) -> Matrix:
    """The weight of a settled layer as a constant of the graph under construction."""
    return _Codes(ops, layer, name) if is_quantized(layer) else _Dense(ops, layer.weight, name)


class _Dense:
    """Kept as (I, O): products need no transposition, which Apple's Linux runtime is slow at."""

    def __init__(self, ops: Ops, weight: mx.array, name: str) -> None:
        self._ops = ops
        self._width = weight.shape[1]
        self._value = ops.program.constant(_transposed(numpy_view(weight)), name)

    def multiply(self, x: Value) -> Value:
        return self._ops.matmul(x, self._value)

    def rows(self, ids: Value) -> Value:
        D = self._width
        index = self._ops.add(ids, np.zeros((D, 1), np.int32))  # (D, T)
        columns = self._ops.face.gather_along_axis(self._value, index, np.array(1, np.int32))
        return self._ops.reshape(self._ops.transpose(columns, 1, 0), 1, -1, D)


class _Codes:
    """MLX's layout: codes (O, I), a scale and a bias for each group of a row.

    The runtime computes scale * code + bias in the scales' type, as ``mx.dequantize`` does.
    """

    def __init__(self, ops: Ops, layer: nn.Module, name: str) -> None:
        self._ops, program = ops, ops.program
        groups = layer.scales.shape
        shape = (groups[0], groups[1] * layer.group_size)
        packed = numpy_view(layer.weight).view(np.uint8)  # little-endian: the first code is first
        self._parts = (
            program.codes(packed, shape, layer.bits, f"{name}.codes"),
            program.constant(numpy_view(layer.scales), f"{name}.scales"),
            program.zero_codes(groups, layer.bits),
            program.constant(numpy_view(layer.biases), f"{name}.biases"),
        )

    def multiply(self, x: Value) -> Value:
        weight = self._ops.face.blockwise_shift_scale(*self._parts)
        return self._ops.matmul(x, self._ops.transpose(weight, 1, 0))

    def rows(self, ids: Value) -> Value:
        index = self._ops.reshape(ids, 1, -1, 1)
        gathered = (self._ops.face.gather_nd(part, index) for part in self._parts)
        return self._ops.face.blockwise_shift_scale(*gathered)


def numpy_view(array: mx.array) -> Any:
    """The array in row order, as NumPy sees it, without a copy where it lies so already."""
    array = mx.contiguous(array)
    mx.eval(array)
    return np.asarray(array)


def _transposed(array: np.ndarray) -> np.ndarray:
    """A contiguous (I, O) copy of (O, I), in strips: NumPy's own way takes four times as long."""
    out = np.empty(array.shape[::-1], array.dtype)
    for start in range(0, len(array), _STRIP):
        out[:, start : start + _STRIP] = array[start : start + _STRIP].T
    return out

"""Low-rank adapters around a plain or quantised linear layer: LoRA and DoRA.

Tensor names are mlx_lm's: ``lora_a`` (I, r), ``lora_b`` (r, O), ``m`` (O,); the adapted layer is
``linear``. I / O input / output features, r rank; for embeddings V vocabulary, D model_dim.

Whatever the base is stored in, the low-rank term is computed in the wider of the activations' and
the adapter's type, added in float32, and rounded once, to the type the base layer returns.
Hu et al. 2021 (arXiv 2106.09685) eq. 3; Liu et al. 2024 (arXiv 2402.09353) eq. 5 and section 4.3.
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.recompute import Dropout

LEAVES = ("lora_a", "lora_b", "m")  # the names of an adapter's own tensors


@dataclass(slots=True, eq=False)
class _Kept:
    """A value and the arrays it was made of; no array itself, so not a part of the model."""

    sources: tuple[mx.array, ...]
    value: mx.array

    def made_of(self, sources: tuple[mx.array, ...]) -> bool:
        return all(a is b for a, b in zip(self.sources, sources, strict=True))


class Adapter(nn.Module):
    """What all adapters share: a frozen layer, two factors and the factor between them.

    Args:
        base: ``nn.Linear``, ``nn.Embedding`` or their quantised forms.
        lora_a: (I, r); for an embedding (V, r).
        lora_b: (r, O); for an embedding (r, D).
        scale: multiplies ``lora_a @ lora_b``; alpha / rank in PEFT's terms.
    """

    inner = "linear"

    def __init__(
        self, base: nn.Module, *, lora_a: mx.array, lora_b: mx.array, scale: float
    ) -> None:
        super().__init__()
        setattr(self, self.inner, base)
        self.lora_a, self.lora_b = lora_a, lora_b
        self.scale = scale
        self._kept: _Kept | None = None

    @property
    def base(self) -> nn.Module:
        """The layer that is adapted."""
        return self[self.inner]

    def delta(self) -> mx.array:
        """What the two factors add to the base's weight, in its layout, float32."""
        a, b = float32(self.lora_a), float32(self.lora_b)
        return self.scale * (b.T @ a.T)  # (O, I)

    def fused_weight(self) -> mx.array:
        """The one matrix that does what base and adapter do together, float32, not quantised."""
        return dense_weight(self.base) + self.delta()

    def kept(self, compute: Callable[[], mx.array]) -> mx.array:
        """What ``compute`` makes of the adapter's and the base's tensors.

        Kept between calls outside training, since a norm of all weights costs more than a token;
        made anew when one of the tensors is another array.
        """
        names = [name for name in LEAVES if name in self]
        sources = (*(self[name] for name in names), self.base.weight)
        if not self.training and self._kept is not None and self._kept.made_of(sources):
            return self._kept.value
        value = compute()
        self._kept = None
        if not self.training:
            try:
                mx.eval(value)
            except ValueError:  # inside mx.compile or vmap: nothing may be kept
                return value
            self._kept = _Kept(sources, value)
        return value


class LoRALinear(Adapter):
    """``linear(x) + scale * dropout(x) @ lora_a @ lora_b``."""

    def __init__(
        self,
        base: nn.Module,
        *,
        lora_a: mx.array,
        lora_b: mx.array,
        scale: float,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(base, lora_a=lora_a, lora_b=lora_b, scale=scale)
        self.dropout = Dropout(dropout)

    def __call__(self, x: mx.array) -> mx.array:
        """(..., I) -> (..., O) in the base's type."""
        y = self.linear(x)
        low = self.scale * (self.dropout(x) @ self.lora_a)  # scaled while it is (..., r)
        return mx.addmm(float32(y), low, self.lora_b).astype(y.dtype)

    def _low_rank(self, x: mx.array) -> mx.array:
        return self.scale * float32((x @ self.lora_a) @ self.lora_b)


class DoRALinear(LoRALinear):
    """LoRA on the direction of each row, with the row's length ``m`` learnt apart.

    ``y + (m/n - 1) W x' + (m/n) scale B A x'`` with y = W x, x' = dropout(x) and n the row norms of
    W + scale B A, which take no gradient. Source of the dropout: apple/corenet@1aa3acd ``lora.py``.

    ``m`` (O,) float32 starts as the base's row norms, so that ``lora_b`` = 0 changes nothing
    (CoreNet takes the norms of a random matrix: BEHAVIOURS (c) 2).
    """

    def __init__(
        self,
        base: nn.Module,
        *,
        lora_a: mx.array,
        lora_b: mx.array,
        scale: float,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(base, lora_a=lora_a, lora_b=lora_b, scale=scale, dropout=dropout)
        self._drops = dropout > 0
        self.m = norms_of(dense_weight(base))

    def __call__(self, x: mx.array) -> mx.array:
        """(..., I) -> (..., O) in the base's type."""
        y = self.linear(x)
        stretch = self._stretch()
        if self.training and self._drops:
            dropped = self.dropout(x)
            low_rank = self._low_rank(dropped)
            out = float32(y) + (stretch - 1) * float32(self.linear(dropped)) + stretch * low_rank
        else:
            out = stretch * (float32(y) + self._low_rank(x))
        return out.astype(y.dtype)

    def fused_weight(self) -> mx.array:
        """(O, I) float32: rows of length ``m``."""
        adapted = super().fused_weight()
        return (float32(self.m) / norms_of(adapted))[:, None] * adapted

    def _stretch(self) -> mx.array:
        """(O,) float32: ``m`` / norms of the adapted rows."""

        def compute() -> mx.array:
            norms = mx.stop_gradient(norms_of(Adapter.fused_weight(self)))
            return float32(self.m) / norms

        return self.kept(compute)


def dense_weight(layer: nn.Module) -> mx.array:
    """A layer's weight in float32, (O, I) or (V, D), dequantised without rounding in between."""
    if not is_quantized(layer):
        return float32(layer.weight)
    scales, biases = layer.scales, layer.get("biases")
    if mx.issubdtype(scales.dtype, mx.floating):
        scales = float32(scales)
    return mx.dequantize(
        layer.weight,
        scales,
        None if biases is None else float32(biases),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
        dtype=mx.float32,
    )


def dense_shape(layer: nn.Module) -> tuple[int, int]:
    """(O, I) of a linear layer, (V, D) of an embedding, whether quantised or not."""
    rows, columns = layer.weight.shape
    return rows, columns * 32 // layer.bits if is_quantized(layer) else columns


def is_quantized(layer: nn.Module) -> bool:
    """Whether a layer keeps packed weights."""
    return isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding)


def is_embedding(layer: nn.Module) -> bool:
    """Whether a layer looks rows up instead of multiplying."""
    return isinstance(layer, nn.Embedding | nn.QuantizedEmbedding)


def float32(x: mx.array) -> mx.array:
    """The same in float32."""
    return x.astype(mx.float32)


def norms_of(weight: mx.array, axis: int = 1) -> mx.array:
    """Euclidean norms along an axis, by default of the rows."""
    return mx.sqrt(mx.sum(mx.square(weight), axis=axis))

"""Low-rank adapters of the token embedding: LoRA, and both meanings of DoRA there.

Tensor names are mlx_lm's: ``lora_a`` (V, r), ``lora_b`` (r, D), ``m``; the adapted layer is
``embedding``. A tied output head keeps the base table, as in CoreNet and PEFT (BEHAVIOURS 27),
unless ``adapt_head`` asks for what mlx_lm does.
"""

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.adapter_layers import Adapter, dense_weight, float32, norms_of


class LoRAEmbedding(Adapter):
    """``embedding[ids] + scale * lora_a[ids] @ lora_b``, without dropout, as CoreNet and PEFT do.

    Args:
        base: ``nn.Embedding`` or its quantised form.
        lora_a: (V, r).
        lora_b: (r, D).
        scale: multiplies ``lora_a @ lora_b``.
        adapt_head: whether the adapter also reaches a tied output head.
    """

    inner = "embedding"

    def __init__(
        self,
        base: nn.Module,
        *,
        lora_a: mx.array,
        lora_b: mx.array,
        scale: float,
        adapt_head: bool = False,
    ) -> None:
        super().__init__(base, lora_a=lora_a, lora_b=lora_b, scale=scale)
        self.adapt_head = adapt_head

    def __call__(self, ids: mx.array) -> mx.array:
        """(...) ids -> (..., D) in the base's type."""
        y = self.embedding(ids)
        return self._rows(ids, y).astype(y.dtype)

    def as_linear(self, x: mx.array) -> mx.array:
        """(..., D) -> (..., V): the tied head, by default from the base table alone."""
        y = self.embedding.as_linear(x)
        return self._adapted_head(x, y).astype(y.dtype) if self.adapt_head else y

    def delta(self) -> mx.array:
        """(V, D) float32."""
        return self.scale * (float32(self.lora_a) @ float32(self.lora_b))

    def _rows(self, ids: mx.array, y: mx.array) -> mx.array:
        return float32(y) + self.scale * float32(self.lora_a[ids] @ self.lora_b)

    def _adapted_head(self, x: mx.array, y: mx.array) -> mx.array:
        return float32(y) + self.scale * float32((x @ self.lora_b.T) @ self.lora_a.T)


class DoRAEmbedding(LoRAEmbedding):
    """LoRA on the direction of the table's rows or columns, their lengths ``m`` learnt apart.

    PEFT has one length a feature, the norm of a column over the vocabulary (its ``dora.py``:
    ``DoraEmbeddingLayer(fan_in_fan_out=True)``); mlx_lm has one a token. CoreNet has neither. The
    norms take no gradient.

    Args:
        base: ``nn.Embedding`` or its quantised form.
        lora_a: (V, r).
        lora_b: (r, D).
        scale: multiplies ``lora_a @ lora_b``.
        by_token: mlx_lm's meaning, ``m`` (V,), in place of PEFT's, ``m`` (D,).
        adapt_head: whether the adapter also reaches a tied output head.
    """

    def __init__(
        self,
        base: nn.Module,
        *,
        lora_a: mx.array,
        lora_b: mx.array,
        scale: float,
        by_token: bool = False,
        adapt_head: bool = False,
    ) -> None:
        super().__init__(base, lora_a=lora_a, lora_b=lora_b, scale=scale, adapt_head=adapt_head)
        self.by_token = by_token
        self.m = norms_of(dense_weight(base), axis=1 if by_token else 0)

    def fused_weight(self) -> mx.array:
        """(V, D) float32: rows or columns of length ``m``."""
        stretch = self._stretch()
        return super().fused_weight() * (stretch[:, None] if self.by_token else stretch)

    def _rows(self, ids: mx.array, y: mx.array) -> mx.array:
        stretch = self._stretch()
        return super()._rows(ids, y) * (stretch[ids][..., None] if self.by_token else stretch)

    def _adapted_head(self, x: mx.array, y: mx.array) -> mx.array:
        stretch = self._stretch()
        if self.by_token:
            return super()._adapted_head(x, y) * stretch
        x = (float32(x) * stretch).astype(x.dtype)
        return super()._adapted_head(x, self.embedding.as_linear(x))

    def _stretch(self) -> mx.array:
        """(V,) or (D,) float32: ``m`` / norms of the adapted table's rows or columns."""

        def compute() -> mx.array:
            adapted = Adapter.fused_weight(self)
            return float32(self.m) / mx.stop_gradient(norms_of(adapted, 1 if self.by_token else 0))

        return self.kept(compute)

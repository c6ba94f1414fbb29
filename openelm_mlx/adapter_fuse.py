"""Adapters folded into the weights of the layers they adapt.

The sum is made in float32 and rounded once to what the model stores; how much of it the rounding
takes is measured, since a small delta can vanish in 16 bit or 4 bit. Knows nothing of files.
"""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.adapter_embeddings import LoRAEmbedding
from openelm_mlx.adapter_layers import (
    Adapter,
    dense_shape,
    dense_weight,
    is_embedding,
    is_quantized,
)
from openelm_mlx.lora import adapted_modules, get_module, module_paths, set_module
from openelm_mlx.model import Model

_QUANTIZATION_KEYS = {"quantization", "quantization_config"}


def fuse_model(model: Model, *, dequantize: bool = False) -> dict[str, float]:
    """Replace adapters by plain or quantised layers that do the same, in place.

    An embedding's adapter that leaves a tied head alone unties the model: the base table becomes
    ``lm_head`` (BEHAVIOURS 27). ``model.args`` follows.

    Args:
        model: with adapters.
        dequantize: store all quantised layers in the model's floating-point type instead of
            quantising the fused ones again.

    Returns:
        Path -> share of the change that rounding took: the norm of (stored - exact), divided by the
        norm of (exact - base). About 2^-10 |W| / |change| in bfloat16; more in 4 bit.

    Raises:
        ValueError: if there are no adapters, or a fused weight is not finite in the stored type.
    """
    adapters = adapted_modules(model)
    if not adapters:
        raise ValueError("the model has no adapters to fuse; load it with an adapter folder")
    if _has_to_untie(model):
        _untie(model)
    dtype = model.transformer.norm.weight.dtype
    lost = {path: _fuse(model, path, adapters[path], dtype, dequantize) for path in adapters}
    if dequantize:
        dequantize_model(model, dtype)
    model.unfreeze()
    shares: Any = mx.stack(list(lost.values())).tolist()
    broken = [path for path, share in zip(lost, shares, strict=True) if not share < float("inf")]
    if broken:
        stored = str(dtype).removeprefix("mlx.core.")
        raise ValueError(
            f"{len(broken)} fused weights are not finite in {stored}, first {broken[0]}; "
            "the adapter is damaged, or its scale too large"
        )
    return dict(zip(lost, shares, strict=True))


def _fuse(model: Model, path: str, adapter: Adapter, dtype: mx.Dtype, dequantize: bool) -> mx.array:
    """Put the fused layer at ``path``; return the share of the change that was lost."""
    exact, base = adapter.fused_weight(), adapter.base
    fused = _plain_layer(exact.astype(dtype), like=base)
    if is_quantized(base) and not dequantize:
        fused = fused.to_quantized(group_size=base.group_size, bits=base.bits, mode=base.mode)
    change = mx.linalg.norm(exact - dense_weight(base))
    rounding = mx.linalg.norm(dense_weight(fused) - exact)
    share = rounding / mx.where(change == 0, 1, change)
    mx.eval(fused.parameters(), share)  # layer by layer: the float32 copies do not pile up
    set_module(model, path, fused)
    return share


def _plain_layer(weight: mx.array, *, like: nn.Module) -> nn.Module:
    rows, columns = weight.shape
    if is_embedding(like):
        layer: nn.Module = nn.Embedding(rows, columns)
    else:
        layer = nn.Linear(columns, rows, bias=False)
    layer.weight = weight
    layer.train(like.training)
    return layer


def _has_to_untie(model: Model) -> bool:
    embedding = model.transformer.token_embeddings
    tied = "lm_head" not in model
    return tied and isinstance(embedding, LoRAEmbedding) and not embedding.adapt_head


def _untie(model: Model) -> None:
    """Give the model a head of its own: the base table, packed as it is if it is quantised."""
    table = model.transformer.token_embeddings.base
    rows, columns = dense_shape(table)
    extra = dict(model.args.extra)
    head: nn.Module = nn.Linear(columns, rows, bias=False)
    if is_quantized(table):
        settings = {"group_size": table.group_size, "bits": table.bits, "mode": table.mode}
        head = nn.QuantizedLinear(columns, rows, bias=False, **settings)
        for name in ("weight", "scales", "biases"):
            head[name] = table.get(name)
        for key in _QUANTIZATION_KEYS & set(extra):
            extra[key] = {**extra[key], "lm_head": settings}
    else:
        head.weight = table.weight
    head.train(model.training)
    set_module(model, "lm_head", head)
    model.args = replace(
        model.args, share_input_output_layers=False, tie_word_embeddings=False, extra=extra
    )


def dequantize_model(model: Model, dtype: mx.Dtype) -> None:
    """Replace quantised layers by plain ones of ``dtype``, in place; ``model.args`` follows."""
    for path in module_paths(model):
        layer = get_module(model, path)
        if is_quantized(layer):
            plain = _plain_layer(dense_weight(layer).astype(dtype), like=layer)
            mx.eval(plain.parameters())
            set_module(model, path, plain)
    extra = {k: v for k, v in model.args.extra.items() if k not in _QUANTIZATION_KEYS}
    model.args = replace(model.args, extra=extra)

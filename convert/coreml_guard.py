"""Keeping a graph inside float16: how large a model's values grow, and what follows from it.

OpenELM's residual stream can reach hundreds of thousands (huggingface/swift-transformers #95),
float16 ends at 65504.  RMSNorm does not see a factor, so the stream may be kept as 2^-k of itself.
The values are measured in MLX, in float32.
"""

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from convert.coreml_settings import ExportSettings, NormForm, Numerics
from convert.quantize_check import Sample, in_float32
from openelm_mlx.model import Model, attention_mask

FP16_MAX = 65504.0
_MARGIN = 4.0  # other texts grow larger than the one that is measured
_SQUARES = 200.0  # squares of values up to this fit float16, should a float32 island be lost
_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Largest absolute values seen, by place; a place is such as ``layer 3, attention output``.

    Attributes:
        residual: of what carries 2^-k: the stream itself and the gated product.
        plain: of what does not: projections and logits.
        tokens: how many were run.
        text: what they were.
    """

    residual: dict[str, float]
    plain: dict[str, float]
    tokens: int
    text: str

    @property
    def largest(self) -> float:
        """The largest value of the residual stream."""
        return max(self.residual.values())


def measure_ranges(model: Model, sample: Sample) -> Ranges:
    """Run a model in float32 and note how large its values grow.

    Args:
        model: of any dtype, quantised or not.
        sample: what to run; the first 512 tokens of its first document.

    Raises:
        ValueError: if a value is not finite, naming the layer.
    """
    ids = sample.documents[0][: min(_TOKENS, model.args.max_context_length)]
    view = in_float32(model)
    residual: dict[str, mx.array] = {}
    plain: dict[str, mx.array] = {}
    tokens = mx.array([ids])
    mask = attention_mask(len(ids))
    x = view.transformer.token_embeddings(tokens)
    residual["embedding"] = _largest(x)
    for index, layer in enumerate(view.layers):
        place = f"layer {index}"
        normed = layer.attn_norm(x)
        plain[f"{place}, query, key and value projection"] = _largest(layer.attn.qkv_proj(normed))
        x = layer.attn(normed, mask, None, residual=x)
        residual[f"{place}, after attention"] = _largest(x)
        normed = layer.ffn_norm(x)
        hidden = layer.ffn.proj_1(normed)
        plain[f"{place}, feed-forward projection"] = _largest(hidden)
        product = layer.ffn._activation(hidden)
        (residual if model.args.ffn_with_glu else plain)[f"{place}, feed-forward product"] = (
            _largest(product)
        )
        x = layer.ffn(normed, residual=x)
        residual[f"{place}, after feed-forward"] = _largest(x)
        mx.eval(x)
    plain["logits"] = _largest(view.head(view.transformer.norm(x)))
    ranges = Ranges(
        residual={k: float(v) for k, v in residual.items()},
        plain={k: float(v) for k, v in plain.items()},
        tokens=len(ids),
        text=sample.name,
    )
    _refuse_unfit(ranges)
    return ranges


def _largest(x: Any) -> mx.array:
    return mx.abs(x).max()


def _refuse_unfit(ranges: Ranges) -> None:
    for place, value in {**ranges.residual, **ranges.plain}.items():
        if not math.isfinite(value):
            raise ValueError(
                f"the model itself gives {value} in {place}, in float32 on {ranges.text}; "
                "its weights are damaged: compare it with `openelm evaluate`"
            )
    for place, value in ranges.plain.items():
        if value > FP16_MAX:
            raise ValueError(
                f"{place} reaches {value:g} on {ranges.text}, beyond float16's 65504, and no scale "
                "can be folded there; a Core ML package of this model would overflow"
            )


def choose_numerics(ranges: Ranges, settings: ExportSettings) -> Numerics:
    """The residual scale 2^-k, and the form of RMSNorm.

    k is the smallest that leaves a factor of 4 below float16's end: more would push small values
    among the subnormal ones. The norm is an island in float32 where its squares would fit float16
    too, since some back ends drop the casts (pytorch/executorch #19523); else it divides by the
    row's largest value first, in float16. On the Neural Engine it is LayerNorm of (x, -x).
    """
    k = max(0, math.ceil(math.log2(max(ranges.largest, 1.0) * _MARGIN / FP16_MAX)))
    stream = max(v for place, v in ranges.residual.items() if "product" not in place) * 2.0**-k
    norm: NormForm = "fp32" if stream <= _SQUARES else "max"
    return Numerics(residual_exponent=k, norm="layer_norm" if settings.target == "ane" else norm)

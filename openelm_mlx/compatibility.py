"""Where a model folder runs, and why not elsewhere.

What each runtime does with a config was read in its source (mlx-lm 0.32.2 ``models/openelm.py``;
mlx-swift-lm ``OpenELM.swift``; Apple's ``modeling_openelm.py``); see README, "Limits".
"""

from collections.abc import Mapping
from typing import Any

from openelm_mlx.config import ModelArgs

APPLES_CODE = "transformers (Apple's code)"


def where_it_runs(
    args: ModelArgs, quantization: Mapping[str, Any] | None = None
) -> dict[str, str | None]:
    """Runtimes and what keeps each from running the model.

    Args:
        args: the architecture.
        quantization: the ``quantization`` entry of the config, None for plain weights.

    Returns:
        runtime -> None where it runs, else the reason in one line.
    """
    return {
        "openelm_mlx": None,
        "mlx_lm": _joined(_mlx_lm_reasons(args)),
        APPLES_CODE: _joined(_transformers_reasons(args, quantization)),
        "mlx-swift-lm": _joined(_swift_reasons(args)),
        "Core ML (openelm convert coreml)": _joined(_coreml_reasons(quantization)),
    }


def _mlx_lm_reasons(args: ModelArgs) -> list[str]:
    reasons = []
    if not args.ffn_with_glu:
        reasons.append("it builds a gated FFN whatever ffn_with_glu says")
    if args.activation_fn_name != "swish":
        reasons.append(
            f"it computes swish, silently, where the config says {args.activation_fn_name}"
        )
    return reasons


def _transformers_reasons(args: ModelArgs, quantization: Mapping[str, Any] | None) -> list[str]:
    reasons = []
    if quantization:
        reasons.append("the weights are quantised by MLX; dequantise first")
    if not _widths_follow_multipliers(args):
        reasons.append("it recomputes the heads from qkv_multipliers and gets other widths")
    if args.rms_norm_eps != 1e-6:
        reasons.append(f"its RMSNorm uses 1e-6, the config says {args.rms_norm_eps}")
    return reasons


def _swift_reasons(args: ModelArgs) -> list[str]:
    reasons = _mlx_lm_reasons(args)
    published = ModelArgs.from_scaling(
        num_transformer_layers=args.num_transformer_layers,
        model_dim=args.model_dim,
        head_dim=args.head_dim,
        num_gqa_groups=args.num_gqa_groups,
        ffn_dim_divisor=args.ffn_dim_divisor,
    )
    widths = (args.num_query_heads, args.num_kv_heads, args.ffn_dims)
    if widths != (published.num_query_heads, published.num_kv_heads, published.ffn_dims):
        reasons.append("it recomputes all widths from its own multipliers and gets others")
    if not args.share_input_output_layers:
        reasons.append("it builds an untied head with the wrong size")
    return reasons


def _coreml_reasons(quantization: Mapping[str, Any] | None) -> list[str]:
    mode = (quantization or {}).get("mode", "affine")
    return [] if mode == "affine" else [f"Core ML has no {mode} weights; dequantise first"]


def _widths_follow_multipliers(args: ModelArgs) -> bool:
    scaled = ModelArgs(
        num_transformer_layers=args.num_transformer_layers,
        model_dim=args.model_dim,
        head_dim=args.head_dim,
        num_gqa_groups=args.num_gqa_groups,
        qkv_multipliers=args.qkv_multipliers,
    )
    return (scaled.num_query_heads, scaled.num_kv_heads) == (
        args.num_query_heads,
        args.num_kv_heads,
    )


def _joined(reasons: list[str]) -> str | None:
    return "; ".join(reasons) or None

"""``config.json`` for Apple's ``modeling_openelm.py``, or why it cannot run a model.

That code recomputes heads from ``qkv_multipliers`` and is found through ``auto_map``; it is named,
never run.
"""

from collections.abc import Mapping
from dataclasses import replace

from openelm_mlx.compatibility import APPLES_CODE, where_it_runs
from openelm_mlx.config import ModelArgs

CODE = "apple/OpenELM-270M"  # all of Apple's repositories hold the same modeling_openelm.py
_CLASSES = {
    "AutoConfig": "configuration_openelm.OpenELMConfig",
    "AutoModelForCausalLM": "modeling_openelm.OpenELMForCausalLM",
}
_QUANTIZATION = ("quantization", "quantization_config")


def apples_args(args: ModelArgs, source: str) -> ModelArgs:
    """The config for Apple's code, without our quantisation and with its ``auto_map``.

    Args:
        args: of a model folder.
        source: its name, for messages.

    Raises:
        ValueError: if Apple's code would not compute what the folder's model does.
    """
    extra = {k: v for k, v in args.extra.items() if k not in _QUANTIZATION}
    extra["auto_map"] = auto_map(extra.get("auto_map"))
    args = replace(args, extra=extra)
    if args.qkv_multipliers is None:
        args = _with_multipliers(args)
    reason = where_it_runs(args)[APPLES_CODE]
    if reason:
        raise ValueError(f"{source} cannot become a folder for Apple's code: {reason}")
    return args


def _with_multipliers(args: ModelArgs) -> ModelArgs:
    """``args`` with the multipliers that give its heads, where a pair does; Apple's code asks."""
    widths = [heads * args.head_dim / args.model_dim for heads in args.num_query_heads]
    for pair in ((0.5, 1.0), (widths[0], widths[-1])):
        candidate = ModelArgs(
            num_transformer_layers=args.num_transformer_layers,
            model_dim=args.model_dim,
            head_dim=args.head_dim,
            num_gqa_groups=args.num_gqa_groups,
            qkv_multipliers=pair,
        )
        if candidate.num_query_heads == args.num_query_heads:
            return replace(args, qkv_multipliers=pair)
    return args


def auto_map(stated: object, repo: str = CODE) -> dict[str, str]:
    """``auto_map`` for a folder that holds no code: each class with the repository that does.

    Args:
        stated: the entry of a config; Apple's classes where there is none.
        repo: one of Apple's repositories; entries that name one keep it.
    """
    entries = stated if isinstance(stated, Mapping) else _CLASSES
    named = {k: v for k, v in entries.items() if isinstance(v, str)}
    return {k: v if "--" in v else f"{repo}--{v}" for k, v in named.items()}

"""What can be wrong with the single settings of an OpenELM config, each said with its mending.

Knows names and ranges, not how widths follow from them (``scaling``).
"""

import math
from collections.abc import Mapping
from typing import Any

ACTIVATIONS = ("swish", "gelu", "relu")

_POSITIVE_INTEGERS = (
    *("vocab_size", "max_context_length", "num_transformer_layers", "model_dim", "head_dim"),
    *("num_gqa_groups", "ffn_dim_divisor", "rope_max_length"),
)
_BOOLEANS = ("ffn_with_glu", "normalize_qk_projections", "share_input_output_layers")


def problems(settings: Mapping[str, Any]) -> list[str]:
    """Everything wrong with single settings, before widths are worked out.

    Args:
        settings: all fields of ``ModelArgs``.

    Returns:
        One phrase a problem, naming the setting, what was expected and what was found.
    """
    return [
        *_names(settings),
        *_numbers(settings),
        *_multipliers(settings),
        *_head_lists(settings),
        *_special_tokens(settings),
    ]


def _names(settings: Mapping[str, Any]) -> list[str]:
    found = []
    if settings["model_type"] != "openelm":
        found.append(f"model_type is {settings['model_type']!r}, expected 'openelm'")
    if settings["activation_fn_name"] not in ACTIVATIONS:
        found.append(
            f"activation_fn_name {settings['activation_fn_name']!r} is not one of "
            + ", ".join(ACTIVATIONS)
        )
    if settings["normalization_layer_name"] != "rms_norm":
        found.append(
            f"normalization_layer_name is {settings['normalization_layer_name']!r}, "
            "only 'rms_norm' exists"
        )
    return found


def _numbers(settings: Mapping[str, Any]) -> list[str]:
    found = []
    for name in _POSITIVE_INTEGERS:
        value = settings[name]
        if not _is_integer(value) or value < 1:
            found.append(f"{name} must be a positive integer, got {value!r}")
    head_dim = settings["head_dim"]
    if _is_integer(head_dim) and head_dim % 2:
        found.append(f"head_dim must be even for rotary embeddings, got {head_dim}")
    for name in ("rope_freq_constant", "rms_norm_eps"):
        if not _is_positive(settings[name]):
            found.append(f"{name} must be positive, got {settings[name]!r}")
    for name in _BOOLEANS:
        if not isinstance(settings[name], bool):
            found.append(f"{name} must be true or false, got {settings[name]!r}")
    return found


def _multipliers(settings: Mapping[str, Any]) -> list[str]:
    found = []
    for name in ("qkv_multipliers", "ffn_multipliers"):
        value = settings[name]
        values = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if not all(_is_positive(v) for v in values):
            found.append(f"{name} must be positive numbers, got {value!r}")
    return found


def _head_lists(settings: Mapping[str, Any]) -> list[str]:
    found = []
    layers = settings["num_transformer_layers"]
    for name in ("num_query_heads", "num_kv_heads"):
        value = settings[name]
        if not isinstance(value, list | tuple) or not all(_is_integer(v) for v in value):
            found.append(f"{name} must be a list of integers, one a layer, got {value!r}")
        elif value and len(value) != layers:
            found.append(f"{name} has {len(value)} entries for {layers} layers; give one a layer")
    return found


def _special_tokens(settings: Mapping[str, Any]) -> list[str]:
    found = []
    if not _is_integer(settings["bos_token_id"]):
        found.append(f"bos_token_id must be an integer, got {settings['bos_token_id']!r}")
    stops = settings["eos_token_id"]
    if not all(_is_integer(s) for s in (stops if isinstance(stops, list | tuple) else [stops])):
        found.append(f"eos_token_id must be an integer or a list of them, got {stops!r}")
    return found


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf

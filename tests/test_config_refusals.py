"""What ``ModelArgs`` refuses: every message names the setting and says what was expected."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from openelm_mlx.config import ModelArgs


def small(**changes: Any) -> dict[str, Any]:
    """Two layers with heads [2, 4] and kv heads [1, 2]."""
    config = {
        "num_transformer_layers": 2,
        "model_dim": 32,
        "head_dim": 8,
        "num_gqa_groups": 2,
        "qkv_multipliers": [0.5, 1.0],
        "ffn_multipliers": [0.5, 1.0],
        "ffn_dim_divisor": 8,
    }
    return {**config, **changes}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "llama"}, "model_type is 'llama', expected 'openelm'"),
    *(
        ({name: value}, f"{name} must be a positive integer, got {value!r}")
        for name in ("vocab_size", "num_transformer_layers", "model_dim", "num_gqa_groups")
        for value in (0, -1, 2.0, True, "8")
    ),
    ({"max_context_length": 0}, "max_context_length must be a positive integer"),
    ({"rope_max_length": 0}, "rope_max_length must be a positive integer"),
    ({"ffn_dim_divisor": 0}, "ffn_dim_divisor must be a positive integer"),
    ({"head_dim": 0}, "head_dim must be a positive integer"),
    ({"head_dim": 7}, "head_dim must be even for rotary embeddings, got 7"),
    *(
        ({name: value}, f"{name} must be positive, got {value!r}")
        for name in ("rope_freq_constant", "rms_norm_eps")
        for value in (0, -1.0, float("nan"), float("inf"), "10000")
    ),
    *(
        ({name: "yes"}, f"{name} must be true or false, got 'yes'")
        for name in ("ffn_with_glu", "normalize_qk_projections", "share_input_output_layers")
    ),
    ({"activation_fn_name": "tanh"}, "'tanh' is not one of swish, gelu, relu"),
    ({"normalization_layer_name": "layer_norm"}, "only 'rms_norm' exists"),
    *(
        ({name: value}, f"{name} must be positive numbers, got {value!r}")
        for name in ("qkv_multipliers", "ffn_multipliers")
        for value in (0, -1.0, "1.0", [0.5, 0], [0.5, "1"], {"lo": 1}, True, [1, float("inf")])
    ),
    ({"qkv_multipliers": [0.5, 0.7, 1.0]}, "qkv_multipliers has 3 entries for 2 layers"),
    ({"qkv_multipliers": []}, "expected a number or a pair"),
    ({"ffn_multipliers": [1.0, 2.0, 3.0]}, "expected a number, a pair or 2 values"),
    ({"num_query_heads": 4}, "num_query_heads must be a list of integers, one a layer, got 4"),
    ({"num_kv_heads": [1.0, 2.0]}, "num_kv_heads must be a list of integers"),
    ({"num_query_heads": [2, 4, 4]}, "num_query_heads has 3 entries for 2 layers; give one"),
    ({"num_kv_heads": [1]}, "num_kv_heads has 1 entries for 2 layers"),
    ({"bos_token_id": "1"}, "bos_token_id must be an integer, got '1'"),
    ({"eos_token_id": [2, "5"]}, "eos_token_id must be an integer or a list of them"),
    ({"num_query_heads": [2, 3], "num_kv_heads": [1, 2]}, "layer 1 has 3 query and 2 key-value"),
    ({"num_query_heads": [2, 0], "num_kv_heads": [1, 1]}, "layer 1 has 0 query"),
    ({"num_query_heads": [2, 2], "num_kv_heads": [0, 1]}, "layer 0 has 2 query and 0 key-value"),
]


@pytest.mark.parametrize(
    ("changes", "message"), REFUSED, ids=[f"{i}-{m[:30]}" for i, (_, m) in enumerate(REFUSED)]
)
def test_wrong_settings_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^config: ") as error:
        ModelArgs.from_dict(small(**changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"^config: ") as error:
        ModelArgs.from_dict(small(head_dim=7, vocab_size=0, activation_fn_name="tanh"))
    for name in ("head_dim", "vocab_size", "activation_fn_name"):
        assert name in str(error.value)


def test_a_null_stop_token_is_not_taken_for_a_number() -> None:
    with pytest.raises(ValueError, match="eos_token_id"):
        ModelArgs(eos_token_id=None)  # type: ignore[arg-type]


def test_args_cannot_be_changed_after_the_check() -> None:
    args = ModelArgs.from_dict(small())
    with pytest.raises(FrozenInstanceError):
        args.model_dim = 64  # type: ignore[misc]

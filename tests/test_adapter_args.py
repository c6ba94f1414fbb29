"""Settings of adapters are checked by name, and scale means alpha over rank."""

from typing import Any

import golden_lora
import golden_set
import pytest

from openelm_mlx.lora import (
    AdapterArgs,
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank must be a positive integer, got 0; use --fine-tune-type full"),
        ({"rank": 8.0}, "rank must be a positive integer, got 8.0"),
        ({"rank": True}, "rank must be a positive integer, got True"),
        ({"scale": 0.0}, "scale must be a positive number, got 0.0"),
        ({"scale": float("nan")}, "scale must be a positive number, got nan"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, r"dropout must lie in \[0, 1\), got -0.1"),
        ({"kind": "rslora"}, "kind must be lora or dora, got 'rslora'"),
        ({"num_layers": 0}, "num_layers must be positive, or -1 for all layers, got 0"),
        ({"num_layers": -2}, "num_layers must be positive, or -1 for all layers, got -2"),
        ({"target_modules": []}, "target_modules is empty; choose from qkv_proj, out_proj"),
        ({"target_modules": "qkv_proj"}, "must be a list of names, got the text 'qkv_proj'"),
        (
            {"target_modules": ["q_proj"]},
            "no module 'q_proj' .did you mean qkv_proj.*; it has qkv_proj, out_proj, proj_1, "
            "proj_2, token_embeddings, lm_head .queries, keys and values are one matrix",
        ),
        ({"target_modules": ["gate"]}, "no module 'gate'; it has qkv_proj"),
        ({"kind": "dora", "target_modules": ["token_embeddings"]}, "would be plain LoRA"),
        ({"embedding_magnitude": "feature"}, "'feature' needs kind dora and token_embeddings"),
        ({"embedding_magnitude": "row"}, "must be none, feature or token, got 'row'"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdapterArgs(**settings)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 2.5), (True, 5.0)])
def test_alpha_is_scale_times_rank_or_its_root(rslora: bool, scale: float) -> None:
    args = AdapterArgs.from_alpha(rank=4, alpha=10, use_rslora=rslora)
    facts = golden_set.read_json(golden_lora.find("lora.json"))
    variant = "rslora_linear" if rslora else "lora_linear"
    assert args.scale == scale == facts["variants"][variant]["scaling"]
    assert args.alpha == 10

"""Fused adapters: Apple's merged weights, one rounding, quantised bases, folders that reload."""

import json
from pathlib import Path
from typing import Any

import golden_lora
import golden_set
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from golden_lora import LINEAR, UNTIED, VARIANTS, fill, largest, logits, randomise
from model_makers import random_model, random_tokens

from openelm_mlx.adapter_fuse import fuse_model
from openelm_mlx.checkpoint import load_model, save_model
from openelm_mlx.lora import AdapterArgs, adapted_modules, adapter_state, add_adapters
from openelm_mlx.model import Model

TIED = {**UNTIED, "share_input_output_layers": True, "model_dim": 64, "head_dim": 32}
TOKENS = random_tokens(2, 9, 61)


def adapted(config: dict[str, Any], args: AdapterArgs) -> Model:
    model = random_model({**config, "ffn_dim_divisor": 32})
    add_adapters(model, args)
    randomise(model)
    return model


def packed(args: AdapterArgs, *, mode: str = "affine") -> Model:
    """A tied model with adapters: layers in 4 bit, the table in 8, a config that says so."""
    settings = {"group_size": 32, "bits": 4, "mode": mode}
    of_table = {"group_size": 64, "bits": 8, "mode": "affine"}
    quantization = {**settings, "transformer.token_embeddings": of_table}
    model = random_model({**TIED, "ffn_dim_divisor": 32, "extra": {"quantization": quantization}})

    def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        return of_table if "token_embeddings" in path else settings

    nn.quantize(model, class_predicate=choose)
    add_adapters(model, args)
    randomise(model)
    return model


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fused_model_gives_apples_logits(variant: str) -> None:
    expected = golden_lora.io(f"{variant}.logits")
    model = golden_lora.adapted_model(variant)
    fuse_model(model)
    assert not adapter_state(model)
    assert largest(logits(model, golden_lora.input_ids()), expected) < 1e-4
    assert model.args.share_input_output_layers == ("embedding" not in variant)


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("lora_linear", "merged"),
        ("dora_linear", "merged"),
        ("lora_recipe_with_embedding", "merged_untied"),
        ("dora_linear_lora_embedding", "merged_untied"),
    ],
)
def test_fused_weights_are_apples(variant: str, kind: str) -> None:
    apples = golden_lora.read_pt(f"{variant}.{kind}.pt")
    expected = {
        "lm_head.weight" if name == "classifier.weight" else f"transformer.{name}": weight
        for name, weight in apples.items()
    }
    model = golden_lora.adapted_model(variant)
    fuse_model(model)
    found = dict(golden_set.flat(model))
    assert set(found) == set(expected)
    assert all(largest(np.array(found[n]), np.array(expected[n])) < 1e-6 for n in found)


@pytest.mark.parametrize("magnitude", ["none", "feature", "token"])
@pytest.mark.parametrize("adapt_head", [False, True])
def test_the_head_is_untied_only_where_the_adapter_leaves_it_alone(
    magnitude: Any, adapt_head: bool
) -> None:
    args = AdapterArgs(
        rank=2,
        scale=2.0,
        kind="lora" if magnitude == "none" else "dora",
        embedding_magnitude=magnitude,
        adapt_tied_head=adapt_head,
    )
    model = adapted(TIED, args)
    before = logits(model, TOKENS)
    fuse_model(model)
    assert ("lm_head" in model) != adapt_head
    assert model.args.share_input_output_layers == adapt_head
    assert largest(logits(model, TOKENS), before) < 1e-4


def test_an_untied_head_is_fused_too() -> None:
    model = adapted(UNTIED, AdapterArgs(rank=2, scale=2.0, target_modules=["lm_head"]))
    before = logits(model, TOKENS)
    fuse_model(model)
    assert largest(logits(model, TOKENS), before) < 1e-4


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_fused_folder_reloads_and_runs_as_before(tmp_path: Path, kind: Any) -> None:
    """Guards mlx#1027: a fused model's files did not load."""
    model = adapted(TIED, AdapterArgs(rank=2, scale=2.0, kind=kind))
    fuse_model(model)
    before = logits(model, TOKENS)
    save_model(model, tmp_path / "fused")
    again = load_model(tmp_path / "fused")
    np.testing.assert_array_equal(logits(again, TOKENS), before)
    config = json.loads((tmp_path / "fused/config.json").read_text())
    assert config["share_input_output_layers"] is False
    assert config["tie_word_embeddings"] is False


def test_a_fused_model_trains_as_a_whole() -> None:
    model = adapted(UNTIED, AdapterArgs(rank=2, scale=2.0))
    fuse_model(model)
    assert set(dict(golden_set.flat(model))) == set(trainable_names(model))


def trainable_names(model: Model) -> list[str]:
    from mlx.utils import tree_flatten

    pairs: Any = tree_flatten(model.trainable_parameters())
    return [name for name, _ in pairs]


# Rounding


def test_a_small_change_is_rounded_once_from_float32() -> None:
    """Guards mlx-examples#832: added in bfloat16, 88 % of a small change was lost."""
    model = random_model(UNTIED)
    model.set_dtype(mx.bfloat16)
    path = "transformer.layers.1.ffn.proj_1"
    add_adapters(model, AdapterArgs(rank=2, scale=1e-3, target_modules=[path]))
    randomise(model)
    layer: Any = adapted_modules(model)[path]
    base = np.array(layer.linear.weight.astype(mx.float32), np.float64)
    change = 1e-3 * np.array(layer.lora_b).T.astype(np.float64) @ np.array(layer.lora_a).T
    lost = fuse_model(model)
    fused = model.transformer.layers[1].ffn.proj_1.weight
    assert fused.dtype == mx.bfloat16
    stored = np.array(fused.astype(mx.float32), np.float64)
    nearest = mx.array((base + change).astype(np.float32)).astype(mx.bfloat16)
    assert np.mean(stored == np.array(nearest.astype(mx.float32))) > 0.999
    share = np.linalg.norm(stored - base - change) / np.linalg.norm(change)
    assert lost == {path: pytest.approx(share, rel=1e-3)}
    assert share > 0.5  # bfloat16 cannot hold it, and that is said


def test_float32_loses_nothing() -> None:
    model = adapted(UNTIED, AdapterArgs(rank=2, scale=2.0, target_modules=LINEAR))
    lost = fuse_model(model)
    assert len(lost) == 8
    assert max(lost.values()) == 0


def test_an_adapter_that_changes_nothing_loses_nothing() -> None:
    model = random_model(UNTIED)
    add_adapters(model, AdapterArgs(rank=2))
    assert set(fuse_model(model).values()) == {0.0}


# Quantised bases


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_dequantised_fusion_keeps_the_change_and_cleans_the_config(
    tmp_path: Path, kind: Any, mode: str
) -> None:
    """Guards mlx-lm#659 and #646: the config kept its quantization entry."""
    model = packed(AdapterArgs(rank=2, scale=2.0, kind=kind), mode=mode)
    before = logits(model, TOKENS)
    lost = fuse_model(model, dequantize=True)
    save_model(model, tmp_path / "fused")
    assert "quantization" not in json.loads((tmp_path / "fused/config.json").read_text())
    again = load_model(tmp_path / "fused")
    assert largest(logits(again, TOKENS), before) < 1e-3
    assert max(lost.values()) < 1e-6


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_quantised_fusion_packs_again_and_reloads(tmp_path: Path, kind: Any, mode: str) -> None:
    model = packed(AdapterArgs(rank=2, scale=2.0, kind=kind), mode=mode)
    exact = {path: np.array(layer.fused_weight()) for path, layer in adapted_modules(model).items()}
    table = np.array(model.transformer.token_embeddings.embedding.scales)
    lost = fuse_model(model)
    assert 0 < max(lost.values()) < 0.5
    fused: Any = model.transformer.layers[0].attn.qkv_proj
    assert isinstance(fused, nn.QuantizedLinear)
    weight = exact["transformer.layers.0.attn.qkv_proj"]
    expected = mx.quantize(mx.array(weight), group_size=32, bits=4, mode=mode)
    for name, array in zip(("weight", "scales", "biases"), expected, strict=False):
        np.testing.assert_array_equal(np.array(fused[name]), np.array(array))
    np.testing.assert_array_equal(np.array(model.lm_head.scales), table)  # the base, untouched
    before = logits(model, TOKENS)
    save_model(model, tmp_path / "fused")
    np.testing.assert_array_equal(logits(load_model(tmp_path / "fused"), TOKENS), before)


# Refusals


def test_a_model_without_adapters_is_not_fused() -> None:
    with pytest.raises(ValueError, match="no adapters to fuse; load it with an adapter folder"):
        fuse_model(random_model(UNTIED))


@pytest.mark.parametrize("value", [float("nan"), 1e6])
def test_weights_that_would_not_be_finite_are_refused(value: float) -> None:
    model = random_model(UNTIED)
    model.set_dtype(mx.float16)
    add_adapters(model, AdapterArgs(rank=2, target_modules=["proj_1", "proj_2"]))
    name = "transformer.layers.1.ffn.proj_2.lora_b"
    fill(model, {name: mx.full(adapter_state(model)[name].shape, value)})
    with pytest.raises(
        ValueError, match=r"1 fused weights are not finite in float16, first .*\.1\.ffn"
    ):
        fuse_model(model)

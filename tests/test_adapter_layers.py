"""The adapter layers: dropout, the tied head, kept norms, number types, quantised bases."""

from typing import Any

import golden_set
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from golden_lora import LINEAR, UNTIED, fill, largest, logits, randomise
from mlx.utils import tree_flatten
from model_makers import random_model, random_tokens
from slow_params import slow

from openelm_mlx.lora import (
    AdapterArgs,
    adapted_modules,
    adapter_state,
    add_adapters,
    trainable_count,
)
from openelm_mlx.model import Model


@pytest.fixture
def tokens() -> mx.array:
    return random_tokens(2, 9, 61)


# Dropout


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_dropout_acts_in_training_only(tiny_model: Model, tokens: mx.array, kind: Any) -> None:
    args = AdapterArgs(rank=2, scale=2.0, dropout=0.5, kind=kind, target_modules=LINEAR)
    add_adapters(tiny_model, args)
    randomise(tiny_model)
    calm = logits(tiny_model, tokens)
    np.testing.assert_array_equal(logits(tiny_model, tokens), calm)
    tiny_model.train()
    first, second = logits(tiny_model, tokens), logits(tiny_model, tokens)
    assert largest(first, second) > 1e-3
    assert largest(first, calm) > 1e-3


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_dropout_spares_the_base_and_thins_the_rest(kind: Any) -> None:
    """BEHAVIOURS 26: under DoRA the dropped input enters both corrections, not the base."""
    model = random_model(UNTIED)
    path = "transformer.layers.1.ffn.proj_1"
    args = AdapterArgs(rank=2, scale=2.0, dropout=0.5, kind=kind, target_modules=[path])
    add_adapters(model, args)
    randomise(model)
    layer: Any = adapted_modules(model)[path]
    layer.train()
    x = mx.random.normal((3, 32))
    mx.random.seed(7)
    out = np.array(layer(x))
    mx.random.seed(7)
    dropped = np.array(nn.Dropout(0.5)(x))
    assert (dropped == 0).any()
    assert (dropped != 0).any()
    W = np.array(layer.linear.weight, np.float64)
    BA = np.array(layer.lora_b, np.float64).T @ np.array(layer.lora_a, np.float64).T
    g = 1.0
    if kind == "dora":
        g = np.array(layer.m) / np.linalg.norm(W + 2 * BA, axis=1)
    expected = np.array(x) @ W.T + (g - 1) * (dropped @ W.T) + g * 2 * (dropped @ BA.T)
    np.testing.assert_allclose(out, expected, atol=1e-5)


# Tied head, kept norms


def test_the_embeddings_adapter_leaves_a_tied_head_alone(
    tiny_model: Model, tokens: mx.array
) -> None:
    """BEHAVIOURS 27."""
    hidden = mx.random.normal((2, 3, 32))
    before = np.array(tiny_model.head(hidden))
    rows = np.array(tiny_model.transformer.token_embeddings(tokens))
    add_adapters(tiny_model, AdapterArgs(rank=2, target_modules=["token_embeddings"]))
    randomise(tiny_model)
    np.testing.assert_array_equal(np.array(tiny_model.head(hidden)), before)
    assert largest(np.array(tiny_model.transformer.token_embeddings(tokens)), rows) > 0.1


@pytest.mark.parametrize("magnitude", ["none", "feature", "token"])
def test_lookup_and_adapted_head_use_the_fused_table(
    tiny_model: Model, tokens: mx.array, magnitude: Any
) -> None:
    args = AdapterArgs(
        rank=2,
        scale=2.0,
        kind="lora" if magnitude == "none" else "dora",
        target_modules=["token_embeddings"],
        embedding_magnitude=magnitude,
        adapt_tied_head=True,
    )
    before = logits(tiny_model, tokens)
    add_adapters(tiny_model, args)
    np.testing.assert_allclose(logits(tiny_model, tokens), before, atol=1e-5)  # as yet the base
    randomise(tiny_model)
    layer: Any = adapted_modules(tiny_model)["transformer.token_embeddings"]
    table = np.array(layer.embedding.weight, np.float64)
    table = table + 2 * np.array(layer.lora_a, np.float64) @ np.array(layer.lora_b, np.float64)
    if magnitude == "token":
        table *= (np.array(layer.m) / np.linalg.norm(table, axis=1))[:, None]
    if magnitude == "feature":
        table *= np.array(layer.m) / np.linalg.norm(table, axis=0)
    hidden = mx.random.normal((2, 3, 32))
    np.testing.assert_allclose(np.array(layer(tokens)), table[np.array(tokens)], atol=1e-5)
    np.testing.assert_allclose(
        np.array(layer.as_linear(hidden)), np.array(hidden) @ table.T, atol=1e-4
    )
    np.testing.assert_allclose(np.array(layer.fused_weight()), table, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_new_tensors_are_seen_after_a_call_that_kept_the_norms(
    tiny_model: Model, tokens: mx.array, kind: Any
) -> None:
    add_adapters(tiny_model, AdapterArgs(rank=2, scale=2.0, kind=kind, target_modules=LINEAR))
    first = logits(tiny_model, tokens)
    randomise(tiny_model, seed=3)
    second = logits(tiny_model, tokens)
    randomise(tiny_model, seed=4)
    third = logits(tiny_model, tokens)
    randomise(tiny_model, seed=3)
    np.testing.assert_array_equal(logits(tiny_model, tokens), second)
    assert largest(first, second) > 1e-2
    assert largest(second, third) > 1e-2


def test_kept_norms_do_not_cut_gradients_of_two_passes(tiny_model: Model, tokens: mx.array) -> None:
    """As in preference tuning, which runs the policy twice, here in eval mode."""
    add_adapters(tiny_model, AdapterArgs(rank=2, scale=2.0, kind="dora", target_modules=LINEAR))
    randomise(tiny_model)

    def twice(model: Model) -> mx.array:
        return model(tokens).square().mean() + model(tokens).square().mean()

    def once(model: Model) -> mx.array:
        return 2 * model(tokens).square().mean()

    logits(tiny_model, tokens)
    found: Any = tree_flatten(nn.value_and_grad(tiny_model, twice)(tiny_model)[1])
    tiny_model.train()  # nothing is kept here
    expected: Any = dict(tree_flatten(nn.value_and_grad(tiny_model, once)(tiny_model)[1]))
    for name, grad in found:
        np.testing.assert_allclose(np.array(grad), np.array(expected[name]), rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # MLX compiles by the C++ compiler on a CPU
def test_norms_are_not_kept_inside_a_compiled_function(tiny_model: Model) -> None:
    path = "transformer.layers.1.ffn.proj_1"
    add_adapters(tiny_model, AdapterArgs(rank=2, kind="dora", target_modules=[path]))
    randomise(tiny_model)
    layer: Any = adapted_modules(tiny_model)[path]
    x = mx.random.normal((3, 32))
    compiled = np.array(mx.compile(lambda x: layer(x))(x))
    np.testing.assert_allclose(np.array(layer(x)), compiled, atol=1e-5)


# Types and quantised bases


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_float32_adapters_keep_the_type_of_a_16_bit_model(
    tokens: mx.array, dtype: mx.Dtype, kind: Any
) -> None:
    model = random_model(UNTIED)
    model.set_dtype(dtype)
    add_adapters(model, AdapterArgs(rank=2, scale=2.0, kind=kind))
    randomise(model)
    assert {array.dtype for array in adapter_state(model).values()} == {mx.float32}
    assert model(tokens).dtype == dtype
    for _, layer in adapted_modules(model).items():
        x = tokens if "embedding" in layer else mx.random.normal((2, layer.lora_a.shape[0]))
        assert layer(x if "embedding" in layer else x.astype(dtype)).dtype == dtype


def test_a_16_bit_layer_rounds_its_sum_once() -> None:
    model = random_model(UNTIED)
    model.set_dtype(mx.bfloat16)
    path = "transformer.layers.1.ffn.proj_1"
    add_adapters(model, AdapterArgs(rank=2, scale=2.0, target_modules=[path]))
    randomise(model)
    layer: Any = adapted_modules(model)[path]
    x = mx.random.normal((64, 32)).astype(mx.bfloat16)
    y, a, b = (
        np.array(t.astype(mx.float32)) for t in (layer.linear(x), layer.lora_a, layer.lora_b)
    )
    exact = y + 2.0 * (np.array(x.astype(mx.float32)) @ a @ b)
    found = np.array(layer(x).astype(mx.float32))
    assert np.all(np.abs(found - exact) <= np.abs(exact) * 2**-8 + 1e-6)  # half a last place


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_may_be_16_bit_too(tokens: mx.array, kind: Any) -> None:
    model = random_model(UNTIED)
    add_adapters(model, AdapterArgs(rank=2, scale=2.0, kind=kind))
    randomise(model)
    expected = logits(model, tokens)
    fill(model, {k: v.astype(mx.bfloat16) for k, v in adapter_state(model).items()})
    assert model(tokens).dtype == mx.float32
    error = largest(logits(model, tokens), expected)
    assert 0 < error < 0.05 * np.abs(expected).max()


def quantized(config: dict[str, Any], mode: str = "affine") -> Model:
    model = random_model({**config, "model_dim": 64, "head_dim": 32, "ffn_dim_divisor": 32})
    nn.quantize(model, group_size=32, bits=4 if mode == "affine" else None, mode=mode)
    model.eval()
    return model


def dequantized(config: dict[str, Any], packed: Model, mode: str) -> Model:
    """A plain model with the packed one's weights, by mlx's own function."""
    plain = random_model({**config, "model_dim": 64, "head_dim": 32, "ffn_dim_divisor": 32})
    flat = dict(golden_set.flat(packed))
    for name, weight in golden_set.flat(plain):
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in flat:
            rest = [
                flat[f"{stem}.{part}"] for part in ("scales", "biases") if f"{stem}.{part}" in flat
            ]
            full = mx.dequantize(flat[name], *rest, group_size=32, bits=4, mode=mode)
            fill(plain, {name: full.astype(weight.dtype)})
    return plain


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("mode", ["affine", *slow("mxfp4")])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_on_a_quantised_base_equal_those_on_its_dequantised_weights(
    tokens: mx.array, kind: Any, mode: str, tied: bool
) -> None:
    """Guards mlx-examples#919: DoRA failed on quantised layers."""
    config = {**UNTIED, "share_input_output_layers": tied}
    packed = quantized(config, mode)
    plain = dequantized(config, packed, mode)
    before = logits(packed, tokens)
    for model in (packed, plain):
        add_adapters(model, AdapterArgs(rank=2, scale=2.0, kind=kind))
    # In mxfp4, MLX looks rows up in bfloat16, so that the packed model runs in it.
    atol = 1e-3 if mode == "affine" else 0.05
    assert largest(logits(packed, tokens), before) < atol
    for model in (packed, plain):
        randomise(model)
    assert set(adapter_state(packed)) == set(adapter_state(plain))
    assert trainable_count(packed) == trainable_count(plain)
    assert largest(logits(packed, tokens), logits(plain, tokens)) < atol
    assert largest(logits(packed, tokens), before) > 0.5

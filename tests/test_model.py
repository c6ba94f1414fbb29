"""The model against the NumPy reference on random shapes; its initial weights; what it loads."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import golden_set
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import reference
from model_makers import apple_model, random_model, random_tokens

from openelm_mlx.cache import make_cache
from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Model, attention_mask, num_parameters

Golden = Callable[[str], Path]
ATOL = 1e-4  # logits reach 5 here


def random_config(seed: int, activation: str, glu: bool) -> dict[str, Any]:
    """Any depth, widths and head counts that differ from layer to layer."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 5))
    kv_heads = rng.integers(1, 4, layers)
    query_heads = kv_heads * rng.integers(1, 4, layers)
    return {
        "vocab_size": int(rng.integers(3, 70)),
        "num_transformer_layers": layers,
        "model_dim": int(rng.integers(2, 6)) * 8,
        "head_dim": int(rng.choice([2, 4, 6, 8])),
        "num_query_heads": query_heads.tolist(),
        "num_kv_heads": kv_heads.tolist(),
        "ffn_multipliers": rng.uniform(0.3, 3, layers).tolist() if layers != 2 else [0.5, 2.0],
        "ffn_dim_divisor": int(rng.choice([1, 3, 8])),
        "ffn_with_glu": glu,
        "activation_fn_name": activation,
        "normalize_qk_projections": bool(rng.integers(2)),
        "share_input_output_layers": bool(rng.integers(2)),
        "rope_freq_constant": float(rng.choice([100, 10000, 500000])),
    }


SHAPES = [
    (seed, activation, glu)
    for seed, (activation, glu) in enumerate(
        [*product(("swish", "gelu", "relu"), (True, False))] * 3
    )
]


@pytest.mark.parametrize(("seed", "activation", "glu"), SHAPES)
def test_random_shapes_agree_with_the_reference(seed: int, activation: str, glu: bool) -> None:
    config = random_config(seed, activation, glu)
    model = random_model(config, seed)
    tokens = random_tokens(2, 11, config["vocab_size"], seed)
    wanted = reference.forward(config, golden_set.numpy_weights(model), np.array(tokens))
    np.testing.assert_allclose(np.array(model(tokens)), wanted, atol=ATOL, rtol=0)
    cache = make_cache(len(model.layers))
    pieces = [model(tokens[:, a:b], cache) for a, b in ((0, 4), (4, 5), (5, 11))]
    stepped = np.array(mx.concatenate(pieces, axis=1))
    np.testing.assert_allclose(stepped, wanted, atol=ATOL, rtol=0)


def test_random_shapes_cover_every_switch() -> None:
    configs = [random_config(*shape) for shape in SHAPES]
    for name in ("normalize_qk_projections", "share_input_output_layers", "ffn_with_glu"):
        assert {c[name] for c in configs} == {True, False}
    assert any(len(set(c["num_query_heads"])) > 1 for c in configs)


def test_hidden_states_keys_and_values_agree_with_the_reference(tiny_model: Model) -> None:
    tokens = random_tokens(2, 9, 61)
    weights = golden_set.numpy_weights(tiny_model)
    wanted = reference.trace(tiny_model.args.to_dict(), weights, np.array(tokens))
    cache = make_cache(2)
    h = tiny_model.transformer.token_embeddings(tokens)
    for i, layer in enumerate(tiny_model.layers):
        h = layer(h, "causal", cache[i])
        np.testing.assert_allclose(np.array(h), wanted[f"layer_{i}"], atol=1e-5, rtol=0)
        keys, values = (np.array(buffer)[:, :, :9] for buffer in cache[i].state)
        rotated = reference.rope(wanted[f"keys.{i}"], np.arange(9), 10000)
        np.testing.assert_allclose(keys, rotated, atol=1e-5, rtol=0)
        np.testing.assert_allclose(values, wanted[f"values.{i}"], atol=1e-5, rtol=0)
    normed = np.array(tiny_model.transformer(tokens))
    np.testing.assert_allclose(normed, wanted["final_norm"], atol=1e-5, rtol=0)


def test_a_batch_of_equal_lengths_equals_its_rows(tiny_model: Model) -> None:
    tokens = random_tokens(3, 9, 61)
    together = np.array(tiny_model(tokens))
    for i in range(3):
        alone = np.array(tiny_model(tokens[i : i + 1]))
        np.testing.assert_allclose(together[i : i + 1], alone, atol=1e-5, rtol=0)


def test_later_tokens_do_not_change_earlier_logits(tiny_model: Model) -> None:
    tokens = random_tokens(1, 9, 61)
    changed = mx.concatenate([tokens[:, :5], (tokens[:, 5:] + 1) % 61], axis=1)
    one, other = np.array(tiny_model(tokens)), np.array(tiny_model(changed))
    np.testing.assert_allclose(one[:, :5], other[:, :5], atol=1e-6, rtol=0)
    assert np.abs(one[:, 5:] - other[:, 5:]).max() > 0.01


def test_training_mode_gives_the_same_logits(tiny_model: Model) -> None:
    tokens = random_tokens(1, 9, 61)
    quiet = np.array(tiny_model(tokens))
    tiny_model.train()
    np.testing.assert_allclose(np.array(tiny_model(tokens)), quiet, atol=1e-6, rtol=0)


def test_the_mask_is_the_caches_own_where_it_has_one() -> None:
    class Windowed:
        def make_mask(self, n: int, return_array: bool, window_size: int | None) -> mx.array:
            return mx.full((n, n), not return_array and window_size is None)

    assert attention_mask(1) is None
    assert attention_mask(5) == "causal"
    assert attention_mask(5, make_cache(1)[0]) == "causal"
    mask = attention_mask(3, Windowed())
    assert isinstance(mask, mx.array)
    assert mask.all().item()


# Weights


def test_names_and_shapes_of_270m_are_those_of_the_release(golden: Golden) -> None:
    released = golden_set.read_json(golden("state_dict_270M_hf.json"))
    model = Model(ModelArgs.preset("270M"))  # lazy: nothing is drawn
    assert {name: list(weight.shape) for name, weight in golden_set.flat(model)} == released
    assert num_parameters(model) == model.args.num_parameters == 271_527_168


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norms", [True, False])
@pytest.mark.parametrize("glu", [True, False])
def test_parameter_count_of_the_config_is_the_models(tied: bool, norms: bool, glu: bool) -> None:
    args = ModelArgs.from_scaling(
        num_transformer_layers=3,
        model_dim=24,
        head_dim=4,
        num_gqa_groups=2,
        ffn_dim_divisor=8,
        vocab_size=13,
        share_input_output_layers=tied,
        normalize_qk_projections=norms,
        ffn_with_glu=glu,
    )
    model = Model(args)
    assert num_parameters(model) == args.num_parameters
    assert [num_parameters(layer) for layer in model.layers] == args.layer_parameters


def test_initial_weights_spread_as_corenets_do(golden: Golden) -> None:
    probes = golden_set.read_json(golden("corenet_probes.json"))["init_std"]
    mx.random.seed(0)
    args = ModelArgs(
        num_transformer_layers=4,
        model_dim=256,
        head_dim=32,
        num_query_heads=[4] * 4,
        num_kv_heads=[1] * 4,
        ffn_multipliers=4.0,
        vocab_size=1024,
    )
    model = Model(args)
    weights = dict(golden_set.flat(model))
    for name, (corenet, shape) in probes.items():
        weight = weights[f"transformer.{name}"]
        assert list(weight.shape) == shape
        # 32768 draws and more have a standard error below 0.4 %, theirs and ours
        np.testing.assert_allclose(np.array(weight).std(), corenet, rtol=0.02, atol=0)
        assert abs(np.array(weight).mean() - (1 if weight.ndim == 1 else 0)) < 1e-3
    spread = {name: np.array(w).std() for name, w in weights.items()}
    for i in range(4):  # in every layer, from in_features, and downscaled into the residual
        layer = f"transformer.layers.{i}"
        assert spread[f"{layer}.ffn.proj_1.weight"] == pytest.approx(256**-0.5, rel=0.02)
        assert spread[f"{layer}.ffn.proj_2.weight"] == pytest.approx((256 * 8) ** -0.5, rel=0.02)
        assert spread[f"{layer}.attn.out_proj.weight"] == pytest.approx((256 * 8) ** -0.5, rel=0.02)
    assert spread["lm_head.weight"] == pytest.approx(256**-0.5, rel=0.02)
    first, second = (np.array(layer.ffn.proj_1.weight) for layer in model.layers[:2])
    assert not np.array_equal(first, second)


def test_a_seed_fixes_the_initial_weights(tiny_args: ModelArgs) -> None:
    def drawn(seed: int) -> np.ndarray:
        mx.random.seed(seed)
        return golden_set.numpy_weights(Model(tiny_args))["transformer.layers.1.ffn.proj_2.weight"]

    assert np.array_equal(drawn(5), drawn(5))
    assert not np.array_equal(drawn(5), drawn(6))


# Matrices that Hugging Face checkpoints hold twice

HEAD, CLASSIFIER = "lm_head.weight", "transformer.classifier.weight"
TABLE = "transformer.token_embeddings.weight"


def checkpoint(tied: bool, **extra: mx.array) -> tuple[Model, dict[str, mx.array]]:
    model = random_model(
        {
            "num_transformer_layers": 1,
            "model_dim": 8,
            "head_dim": 4,
            "ffn_dim_divisor": 4,
            "vocab_size": 5,
            "share_input_output_layers": tied,
        }
    )
    return model, {**dict(golden_set.flat(model)), **extra}


def test_an_untied_head_is_taken_from_either_copy() -> None:
    model, weights = checkpoint(tied=False)
    wanted = set(weights)
    both = model.sanitize({**weights, CLASSIFIER: weights[HEAD]})
    assert set(both) == wanted
    del weights[HEAD]
    matrix = mx.random.normal((5, 8))
    alone = model.sanitize({**weights, CLASSIFIER: matrix})
    assert set(alone) == wanted
    assert alone[HEAD] is matrix


def test_a_tied_model_drops_copies_of_its_table() -> None:
    model, weights = checkpoint(tied=True)
    copies = {HEAD: weights[TABLE] + 0, CLASSIFIER: weights[TABLE] + 0}
    assert set(model.sanitize({**weights, **copies})) == set(weights)


@pytest.mark.parametrize(
    ("tied", "name", "of"),
    [(False, CLASSIFIER, HEAD), (True, HEAD, TABLE), (True, CLASSIFIER, TABLE)],
)
@pytest.mark.parametrize("rows", [5, 6], ids=["other-values", "other-shape"])
def test_copies_that_differ_are_refused_by_name(tied: bool, name: str, of: str, rows: int) -> None:
    model, weights = checkpoint(tied)
    weights[name] = mx.random.normal((rows, 8))
    with pytest.raises(ValueError, match=f"{name} differs from {of}") as error:
        model.sanitize(weights)
    assert "share_input_output_layers" in str(error.value)
    assert "\n" not in str(error.value)


def test_sanitize_leaves_its_input_alone() -> None:
    model, weights = checkpoint(tied=False)
    given = {**weights, CLASSIFIER: weights[HEAD]}
    before = set(given)
    model.sanitize(given)
    assert set(given) == before


def test_apples_untied_folders_hold_both_copies(golden_model: str, golden: Golden) -> None:
    raw: Any = mx.load(str(golden(f"hf/{golden_model}/model.safetensors")))
    model, config = apple_model(golden_model)
    untied = not config["share_input_output_layers"]
    assert (CLASSIFIER in raw, HEAD in raw) == (untied, untied)
    assert set(model.sanitize(raw)) == {name for name, _ in golden_set.flat(model)}


def test_a_quantised_model_runs_and_stays_close() -> None:
    config = {
        "num_transformer_layers": 2,
        "model_dim": 64,
        "head_dim": 16,
        "num_query_heads": [2, 4],
        "num_kv_heads": [1, 2],
        "ffn_multipliers": [0.5, 1.0],
        "ffn_dim_divisor": 32,
        "vocab_size": 61,
        "normalize_qk_projections": True,
    }
    model = random_model(config)
    tokens = random_tokens(1, 7, 61)
    exact = np.array(model(tokens))
    nn.quantize(model, group_size=32, bits=8)
    assert "scales" in model.layers[1].attn.out_proj
    assert 0 < np.abs(np.array(model(tokens)) - exact).max() < 0.1

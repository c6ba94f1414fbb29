"""Adapters on a model: Apple's numbers, what trains, how they start, what they refuse."""

from typing import Any

import golden_lora
import golden_set
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from golden_lora import LINEAR, UNTIED, VARIANTS, largest, logits, randomise
from mlx.utils import tree_flatten
from model_makers import random_model, random_tokens

from openelm_mlx.config import ModelArgs
from openelm_mlx.lora import (
    AdapterArgs,
    adapted_modules,
    adapter_shapes,
    adapter_state,
    add_adapters,
    trainable_count,
)
from openelm_mlx.model import Model

ATOL = 1e-4  # two right fp32 implementations differ by up to 4.3e-5, a wrong one by more than 1


@pytest.fixture
def tokens() -> mx.array:
    return random_tokens(2, 9, 61)


# Apple's numbers


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapters_give_apples_logits(variant: str) -> None:
    model = golden_lora.adapted_model(variant)
    expected = golden_lora.io(f"{variant}.logits")
    assert largest(logits(model, golden_lora.input_ids()), expected) < ATOL
    assert largest(expected, golden_lora.io("base.logits")) > 1  # the adapters matter


@pytest.mark.parametrize("variant", ["lora_linear", "dora_linear"])
def test_adapters_have_apples_gradients(variant: str) -> None:
    grads: Any = mx.load(str(golden_lora.find(f"{variant}.grads.safetensors")))
    expected = golden_lora.our_names(grads)
    model, ids = golden_lora.adapted_model(variant), golden_lora.input_ids()

    def loss(model: Model) -> mx.array:
        return nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:], reduction="mean")

    value, found = nn.value_and_grad(model, loss)(model)
    facts = golden_set.read_json(golden_lora.find("lora.json"))["variants"][variant]
    assert value.item() == pytest.approx(facts["ce_loss_next_token"], abs=ATOL)
    flat: Any = tree_flatten(found)
    mine = dict(flat)
    assert set(mine) == set(expected)
    assert all(largest(np.array(mine[name]), np.array(expected[name])) < 5e-5 for name in mine)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_new_adapter_changes_nothing(variant: str) -> None:
    """Guards CoreNet's bug (c) 2: its DoRA starts 5.6 away from the base."""
    model, ids = golden_lora.base_model(), golden_lora.input_ids()
    before = logits(model, ids)
    add_adapters(model, VARIANTS[variant])
    # Only the order of the sum with the residual differs.
    np.testing.assert_allclose(logits(model, ids), before, atol=1e-5)


def test_dora_starts_from_the_norms_of_the_pretrained_rows() -> None:
    model = golden_lora.base_model()
    add_adapters(model, VARIANTS["dora_linear"])
    m = np.array(adapter_state(model)["transformer.layers.0.attn.qkv_proj.m"])
    expected = golden_lora.io("dora_linear.layer0_qkv_pretrained_row_norm")
    assert largest(m, expected) < 1e-6
    apples = golden_lora.io("dora_linear.layer0_qkv_magnitude_after_get_model")
    assert largest(expected, apples) > 0.1  # the two could be told apart


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_tensors_that_train_are_apples(variant: str) -> None:
    facts = golden_set.read_json(golden_lora.find("lora.json"))["variants"][variant]
    shapes = {name: mx.zeros(facts["state_dict"][name]) for name in facts["trainable"]}
    expected = golden_lora.our_names(shapes)
    found = adapter_shapes(golden_lora.base_model(), VARIANTS[variant])
    assert found == {name: array.shape for name, array in expected.items()}


# What trains


def expected_count(args: ModelArgs, rank: int, *, dora: bool, embedding: bool) -> int:
    """From the widths alone: rank * (in + out) a matrix, and one number a row under DoRA."""
    total = rank * (args.vocab_size + args.model_dim) if embedding else 0
    D, E = args.model_dim, args.head_dim
    layers = zip(args.num_query_heads, args.num_kv_heads, args.ffn_dims, strict=True)
    for H, K, F in layers:
        for rows, columns in ((H + 2 * K) * E, D), (D, H * E), (2 * F, D), (D, F):
            total += rank * (rows + columns) + (rows if dora else 0)
    return total


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("size", ["270M", "1.1B"])
def test_trainable_parameters_follow_the_formula(size: str, kind: Any) -> None:
    model = Model(ModelArgs.preset(size))  # lazy: no weight is made
    args = AdapterArgs(rank=32, kind=kind)
    shapes = adapter_shapes(model, args)
    add_adapters(model, args)
    expected = expected_count(model.args, 32, dora=kind == "dora", embedding=True)
    assert trainable_count(model) == expected
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == expected


@pytest.mark.parametrize(("kind", "leaves"), [("lora", {"lora_a", "lora_b"}), ("dora", {"m"})])
def test_only_adapters_train_and_all_of_them_move(
    tiny_model: Model, tokens: mx.array, kind: Any, leaves: set[str]
) -> None:
    """Guards unsloth-zoo#954: DoRA that silently is plain LoRA."""
    add_adapters(tiny_model, AdapterArgs(rank=2, scale=2.0, kind=kind))
    randomise(tiny_model)
    grads = nn.value_and_grad(tiny_model, lambda m: m(tokens).square().mean())(tiny_model)[1]
    flat: Any = tree_flatten(grads)
    assert {name for name, _ in flat} == set(adapter_state(tiny_model))
    assert {name.rpartition(".")[2] for name, _ in flat} >= leaves
    assert all(mx.abs(grad).max().item() > 0 for _, grad in flat)


def test_the_last_layers_only_are_adapted(tiny_model: Model) -> None:
    args = AdapterArgs(num_layers=1, target_modules=["qkv_proj", "token_embeddings"])
    add_adapters(tiny_model, args)
    expected = ["transformer.token_embeddings", "transformer.layers.1.attn.qkv_proj"]
    assert list(adapted_modules(tiny_model)) == expected


def test_whole_paths_and_mlx_lm_keys_name_modules_too(tiny_model: Model) -> None:
    path = "transformer.layers.0.ffn.proj_2"
    add_adapters(tiny_model, AdapterArgs(num_layers=1, target_modules=[path, "attn.out_proj"]))
    assert list(adapted_modules(tiny_model)) == [path, "transformer.layers.1.attn.out_proj"]


@pytest.mark.parametrize("target", [*LINEAR, "token_embeddings"])
def test_each_target_changes_the_output(tiny_model: Model, tokens: mx.array, target: str) -> None:
    """The model's short cut for plain matrices must not pass adapters by."""
    before = logits(tiny_model, tokens)
    add_adapters(tiny_model, AdapterArgs(rank=2, scale=2.0, target_modules=[target]))
    randomise(tiny_model)
    assert largest(logits(tiny_model, tokens), before) > 1e-2


def test_an_untied_head_can_be_adapted(tokens: mx.array) -> None:
    model = random_model(UNTIED)
    before = logits(model, tokens)
    add_adapters(model, AdapterArgs(rank=2, scale=2.0, target_modules=["lm_head"]))
    randomise(model)
    state = {name: np.array(array) for name, array in adapter_state(model).items()}
    hidden = np.array(model.transformer(tokens))
    added = 2.0 * hidden @ state["lm_head.lora_a"] @ state["lm_head.lora_b"]
    assert largest(logits(model, tokens), before + added) < ATOL


def test_the_mode_of_the_model_is_kept(tiny_model: Model) -> None:
    add_adapters(tiny_model, AdapterArgs(dropout=0.5))
    assert not any(module.training for _, module in tiny_model.named_modules())


# How they start


def drawn(seed: int, disturbance: int) -> dict[str, np.ndarray]:
    mx.random.seed(disturbance)
    model = random_model(UNTIED)
    mx.random.seed(disturbance)
    add_adapters(model, AdapterArgs(rank=2), seed=seed)
    return {name: np.array(array) for name, array in adapter_state(model).items()}


def test_a_seed_draws_the_same_adapters_whatever_was_drawn_before() -> None:
    first, second, other = drawn(5, 0), drawn(5, 1), drawn(6, 0)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    for name in first:
        zero = name.endswith("lora_b") != ("embeddings" in name)
        assert np.array_equal(first[name], other[name]) == zero, name
        assert first[name].any() != zero, name


def test_adapters_of_different_modules_start_apart() -> None:
    first = drawn(5, 0)
    a = first["transformer.layers.0.ffn.proj_1.lora_a"]
    assert not np.array_equal(a, first["transformer.layers.1.ffn.proj_1.lora_a"])
    assert np.abs(a).max() <= 32**-0.5
    assert np.abs(a).max() > 0.8 * 32**-0.5


# What does not fit


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_layers": 3}, "num_layers is 3, but the model has 2; -1 is all"),
        (
            {"target_modules": ["qkv_proj", "lm_head"]},
            "no module 'lm_head'; .* qkv_proj, out_proj, proj_1, proj_2",
        ),
        ({"target_modules": ["transformer.layers.2.ffn.proj_1"]}, "no module 'transformer.lay"),
        ({"target_modules": ["ffn.qkv_proj"]}, "no module 'ffn.qkv_proj'; in each of its 2 layers"),
    ],
)
def test_settings_that_do_not_fit_the_model_leave_it_alone(
    tiny_model: Model, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        add_adapters(tiny_model, AdapterArgs(**settings))
    assert not adapted_modules(tiny_model)
    assert trainable_count(tiny_model) > 0


def test_adapters_are_not_put_on_adapters(tiny_model: Model) -> None:
    add_adapters(tiny_model, AdapterArgs())
    with pytest.raises(ValueError, match="has adapters already; fuse them"):
        add_adapters(tiny_model, AdapterArgs())

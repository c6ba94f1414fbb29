"""Queries and keys share one norm, whose weights are kept between calls: never stale or lost."""

import copy
from collections.abc import Callable
from typing import Any

import golden_set
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
import reference
from mlx.utils import tree_flatten, tree_map
from model_makers import random_model, random_tokens

from openelm_mlx.model import Model

CONFIG: dict[str, Any] = {
    "num_transformer_layers": 2,
    "model_dim": 16,
    "head_dim": 4,
    "num_query_heads": [2, 4],
    "num_kv_heads": [1, 2],
    "ffn_multipliers": [0.5, 1.0],
    "ffn_dim_divisor": 8,
    "vocab_size": 11,
    "normalize_qk_projections": True,
    "share_input_output_layers": True,
}
NORMS = [
    f"transformer.layers.{i}.attn.{name}.weight" for i in (0, 1) for name in ("q_norm", "k_norm")
]
TOKENS = random_tokens(2, 7, 11)


@pytest.fixture
def model() -> Model:
    return random_model(CONFIG, seed=3)


def judged(model: Model) -> np.ndarray:
    """What the model's present weights give, by the reference."""
    return reference.forward(CONFIG, golden_set.numpy_weights(model), np.array(TOKENS))


def assert_right(model: Model) -> None:
    np.testing.assert_allclose(np.array(model(TOKENS)), judged(model), atol=5e-5, rtol=0)


def new_norms(seed: int = 9) -> list[tuple[str, mx.array]]:
    rng = np.random.default_rng(seed)
    return [(name, mx.array(rng.uniform(1, 3, 4).astype(np.float32))) for name in NORMS]


def by_loading(model: Model) -> None:
    model.load_weights(new_norms(), strict=False)


def by_update(model: Model) -> None:
    model.update(tree_map(lambda w: w * 1.5, model.parameters()))


def by_assignment(model: Model) -> None:
    for layer in model.layers:
        layer.attn.k_norm.weight = layer.attn.k_norm.weight * 2


def by_new_dtype(model: Model) -> None:
    model.set_dtype(mx.bfloat16)
    model.set_dtype(mx.float32)


def by_writing_in_place_while_training(model: Model) -> None:
    model.train()
    model(TOKENS)
    model.layers[1].attn.q_norm.weight *= 2
    model.eval()


@pytest.mark.parametrize(
    "change",
    [by_loading, by_update, by_assignment, by_new_dtype, by_writing_in_place_while_training],
)
def test_new_norm_weights_count_at_once(model: Model, change: Callable[[Model], None]) -> None:
    assert_right(model)
    before = np.array(model(TOKENS))
    change(model)
    assert_right(model)
    assert np.abs(np.array(model(TOKENS)) - before).max() > 1e-4


@pytest.mark.slow
def test_every_update_counts_in_a_long_run_of_updates(model: Model) -> None:
    # guards against keeping by id(): ids of freed arrays come again
    for seed in range(40):
        model.load_weights(new_norms(seed), strict=False)
        assert_right(model)


def test_rows_are_kept_between_calls_and_not_while_training(model: Model) -> None:
    attention = model.layers[1].attn
    assert attention._qk_weight() is attention._qk_weight()
    model.train()
    assert attention._qk_weight() is not attention._qk_weight()


def test_kept_rows_are_no_part_of_the_model(model: Model) -> None:
    before = [name for name, _ in _leaves(model.state)]
    model(TOKENS)
    assert [name for name, _ in _leaves(model.state)] == before
    assert {name for name, _ in golden_set.flat(model)} >= set(NORMS)


def _leaves(tree: Any) -> Any:
    return tree_flatten(tree)


def test_copies_of_a_model_go_their_own_ways(model: Model) -> None:
    model(TOKENS)
    other = copy.deepcopy(model)
    by_loading(other)
    assert_right(other)
    assert_right(model)


# Function transformations; mx.compile is slow on a CPU, where it runs the C++ compiler


@pytest.mark.slow
def test_compiled_calls_follow_the_weights(model: Model) -> None:
    compiled = mx.compile(lambda x: model(x), inputs=model.state)
    for _ in range(2):
        np.testing.assert_allclose(np.array(compiled(TOKENS)), judged(model), atol=1e-5, rtol=0)
        assert_right(model)
        by_loading(model)


@pytest.mark.slow
def test_a_compiled_first_call_keeps_nothing_from_the_trace(model: Model) -> None:
    compiled = mx.compile(lambda x: model(x), inputs=model.state)
    compiled(TOKENS)
    assert_right(model)


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_compiled_training_steps_between_evaluations(model: Model, training: bool) -> None:
    optimizer = optim.SGD(learning_rate=0.5)
    state = [model.state, optimizer.state]

    def step(tokens: mx.array) -> mx.array:
        loss, gradients = nn.value_and_grad(model, _loss)(model, tokens)
        optimizer.update(model, gradients)
        return loss

    compiled = mx.compile(step, inputs=state, outputs=state)
    for _ in range(5):
        model.train(training)
        before = np.array(model.layers[0].attn.q_norm.weight)
        mx.eval(compiled(TOKENS), state)
        assert not np.array_equal(before, np.array(model.layers[0].attn.q_norm.weight))
        model.eval()
        assert_right(model)


def _loss(model: Model, tokens: mx.array) -> mx.array:
    logits = model(tokens[:, :-1])
    return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")


def reference_loss(weights: dict[str, np.ndarray]) -> float:
    tokens = np.array(TOKENS)
    logits = reference.forward(CONFIG, weights, tokens[:, :-1])
    logprobs = np.log(reference.softmax(logits))
    return float(-np.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean())


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "compiled"]
)
def test_gradients_are_those_of_the_reference(
    model: Model, training: bool, warm: bool, compiled: bool
) -> None:
    if warm:
        model(TOKENS)
    model.train(training)

    def gradients() -> Any:
        return nn.value_and_grad(model, _loss)(model, TOKENS)[1]

    if compiled:  # value_and_grad puts tracers into the model, so that it is an output too
        gradients = mx.compile(gradients, inputs=model.state, outputs=model.state)
    found = gradients()
    flat = {name: np.array(g) for name, g in _leaves(found)}
    weights = {k: v.astype(np.float64) for k, v in golden_set.numpy_weights(model).items()}
    assert set(flat) == set(weights)
    for name in NORMS:
        wanted = np.array([slope(weights, name, np.eye(4)[i]) for i in range(4)])
        assert np.abs(wanted).max() > 1e-3
        np.testing.assert_allclose(flat[name], wanted, atol=1e-5, rtol=1e-3)
    rng = np.random.default_rng(0)
    for name, weight in weights.items():
        direction = rng.normal(size=weight.shape)
        wanted = slope(weights, name, direction)
        assert (flat[name] * direction).sum() == pytest.approx(wanted, abs=1e-5, rel=1e-3)
    assert_right(model)


def slope(weights: dict[str, np.ndarray], name: str, direction: np.ndarray) -> float:
    """Central difference of the reference's loss along a direction, in float64."""
    h = 1e-5
    up = reference_loss({**weights, name: weights[name] + h * direction})
    down = reference_loss({**weights, name: weights[name] - h * direction})
    return (up - down) / (2 * h)


def test_checkpointed_layers_have_the_same_gradients(model: Model) -> None:
    model(TOKENS)  # eval mode: rows are kept
    plain = dict(_leaves(nn.value_and_grad(model, _loss)(model, TOKENS)[1]))
    steps = [nn.utils.checkpoint(layer) for layer in model.layers]

    def loss(model: Model, tokens: mx.array) -> mx.array:
        h = model.transformer.token_embeddings(tokens[:, :-1])
        for step in steps:
            h = step(h, "causal")
        logits = model.head(model.transformer.norm(h))
        return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean")

    saved = dict(_leaves(nn.value_and_grad(model, loss)(model, TOKENS)[1]))
    for name, gradient in plain.items():
        np.testing.assert_allclose(np.array(saved[name]), np.array(gradient), atol=1e-6, rtol=1e-5)
    assert_right(model)


def test_gradients_by_the_input_after_gradients_by_the_weights(model: Model) -> None:
    by_weights = nn.value_and_grad(model, _loss)
    by_weights(model, TOKENS)

    def loss(h: mx.array) -> mx.array:
        return model.layers[0](h, "causal").square().sum()

    h = mx.random.normal((1, 3, 16), key=mx.random.key(0))
    kept = np.array(mx.grad(loss)(h))
    model.train()
    np.testing.assert_allclose(kept, np.array(mx.grad(loss)(h)), atol=1e-5, rtol=1e-5)


def test_frozen_norms_keep_their_rows_and_get_no_gradient(model: Model) -> None:
    model(TOKENS)
    model.freeze(keys=["weight"])
    model.layers[0].ffn.unfreeze()
    _, gradients = nn.value_and_grad(model, _loss)(model, TOKENS)
    assert {name.split(".")[3] for name, _ in _leaves(gradients)} == {"ffn"}
    assert_right(model)

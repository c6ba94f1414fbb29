"""Recomputing in the backward pass changes memory alone: gradients, dropout and weights stay."""

import os
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from golden_lora import randomise
from mlx.utils import tree_flatten
from model_makers import model_of, random_tokens
from slow_params import slow_cases

from openelm_mlx import cpu_attention
from openelm_mlx.attention_gradient import attention_without_scores
from openelm_mlx.batches import Batch
from openelm_mlx.config import ModelArgs
from openelm_mlx.lora import AdapterArgs, add_adapters
from openelm_mlx.model import Model
from openelm_mlx.objectives import language_model_loss
from openelm_mlx.recompute import recomputed
from openelm_mlx.training_step import set_grad_checkpoint

MODES = ["scores", "attention", "layer"]


def batch(rows: int, length: int, *, packed: bool) -> Batch:
    segments = mx.array([[0] * 100 + [1] * (length - 100)] * rows) if packed else None
    return Batch(
        tokens=random_tokens(rows, length, 61),
        targets=random_tokens(rows, length, 61, seed=1),
        mask=mx.ones((rows, length)),
        segments=segments,
    )


def adapted(args: ModelArgs, mode: str, dropout: float | None) -> Model:
    """In training mode; no adapters where ``dropout`` is None."""
    model = model_of(args, seed=1)
    if dropout is not None:
        add_adapters(model, AdapterArgs(rank=2, scale=0.3, dropout=dropout))
        randomise(model)
    set_grad_checkpoint(model, mode)
    model.train()
    return model


def loss_and_gradients(
    model: Model, data: Batch, wrap: Callable[[Any], Any] = lambda f: f
) -> tuple[float, dict[str, mx.array]]:
    loss = language_model_loss()
    step = nn.value_and_grad(model, lambda: loss(model, data)[0])
    mx.random.seed(4)
    value, gradients = wrap(step)()
    return value.item(), dict(tree_flatten(gradients))


@pytest.mark.parametrize(
    ("rows", "length", "packed"), [(5, 200, True), *slow_cases((3, 260, False))]
)
@pytest.mark.parametrize("dropout", [None, 0.0], ids=["full", "adapters"])
@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradients_are_those_without(
    tiny_args: ModelArgs, mode: str, dropout: float | None, rows: int, length: int, packed: bool
) -> None:
    """Groups of one row, and of two, two and one."""
    data = batch(rows, length, packed=packed)
    found = loss_and_gradients(adapted(tiny_args, mode, dropout), data)
    assert_equal(found, loss_and_gradients(adapted(tiny_args, "none", dropout), data))


@pytest.mark.slow  # MLX compiles by the C++ compiler on a CPU
def test_compiled_they_are_too(tiny_args: ModelArgs) -> None:
    data = batch(5, 200, packed=True)
    expected = loss_and_gradients(adapted(tiny_args, "none", 0.0), data)
    mx.enable_compile()
    try:
        found = loss_and_gradients(adapted(tiny_args, "layer", 0.0), data, mx.compile)
    finally:
        if "MLX_DISABLE_COMPILE" in os.environ:
            mx.disable_compile()
    assert_equal(found, expected)


def assert_equal(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert set(found[1]) == set(expected[1])
    for name, gradient in expected[1].items():
        scale = float(mx.abs(gradient).max())  # float32 sums in another order
        np.testing.assert_allclose(
            np.array(found[1][name]), np.array(gradient), atol=2e-5 * scale, err_msg=name
        )


@pytest.mark.parametrize("mode", MODES)
def test_dropout_drops_the_same_values_when_recomputed(tiny_args: ModelArgs, mode: str) -> None:
    """Guards a bug: the gradient was that of other random numbers than the loss.

    The judge is the loss itself, a little to both sides along a direction.
    """
    model, data = adapted(tiny_args, mode, 0.5), batch(3, 260, packed=False)
    _, gradients = loss_and_gradients(model, data)
    start: Any = dict(tree_flatten(model.trainable_parameters()))
    mx.random.seed(8)
    along = {name: mx.random.normal(array.shape) for name, array in start.items()}

    def loss_at(step: float) -> float:
        moved = [(name, array + step * along[name]) for name, array in start.items()]
        model.load_weights(moved, strict=False)
        mx.random.seed(4)
        return language_model_loss()(model, data)[0].item()

    slope = (loss_at(1e-3) - loss_at(-1e-3)) / 2e-3
    expected = sum((gradients[name] * along[name]).sum().item() for name in start)
    assert abs(expected) > 1
    assert slope == pytest.approx(expected, rel=0.02, abs=0.3)  # curvature, float32 of a sum


def test_the_model_keeps_its_own_weights(tiny_args: ModelArgs) -> None:
    """Tracers left in the layers would break whatever comes after the step."""
    model = adapted(tiny_args, "layer", None)
    before: Any = dict(tree_flatten(model.layers[0].parameters()))
    layer = model.layers[0]
    mx.eval(recomputed(lambda x, _: layer.ffn_norm(x), mx.ones((1, 2, 32)), None, [layer]))
    after: Any = dict(tree_flatten(model.layers[0].parameters()))
    assert all(after[name] is array for name, array in before.items())
    loss_and_gradients(model, batch(1, 260, packed=True))
    mx.eval(model.parameters())


@pytest.mark.slow
def test_the_intermediate_values_of_one_group_are_alive_at_a_time() -> None:
    wide = nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 64))
    x = mx.random.normal((8, 512, 64))
    mx.eval(wide.parameters(), x)

    def peak(group: int) -> int:
        def loss(x: mx.array) -> mx.array:
            return recomputed(lambda rows, _: wide(rows), x, None, [wide], group=group).sum()

        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(mx.grad(loss)(x))
        return mx.get_peak_memory() - before

    assert peak(512) < 0.5 * peak(8 * 512)


@pytest.mark.parametrize("kind", ["causal", "packed"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (2, 2)])
def test_attention_without_scores_has_the_gradients_of_plain_attention(
    kind: str, heads: int, kv_heads: int
) -> None:
    """Groups of two rows, two and one; the judge is MLX's own gradient of plain attention."""
    B, L, E = 5, 200, 8
    q, k, v, along = (
        mx.random.normal((B, n, L, E), key=mx.random.key(i))
        for i, n in enumerate((heads, kv_heads, kv_heads, heads))
    )
    mask: Any = "causal"
    if kind == "packed":
        segments = mx.arange(L) // mx.array([[150], [70], [L], [1], [33]])
        mask = (segments[:, None, :, None] == segments[:, None, None, :]) & mx.tril(
            mx.ones((L, L), mx.bool_)
        )

    def ours(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return (attention_without_scores(q, k, v, scale=0.3, mask=mask) * along).sum()

    def plain(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        repeated = [mx.repeat(array, heads // kv_heads, axis=1) for array in (k, v)]
        allowed = mx.tril(mx.ones((L, L), mx.bool_)) if kind == "causal" else mask
        scores = mx.where(allowed, 0.3 * q @ repeated[0].swapaxes(-1, -2), -mx.inf)
        return ((mx.softmax(scores, axis=-1) @ repeated[1]) * along).sum()

    for found, expected in zip(
        mx.grad(ours, (0, 1, 2))(q, k, v), mx.grad(plain, (0, 1, 2))(q, k, v), strict=True
    ):
        np.testing.assert_allclose(np.array(found), np.array(expected), atol=2e-5)
    assert ours(q, k, v).item() == pytest.approx(plain(q, k, v).item(), rel=1e-4, abs=1e-3)


@pytest.mark.slow  # exp is slow on a CPU
@pytest.mark.parametrize(
    "without", [attention_without_scores, cpu_attention.attention], ids=["any", "x86"]
)
def test_scores_are_not_kept(without: Callable[..., mx.array]) -> None:
    """Four attentions on top of each other."""
    q, k, v = (mx.random.normal((8, n, 256, 16)) for n in (8, 2, 2))
    mx.eval(q, k, v)

    def peak(attend: Callable[..., mx.array]) -> int:
        def loss(x: mx.array) -> mx.array:
            for _ in range(4):
                x = attend(x, k, v, scale=0.3, mask="causal")
            return x.sum()

        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        mx.eval(mx.grad(loss)(q))
        return mx.get_peak_memory() - before

    assert peak(without) < 0.6 * peak(mx.fast.scaled_dot_product_attention)

"""Attention and exp for x86 CPUs have the values and gradients of MLX's own."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from openelm_mlx import cpu_attention, cpu_exp

Pieces = tuple[int, int]  # queries, scores


@pytest.fixture(params=[(64, 1 << 20), (7, 1), (7, 2000)], ids=["whole", "single", "few"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Pieces:
    """Small pieces of many kinds: one head of one row, some heads, some rows."""
    queries, scores = request.param
    monkeypatch.setattr(cpu_attention, "_QUERIES", queries)
    monkeypatch.setattr(cpu_attention, "_SCORES", scores)
    return queries, scores


def mask_of(kind: str, B: int, L: int, S: int) -> Any:
    causal = mx.tril(mx.ones((L, S), mx.bool_), k=S - L)
    if kind == "packed":
        segments = mx.arange(S) // mx.array([[5], [9], [S]])
        return (segments[:B, None, S - L :, None] == segments[:B, None, None, :]) & causal
    padded = mx.arange(S) >= mx.array([[0], [3], [1]])  # left padding: some rows see nothing
    return {
        "causal": "causal",
        "all": None,
        "one for all": causal,
        "padded": padded[:B, None, None, :] & causal,
        "added": mx.where(causal, mx.random.normal((L, S), key=mx.random.key(9)), -1e9)[None, None],
    }[kind]


@pytest.mark.parametrize("kind", ["causal", "all", "one for all", "packed", "padded", "added"])
@pytest.mark.parametrize(("heads", "kv_heads", "L", "S"), [(4, 2, 20, 20), (3, 1, 9, 25)])
def test_values_and_gradients_are_mlxs(
    pieces: Pieces, kind: str, heads: int, kv_heads: int, L: int, S: int
) -> None:
    B, E = 3, 8
    shapes = ((heads, L), (kv_heads, S), (kv_heads, S), (heads, L))
    q, k, v, along = (
        mx.random.normal((B, n, length, E), key=mx.random.key(i))
        for i, (n, length) in enumerate(shapes)
    )
    settings = {"scale": 0.4, "mask": mask_of(kind, B, L, S)}
    np.testing.assert_allclose(
        np.array(cpu_attention.attention(q, k, v, **settings)),
        np.array(mx.fast.scaled_dot_product_attention(q, k, v, **settings)),
        atol=2e-6,
    )

    def gradients(attend: Callable[..., mx.array]) -> tuple[mx.array, ...]:
        def loss(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
            return (attend(q, k, v, **settings) * along).sum()

        found: tuple[mx.array, ...] = mx.grad(loss, (0, 1, 2))(q, k, v)
        return found

    found_ones = gradients(cpu_attention.attention)
    if kind == "padded":  # in MLX they have some, to all values alike
        along = along * settings["mask"].any(axis=-1, keepdims=True)
    expected_ones = gradients(mx.fast.scaled_dot_product_attention)
    for found, expected in zip(found_ones, expected_ones, strict=True):
        np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-5)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_it_is_taken_for_several_float32_tokens(
    monkeypatch: pytest.MonkeyPatch, length: int, dtype: mx.Dtype
) -> None:
    monkeypatch.setattr(cpu_exp, "_X86", True)
    monkeypatch.setattr(cpu_exp, "_MANY", 1)
    queries = mx.zeros((1, 2, length, 4), dtype)
    on_cpu = mx.default_device().type != mx.gpu
    expected = on_cpu and length > 1 and dtype == mx.float32
    assert cpu_attention.pays(queries, "causal") == expected
    assert cpu_attention.pays(queries, mx.zeros((3, 1, length, 9))) == expected
    assert not cpu_attention.pays(queries, mx.zeros((3, 2, length, 9)))  # a mask for each head
    monkeypatch.setattr(cpu_exp, "_X86", False)
    assert not cpu_attention.pays(queries, "causal")


@pytest.fixture(params=[True, False], ids=["x86", "others"])
def kind_of_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(cpu_exp, "_X86", request.param)
    is_x86: bool = request.param
    return is_x86


@pytest.mark.usefixtures("kind_of_cpu")
def test_exp_and_sigmoid_are_exact_to_their_last_digits() -> None:
    x = np.linspace(-80, 80, 4001, dtype=np.float32)
    exact = np.exp(x.astype(np.float64))
    off = np.abs(np.array(cpu_exp.exp(mx.array(x)), np.float64) / exact - 1)
    assert (off <= 1e-7 * (1 + np.abs(x))).all()
    share = np.array(cpu_exp.sigmoid(mx.array(x)), np.float64)
    np.testing.assert_allclose(share, exact / (1 + exact), rtol=1e-5)


@pytest.mark.usefixtures("kind_of_cpu")
def test_what_is_no_number_stays_so_and_extremes_saturate() -> None:
    x = mx.array([-mx.inf, mx.inf, mx.nan, -200.0, 200.0])
    np.testing.assert_array_equal(np.array(cpu_exp.exp(x)), [0, np.inf, np.nan, 0, np.inf])
    np.testing.assert_allclose(np.array(cpu_exp.sigmoid(x)), [0, 1, np.nan, 0, 1], atol=1e-38)
    assert np.isnan(np.array(cpu_exp.log_sum_exp(mx.array([[1.0, mx.nan, 2.0]])))).all()


@pytest.mark.usefixtures("kind_of_cpu")
def test_sigmoid_has_its_gradient_far_out_too() -> None:
    x = mx.array([-1000.0, -100.0, -3.0, 0.0, 2.0, 100.0])
    found = np.array(mx.grad(lambda x: cpu_exp.sigmoid(x).sum())(x))
    share = 1 / (1 + np.exp(-np.clip(np.array(x, np.float64), -700, 700)))
    np.testing.assert_allclose(found, share * (1 - share), rtol=1e-5, atol=1e-30)


@pytest.mark.usefixtures("kind_of_cpu")
def test_log_sum_exp_and_its_gradient_are_mlxs() -> None:
    x = mx.random.normal((3, 5, 70), key=mx.random.key(0)) * 20

    def summed(function: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
        return lambda x: (function(x) * mx.arange(15).reshape(3, 5, 1)).sum()

    def plain(x: mx.array) -> mx.array:
        return mx.logsumexp(x, axis=-1, keepdims=True)

    np.testing.assert_allclose(
        np.array(cpu_exp.log_sum_exp(x)), np.array(plain(x)), rtol=1e-6, atol=1e-6
    )
    found, expected = mx.grad(summed(cpu_exp.log_sum_exp))(x), mx.grad(summed(plain))(x)
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-5, atol=1e-6)

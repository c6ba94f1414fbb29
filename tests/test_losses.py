"""The loss against Apple's numbers, torch-free: goldens, a NumPy reference and properties."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from openelm_mlx.losses import (
    LossArgs,
    chunked_cross_entropy,
    cross_entropy_sums,
    fused_cross_entropy,
    fused_sequence_logprobs,
    ignored_z_loss,
    sequence_logprobs,
)

Golden = Callable[[str], Path]


@pytest.fixture
def batch(golden: Golden) -> dict[str, Any]:
    arrays = mx.load(str(golden("train/loss_batch.safetensors")))
    facts = json.loads(golden("train/loss.json").read_text())
    targets = arrays["targets"].reshape(-1).astype(mx.int32)
    mask = targets != facts["ignore_index"]
    return {
        "logits": arrays["logits"].reshape(-1, arrays["logits"].shape[-1]),
        "targets": mx.where(mask, targets, 0),
        "mask": mask,
        "facts": facts,
    }


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_corenet(batch: dict[str, Any], smoothing: float) -> None:
    args = LossArgs(label_smoothing=smoothing)
    total = cross_entropy_sums(batch["logits"], batch["targets"], batch["mask"], args)
    name = "ce_float64" if smoothing == 0 else "ce_ls0.1_float64"
    assert (total / batch["mask"].sum()).item() == pytest.approx(
        batch["facts"][name]["total_loss"], abs=1e-4
    )


def test_z_loss_counts_real_tokens_and_by_a_switch_the_ignored_as_corenet_does(
    batch: dict[str, Any],
) -> None:
    facts, n = batch["facts"], batch["mask"].sum()
    args = LossArgs(z_loss=facts["z_loss_eps"])
    plain = cross_entropy_sums(batch["logits"], batch["targets"], batch["mask"])
    total = cross_entropy_sums(batch["logits"], batch["targets"], batch["mask"], args)
    only_real = ((total - plain) / n).item()
    expected = facts["_explain_z_loss_if_ignored_positions_were_excluded"]
    assert only_real == pytest.approx(expected, abs=1e-6)
    ignored = mx.array(facts["num_ignored"])
    as_corenet = total + ignored_z_loss(ignored, batch["logits"].shape[-1], args)
    assert (as_corenet / n).item() == pytest.approx(facts["ce_z"]["total_loss"], abs=1e-4)


def _random(seed: int, n: int, d: int, v: int) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    rng = np.random.default_rng(seed)
    hidden = mx.array(rng.normal(size=(n, d)).astype(np.float32))
    table = mx.array(rng.normal(size=(v, d)).astype(np.float32))
    targets = mx.array(rng.integers(0, v, n).astype(np.int32))
    mask = mx.array((rng.random(n) > 0.3).astype(np.float32))
    return hidden, table, targets, mask


@pytest.mark.parametrize("chunk", [3, 8, 64])
@pytest.mark.parametrize(
    "args",
    [
        {},
        {"z_loss": 1e-2},
        {"label_smoothing": 0.2},
        {"z_loss": 1e-2, "label_smoothing": 0.2},
    ],
)
def test_fused_loss_and_gradients_equal_the_materialised_ones(
    chunk: int, args: dict[str, float]
) -> None:
    hidden, table, targets, mask = _random(chunk, n=13, d=6, v=11)
    settings = LossArgs(loss_chunk=chunk, **args)

    def fused(hidden: mx.array, weight: mx.array) -> mx.array:
        head = nn.Embedding(11, 6)
        head.weight = weight
        return 3 * fused_cross_entropy(hidden, head, targets, mask, settings, head_trains=True)

    def plain(hidden: mx.array, weight: mx.array) -> mx.array:
        return 3 * cross_entropy_sums(hidden @ weight.T, targets, mask, settings)

    ours = mx.value_and_grad(fused, argnums=(0, 1))(hidden, table)
    theirs = mx.value_and_grad(plain, argnums=(0, 1))(hidden, table)
    assert ours[0].item() == pytest.approx(theirs[0].item(), rel=1e-5)
    for a, b in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=2e-5)


def test_the_fused_loss_takes_quantised_frozen_and_adapted_heads() -> None:
    hidden, table, targets, mask = _random(1, n=9, d=64, v=32)
    embedding = nn.Embedding(32, 64)
    embedding.weight = table
    quantised = embedding.to_quantized(group_size=32, bits=8)
    adapted = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Identity())

    for head, logits in (
        (quantised, quantised.as_linear),
        (embedding, embedding.as_linear),
        (adapted, adapted),
    ):

        def fused(hidden: mx.array, head: Any = head) -> mx.array:
            return fused_cross_entropy(
                hidden, head, targets, mask, LossArgs(loss_chunk=4), head_trains=False
            )

        def plain(hidden: mx.array, logits: Any = logits) -> mx.array:
            return cross_entropy_sums(logits(hidden), targets, mask)

        ours, theirs = mx.value_and_grad(fused)(hidden), mx.value_and_grad(plain)(hidden)
        assert ours[0].item() == pytest.approx(theirs[0].item(), rel=1e-5)
        np.testing.assert_allclose(np.array(ours[1]), np.array(theirs[1]), atol=2e-4)


def test_evaluation_loss_equals_the_training_loss() -> None:
    hidden, table, targets, mask = _random(2, n=10, d=4, v=7)
    args = LossArgs(z_loss=1e-3, loss_chunk=3)
    assert chunked_cross_entropy(
        hidden, lambda h: h @ table.T, targets, mask, args
    ).item() == pytest.approx(
        cross_entropy_sums(hidden @ table.T, targets, mask, args).item(), rel=1e-6
    )


def test_sixteen_bit_logits_are_reduced_in_float32() -> None:
    hidden, table, targets, mask = _random(3, n=8, d=16, v=4000)
    exact = cross_entropy_sums(hidden @ table.T, targets, mask)
    head = nn.Embedding(4000, 16)
    head.weight = table.astype(mx.bfloat16)
    half = fused_cross_entropy(hidden.astype(mx.bfloat16), head, targets, mask, head_trains=False)
    assert half.dtype == mx.float32
    assert half.item() == pytest.approx(exact.item(), rel=2e-2)


def test_padding_and_prompt_do_not_change_a_sequence_logprob() -> None:
    rng = np.random.default_rng(0)
    logits = mx.array(rng.normal(size=(2, 5, 9)).astype(np.float32))
    targets = mx.array(rng.integers(0, 9, (2, 5)).astype(np.int32))
    mask = mx.array([[0, 1, 1, 0, 0], [1, 1, 1, 1, 0]])
    wide = np.array(logits, dtype=np.float64)
    log_p = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_p, np.array(targets)[..., None], -1)[..., 0]
    expected = (picked * np.array(mask)).sum(-1)
    np.testing.assert_allclose(np.array(sequence_logprobs(logits, targets, mask)), expected, 1e-5)
    other = mx.where(mask == 1, targets, (targets + 1) % 9)
    np.testing.assert_array_equal(
        np.array(sequence_logprobs(logits, other, mask)),
        np.array(sequence_logprobs(logits, targets, mask)),
    )


def test_fused_sequence_logprobs_equal_the_plain_ones_with_all_gradients() -> None:
    hidden, table, targets, _ = _random(4, n=12, d=5, v=9)
    hidden, targets = hidden.reshape(3, 4, 5), targets.reshape(3, 4)
    mask = mx.array(np.random.default_rng(1).random((3, 4)) > 0.4)
    weights = mx.array([0.3, -1.0, 2.0])
    head = nn.Embedding(9, 5)

    def fused(hidden: mx.array, table: mx.array) -> mx.array:
        head.weight = table
        return (weights * fused_sequence_logprobs(hidden, head, targets, mask, chunk=5)).sum()

    def plain(hidden: mx.array, table: mx.array) -> mx.array:
        return (weights * sequence_logprobs(hidden @ table.T, targets, mask)).sum()

    ours = mx.value_and_grad(fused, argnums=(0, 1))(hidden, table)
    theirs = mx.value_and_grad(plain, argnums=(0, 1))(hidden, table)
    assert ours[0].item() == pytest.approx(theirs[0].item(), rel=1e-5)
    for a, b in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5)


def test_an_adapted_head_gets_its_gradient_through_the_recomputed_loss() -> None:
    hidden, _, targets, mask = _random(6, n=9, d=8, v=7)
    head = nn.Sequential(nn.Linear(8, 7, bias=False), nn.Tanh())

    def fused(head: nn.Module) -> mx.array:
        return fused_cross_entropy(
            hidden, head, targets, mask, LossArgs(loss_chunk=4), head_trains=True
        )

    def plain(head: nn.Module) -> mx.array:
        return cross_entropy_sums(head(hidden), targets, mask)

    _, ours = nn.value_and_grad(head, fused)(head)
    _, theirs = nn.value_and_grad(head, plain)(head)
    a, b = ours["layers"][0]["weight"], theirs["layers"][0]["weight"]
    assert mx.abs(a).max().item() > 0.01
    np.testing.assert_allclose(np.array(a), np.array(b), atol=1e-5)


def test_unshifted_mask_is_refused_with_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(2, 4\).*\(2, 5\)"):
        sequence_logprobs(mx.zeros((2, 5, 3)), mx.zeros((2, 5), mx.int32), mx.ones((2, 4)))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"z_loss": -1.0}, "z_loss must be 0"),
        ({"label_smoothing": 1.0}, "label_smoothing must be in"),
        ({"loss_chunk": 0}, "loss_chunk must be at least 1"),
    ],
)
def test_bad_loss_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LossArgs(**settings)


def test_a_batch_without_targets_sums_to_zero_not_nan() -> None:
    hidden, table, targets, mask = _random(5, n=6, d=4, v=7)
    head = nn.Embedding(7, 4)
    head.weight = table
    total = fused_cross_entropy(hidden, head, targets, mask * 0, head_trains=True)
    assert total.item() == 0
    assert math.isfinite(total.item())

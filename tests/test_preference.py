"""DPO losses against a NumPy reference and the values that theory gives at step 0."""

import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from training_makers import make_batch, make_model

from openelm_mlx.batches import Batch
from openelm_mlx.losses import sequence_logprobs
from openelm_mlx.preference import (
    PreferenceArgs,
    pair_losses,
    preference_loss,
    sequence_logprobs_of,
)

AT_ZERO = {"sigmoid": math.log(2), "hinge": 1.0, "rso": 1.0, "ipo": (1 / (2 * 0.1)) ** 2}


def pairs(model: Any, rows: int = 6, shift: float = 0.0) -> Batch:
    """Pairs whose reference is the model itself, moved by ``shift`` nats on the chosen rows."""
    batch = make_batch(1, rows=rows)
    model.eval()
    reference = sequence_logprobs_of(model, batch)
    moved = mx.concatenate([mx.full((rows // 2,), shift), mx.zeros((rows // 2,))])
    return Batch(
        tokens=batch.tokens,
        targets=batch.targets,
        mask=batch.mask,
        reference=reference - moved,
    )


@pytest.mark.parametrize("name", sorted(AT_ZERO))
def test_the_loss_at_step_0_is_what_theory_says(name: str) -> None:
    """The policy is its own reference (REPORTS B30)."""
    model = make_model()
    loss = preference_loss(PreferenceArgs(loss=name, beta=0.1))
    batch = pairs(model)
    model.train()
    total, n, sums = loss(model, batch)  # type: ignore[misc]
    assert n.item() == 3
    assert total.item() / 3 == pytest.approx(AT_ZERO[name], rel=1e-5)
    assert sums["margin"].item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("name", sorted(AT_ZERO))
def test_the_losses_equal_a_numpy_reference(name: str) -> None:
    h, beta = np.array([-30.0, -1.0, 0.0, 0.5, 4.0, 30.0]), 0.3
    expected = {
        "sigmoid": np.log1p(np.exp(-beta * h)),
        "hinge": np.maximum(0, 1 - beta * h),
        "rso": np.maximum(0, 1 - beta * h),
        "ipo": (h - 1 / (2 * beta)) ** 2,
    }[name]
    got = pair_losses(mx.array(h.astype(np.float32)), PreferenceArgs(loss=name, beta=beta))
    np.testing.assert_allclose(np.array(got), expected, rtol=2e-6)


def test_margins_and_accuracies_are_counted_per_pair() -> None:
    model = make_model()
    loss = preference_loss(PreferenceArgs(loss="sigmoid", beta=0.5))
    _, n, sums = loss(model, pairs(model, shift=2.0))  # type: ignore[misc]
    assert sums["accuracy"].item() == n.item() == 3
    assert sums["margin"].item() == pytest.approx(3 * 0.5 * 2.0, rel=1e-4)
    assert sums["chosen_reward"].item() == pytest.approx(3.0, rel=1e-4)
    _, _, sums = loss(model, pairs(model, shift=-2.0))  # type: ignore[misc]
    assert sums["accuracy"].item() == 0


def test_prompt_tokens_and_padding_do_not_count() -> None:
    model = make_model()
    batch = pairs(model)
    loss = preference_loss(PreferenceArgs(beta=0.2))
    longer = Batch(
        tokens=mx.pad(batch.tokens, [(0, 0), (0, 5)]),
        targets=mx.pad(batch.targets, [(0, 0), (0, 5)], constant_values=3),
        mask=mx.pad(batch.mask, [(0, 0), (0, 5)]),
        reference=batch.reference,
    )
    assert loss(model, longer)[0].item() == pytest.approx(loss(model, batch)[0].item(), rel=1e-5)


def test_an_empty_pair_that_fills_a_batch_adds_nothing() -> None:
    model = make_model()
    batch = pairs(model, rows=4)
    loss = preference_loss(PreferenceArgs(beta=0.2))

    def doubled(array: mx.array | None, fill: float = 0) -> mx.array:
        assert array is not None
        chosen, rejected = mx.split(array, 2)
        blank = mx.full(chosen[:1].shape, fill, array.dtype)
        return mx.concatenate([chosen, blank, rejected, blank])

    filled = Batch(
        tokens=doubled(batch.tokens),
        targets=doubled(batch.targets),
        mask=doubled(batch.mask),
        reference=doubled(batch.reference),
    )
    a, b = loss(model, batch), loss(model, filled)
    assert a[1].item() == b[1].item() == 2
    assert a[0].item() == pytest.approx(b[0].item(), rel=1e-5)


def test_the_gradient_reaches_every_parameter_and_equals_the_plain_one() -> None:
    """REPORTS B29: a differentiated loss that never touches the model has zero gradient."""
    model = make_model()
    batch = pairs(model, shift=1.0)
    settings = PreferenceArgs(loss="sigmoid", beta=0.7, loss_chunk=5)
    ours = preference_loss(settings)

    def plain(model: Any) -> mx.array:
        logprobs = sequence_logprobs(model(batch.tokens), batch.targets, batch.mask)
        chosen, rejected = mx.split(logprobs - batch.reference, 2)
        return pair_losses(chosen - rejected, settings).sum()

    model.train()
    _, a = nn.value_and_grad(model, lambda m: ours(m, batch)[0])(model)
    _, b = nn.value_and_grad(model, plain)(model)
    from mlx.utils import tree_flatten

    flat_a: Any = tree_flatten(a)
    flat_b: Any = dict(tree_flatten(b))
    for name, gradient in flat_a:
        assert mx.abs(gradient).max().item() > 0, name
        np.testing.assert_allclose(np.array(gradient), np.array(flat_b[name]), atol=2e-5)


def test_a_batch_without_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the reference model's"):
        preference_loss(PreferenceArgs())(make_model(), make_batch(0))


def test_bad_settings_are_all_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"loss 'orpo' is not one of.*; beta must be positive"):
        PreferenceArgs(loss="orpo", beta=0.0)

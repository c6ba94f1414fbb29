"""Samplers and penalties, judged by NumPy and by Hugging Face's own penalty."""

import copy

import mlx.core as mx
import numpy as np
import pytest

from openelm_mlx.sampling import (
    apply_all,
    greedy,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    make_sampler,
    repetition_penalty,
)


def logits(seed: int = 0, size: int = 40) -> mx.array:
    return mx.random.normal((1, size), key=mx.random.key(seed)) * 3


def probabilities(values: mx.array) -> np.ndarray:
    row = np.array(values, np.float64)[0]
    return np.exp(row - row.max()) / np.exp(row - row.max()).sum()


def kept(filtered: mx.array) -> set[int]:
    return set(np.flatnonzero(np.isfinite(np.array(filtered)[0])))


def nucleus(p: np.ndarray, mass: float) -> set[int]:
    """The smallest set of likeliest tokens whose probability reaches ``mass``."""
    order = np.argsort(-p)
    count = int(np.searchsorted(np.cumsum(p[order]), mass)) + 1
    return set(order[:count].tolist())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mass", [0.05, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_it(seed: int, mass: float) -> None:
    values = logits(seed)
    filtered = keep_top_p(values, mass)
    assert kept(filtered) == nucleus(probabilities(values), mass)
    np.testing.assert_array_equal(
        np.array(filtered)[0, list(kept(filtered))], np.array(values)[0, list(kept(filtered))]
    )


@pytest.mark.parametrize("k", [1, 5, 39])
def test_top_k_keeps_the_k_likeliest(k: int) -> None:
    values = logits()
    assert kept(keep_top_k(values, k)) == set(np.argsort(-np.array(values)[0])[:k].tolist())


@pytest.mark.parametrize("p", [0.01, 0.2, 1.0])
def test_min_p_is_relative_to_the_likeliest(p: float) -> None:
    values = logits()
    probs = probabilities(values)
    assert kept(keep_min_p(values, p)) == set(np.flatnonzero(probs >= p * probs.max()).tolist())


def test_filters_look_at_each_row_of_a_batch() -> None:
    rows = mx.concatenate([logits(1), logits(2)])
    for keep, setting in ((keep_top_k, 3), (keep_top_p, 0.7), (keep_min_p, 0.1)):
        together = np.array(keep(rows, setting))
        for row in (0, 1):
            np.testing.assert_array_equal(
                together[row], np.array(keep(rows[row][None], setting))[0]
            )


def test_top_p_after_top_k_counts_the_mass_that_is_left() -> None:
    values = logits()
    probs = probabilities(values)
    best = np.argsort(-probs)[:10]
    left = np.zeros_like(probs)
    left[best] = probs[best] / probs[best].sum()
    sampler = make_sampler(1.0, top_k=10, top_p=0.8, seed=0)
    drawn = {int(sampler(values).tolist()[0]) for _ in range(400)}
    assert drawn == nucleus(left, 0.8)


def test_draws_have_the_softmax_distribution_at_the_temperature() -> None:
    values, temp, n = logits(size=6), 0.7, 4000
    sampler = make_sampler(temp, seed=1)
    drawn = np.bincount(np.array(sampler(mx.repeat(values, n, axis=0))), minlength=6) / n
    expected = probabilities(values / temp)
    spread = np.sqrt(expected * (1 - expected) / n)
    assert np.all(np.abs(drawn - expected) < 4 * spread + 1e-4)  # four standard deviations


def test_the_filters_see_probabilities_before_the_temperature() -> None:
    values = logits()
    inside = nucleus(probabilities(values), 0.6)
    sampler = make_sampler(5.0, top_p=0.6, seed=0)
    assert {int(sampler(values).tolist()[0]) for _ in range(300)} == inside


def draws(seed: int | None, count: int = 20) -> list[int]:
    sampler = make_sampler(1.0, seed=seed)
    return [int(sampler(logits()).tolist()[0]) for _ in range(count)]


def test_equal_seeds_repeat_whatever_else_draws_numbers_and_others_differ() -> None:
    first = draws(7)
    mx.random.seed(123)
    mx.eval(mx.random.normal((3,)))
    assert draws(7) == first
    assert draws(8) != first


def test_without_a_seed_mlx_s_global_state_decides() -> None:
    mx.random.seed(5)
    first = draws(None)
    assert draws(None) != first
    mx.random.seed(5)
    assert draws(None) == first


def test_a_copy_draws_what_the_original_would_draw_next() -> None:
    sampler = make_sampler(1.0, seed=3)
    sampler(logits())
    twin = copy.copy(sampler)
    ahead = [twin(logits()).tolist() for _ in range(5)]
    assert [sampler(logits()).tolist() for _ in range(5)] == ahead


def test_temperature_zero_is_greedy_and_ignores_filters() -> None:
    assert make_sampler(0.0, top_p=0.1, top_k=2, seed=1) is greedy
    assert greedy(logits()).tolist() == [int(np.argmax(np.array(logits())[0]))]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temp": -1}, "temp must be 0 or more, got -1"),
        ({"temp": float("nan")}, "temp must be 0 or more"),
        ({"temp": float("inf")}, "temp must be 0 or more"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\]"),
        ({"top_k": -1}, "top_k must be 0"),
        ({"min_p": 2}, r"min_p must be in \[0, 1\]"),
        ({"temp": -1, "top_k": -1}, "temp .*; top_k"),
    ],
)
def test_settings_out_of_range_are_all_named(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make_sampler(**settings)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def penalised(values: np.ndarray, seen: set[int], penalty: float) -> np.ndarray:
    """Keskar et al. 2019 as Hugging Face has it: negative scores are multiplied."""
    out = values.copy()
    for token in seen:
        out[0, token] = out[0, token] * penalty if out[0, token] < 0 else out[0, token] / penalty
    return out


TOKENS = [3, 5, 3, 9, 39, 0]


@pytest.mark.parametrize("penalty", [0.8, 1.2, 3.0])
def test_repetition_penalty_counts_a_token_once(penalty: float) -> None:
    found = repetition_penalty(penalty)(mx.array(TOKENS), logits())
    expected = penalised(np.array(logits()), set(TOKENS), penalty)
    np.testing.assert_allclose(np.array(found), expected, rtol=1e-6)


def test_the_whole_text_counts_unless_a_window_is_given() -> None:
    long = [7, *[11] * 50]  # mlx_lm looks at 20 tokens (REPORTS D9)
    values = np.array(logits())
    everything = np.array(repetition_penalty(2.0)(mx.array(long), logits()))
    newest = np.array(repetition_penalty(2.0, window=20)(mx.array(long), logits()))
    np.testing.assert_allclose(everything, penalised(values, {7, 11}, 2.0), rtol=1e-6)
    np.testing.assert_allclose(newest, penalised(values, {11}, 2.0), rtol=1e-6)


def test_penalty_keeps_the_dtype_and_the_given_logits() -> None:
    values = logits().astype(mx.bfloat16)
    before = np.array(values.astype(mx.float32))
    assert repetition_penalty(1.2)(mx.array(TOKENS), values).dtype == mx.bfloat16
    np.testing.assert_array_equal(np.array(values.astype(mx.float32)), before)


@pytest.mark.parametrize(
    ("penalty", "window", "message"),
    [
        (0.0, None, "repetition penalty must be positive"),
        (float("nan"), None, "repetition penalty must be positive"),
        (1.2, 0, "at least 1 token"),
    ],
)
def test_penalties_out_of_range_are_refused(
    penalty: float, window: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        repetition_penalty(penalty, window)


def test_processors_run_in_order() -> None:
    add = lambda tokens, values: values + tokens.size  # noqa: E731
    double = lambda tokens, values: values * 2  # noqa: E731
    found = apply_all([add, double], mx.array([1, 2]), mx.array([[1.0]]))
    assert found.tolist() == [[6.0]]


@pytest.mark.slow
def test_repetition_penalty_equals_hugging_face_s() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    judge = transformers.RepetitionPenaltyLogitsProcessor(penalty=1.2)
    for seed in range(3):
        values = logits(seed)
        expected = judge(torch.tensor([TOKENS]), torch.tensor(np.array(values)))
        found = repetition_penalty(1.2)(mx.array(TOKENS), values)
        np.testing.assert_allclose(np.array(found), expected.numpy(), rtol=1e-6)

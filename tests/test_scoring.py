"""Batched log-likelihoods equal those of one request after another, whatever is shared."""

import logging
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import model_makers
import numpy as np
import pytest
import reference
from slow_params import slow_cases

from openelm_mlx.model import Model, ModelArgs
from openelm_mlx.scoring import Likelihood, log_likelihoods
from openelm_mlx.scoring_plan import (
    CACHED_TOKENS,
    PASS_TOKENS,
    Request,
    make_batches,
    make_items,
    padded,
)

VOCABULARY = 61
ATOL = 1e-5  # float32; nats of some 25, whose last place is 2e-6


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


def few_shot_requests(seed: int = 0) -> list[Request]:
    """Contexts that begin alike, pairs that share more, single ones, and answers of all lengths."""
    rng = random.Random(seed)
    examples, requests = ids(rng, 30), []
    for number in range(9):
        context = [1, *examples, *ids(rng, rng.randrange(1, 25))]
        answers = [ids(rng, rng.randrange(1, 6)) for _ in range(1 + number % 4)]
        answers.append([*answers[0], *ids(rng, 2)])  # one begins another
        answers.append([*answers[0][:-1], 4])  # differs in the last token only
        requests += [(context, answer) for answer in answers]
    for _ in range(3):
        start = [1, *ids(rng, 20)]
        requests += [([*start, *ids(rng, n)], ids(rng, 3)) for n in (1, 2)]
    requests += [([1], ids(rng, n)) for n in (1, 2, 5)]
    requests += [([1, 7], ids(rng, 4)), (requests[0][0], requests[0][1])]
    return requests


def one_by_one(model: Model, requests: list[Request], max_length: int = 2048) -> list[Likelihood]:
    """The plain definition: a forward pass a request, log-softmax in float64."""
    found = []
    for context, continuation in requests:
        tokens = [*context, *continuation][-(max_length + 1) :]
        logits = np.array(model(mx.array([tokens[:-1]]))[0].astype(mx.float32), np.float64)
        rows = logits[-len(continuation) :]
        log_z = np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1)) + rows.max(1)
        picked = rows[np.arange(len(rows)), list(continuation)] - log_z
        greedy = bool((rows.argmax(1) == np.array(continuation)).all())
        found.append(Likelihood(math.fsum(picked), greedy))
    return found


def assert_equal(found: list[Likelihood], expected: list[Likelihood], atol: float = ATOL) -> None:
    assert [score.greedy for score in found] == [score.greedy for score in expected]
    for score, other in zip(found, expected, strict=True):
        assert score.logprob == pytest.approx(other.logprob, abs=atol)


@contextmanager
def counted(model: Model) -> Iterator[dict[str, list[int]]]:
    """Tokens of each pass through the layers, and rows of each through the head."""
    seen: dict[str, list[int]] = {"passes": [], "head": []}
    layers, head = type(model.transformer).__call__, Model.head

    def count_layers(self, inputs, *rest):  # type: ignore[no-untyped-def]
        seen["passes"].append(inputs.size)
        return layers(self, inputs, *rest)

    def count_head(self, hidden):  # type: ignore[no-untyped-def]
        seen["head"].append(hidden.shape[0])
        return head(self, hidden)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.transformer), "__call__", count_layers)
        patch.setattr(Model, "head", count_head)
        yield seen


@pytest.mark.parametrize(
    ("batch_size", "share"), [(3, True), *slow_cases((1, True), (64, True), (5, False))]
)
def test_batches_score_as_one_request_after_another(
    tiny_model: Model, batch_size: int, share: bool
) -> None:
    requests = few_shot_requests()
    found = log_likelihoods(tiny_model, requests, batch_size=batch_size, share=share)
    assert_equal(found, one_by_one(tiny_model, requests))


def test_scores_are_those_of_the_reference_in_numpy(tiny_model: Model) -> None:
    requests = few_shot_requests()[:6]
    weights = {name: np.array(w) for name, w in model_makers.golden_set.flat(tiny_model)}
    config = tiny_model.args.to_dict()
    for score, (context, continuation) in zip(
        log_likelihoods(tiny_model, requests), requests, strict=True
    ):
        tokens = np.array([[*context, *continuation][:-1]])
        rows = reference.forward(config, weights, tokens)[0, -len(continuation) :]
        log_z = np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1)) + rows.max(1)
        expected = (rows[np.arange(len(rows)), list(continuation)] - log_z).sum()
        assert score.logprob == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("max_length", [24, 40])
def test_long_contexts_lose_their_beginning_as_in_lm_eval(
    tiny_model: Model, max_length: int, caplog: pytest.LogCaptureFixture
) -> None:
    requests = few_shot_requests()
    with caplog.at_level(logging.WARNING):
        found = log_likelihoods(tiny_model, requests, max_length=max_length)
    assert_equal(found, one_by_one(tiny_model, requests, max_length))
    long = sum(len(c) + len(t) > max_length + 1 for c, t in requests)
    assert f"{long} of {len(requests)} contexts lost their beginning" in caplog.text


def test_a_continuation_may_fill_the_context_whole(tiny_model: Model) -> None:
    rng = random.Random(1)
    requests = [([1, 5], ids(rng, 12)), ([1], ids(rng, 12)), ([1], ids(rng, 11))]
    found = log_likelihoods(tiny_model, requests, max_length=12)
    assert_equal(found, one_by_one(tiny_model, requests, 12))


def test_greedy_is_true_of_what_the_model_would_write(tiny_model: Model) -> None:
    context = [1, 5, 9, 12]
    written = list(context)
    for _ in range(4):
        written.append(int(mx.argmax(tiny_model(mx.array([written]))[0, -1]).item()))
    answer = written[4:]
    wrong = [*answer[:3], (answer[3] + 1) % VOCABULARY]
    found = log_likelihoods(tiny_model, [(context, answer), (context, wrong)])
    assert [score.greedy for score in found] == [True, False]


def test_one_token_answers_cost_one_pass_over_the_context_and_one_row_of_logits(
    tiny_model: Model,
) -> None:
    context = [1, *ids(random.Random(2), 31)]
    with counted(tiny_model) as seen:
        log_likelihoods(tiny_model, [(context, [answer]) for answer in (4, 5, 6, 7, 8)])
    assert seen == {"passes": [32, 1], "head": [1]}  # 31 padded, then the last token


def test_a_shared_context_is_computed_once_and_logits_only_where_they_count(
    tiny_model: Model,
) -> None:
    rng = random.Random(3)
    context = [1, *ids(rng, 63)]
    requests = [(context, [n, *ids(rng, 3)]) for n in (4, 5, 6, 7)]
    with counted(tiny_model) as seen:
        log_likelihoods(tiny_model, requests)
    assert seen == {"passes": [64, 4 * 4], "head": [4 * 4]}
    with counted(tiny_model) as seen:
        log_likelihoods(tiny_model, requests, share=False)
    assert sum(seen["passes"]) == 4 * 64 + 16


def test_examples_that_all_items_begin_with_are_computed_once_for_all_batches(
    tiny_model: Model,
) -> None:
    rng = random.Random(4)
    examples = [1, *ids(rng, 95)]
    requests = [([*examples, n, *ids(rng, 7)], [5]) for n in range(10, 20)]
    with counted(tiny_model) as seen:
        log_likelihoods(tiny_model, requests, batch_size=4)
    assert seen["passes"] == [96, 4 * 8, 4, 4 * 8, 4, 2 * 8, 2]


@pytest.mark.slow
def test_a_larger_model_and_quantised_weights_share_as_well() -> None:
    import mlx.nn as nn

    args = ModelArgs.from_scaling(
        num_transformer_layers=3, model_dim=64, head_dim=16, vocab_size=VOCABULARY
    )
    model = model_makers.model_of(args, seed=5)
    nn.quantize(model, group_size=32, bits=8)
    requests = few_shot_requests(6)
    assert_equal(log_likelihoods(model, requests), one_by_one(model, requests), 1e-4)


def test_progress_counts_every_request_once(tiny_model: Model) -> None:
    requests, seen = few_shot_requests(), []
    log_likelihoods(tiny_model, requests, batch_size=3, progress=seen.append)
    assert len(seen) > 3
    assert sum(seen) == len(requests)


def test_no_requests_give_no_scores(tiny_model: Model) -> None:
    assert log_likelihoods(tiny_model, []) == []


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (([], [5]), "request 2 has an empty context"),
        (([1], []), "request 2 has an empty continuation"),
        (([1], [5] * 33), "33 tokens, and the context of the model 32"),
        (([1, 61], [5]), "token 61 is none of the model's 61"),
        (([1], [99]), "token 99 is none of the model's 61"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_number(
    tiny_model: Model, request_: Request, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        log_likelihoods(tiny_model, [([1], [4]), request_], max_length=32)


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_every_request_has_one_place_in_one_batch(batch_size: int) -> None:
    requests = few_shot_requests(7)
    items = make_items(requests, 2048, share=True)
    places = []
    for batch in make_batches(items, batch_size, share=True):
        assert len(batch.items) <= batch_size
        for item, prefix in batch.items:
            if item.shared:
                assert batch.prefixes[prefix] == item.head[: item.shared]
            for row in item.rows:
                for number, targets in row.uses:
                    context, continuation = requests[number]
                    assert [*item.head, row.tokens[0]] == context
                    assert row.tokens[1 : len(targets)] == tuple(continuation[:-1])
                    places.append(number)
    assert sorted(places) == list(range(len(requests)))


def test_long_rows_come_fewer_at_a_time() -> None:
    requests: list[Request] = [([n] * 2000, [5]) for n in range(4, 12)]
    items = make_items(requests, 2048, share=True)
    sizes = [len(batch.items) for batch in make_batches(items, 8, share=True)]
    assert sizes == [PASS_TOKENS // padded(1999)] * 4
    requests = [([4] * 1900 + [n] * 20, [5]) for n in range(5, 45)]
    items = make_items(requests, 2048, share=True)
    sizes = [len(batch.items) for batch in make_batches(items, 32, share=True)]
    assert max(sizes) == CACHED_TOKENS // 1919


def test_pairs_that_share_much_are_not_lost_among_many_that_share_little() -> None:
    rng = random.Random(8)
    common = ids(rng, 20)
    requests: list[Request] = []
    for _ in range(4):
        sentence = [*common, *ids(rng, 60)]
        requests += [([*sentence, n], [3, 4]) for n in (5, 6)]
    items = make_items(requests, 2048, share=True)
    list(make_batches(items, 4, share=True))
    assert {item.shared for item in items} == {80}


def test_lengths_are_padded_to_few_sizes_and_by_an_eighth_at_most() -> None:
    sizes = {padded(n) for n in range(1, 2049)}
    assert len(sizes) < 60
    assert all(n <= padded(n) <= max(n * 1.125 + 7, 8) for n in range(1, 2049))
    assert padded(2048) == 2048

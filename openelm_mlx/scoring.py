"""Log-likelihood of continuations after contexts, in batches, each shared part computed once.

Three kinds of forward pass follow each other: prefixes that many contexts share, the rest of the
contexts, and the rows that are scored; each continues the keys and values of the one before. Logits
exist only where a continuation is scored. B rows, L new tokens, S cached ones, K key-value heads,
E head_dim, D model_dim, V vocabulary. Knows token ids, no text.
"""

import logging
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from openelm_mlx import cpu_exp
from openelm_mlx.model import Model
from openelm_mlx.scoring_plan import (
    CACHED_TOKENS,
    PASS_TOKENS,
    Batch,
    Ids,
    Request,
    Row,
    make_batches,
    make_items,
    padded,
)

logger = logging.getLogger(__name__)

_HEAD_ROWS = 256  # rows whose logits exist at a time


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Of one continuation.

    Attributes:
        logprob: in nats, summed over its tokens.
        greedy: whether each of its tokens was the likeliest.
    """

    logprob: float
    greedy: bool


class Memory(Protocol):
    """Answers that outlast a call."""

    def get(self, request: Request) -> Likelihood | None:
        """A known answer, or None."""

    def put(self, answers: Sequence[tuple[Request, Likelihood]]) -> None:
        """Keep answers."""


def log_likelihoods(
    model: Model,
    requests: Sequence[Request],
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    share: bool = True,
    progress: Callable[[int], Any] = lambda _: None,
    memory: Memory | None = None,
) -> list[Likelihood]:
    """Score continuations; the result does not depend on what comes together.

    Args:
        model: in eval mode.
        requests: contexts and continuations as token ids, BOS included where there is to be one.
        batch_size: contexts a forward pass at most.
        max_length: inputs at most, by default the model's context. A longer context loses its
            beginning, BOS included, as in lm-eval.
        share: compute equal contexts and prefixes once; off, every request is computed alone.
        progress: called with the number of requests that are done after each batch.
        memory: answers that need not be computed; each batch's are put there.

    Returns:
        One likelihood a request, in their order; log-probabilities are taken in float32.

    Raises:
        ValueError: if a context or a continuation is empty, a continuation is longer than
            ``max_length``, or a token is none of the model's.
    """
    max_length = max_length or model.args.max_context_length
    _check(requests, max_length, model.args.vocab_size)
    found = {} if memory is None else _known(requests, memory)
    progress(len(found))
    asked = [number for number in range(len(requests)) if number not in found]
    items = make_items([requests[number] for number in asked], max_length, share=share)
    prefix: tuple[tuple[Ids, ...], _Level | None] = ((), None)  # that of the batch before
    for batch in make_batches(items, batch_size, share=share):
        if batch.prefixes != prefix[0]:
            prefix = (batch.prefixes, _prefix_level(model, batch))
        new = {asked[number]: answer for number, answer in _score(model, batch, prefix[1])}
        if memory is not None:
            memory.put([(requests[number], answer) for number, answer in new.items()])
        found |= new
        progress(len(new))
        mx.clear_cache()
    return [found[number] for number in range(len(requests))]


def _known(requests: Sequence[Request], memory: Memory) -> dict[int, Likelihood]:
    answers = enumerate(memory.get(request) for request in requests)
    return {number: answer for number, answer in answers if answer is not None}


def _check(requests: Sequence[Request], max_length: int, vocab_size: int) -> None:
    shortened = 0
    for number, (context, continuation) in enumerate(requests, start=1):
        if not context or not continuation:
            empty = "context" if not context else "continuation"
            raise ValueError(f"request {number} has an empty {empty}; give at least one token")
        if len(continuation) > max_length:
            raise ValueError(
                f"the continuation of request {number} has {len(continuation)} tokens, and the "
                f"context of the model {max_length}; shorten it"
            )
        highest = max(max(context), max(continuation))
        if highest >= vocab_size:
            raise ValueError(
                f"request {number}: token {highest} is none of the model's {vocab_size}; the "
                "tokenizer belongs to another model"
            )
        shortened += len(context) + len(continuation) > max_length + 1
    if shortened:
        logger.warning(
            "%d of %d contexts lost their beginning: with the continuation they are longer than "
            "%d tokens",
            *(shortened, len(requests), max_length),
        )


@dataclass(frozen=True, slots=True)
class _Level:
    """What rows have cached: their own tokens and those of the rows that they continue.

    Attributes:
        layers: keys and values of each layer, (B, K, S, E).
        valid: (B, S) bool, False on padding.
        lengths: (B,) int32, tokens of each row: the position of the next one.
    """

    layers: list[tuple[mx.array, mx.array]]
    valid: mx.array
    lengths: mx.array

    def pick(self, rows: Sequence[int]) -> "_Level":
        """The rows in another order, some perhaps several times, some not at all."""
        if list(rows) == list(range(self.lengths.size)):
            return self
        index = mx.array(list(rows), dtype=mx.int32)

        def picked(array: mx.array) -> mx.array:
            if array.shape[0] == 1:  # a view, copied where it is continued
                return mx.broadcast_to(array, (len(rows), *array.shape[1:]))
            return array[index]

        layers = [(picked(keys), picked(values)) for keys, values in self.layers]
        return _Level(layers, picked(self.valid), picked(self.lengths))


class _Branch:
    """One layer's cache of a forward pass: what is continued, then the new tokens."""

    def __init__(self, keys: mx.array | None, values: mx.array | None, offset: Any) -> None:
        self.keys, self.values, self.offset = keys, values, offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (B, K, L, E) keys and values; return all."""
        if self.keys is not None and self.values is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = keys, values
        return keys, values


def _extend(model: Model, before: _Level | None, rows: Sequence[Ids]) -> tuple[mx.array, _Level]:
    """Run rows of tokens, each after its row of ``before``: hidden states (B, L, D) and caches.

    Nothing is computed before it is asked for: who only wants the keys and values does not pay for
    what the last layer does with them.
    """
    length = padded(max(map(len, rows)))
    tokens = mx.array([[*row, *[0] * (length - len(row))] for row in rows], dtype=mx.int32)
    lengths = mx.array([len(row) for row in rows], dtype=mx.int32)
    valid = mx.arange(length, dtype=mx.int32) < lengths[:, None]  # (B, L)
    mask = None
    if before is None:
        caches = [_Branch(None, None, 0) for _ in model.layers]
    else:
        caches = [_Branch(keys, values, before.lengths) for keys, values in before.layers]
        mask = _mask(before.valid, length)
        valid = mx.concatenate([before.valid, valid], axis=1)
        lengths = before.lengths + lengths
    hidden = model.transformer(tokens, caches, mask)
    layers = [(cache.keys, cache.values) for cache in caches]
    return hidden, _Level(layers, valid, lengths)  # type: ignore[arg-type]  # filled just now


def _mask(valid: mx.array, length: int) -> mx.array:
    """(B, 1, L, S + L) bool: what is cached and no padding, and among the new ones no later."""
    B, S = valid.shape
    causal = mx.tril(mx.ones((length, length), dtype=mx.bool_))
    cached = mx.broadcast_to(valid[:, None, None, :], (B, 1, length, S))
    return mx.concatenate([cached, mx.broadcast_to(causal, (B, 1, length, length))], axis=-1)


def _prefix_level(model: Model, batch: Batch) -> _Level | None:
    return _extend(model, None, batch.prefixes)[1] if batch.prefixes else None


def _score(model: Model, batch: Batch, prefix: _Level | None) -> Iterator[tuple[int, Likelihood]]:
    """The contexts of a batch, then its rows; number and likelihood of each request."""
    before = prefix.pick([index for _, index in batch.items]) if prefix is not None else None
    rests = [item.rest for item, _ in batch.items]
    if any(rests):
        before = _extend(model, before, rests)[1]
    if before is not None:
        mx.eval(before.layers)
    rows = [(row, i) for i, (item, _) in enumerate(batch.items) for row in item.rows]
    rows.sort(key=lambda pair: len(pair[0].tokens), reverse=True)
    cached = 0 if before is None else before.valid.shape[1]
    start = 0
    while start < len(rows):
        length = padded(len(rows[start][0].tokens))
        count = min(PASS_TOKENS // length, CACHED_TOKENS // (cached + length))
        part = rows[start : start + max(count, 1)]
        level = None if before is None else before.pick([i for _, i in part])
        hidden, _ = _extend(model, level, [row.tokens for row, _ in part])
        yield from _likelihoods(model, hidden, [row for row, _ in part])
        start += len(part)


def _likelihoods(
    model: Model, hidden: mx.array, rows: Sequence[Row]
) -> Iterator[tuple[int, Likelihood]]:
    """Number and likelihood of each request of some rows, of their (B, L, D) hidden states."""
    places, asked = _what_counts(rows, hidden.shape[1])
    flat = hidden.flatten(0, 1)
    logprobs: dict[int, list[float]] = defaultdict(list)
    greedy: dict[int, bool] = defaultdict(lambda: True)
    for start in range(0, len(places), _HEAD_ROWS):
        stop = min(start + _HEAD_ROWS, len(places))
        part = asked[bisect_left(asked, (start,)) : bisect_left(asked, (stop,))]
        logits = model.head(flat[mx.array(places[start:stop])]).astype(mx.float32)
        index = mx.array([place - start for place, _, _ in part], dtype=mx.int32)
        targets = mx.array([target for _, target, _ in part], dtype=mx.int32)
        picked = logits[index, targets] - cpu_exp.log_sum_exp(logits)[index, 0]
        likeliest = mx.argmax(logits, axis=-1)[index] == targets
        mx.eval(picked, likeliest)  # one chunk of logits at a time
        values: Any = picked.tolist()
        hits: Any = likeliest.tolist()
        for (_, _, number), value, hit in zip(part, values, hits, strict=True):
            logprobs[number].append(value)
            greedy[number] = greedy[number] and hit
    for number, parts in logprobs.items():
        yield number, Likelihood(math.fsum(parts), greedy[number])


def _what_counts(rows: Sequence[Row], length: int) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Which of the rows' B x ``length`` positions are scored, and for what.

    Returns:
        The positions that are no padding; and, sorted, the index among them, the target and the
        number of the request of all that is asked.
    """
    places: list[int] = []
    asked: list[tuple[int, int, int]] = []
    for i, row in enumerate(rows):
        asked += [
            (len(places) + j, target, number)
            for number, targets in row.uses
            for j, target in enumerate(targets)
        ]
        places += range(i * length, i * length + len(row.tokens))
    return places, sorted(asked)

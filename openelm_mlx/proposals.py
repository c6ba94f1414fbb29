"""Where the proposed tokens of speculative decoding come from: a smaller model, or the text so far.

Wrong proposals cost time, never correctness. Knows no text.
"""

import copy
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from openelm_mlx.cache import make_cache, trim
from openelm_mlx.decoding import CompiledStep, make_step, prefill
from openelm_mlx.model import Model
from openelm_mlx.sampling import Processor, RandomSampler, Sampler, apply_all, greedy

_NGRAMS = (4, 2)  # tokens that must match, longest first: (4, 2) copied best of those simulated
_REPLACED = 1  # the match after one token that differs; shorter than any n-gram
_EXPECTED = {4: 2.0, 2: 1.0, _REPLACED: 2.0}  # tokens that are right behind a match, at first
_LONG_COPY = 4  # tokens copied in a row after which a miss looks like a replaced token
_MEMORY = 0.2  # weight of the newest outcome
_LONGEST_PAUSE = 16  # passes


class Proposer(Protocol):
    """What the loop asks of a source of proposals."""

    def ready(self) -> bool:
        """Whether there is something to propose; asked once a plain pass."""

    def propose(self, most: int, history: mx.array) -> mx.array:
        """Guess what follows the newest token.

        Args:
            most: how many tokens at most.
            history: (n,) prompt and output; kept up to date only where there are processors.

        Returns:
            (L,) int32 ids, none where there is no guess.
        """

    def took(self, tokens: list[int]) -> None:
        """Learn the tokens emitted since; after proposals, the right ones and one more."""


class Pace:
    """How many tokens are worth proposing: about twice as many as were right lately.

    After misses it pauses, up to ``_LONGEST_PAUSE`` passes, so that hopeless text costs nothing.
    """

    def __init__(self, limit: int, expected: float) -> None:
        self._limit, self._expected = limit, expected
        self._pause = self._left = 0

    def size(self) -> int:
        """Tokens to propose, 0 while pausing."""
        return 0 if self._left else max(1, min(self._limit, round(2 * self._expected) + 1))

    def wait(self) -> None:
        """Count a pass without a proposal."""
        self._left = max(0, self._left - 1)

    def record(self, proposed: int, right: int) -> None:
        """Learn how many of the proposed tokens were right."""
        found = right if right < proposed else 1.5 * proposed  # more would have been right
        self._expected += _MEMORY * (found - self._expected)
        if right:
            self._pause = 0
        elif self._expected < 1:
            self._pause = self._left = min(_LONGEST_PAUSE, 2 * self._pause + 1)


class Lookup:
    """Proposes what followed the newest tokens when they last occurred.

    Where a long copy goes wrong, a token was replaced, perhaps: without another match it is taken
    up again behind that one. On near-copies with a token in twenty replaced that gives a quarter
    more tokens in the same time, and elsewhere costs nothing (simulated on prose and code).

    Args:
        prompt: token ids.
        limit: proposed a pass at most.
    """

    def __init__(self, prompt: Sequence[int], *, limit: int) -> None:
        self._text: list[int] = []
        self._seen: dict[tuple[int, ...], int] = {}  # n-gram -> position after its newest place
        self._paces = {n: Pace(limit, expected) for n, expected in _EXPECTED.items()}
        self._size = self._source = 0  # length of the match and where it goes on; 0 for none
        self._proposed = self._copied = 0
        for token in prompt:
            self._add(token)

    def ready(self) -> bool:
        """Whether the newest tokens occurred before and matches like theirs have been useful."""
        if not self._size:
            return False
        pace = self._paces[self._size]
        size = pace.size()
        pace.wait()
        return size > 0

    def propose(self, most: int, history: mx.array) -> mx.array:
        """See :class:`Proposer`; a match that reaches the end of the text is repeated on."""
        wanted = min(most, self._paces[self._size].size()) if self._size else 0
        found: list[int] = []
        for i in range(self._source, self._source + wanted):
            found.append(self._text[i] if i < len(self._text) else found[i - len(self._text)])
        self._proposed = len(found)
        return mx.array(found, dtype=mx.int32)

    def took(self, tokens: list[int]) -> None:
        """See :class:`Proposer`."""
        behind = self._learn(len(tokens) - 1) if self._proposed else None
        for token in tokens:
            self._add(token)
        if not self._size and behind is not None:
            self._size, self._source = _REPLACED, behind
        elif not self._size:
            self._copied = 0

    def _learn(self, right: int) -> int | None:
        """Note how many proposals were right; where to go on behind a replaced token, if so."""
        self._paces[self._size].record(self._proposed, right)
        self._copied += right
        missed, self._proposed = right < self._proposed, 0
        if not missed:
            return None
        copied, self._copied = self._copied, 0
        return self._source + right + 1 if copied >= _LONG_COPY else None

    def _add(self, token: int) -> None:
        """Append a token and find the longest n-gram at the end that occurred before."""
        self._text.append(token)
        end, self._size = len(self._text), 0
        for n in _NGRAMS:
            ngram = tuple(self._text[-n:])
            if len(ngram) < n:
                continue
            if not self._size and ngram in self._seen:
                self._size, self._source = n, self._seen[ngram]
            self._seen[ngram] = end


class DraftModel:
    """Proposes what a smaller model would say, drawn with the same random numbers.

    Args:
        model: the smaller model, in eval mode.
        prompt: token ids.
        limit: proposed a pass at most.
        sampler: the caller's; a copy of it draws the proposals.
        processors: the caller's.
        prefill_step: prompt tokens a forward pass.
        compiled: as for ``decode``.
    """

    def __init__(
        self,
        model: Model,
        prompt: Sequence[int],
        *,
        limit: int,
        sampler: Sampler,
        processors: Sequence[Processor],
        prefill_step: int,
        compiled: bool | None,
    ) -> None:
        self._model, self._sampler, self._processors = model, sampler, processors
        self._cache = make_cache(len(model.layers))
        self._step = make_step(model, self._cache, compiled)
        self._prefill_step = prefill_step
        self._missing = list(prompt)  # emitted tokens that are not in the cache
        self._pace = Pace(limit, float(limit))
        self._proposed = 0

    def ready(self) -> bool:
        """Whether its proposals have been useful."""
        size = self._pace.size()
        self._pace.wait()
        return size > 0

    def propose(self, most: int, history: mx.array) -> mx.array:
        """See :class:`Proposer`; nothing is evaluated."""
        self._proposed = wanted = min(most, self._pace.size())
        if wanted < 1:
            return mx.array([], dtype=mx.int32)
        sampler = copy.copy(self._sampler) if isinstance(self._sampler, RandomSampler) else greedy
        logits = self._catch_up()
        found: list[mx.array] = []
        while True:
            if self._processors:
                logits = apply_all(self._processors, mx.concatenate([history, *found]), logits)
            found.append(sampler(logits).astype(mx.int32))
            if len(found) == wanted:
                return mx.concatenate(found)
            logits = self._step(found[-1])

    def took(self, tokens: list[int]) -> None:
        """See :class:`Proposer`."""
        if not self._proposed:
            self._missing += tokens
            return
        right, cached = len(tokens) - 1, self._proposed - 1  # the last proposal was not run
        self._pace.record(self._proposed, right)
        self._step.finish()
        trim(self._cache, cached - min(right, cached))
        self._missing = tokens[min(right, cached) :]
        self._proposed = 0

    def _catch_up(self) -> mx.array:
        """Run the missing tokens; (1, V) logits after the last."""
        missing, self._missing = mx.array(self._missing, dtype=mx.int32), []
        if isinstance(self._step, CompiledStep) and missing.size <= 2 and self._cache[0].offset:
            for i in range(missing.size):
                logits = self._step(missing[i : i + 1])
            return logits
        self._step.finish()
        return prefill(self._model, missing, self._cache, step=self._prefill_step)

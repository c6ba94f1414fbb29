"""Scores from a model that is fed tokens and gives logits: a Core ML package or a Core AI bundle.

n tokens, V vocabulary. Knows the feeding, not what runs behind it.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from openelm_mlx.token_scoring import TokenScores, Window

_ROWS = 64  # tokens whose logits exist at a time


class Feeder(Protocol):
    """One sequence of tokens going through a model."""

    def reset(self) -> None:
        """Begin a new sequence."""

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens; the (V,) logits after the last of them."""

    def feed_all(self, ids: Sequence[int]) -> np.ndarray:
        """Append n tokens; the (n, V) logits after each of them."""


class StepwiseScorer:
    """A :class:`openelm_mlx.token_scoring.TokenScorer` of a :class:`Feeder`.

    Args:
        feeder: of the model; asked for one token, to learn the size of the vocabulary.
        context: tokens that it holds.
        every_row: whether ``feed_all`` can be used; else scored tokens are fed one by one.
        close: frees what the feeder holds.
    """

    def __init__(
        self,
        feeder: Feeder,
        *,
        context: int,
        every_row: bool,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._feeder, self._context, self._every_row = feeder, context, every_row
        self.close = close
        self._vocab_size = feeder.feed([0]).shape[-1]

    @property
    def context(self) -> int:
        """Tokens that the model's cache holds."""
        return self._context

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return int(self._vocab_size)

    def score(self, windows: Sequence[Window]) -> list[TokenScores]:
        """One window after the other; log-probabilities are taken in float64."""
        return [self._score(window) for window in windows]

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Continue a prompt by the likeliest token, as far as the context goes."""
        self._feeder.reset()
        logits = self._feeder.feed(prompt)
        out: list[int] = []
        for _ in range(min(max_tokens, self._context - len(prompt) + 1)):
            out.append(int(logits.argmax()))
            if len(out) < max_tokens and len(prompt) + len(out) <= self._context:
                logits = self._feeder.feed(out[-1:])
        return out

    def _score(self, window: Window) -> TokenScores:
        self._feeder.reset()
        if window.first:
            self._feeder.feed(window.ids[: window.first])
        logprobs: list[float] = []
        right: list[bool] = []
        step = _ROWS if self._every_row else 1
        end = len(window.ids) - 1
        for start in range(window.first, end, step):
            stop = min(start + step, end)
            inputs, targets = window.ids[start:stop], np.array(window.ids[start + 1 : stop + 1])
            rows = self._feeder.feed_all(inputs) if self._every_row else self._feeder.feed(inputs)
            nats, hits = _scores(rows.reshape(stop - start, -1), targets)
            logprobs += nats
            right += hits
        return TokenScores(logprobs=logprobs, right=right)


def _scores(logits: np.ndarray, targets: np.ndarray) -> tuple[list[float], list[bool]]:
    """Log-probabilities of targets from (n, V) logits, and whether they were the likeliest."""
    logits = logits.astype(np.float64)
    highest = logits.max(axis=-1, keepdims=True)
    log_z = np.log(np.exp(logits - highest).sum(axis=-1)) + highest[:, 0]
    picked = logits[np.arange(len(targets)), targets] - log_z
    return picked.tolist(), (logits.argmax(axis=-1) == targets).tolist()

"""Token ids -> the log-probability of each, whatever runs the model; here: an MLX model.

Other kinds of model (Core ML packages, Core AI bundles) implement :class:`TokenScorer` too.
W windows, L tokens, N = W L, D model_dim, V vocabulary. Knows no text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from openelm_mlx import cpu_exp
from openelm_mlx.decoding import decode
from openelm_mlx.model import Model

CHUNK = 256  # tokens whose logits exist at a time
_MULTIPLE = 16  # lengths are rounded up to it: fewer shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of token ids that fits a model's context, and what of it is scored.

    Attributes:
        ids: the inputs and, last, the target of the last input; position p predicts ``ids[p + 1]``.
        first: the first position that is scored; those before it are context.
    """

    ids: Sequence[int]
    first: int = 0

    @property
    def scored(self) -> int:
        """How many positions are scored."""
        return len(self.ids) - 1 - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Of each scored position of a window: nats, and whether the target was the likeliest."""

    logprobs: list[float]
    right: list[bool]


class TokenScorer(Protocol):
    """Something that gives log-probabilities of token ids."""

    @property
    def context(self) -> int:
        """Inputs that a window may have at most."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""

    def score(self, windows: Sequence[Window]) -> list[TokenScores]:
        """Score windows; the result does not depend on which ones come together."""

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Continue a prompt by the likeliest token, ``max_tokens`` times."""

    def close(self) -> None:
        """Free what is held beside memory."""


class ModelScorer:
    """A :class:`TokenScorer` of an MLX model: padded batches, float32 log-probabilities.

    Args:
        model: in eval mode.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    @property
    def context(self) -> int:
        """The model's ``max_context_length``."""
        return self.model.args.max_context_length

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return self.model.args.vocab_size

    def score(self, windows: Sequence[Window]) -> list[TokenScores]:
        """One forward pass over all windows; logits exist for 256 tokens at a time.

        Padding stands right of the tokens, where causal attention does not see it.
        """
        inputs = [window.ids[:-1] for window in windows]
        length = -(-max(map(len, inputs)) // _MULTIPLE) * _MULTIPLE
        padded = [[*ids, *[0] * (length - len(ids))] for ids in inputs]
        hidden = self.model.transformer(mx.array(padded, dtype=mx.int32)).flatten(0, 1)  # (N, D)
        rows = [
            row * length + position
            for row, window in enumerate(windows)
            for position in range(window.first, len(window.ids) - 1)
        ]
        targets = [i for window in windows for i in window.ids[window.first + 1 :]]
        logprobs, right = self._scores(hidden, rows, targets)
        scores, start = [], 0
        for window in windows:
            stop = start + window.scored
            scores.append(TokenScores(logprobs=logprobs[start:stop], right=right[start:stop]))
            start = stop
        return scores

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Plain decoding with the cache."""
        return list(decode(self.model, prompt, max_tokens=max_tokens))

    def close(self) -> None:
        """Nothing is held."""

    def _scores(
        self, hidden: mx.array, rows: list[int], targets: list[int]
    ) -> tuple[list[float], list[bool]]:
        """Log-probabilities of targets at some rows of (N, D) hidden states."""
        logprobs: list[float] = []
        right: list[bool] = []
        for start in range(0, len(rows), CHUNK):
            part = slice(start, start + CHUNK)
            target = mx.array(targets[part], dtype=mx.int32)[:, None]
            logits = self.model.head(hidden[mx.array(rows[part])]).astype(mx.float32)
            picked = mx.take_along_axis(logits, target, axis=-1) - cpu_exp.log_sum_exp(logits)
            likeliest = mx.argmax(logits, axis=-1) == target[:, 0]
            mx.eval(picked, likeliest)  # one chunk of logits at a time
            nats: Any = picked[:, 0].tolist()
            hits: Any = likeliest.tolist()
            logprobs += nats
            right += hits
        return logprobs, right

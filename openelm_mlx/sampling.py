"""Samplers and penalties: logits -> the next token. Pure functions and small callables on mlx.

V vocabulary. Filters look at probabilities before the temperature, as mlx_lm's do; the repetition
penalty means what Hugging Face's means. Nothing here waits for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]


def greedy(logits: mx.array) -> mx.array:
    """(..., V) logits -> (...) index of the largest."""
    return mx.argmax(logits, axis=-1)


def make_sampler(
    temp: float = 0.0,
    *,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = None,
) -> Sampler:
    """Build a sampler.

    Args:
        temp: divides the logits; 0 is greedy and ignores the filters.
        top_p: keep the smallest set of tokens whose probability reaches this (Holtzman et al.
            2020); 1 keeps all.
        top_k: keep the k likeliest tokens; 0 keeps all.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 keeps all.
        seed: of this sampler's own key, so that equal seeds repeat whatever else draws numbers;
            None draws a seed from MLX's global state.

    Returns:
        (..., V) logits -> (...) token ids; each call advances the sampler's key.

    Raises:
        ValueError: naming the setting that is out of range.
    """
    check_sampling(temp=temp, top_p=top_p, top_k=top_k, min_p=min_p)
    if temp == 0:
        return greedy
    key = mx.random.key(_draw() if seed is None else seed)
    return RandomSampler(temp=temp, top_p=top_p, top_k=top_k, min_p=min_p, key=key)


@dataclass
class RandomSampler:
    """Draws from the filtered distribution; a copy draws what the original would draw next."""

    temp: float
    top_p: float
    top_k: int
    min_p: float
    key: mx.array

    def __call__(self, logits: mx.array) -> mx.array:
        """(..., V) logits -> (...) token ids; advances the key."""
        self.key, now = mx.random.split(self.key)
        logits = logits.astype(mx.float32)
        if 0 < self.top_k < logits.shape[-1]:
            logits = keep_top_k(logits, self.top_k)
        if self.top_p < 1:
            logits = keep_top_p(logits, self.top_p)
        if self.min_p > 0:
            logits = keep_min_p(logits, self.min_p)
        return mx.random.categorical(logits / self.temp, key=now)


def keep_top_k(logits: mx.array, k: int) -> mx.array:
    """(..., V) logits with all but the k largest set to -inf."""
    kth = mx.topk(logits, k, axis=-1).min(axis=-1, keepdims=True)
    return mx.where(logits < kth, -mx.inf, logits)


def keep_top_p(logits: mx.array, p: float) -> mx.array:
    """(..., V) logits with all outside the nucleus of probability ``p`` set to -inf."""
    order = mx.argsort(-logits, axis=-1)
    probs = mx.softmax(mx.take_along_axis(logits, order, axis=-1), axis=-1, precise=True)
    before = mx.cumsum(probs, axis=-1) - probs  # probability of all likelier tokens
    dropped = mx.put_along_axis(mx.zeros_like(before), order, before, axis=-1) >= p
    return mx.where(dropped, -mx.inf, logits)


def keep_min_p(logits: mx.array, p: float) -> mx.array:
    """(..., V) logits with tokens less likely than ``p`` times the likeliest set to -inf."""
    floor = mx.max(logits, axis=-1, keepdims=True) + mx.log(mx.array(p))
    return mx.where(logits < floor, -mx.inf, logits)


def repetition_penalty(penalty: float, window: int | None = None) -> Processor:
    """Make tokens that occurred before less likely (Keskar et al. 2019, as Hugging Face does).

    Args:
        penalty: positive logits are divided by it, negative ones multiplied; 1 changes nothing.
        window: how many of the newest tokens count; None counts the whole prompt and output.

    Returns:
        ((n,) tokens so far, (..., V) logits) -> (..., V) logits.

    Raises:
        ValueError: for a penalty or window that is not positive.
    """
    if not penalty > 0:
        raise ValueError(f"repetition penalty must be positive, got {penalty}; 1 turns it off")
    if window is not None and window < 1:
        raise ValueError(f"repetition window must be at least 1 token, got {window}")

    def apply(tokens: mx.array, logits: mx.array) -> mx.array:
        recent = tokens if window is None else tokens[-window:]
        seen = mx.zeros((logits.shape[-1],), dtype=mx.bool_)
        seen[recent] = True
        penalised = mx.where(logits < 0, logits * penalty, logits / penalty)
        return mx.where(seen, penalised, logits)

    return apply


def check_sampling(*, temp: float, top_p: float, top_k: int, min_p: float) -> None:
    """Refuse settings that are out of range.

    Raises:
        ValueError: naming all of them.
    """
    problems = []
    if not 0 <= temp < float("inf"):
        problems.append(f"temp must be 0 or more, got {temp}")
    if not 0 < top_p <= 1:
        problems.append(f"top_p must be in (0, 1], got {top_p}")
    if top_k < 0:
        problems.append(f"top_k must be 0 (off) or more, got {top_k}")
    if not 0 <= min_p <= 1:
        problems.append(f"min_p must be in [0, 1], got {min_p}")
    if problems:
        raise ValueError("sampling: " + "; ".join(problems))


def apply_all(processors: Sequence[Processor], tokens: mx.array, logits: mx.array) -> mx.array:
    """Run the processors in order."""
    for process in processors:
        logits = process(tokens, logits)
    return logits


def _draw() -> int:
    drawn: Any = mx.random.randint(0, 2**31 - 1, shape=()).item()
    return int(drawn)

"""A package's logits against MLX's: prompts of several lengths, prefill and single steps, text.

V vocabulary.  The reference is a float32 MLX model with the weights that the package stores, so
that what is left is the graph. Who computes the package, evaluator or Core ML, is not known here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from convert.coreml_client import Client, Contract
from openelm_mlx.cache import KVCache
from openelm_mlx.model import Model

STEPS = 3  # single tokens after each prompt
TEXT_TOKENS = 12
_LONG = 4  # prefill calls that a prompt reaching the end of the context may need


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One sequence's errors: of the prompt's last logits, then of each single step.

    Attributes:
        tokens: of the prompt.
        calls: logits compared.
        max_error: largest absolute difference of a logit.
        sum_error: sum of mean absolute differences, over ``calls``.
        sum_square: sum of mean squared differences, over ``calls``.
        scale: largest absolute logit of the reference.
        same_first_choice: calls whose likeliest token is the same.
    """

    tokens: int
    calls: int
    max_error: float
    sum_error: float
    sum_square: float
    scale: float
    same_first_choice: int


@dataclass(frozen=True, kw_only=True)
class Parity:
    """All prompts, and the greedy continuation of the first.

    Attributes:
        prompts: see :class:`Prompt`.
        expected: ids that the reference chooses.
        found: ids that the package chooses.
    """

    prompts: list[Prompt]
    expected: list[int]
    found: list[int]

    @property
    def max_error(self) -> float:
        """Largest absolute difference of a logit; NaN where the package gives one."""
        return float(np.max([p.max_error for p in self.prompts]))

    @property
    def mean_error(self) -> float:
        """Mean absolute difference."""
        return sum(p.sum_error for p in self.prompts) / self.calls

    @property
    def scale(self) -> float:
        """Largest absolute logit of the reference."""
        return max(p.scale for p in self.prompts)

    @property
    def relative(self) -> float:
        """:attr:`max_error` over :attr:`scale`."""
        return self.max_error / max(self.scale, 1e-6)

    @property
    def calls(self) -> int:
        """Logits compared."""
        return sum(p.calls for p in self.prompts)

    @property
    def same_first_choice(self) -> float:
        """Share of calls whose likeliest token is the same."""
        return sum(p.same_first_choice for p in self.prompts) / self.calls


def prompt_lengths(contract: Contract) -> list[int]:
    """Lengths that reach every branch of the calling rule.

    A single token; part of a prefill call; exactly one and a decode; one and a padded part; and,
    where the context is not too long to wait for, one whose last chunk must overlap.
    """
    q, room = contract.prefill, contract.context - STEPS
    wanted = {1, q // 2 + 1, q + 1, q + q // 2 + 1}
    if contract.context <= _LONG * q:
        wanted.add(room)
    return sorted(n for n in wanted if 1 <= n <= room)


def measure_parity(
    client: Client,
    reference: Model,
    ids: Sequence[int],
    lengths: Sequence[int],
    *,
    text_tokens: int = TEXT_TOKENS,
) -> Parity:
    """Hold a package against a reference.

    Args:
        client: of the package.
        reference: in float32.
        ids: tokens to draw prompts from, repeated where they do not suffice.
        lengths: of the prompts.
        text_tokens: of the greedy continuation.
    """
    longest = max(lengths) + STEPS
    pool = list(ids) * (longest // len(ids) + 1)
    prompts = [_prompt(client, reference, pool[: n + STEPS], n) for n in lengths]
    start = pool[: min(lengths[-1], 8)]
    count = min(text_tokens, client.contract.context - len(start))
    return Parity(
        prompts=prompts,
        expected=_greedy_by_model(reference, start, count),
        found=_greedy_by_client(client, start, count),
    )


def _prompt(client: Client, reference: Model, ids: Sequence[int], length: int) -> Prompt:
    want = np.array(reference(mx.array([list(ids)]))[0, length - 1 :])  # (1 + steps, V)
    client.reset()
    rows = [client.feed(ids[:length])]
    rows += [client.feed([token]) for token in ids[length:]]
    return compare_rows(np.stack(rows), want, length)


def compare_rows(found: np.ndarray, want: np.ndarray, tokens: int) -> Prompt:
    """(n, V) logits against (n, V) expected ones."""
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(found.astype(np.float64) - want)
    return Prompt(
        tokens=tokens,
        calls=len(want),
        max_error=float(error.max()),
        sum_error=float(error.mean(axis=-1).sum()),
        sum_square=float((error**2).mean(axis=-1).sum()),
        scale=float(np.abs(want).max()),
        same_first_choice=int((found.argmax(axis=-1) == want.argmax(axis=-1)).sum()),
    )


def _greedy_by_model(model: Model, start: Sequence[int], count: int) -> list[int]:
    cache = [KVCache() for _ in model.layers]
    chosen: list[int] = []
    tokens = list(start)
    for _ in range(count):
        logits = model(mx.array([tokens]), cache=cache)[0, -1]
        tokens = mx.argmax(logits, keepdims=True).tolist()  # type: ignore[assignment]
        chosen += tokens
    return chosen


def _greedy_by_client(client: Client, start: Sequence[int], count: int) -> list[int]:
    client.reset()
    chosen: list[int] = []
    tokens = list(start)
    for _ in range(count):
        tokens = [int(client.feed(tokens).argmax())]
        chosen += tokens
    return chosen


def step_errors(client: Client, reference: Model, ids: Sequence[int]) -> tuple[float, float]:
    """Root mean square errors of a package and of MLX's own float16, one token at a time.

    Args:
        client: of the package, evaluated in float16.
        reference: in float32; a copy in float16 is made of it.
        ids: few: float16 is slow on a CPU.

    Returns:
        The package's error and MLX's, both against the reference in float32.
    """
    want = np.array(reference(mx.array([list(ids)]))[0])
    client.reset()
    package = compare_rows(np.stack([client.feed([token]) for token in ids]), want, len(ids))
    half = Model(reference.args)
    half.update(reference.parameters())
    half.set_dtype(mx.float16)
    half.eval()
    rows = np.array(half(mx.array([list(ids)]))[0].astype(mx.float32))
    mlx = compare_rows(rows, want, len(ids))
    return (package.sum_square / len(ids)) ** 0.5, (mlx.sum_square / len(ids)) ** 0.5

"""Many prompts at a time, through mlx_lm's continuous batching; each comes out as it would alone.

Knows the tokenizer and stop conditions; the loop and the batch cache are mlx_lm's, imported when
asked for. ``batch_file`` reads prompts from a file.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from openelm_mlx.detokenizer import Detokenizer, StopMatcher
from openelm_mlx.generation_settings import GenerateArgs, prompt_ids, token_budget
from openelm_mlx.model import Model
from openelm_mlx.sampling import Sampler
from openelm_mlx.tokenizer import Tokenizer

_PREFILL_ROWS = 8  # prompts prefilled together at most
_WINDOW = 8  # batches whose prompts are sorted by length, so that prefill pads little


@dataclass(frozen=True, kw_only=True)
class BatchResult:
    """What one prompt gave.

    Attributes:
        text: the new text, without stop texts and special tokens.
        tokens: its ids, without the end token.
        finish_reason: "stop", "length" or "context", as in ``generate.Response``.
        generation_tokens: how many tokens were generated, the end token included.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    generation_tokens: int


def generate_batch(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    settings: GenerateArgs,
    *,
    batch_size: int = 16,
    progress: Callable[[int, BatchResult], None] | None = None,
) -> list[BatchResult]:
    """Continue many prompts; the results equal those of single runs with the same settings.

    Args:
        model: in eval mode.
        tokenizer: of the model.
        prompts: texts or token ids, of any lengths; exactly one BOS is put in front of each.
        settings: for every prompt; each row draws with the same ``seed``.
        batch_size: rows that are decoded together at most.
        progress: called with the index and the result of each prompt as it ends.

    Returns:
        One result a prompt, in the order of ``prompts``.

    Raises:
        ValueError: for settings that a batch cannot have, or a prompt longer than the context.
    """
    check_settings(settings, batch_size=batch_size)
    rows = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            rows.append(_row(model, tokenizer, prompt, settings))
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from error
    results: dict[int, BatchResult] = {}
    for index, result in _run(model, rows, tokenizer.eos_ids, settings, batch_size):
        results[index] = result
        if progress is not None:
            progress(index, result)
    return [results[index] for index in range(len(rows))]


def check_settings(settings: GenerateArgs, *, batch_size: int, draft: bool = False) -> None:
    """Refuse what a batch cannot do.

    Raises:
        ValueError: naming it.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    given = {
        "kv_bits": settings.kv_bits is not None,
        "max_kv_size": settings.max_kv_size is not None,
        "prompt_lookup": settings.prompt_lookup > 0,
        "a draft model": draft,
    }
    names = [name for name, is_given in given.items() if is_given]
    if names:
        raise ValueError(
            f"a batch of prompts cannot use {' or '.join(names)}; leave that out, or run the "
            "prompts one by one"
        )


@dataclass(kw_only=True)
class _Row:
    """One prompt on its way through the batch."""

    ids: list[int]
    budget: int
    limit: str  # the finish reason where the budget ends: "length" or "context"
    detokenizer: Detokenizer
    matcher: StopMatcher
    text: str = ""
    tokens: list[int] = field(default_factory=list)

    def take(self, token: int, *, is_end: bool) -> BatchResult | None:
        """Add a token; the result where it was the last."""
        if is_end:
            return self._finish("stop", 1)
        self.tokens.append(token)
        text, stopped = self.matcher.feed(self.detokenizer.add_token(token))
        self.text += text
        if stopped:
            return self._finish("stop", 0)
        return self._finish(self.limit, 0) if len(self.tokens) == self.budget else None

    def _finish(self, reason: str, end_tokens: int) -> BatchResult:
        text, stopped = self.matcher.feed(self.detokenizer.finish())
        return BatchResult(
            text=self.text + text + self.matcher.flush(),
            tokens=self.tokens,
            finish_reason="stop" if stopped else reason,
            generation_tokens=len(self.tokens) + end_tokens,
        )


def _row(
    model: Model, tokenizer: Tokenizer, prompt: str | Sequence[int], settings: GenerateArgs
) -> _Row:
    ids = prompt_ids(tokenizer, prompt)
    if not ids:
        raise ValueError("the prompt is empty; give at least one token")
    budget, context_ends = token_budget(model, settings, len(ids))
    return _Row(
        ids=ids,
        budget=budget,
        limit="context" if context_ends else "length",
        detokenizer=tokenizer.detokenizer(),
        matcher=StopMatcher(settings.stop),
    )


def _run(
    model: Model,
    rows: Sequence[_Row],
    eos_ids: frozenset[int],
    settings: GenerateArgs,
    batch_size: int,
) -> Iterator[tuple[int, BatchResult]]:
    """Decode all rows; yields index and result of each as it ends."""
    from mlx_lm.generate import BatchGenerator

    window = _WINDOW * batch_size
    order = sorted(range(len(rows)), key=lambda i: (i // window, -len(rows[i].ids)))
    generator = BatchGenerator(
        model,
        stop_tokens=[[index] for index in eos_ids],
        completion_batch_size=batch_size,
        prefill_batch_size=min(_PREFILL_ROWS, batch_size),
        prefill_step_size=settings.prefill_step,
    )
    try:
        uids = generator.insert(
            [rows[i].ids for i in order],
            max_tokens=[rows[i].budget for i in order],
            samplers=_samplers(settings, len(order)),
            logits_processors=[settings.processors() for _ in order],
        )
        index_of = dict(zip(uids, order, strict=True))
        while responses := generator.next_generated():
            for response in responses:
                index = index_of[response.uid]
                is_end = response.token in eos_ids
                result = rows[index].take(response.token, is_end=is_end)
                if result is None:
                    continue
                if response.finish_reason is None:  # a stop text, which only we know
                    generator.remove([response.uid])
                yield index, result
    finally:
        generator.close()


def _samplers(settings: GenerateArgs, count: int) -> list[Sampler]:
    """One a row where a seed makes each draw as alone, else one for all, called once a step."""
    if settings.seed is None:
        return [settings.sampler()] * count
    return [settings.sampler() for _ in range(count)]

"""Speculative decoding: several proposed tokens are checked in one forward pass.

The model's own tokens come out, each sampled from the model's logits with the caller's sampler;
a proposal only decides how many of them one pass gives (Leviathan et al. 2023, Chen et al. 2023,
with the draft's token accepted where it equals the sampled one). Knows no text.

L tokens a pass, V vocabulary; one sequence at a time.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import mlx.core as mx

from openelm_mlx.decoding import PREFILL_STEP, make_step, prefill
from openelm_mlx.draft_model import check_vocabulary
from openelm_mlx.model import Model
from openelm_mlx.proposals import DraftModel, Lookup, Proposer
from openelm_mlx.sampling import Processor, Sampler, apply_all, greedy


def speculative_decode(
    model: Model,
    prompt: Sequence[int] | mx.array,
    *,
    draft_model: Model | None = None,
    num_draft_tokens: int,
    max_tokens: int,
    sampler: Sampler = greedy,
    processors: Sequence[Processor] = (),
    cache: list[Any],
    prefill_step: int = PREFILL_STEP,
    compiled: bool | None = None,
) -> Generator[int, None, None]:
    """Generate the tokens that :func:`openelm_mlx.decoding.decode` would, in fewer passes.

    Args:
        model: in eval mode.
        prompt: at least one token id, not yet in the cache.
        draft_model: proposes tokens; None proposes what followed the newest tokens when they
            last occurred in ``prompt`` or the output (prompt lookup, Saxena 2023).
        num_draft_tokens: proposed a pass at most; fewer where few are accepted.
        max_tokens: how many to generate at most.
        sampler: (1, V) logits -> (1,) token; called once a token, in order.
        processors: applied to the logits first; they see prompt and output.
        cache: one a layer, that can go back; left as ``decode`` leaves it.
        prefill_step: prompt tokens a forward pass.
        compiled: as for ``decode``.

    Returns:
        Token ids one by one, end-of-sequence tokens included.

    Raises:
        ValueError: for an empty prompt, a draft model with another vocabulary, or a cache that
            cannot go back.
    """
    tokens: Any = prompt.tolist() if isinstance(prompt, mx.array) else list(prompt)
    if not tokens:
        raise ValueError("the prompt is empty; give at least one token")
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens must be at least 1, got {num_draft_tokens}")
    if draft_model is not None:
        check_vocabulary(model.args.vocab_size, draft_model.args.vocab_size)
    if not all(layer.is_trimmable() and not hasattr(layer, "max_size") for layer in cache):
        raise ValueError(
            "speculative decoding needs a cache that can go back, which a rotating one cannot; "
            "leave out max_kv_size, or the draft model and prompt lookup"
        )
    if draft_model is None:
        proposer: Proposer = Lookup(tokens, limit=num_draft_tokens)
    else:
        proposer = DraftModel(
            draft_model,
            tokens,
            limit=num_draft_tokens,
            sampler=sampler,
            processors=processors,
            prefill_step=prefill_step,
            compiled=compiled,
        )
    run = _Run(model, tokens, cache, proposer, sampler, processors, compiled)
    return run.tokens(max_tokens, prefill_step)


class _Run:
    """One generation: the model, its cache and what was emitted."""

    def __init__(
        self,
        model: Model,
        prompt: list[int],
        cache: list[Any],
        proposer: Proposer,
        sampler: Sampler,
        processors: Sequence[Processor],
        compiled: bool | None,
    ) -> None:
        self._model, self._cache, self._proposer = model, cache, proposer
        self._sampler, self._processors = sampler, processors
        self._step = make_step(model, cache, compiled)
        self._prompt = mx.array(prompt, dtype=mx.int32)
        self._history = self._prompt  # prompt and output, for the processors
        self._start = cache[0].offset + len(prompt)  # cached tokens after prefill

    def tokens(self, max_tokens: int, prefill_step: int) -> Generator[int, None, None]:
        """Prefill, then emit tokens one by one."""
        emitted: list[int] = []  # handed to the caller
        try:
            for token in self._generate(max_tokens, prefill_step):
                emitted.append(token)
                yield token
        finally:
            self._settle(emitted, max_tokens)

    def _generate(self, left: int, prefill_step: int) -> Iterator[int]:
        logits = prefill(self._model, self._prompt, self._cache, step=prefill_step)
        while left:
            checking = self._proposer.ready()  # then the next pass waits for the token's value
            token = self._draw(logits)
            if left > 1 and not checking:
                logits = self._step(token)
                mx.async_eval(token, logits)
            picked: Any = token.tolist()
            while picked:
                self._proposer.took(picked)
                left -= len(picked)
                yield from picked
                token = mx.array(picked[-1:], dtype=mx.int32)
                picked = self._check(token, left) if left and checking else []
            if left and checking:  # nothing is proposed for this token
                logits = self._step(token)

    def _check(self, token: mx.array, left: int) -> list[int]:
        """Run the newest token and proposals through the model; the tokens that it gives."""
        proposed = self._proposer.propose(left - 1, self._history)
        if not proposed.size:
            return []
        self._step.finish()
        inputs = mx.concatenate([token, proposed])
        logits = self._model(inputs[None], self._cache)[0]  # (L, V)
        if self._sampler is greedy and not self._processors:
            best = mx.argmax(logits, axis=-1)
            mx.eval(best, proposed)
            own: Any = best.tolist()
            accepted = _common(own, proposed)
            picked = own[: accepted + 1]
        else:
            picked = self._draw_while_accepted(logits, proposed)
        _trim(self._cache, inputs.size - len(picked))
        return picked

    def _draw_while_accepted(self, logits: mx.array, proposed: mx.array) -> list[int]:
        """Sample position by position, up to the first that differs from its proposal."""
        mx.eval(logits, proposed)
        wanted: Any = proposed.tolist()
        picked: list[int] = []
        for position, want in enumerate([*wanted, None]):
            token: Any = self._draw(logits[position : position + 1]).tolist()
            picked.append(token[0])
            if token[0] != want:
                break
        return picked

    def _draw(self, logits: mx.array) -> mx.array:
        """(1, V) logits -> (1,) the next token, remembered where processors want it."""
        if not self._processors:
            return self._sampler(logits)
        token = self._sampler(apply_all(self._processors, self._history, logits))
        self._history = mx.concatenate([self._history, token.astype(mx.int32)])
        return token

    def _settle(self, emitted: list[int], max_tokens: int) -> None:
        """Leave the caches as ``decode`` does: all emitted tokens, but for the last of all."""
        self._step.finish()
        wanted = self._start + min(len(emitted), max_tokens - 1)
        surplus = self._cache[0].offset - wanted
        if surplus > 0:
            _trim(self._cache, surplus)
        elif surplus < 0 and emitted:
            self._model.transformer(mx.array([emitted[-1:]], dtype=mx.int32), self._cache)


def _common(own: list[int], proposed: mx.array) -> int:
    """How many proposals are right."""
    wanted: Any = proposed.tolist()
    wrong = (i for i, want in enumerate(wanted) if want != own[i])
    return next(wrong, len(wanted))


def _trim(cache: Sequence[Any], n: int) -> None:
    for layer in cache:
        layer.trim(n)

"""Stage: text completion. Prompt text or ids in, streamed text out.

Knows the tokenizer, stop conditions and the two speculative modes; the loops themselves are in
``decoding`` and ``speculative``. Plain generation imports neither mlx_lm nor transformers.
"""

import argparse
import logging
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from openelm_mlx.cpu_weights import prepare_for_generation
from openelm_mlx.decoding import decode
from openelm_mlx.generation_settings import (
    GenerateArgs,
    add_sampling_arguments,
    make_generation_cache,
    prompt_ids,
    token_budget,
)
from openelm_mlx.model import Model

if TYPE_CHECKING:  # kept out of `openelm generate --help`, which has to be quick
    from openelm_mlx.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_CHARACTERS = 4  # of a token, about


@dataclass(frozen=True, kw_only=True)
class Response:
    """One step of a streamed generation; the last one has a ``finish_reason``.

    Attributes:
        text: new text, safe to append; may be empty while bytes or a stop text are held back.
        token: the id this step is about, None for the closing step.
        finish_reason: None, or "stop" (end token or stop text), "length" (``max_tokens``),
            "context" (the model's context is full).
        prompt_tokens: ids of the prompt, BOS included.
        generation_tokens: ids generated so far.
        prompt_tps: prompt tokens a second.
        generation_tps: generated tokens a second.
        peak_memory_gb: the process's highest MLX memory, in 1e9 bytes.
    """

    text: str
    token: int | None
    finish_reason: str | None
    prompt_tokens: int
    generation_tokens: int
    prompt_tps: float
    generation_tps: float
    peak_memory_gb: float


def generate(
    model: Model, tokenizer: "Tokenizer | None", prompt: str | Sequence[int], **settings: Any
) -> str:
    """Continue a prompt and return the new text.

    Args:
        model: in eval mode, from :func:`openelm_mlx.load`.
        tokenizer: of the model, from the same call.
        prompt: text, or token ids; exactly one BOS is put in front either way.
        **settings: fields of :class:`GenerateArgs`, and those of :func:`stream_generate`.

    Returns:
        The text after the prompt, without stop texts and special tokens.

    Raises:
        ValueError: as :func:`stream_generate`.
    """
    return "".join(part.text for part in stream_generate(model, tokenizer, prompt, **settings))


def stream_generate(
    model: Model,
    tokenizer: "Tokenizer | None",
    prompt: str | Sequence[int],
    *,
    draft_model: Model | None = None,
    cache: list[Any] | None = None,
    args: GenerateArgs | None = None,
    **settings: Any,
) -> Generator[Response, None, None]:
    """Continue a prompt step by step.

    Args:
        model: in eval mode.
        tokenizer: of the model.
        prompt: text, or token ids; exactly one BOS is put in front either way. With a ``cache``
            that holds a prefix the ids are taken as they are.
        draft_model: a smaller model with the same vocabulary that proposes tokens; the output
            stays what the model alone would give.
        cache: to use and fill; None makes one that fits the settings.
        args: the settings as one object, in place of ``settings``.
        **settings: fields of :class:`GenerateArgs`.

    Yields:
        One :class:`Response` a token and a closing one.

    Raises:
        ValueError: without a tokenizer, for settings out of range or that do not go together, a
            prompt longer than the context, or a draft model with another vocabulary.
    """
    args = replace(args, **settings) if args is not None else GenerateArgs(**settings)
    tokenizer = required(tokenizer)
    args.check_draft(draft_model is not None)
    continued = cache is not None and cache[0].offset > 0
    ids = list(prompt) if continued and not isinstance(prompt, str) else None
    ids = prompt_ids(tokenizer, prompt) if ids is None else ids
    used = cache[0].offset if cache is not None else 0
    budget, context_ends = token_budget(model, args, used + len(ids))
    if cache is None:
        cache = make_generation_cache(model, args)
    tokens = _token_stream(model, ids, args, budget, cache, draft_model)
    return stream_text(tokens, tokenizer, args, len(ids), budget, context_ends)


def required(tokenizer: "Tokenizer | None") -> "Tokenizer":
    """The tokenizer, or a message that says how to get one.

    Raises:
        ValueError: if there is none.
    """
    if tokenizer is None:
        raise ValueError(
            "the model has no tokenizer; load it with tokenizer=PATH (--tokenizer), the LLaMA "
            "tokenizer of 32000 pieces for Apple's models"
        )
    return tokenizer


def _token_stream(
    model: Model,
    ids: list[int],
    args: GenerateArgs,
    budget: int,
    cache: list[Any],
    draft_model: Model | None,
) -> Generator[int, None, None]:
    if draft_model is None and not args.prompt_lookup:
        return decode(
            model,
            ids,
            max_tokens=budget,
            sampler=args.sampler(),
            processors=args.processors(),
            cache=cache,
            prefill_step=args.prefill_step,
        )
    from openelm_mlx.speculative import speculative_decode

    return speculative_decode(
        model,
        ids,
        draft_model=draft_model,
        num_draft_tokens=args.prompt_lookup if draft_model is None else args.num_draft_tokens,
        max_tokens=budget,
        sampler=args.sampler(),
        processors=args.processors(),
        cache=cache,
        prefill_step=args.prefill_step,
    )


def stream_text(
    tokens: Generator[int, None, None],
    tokenizer: "Tokenizer",
    args: GenerateArgs,
    prompt_tokens: int,
    budget: int,
    context_ends: bool,
) -> Generator[Response, None, None]:
    """Turn ids into text, watch for the end, and measure.

    Args:
        tokens: the ids, whatever computes them.
        tokenizer: whose end-of-text ids end the text.
        args: the stop texts.
        prompt_tokens: ids of the prompt.
        budget: how many ids there may be.
        context_ends: whether the context, not ``max_tokens``, limits them.

    Yields:
        One :class:`Response` a token and a closing one.
    """
    from openelm_mlx.detokenizer import StopMatcher

    detokenizer, matcher = tokenizer.detokenizer(), StopMatcher(args.stop)
    start = first = time.perf_counter()
    prompt_tps, count = 0.0, 0
    reason: str | None = None

    def response(text: str, token: int | None, reason: str | None) -> Response:
        elapsed = time.perf_counter() - first
        return Response(
            text=text,
            token=token,
            finish_reason=reason,
            prompt_tokens=prompt_tokens,
            generation_tokens=count,
            prompt_tps=prompt_tps,
            generation_tps=(count - 1) / elapsed if count > 1 else 0.0,
            peak_memory_gb=mx.get_peak_memory() / 1e9,
        )

    with closing(tokens):  # its end hands the cache back
        for token in tokens:
            count += 1
            if count == 1:
                first = time.perf_counter()
                prompt_tps = prompt_tokens / (first - start)
            if token in tokenizer.eos_ids:
                reason = "stop"
                break
            text, stopped = matcher.feed(detokenizer.add_token(token))
            if stopped:
                yield response(text, token, "stop")
                return
            yield response(text, token, None)
    text, stopped = matcher.feed(detokenizer.finish())
    tail = text if stopped else text + matcher.flush()
    if reason is None:
        reason = "stop" if stopped else "context" if context_ends and count == budget else "length"
    yield response(tail, None, reason)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``openelm generate``."""
    add = parser.add_argument
    add_model_arguments(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="text to continue; - reads standard input")
    source.add_argument(
        "--prompts", metavar="FILE", help='JSON lines {"prompt": TEXT}, answered as one batch'
    )
    add_sampling_arguments(parser)
    add("--draft-model", metavar="M", help="smaller model that proposes tokens (same vocabulary)")
    add("--num-draft-tokens", type=int, metavar="N", help="proposed a step (default 4)")
    add("--prompt-lookup", type=int, metavar="N", help="propose N tokens by repeating the text")
    add("--batch-size", type=int, default=16, metavar="N", help="prompts at a time (default 16)")
    add("--verbose", action="store_true", help="say speed and memory on standard error")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a model, its adapters and its tokenizer."""
    parser.add_argument("--model", required=True, metavar="M", help="model folder or Hub id")
    parser.add_argument("--adapter-path", metavar="A", help="folder with LoRA / DoRA adapters")
    parser.add_argument("--tokenizer", metavar="T", help="tokenizer file, folder or Hub id")


def run(args: argparse.Namespace) -> int:
    """Run ``openelm generate``: text to standard output as it comes."""
    settings = GenerateArgs.from_namespace(args)
    settings.check_draft(args.draft_model is not None)
    if args.num_draft_tokens is not None and args.draft_model is None:
        raise ValueError("--num-draft-tokens needs --draft-model; --prompt-lookup N has its own N")
    if args.prompts is not None:
        return _run_prompts(args, settings)
    from openelm_mlx.checkpoint import load

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    model, found = load(args.model, args.adapter_path, args.tokenizer, need_tokenizer=True)
    tokenizer = required(found)
    draft = None
    if args.draft_model is not None:
        from openelm_mlx.draft_model import load_draft

        draft = load_draft(args.draft_model, model, tokenizer)
    tokens = settings.max_tokens + len(prompt) // _CHARACTERS
    for used in (model, draft):
        if used is not None:
            prepare_for_generation(used, tokens=tokens)
    last: Response | None = None
    for last in stream_generate(model, tokenizer, prompt, draft_model=draft, args=settings):
        sys.stdout.write(last.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    if last is not None:
        report(last, verbose=args.verbose)
    return 0


def _run_prompts(args: argparse.Namespace, settings: GenerateArgs) -> int:
    from openelm_mlx.batch import check_settings
    from openelm_mlx.batch_file import read_requests, run_requests
    from openelm_mlx.checkpoint import load

    check_settings(settings, batch_size=args.batch_size, draft=args.draft_model is not None)
    requests = read_requests(args.prompts)
    model, found = load(args.model, args.adapter_path, args.tokenizer, need_tokenizer=True)
    prepare_for_generation(model, tokens=settings.max_tokens * len(requests))
    return run_requests(model, required(found), requests, settings, batch_size=args.batch_size)


def report(last: Response, *, verbose: bool) -> None:
    """Say how a generation ended: a full context always, speed and memory when asked for."""
    if last.finish_reason == "context":
        logger.warning("stopped: the model's context is full; --max-kv-size N forgets the oldest")
    if verbose:
        sys.stderr.write(
            f"prompt {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tokens/s; output "
            f"{last.generation_tokens} tokens, {last.generation_tps:.1f} tokens/s; peak memory "
            f"{last.peak_memory_gb:.2f} GB\n"
        )

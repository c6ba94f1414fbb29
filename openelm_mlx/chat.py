"""Stage: ``openelm chat``: a conversation in the terminal.

Keeps the key-value cache between turns and recomputes only what changed; drops the oldest
exchanges when the context is full.
"""

import argparse
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from openelm_mlx.chat_template import APPLE_INSTRUCT_TEMPLATE, CHAT_DEFAULTS, NEXT_TURN
from openelm_mlx.checkpoint import load
from openelm_mlx.cpu_weights import prepare_for_generation
from openelm_mlx.generate import Response, add_model_arguments, report, stream_generate
from openelm_mlx.generation_settings import (
    GenerateArgs,
    add_sampling_arguments,
    make_generation_cache,
)
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_HELP = "/reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C stops an answer"


@dataclass
class Conversation:
    """A conversation with one model.

    Attributes:
        model: in eval mode.
        tokenizer: with a chat template.
        settings: sampling and cache.
        system: the system message, None for the template's own.
        messages: the turns so far, ``{"role": ..., "content": ...}``.
    """

    model: Model
    tokenizer: Tokenizer
    settings: GenerateArgs
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    _cache: list[Any] | None = None
    _cached_ids: list[int] = field(default_factory=list)

    def reset(self) -> None:
        """Forget all turns."""
        self.messages.clear()
        self._cache, self._cached_ids = None, []

    def ask(self, text: str) -> Iterator[Response]:
        """Add a user turn and stream the answer, which becomes the next turn.

        Args:
            text: the user's message.

        Yields:
            Parts of the answer; breaking off keeps what was said so far.

        Raises:
            ValueError: if this message alone does not fit the context.
        """
        self.messages.append({"role": "user", "content": text})
        ids = self._fitting_ids()
        cache, new_ids = self._resume(ids)
        generated: list[int] = []
        answer = ""
        stream = stream_generate(
            self.model, self.tokenizer, new_ids, cache=cache, args=self.settings
        )
        try:
            for part in stream:
                if part.token is not None:
                    generated.append(part.token)
                answer += part.text
                yield part
        finally:
            stream.close()  # ends the decoding loop
            self.messages.append({"role": "assistant", "content": answer.strip()})
            self._remember(ids + generated)

    def _prompt(self) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + self.messages

    def _fitting_ids(self) -> list[int]:
        """The conversation's ids, the oldest exchanges dropped until an answer fits."""
        context = self.model.args.max_context_length
        wanted = min(self.settings.max_tokens, context // 4)
        ids = self.tokenizer.encode_chat(self._prompt())
        dropped = 0
        while len(ids) + wanted > context and len(self.messages) > 1:
            del self.messages[:2]
            dropped += 1
            ids = self.tokenizer.encode_chat(self._prompt())
        if dropped:
            logger.warning("the context is full: forgot the oldest %d exchanges", dropped)
        return ids

    def _resume(self, ids: list[int]) -> tuple[list[Any], list[int]]:
        """A cache holding the longest prefix of ``ids`` that was computed before, and the rest."""
        cache = self._cache
        shared = _common_prefix(self._cached_ids, ids[:-1])
        if cache is None or not all(layer.is_trimmable() for layer in cache) or shared == 0:
            self._cache = cache = make_generation_cache(self.model, self.settings)
            return cache, ids
        for layer in cache:
            layer.trim(layer.offset - shared)
        return cache, ids[shared:]

    def _remember(self, ids: list[int]) -> None:
        """Note what the cache holds; an end token or a stop text may have gone in beyond it."""
        if self._cache is None:
            return
        offset = self._cache[0].offset
        self._cached_ids = ids[:offset]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``openelm chat``."""
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_arguments(parser, temp=CHAT_DEFAULTS["temp"])
    parser.add_argument("--verbose", action="store_true", help="say speed and memory of answers")


def run(args: argparse.Namespace) -> int:
    """Run ``openelm chat``; standard input may be a pipe, one message a line."""
    for name, value in CHAT_DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    settings = GenerateArgs.from_namespace(args)
    settings = replace(settings, stop=(*settings.stop, *NEXT_TURN))
    model, tokenizer = load(args.model, args.adapter_path, args.tokenizer, need_tokenizer=True)
    if tokenizer is None:
        raise ValueError("chat needs a tokenizer")
    if tokenizer.chat_template is None:
        logger.warning(
            "this folder has no chat template, so it is probably a base model that was not trained "
            "to chat; Apple's instruct template is used"
        )
        tokenizer.chat_template = APPLE_INSTRUCT_TEMPLATE
    prepare_for_generation(model, tokens=2 * settings.max_tokens)  # a conversation: two answers
    conversation = Conversation(model, tokenizer, settings, system=args.system)
    interactive = sys.stdin.isatty()
    if interactive:
        sys.stderr.write(_HELP + "\n")
    for text in _messages(interactive):
        if text == "/reset":
            conversation.reset()
        elif text == "/help":
            sys.stderr.write(_HELP + "\n")
        else:
            _answer(conversation, text, verbose=args.verbose)
    return 0


def _messages(interactive: bool) -> Iterator[str]:
    """Lines that the user types, without blank ones, until /quit or the end of the input."""
    if interactive:
        import readline  # noqa: F401  # gives input() history and editing
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            return
        if text in ("/quit", "/exit"):
            return
        if text:
            yield text


def _answer(conversation: Conversation, text: str, *, verbose: bool) -> None:
    last: Response | None = None
    parts = conversation.ask(text)
    started = False
    try:
        for last in parts:
            shown = last.text if started else last.text.lstrip()
            started = started or bool(shown)
            sys.stdout.write(shown)
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write(" (stopped)")
    finally:
        parts.close()  # type: ignore[attr-defined]  # a generator
    sys.stdout.write("\n")
    sys.stdout.flush()
    if last is not None and last.finish_reason is not None:
        report(last, verbose=verbose)


def _common_prefix(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)

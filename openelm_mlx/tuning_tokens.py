"""Prompt and answer, or a conversation -> token ids and where the answers lie among them.

One BOS at the start and one EOS at the end, whatever the template writes. Ids are those of the
whole text, so that they are what generation will see; a prompt's end is found by comparing.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from openelm_mlx.tokenizer import APPLE_INSTRUCT_TEMPLATE, Tokenizer
from openelm_mlx.tuning_formats import Chat, Text

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
_AT_ONCE = 1024  # items worked on ahead of their use


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """One sample's ids.

    Attributes:
        ids: with BOS and EOS.
        answers: half-open stretches of ``ids`` that are answers, EOS included.
    """

    ids: list[int]
    answers: list[tuple[int, int]]


def encode_text(tokenizer: Tokenizer, text: Text) -> Tokens:
    """Ids of a prompt and its answer, encoded as one text; without a prompt all is the answer."""
    ids = tokenizer.encode(text.prompt + text.answer, eos=True)
    head = tokenizer.encode(text.prompt) if text.prompt else ids[: _bos(tokenizer, ids)]
    return Tokens(ids=ids, answers=[(common_prefix(head, ids), len(ids))])


def encode_chat(tokenizer: Tokenizer, chat: Chat) -> Tokens:
    """Ids of a conversation by the tokenizer's template; what the assistant says are the answers.

    What a template writes behind the EOS of the last answer is left out; where it writes none, EOS
    is added.

    Raises:
        ValueError: if the template cannot render the messages, or renders a turn in another way
            once others follow, so that the answers cannot be told from the rest.
    """
    messages = chat.messages
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False)
    answers = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.encode_chat(messages[:turn], add_generation_prompt=True)
        start, end = common_prefix(before, ids), len(ids)
        if turn + 1 < len(messages):
            after = tokenizer.encode_chat(messages[: turn + 1], add_generation_prompt=False)
            end = common_prefix(after, ids)
        if end <= start:
            raise ValueError(f"the chat template does not keep message {turn + 1} as it was")
        answers.append((start, _behind_eos(tokenizer, ids, start, end)))
    if messages[-1]["role"] == "assistant":
        start, end = answers[-1]
        ids = ids[:end]
        if tokenizer.eos_id is not None and ids[-1] not in tokenizer.eos_ids:
            ids.append(tokenizer.eos_id)
        answers[-1] = (start, len(ids))
    return Tokens(ids=ids, answers=answers)


def in_threads(work: Callable[[T], R], items: Sequence[T]) -> Iterator[tuple[T, R | ValueError]]:
    """Each item with what ``work`` made of it, or the ValueError it raised, in order.

    SentencePiece lets other threads run while it encodes.
    """

    def attempt(item: T) -> R | ValueError:
        try:
            return work(item)
        except ValueError as error:
            return error

    with ThreadPoolExecutor() as pool:
        for start in range(0, len(items), _AT_ONCE):
            part = items[start : start + _AT_ONCE]
            yield from zip(part, pool.map(attempt, part), strict=True)


def ensure_chat_template(tokenizer: Tokenizer) -> None:
    """Give a tokenizer without a chat template Apple's, and say so."""
    if tokenizer.chat_template is None:
        tokenizer.chat_template = APPLE_INSTRUCT_TEMPLATE
        logger.info("the model has no chat template: conversations get Apple's instruct template")


def as_chat(prompt: str, answer: str) -> Chat:
    """A prompt and its answer as two messages."""
    messages: Sequence[Mapping[str, Any]] = (
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": answer},
    )
    return Chat(messages=messages)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences share from the start."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def _bos(tokenizer: Tokenizer, ids: Sequence[int]) -> int:
    return int(tokenizer.bos_id is not None and ids[:1] == [tokenizer.bos_id])


def _behind_eos(tokenizer: Tokenizer, ids: Sequence[int], start: int, end: int) -> int:
    """The end of an answer, just behind its last EOS; ``end`` where it has none."""
    places = [i for i in range(start, end) if ids[i] in tokenizer.eos_ids]
    return places[-1] + 1 if places else end

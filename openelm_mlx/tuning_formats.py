"""What the records of a tuning data set say: which format they are in, prompt and answer.

Knows keys and prompt texts; neither files nor token ids.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Fields = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text whose last part is the answer.

    Attributes:
        prompt: what stands before the answer; empty where all of the text is to be learned.
        answer: the rest.
    """

    prompt: str = ""
    answer: str


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation.

    Attributes:
        messages: with ``role`` and ``content``.
    """

    messages: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Format:
    """One kind of record.

    Attributes:
        name: as ``--format`` takes it.
        keys: those that a record must have.
        read: from a record's fields to its text; raises ValueError for what is wrong with them.
    """

    name: str
    keys: tuple[str, ...]
    read: Callable[[Fields], Text | Chat]


def recognise(fields: Sequence[Fields]) -> Format:
    """The format of a set of records: the first of ``FORMATS`` whose keys they all have.

    Where none fits all, the first record decides, and the others will be refused by line.

    Raises:
        ValueError: if the first record is in no known format.
    """
    known = list(FORMATS.values())
    for candidates in ([f for f in known if all(_fits(f, r) for r in fields)], known):
        for kind in candidates:
            if _fits(kind, fields[0]):
                return kind
    if {"chosen", "rejected"} <= fields[0].keys():
        raise ValueError("these are preference pairs; tune on them with `openelm dpo`")
    options = "; ".join(f"{f.name}: {', '.join(f.keys)}" for f in FORMATS.values())
    raise ValueError(f"no format has the keys {', '.join(fields[0]) or '(none)'} ({options})")


def text_of(fields: Fields, key: str) -> str:
    """The text under a key.

    Raises:
        ValueError: if there is none, or it is no text that can be encoded.
    """
    if key not in fields:
        raise ValueError(f"has no key {key!r} (it has {', '.join(fields) or 'none'})")
    value = fields[key]
    if not isinstance(value, str):
        raise ValueError(f"{key!r} must be text, got {_shown(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(f"{key!r} holds half of a surrogate pair") from None
    return value


def messages_of(fields: Fields, key: str) -> list[Mapping[str, Any]]:
    """The messages under a key, each with a ``role`` and a ``content`` of text.

    Raises:
        ValueError: if they are no such list.
    """
    if key not in fields:
        raise ValueError(f"has no key {key!r} (it has {', '.join(fields) or 'none'})")
    messages = fields[key]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{key!r} must be a list of messages, got {_shown(messages)}")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} of {key!r} must be an object")
        for part in ("role", "content"):
            try:
                text_of(message, part)
            except ValueError as error:
                raise ValueError(f"message {number} of {key!r}: {error}") from None
    return messages


def join(prompt: str, answer: str) -> str:
    """The answer with a space before it, unless one of the two has white space at the seam."""
    seamless = prompt and answer and not prompt[-1].isspace() and not answer[0].isspace()
    return " " + answer if seamless else answer


def commonsense_prompt(instruction: str, context: str | None) -> str:
    """The prompt of CommonSense-170k in CoreNet, byte for byte.

    The indentation and the spaces behind "request." are part of it (apple/corenet@1aa3acd,
    ``corenet/data/datasets/language_modeling/commonsense_170k.py``).
    """
    indent = " " * 16
    lines = ["", "### Instruction:", instruction, ""]
    opening, ending = _TASK, "  "
    if context:
        lines += ["### Input:", context, ""]
        opening, ending = _TASK_WITH_INPUT, " "
    return opening + ending + "\n" + f"\n{indent}".join([*lines, "### Response:", ""])


def alpaca_prompt(instruction: str, context: str | None) -> str:
    """The prompt of the Stanford Alpaca data."""
    parts = [_TASK_WITH_INPUT if context else _TASK, f"### Instruction:\n{instruction}"]
    if context:
        parts.append(f"### Input:\n{context}")
    return "\n\n".join([*parts, "### Response:\n"])


def _instruction(prompt: Callable[[str, str | None], str]) -> Callable[[Fields], Text]:
    def read(fields: Fields) -> Text:
        instruction, answer = text_of(fields, "instruction"), text_of(fields, "output")
        context = text_of(fields, "input") if fields.get("input") is not None else None
        return Text(prompt=prompt(instruction, context), answer=answer)

    return read


def _completion(fields: Fields) -> Text:
    prompt, answer = text_of(fields, "prompt"), text_of(fields, "completion")
    return Text(prompt=prompt, answer=join(prompt, answer))


def _chat(fields: Fields) -> Chat:
    messages = messages_of(fields, "messages")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("has no message of the assistant")
    return Chat(messages=messages)


def _fits(kind: Format, fields: Fields) -> bool:
    return all(key in fields for key in kind.keys)


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_TASK = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request."
)
_TASK_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request."
)
# In the order in which they are tried: what asks for more keys comes first.
FORMATS = {
    kind.name: kind
    for kind in (
        Format(name="messages", keys=("messages",), read=_chat),
        Format(name="completions", keys=("prompt", "completion"), read=_completion),
        Format(
            name="commonsense",
            keys=("instruction", "output", "answer"),
            read=_instruction(commonsense_prompt),
        ),
        Format(name="alpaca", keys=("instruction", "output"), read=_instruction(alpaca_prompt)),
        Format(
            name="text", keys=("text",), read=lambda fields: Text(answer=text_of(fields, "text"))
        ),
    )
}

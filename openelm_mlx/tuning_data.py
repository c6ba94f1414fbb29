"""Data sets for supervised fine-tuning: files -> samples of token ids, checked, cut to length.

Formats are ``tuning_formats``', ids ``tuning_tokens``', batches ``tuning_batches``'.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from openelm_mlx.text_filters import fix_text
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tuning_args import TuningArgs as TuningArgs
from openelm_mlx.tuning_files import Record, find_split, read_records, refuse
from openelm_mlx.tuning_formats import FORMATS, Chat, Format, Text, recognise
from openelm_mlx.tuning_lengths import Fitter, Row
from openelm_mlx.tuning_tokens import (
    Tokens,
    as_chat,
    encode_chat,
    encode_text,
    ensure_chat_template,
    in_threads,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Sample:
    """One row of training data.

    Attributes:
        tokens: (n,) int32 ids, BOS first; at most ``max_seq_length`` + 1.
        mask: (n,) bool, whether a token is learned; never BOS.
        name: file and line, for messages.
    """

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    name: str

    @property
    def num_targets(self) -> int:
        """Tokens that are learned."""
        return int(self.mask.sum())


def load_split(
    path: str | Path, split: str, tokenizer: Tokenizer, args: TuningArgs
) -> list[Sample]:
    """Read, encode and cut one split of a data set, and say what it holds.

    Args:
        path: a .jsonl or .json file (all of it training data), or a folder with train, valid, test.
        split: ``train``, ``valid`` or ``test``.
        tokenizer: of the model; one without a chat template gets Apple's if it needs one.
        args: format, mask and length.

    Returns:
        The samples in the file's order; none where there is no such validation or test split.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming the damaged lines; or if no sample has anything to learn.
    """
    file = find_split(path, split)
    if file is None:
        logger.info("%s has no %s data", path, "validation" if split == "valid" else split)
        return []
    records = read_records(file)
    kind = _format(file, records, args)
    if kind.name == "messages" or args.use_chat_template:
        ensure_chat_template(tokenizer)
    fitter = Fitter(
        max_seq_length=args.max_seq_length,
        bos_id=tokenizer.bos_id,
        split_long=args.split_long,
        cut_left=args.long_prompts == "cut",
    )
    encode = partial(_encode, kind=kind, tokenizer=tokenizer, args=args)
    samples, problems, empty = [], [], 0
    for record, row in in_threads(encode, records):
        if isinstance(row, ValueError):
            problems.append(f"{record.place}: {row}")
        elif row is None:
            empty += 1
        else:
            name = record.name_in(file.name)
            samples += [Sample(tokens=t, mask=m, name=name) for t, m in fitter.fit(*row)]
    refuse(file, problems)
    _say(file, kind, samples, fitter.notes(), empty)
    if not samples:
        raise ValueError(
            f"{file}: no sample has anything to learn within max_seq_length {args.max_seq_length}; "
            "raise it, or set --long-prompts cut"
        )
    return samples


def describe_samples(samples: Sequence[Sample], tokenizer: Tokenizer, n: int = 2) -> str:
    """The first samples as the model will see them, learned stretches told from the others.

    Args:
        samples: from :func:`load_split`.
        tokenizer: that they were encoded with.
        n: how many to show.

    Returns:
        Lines of text.
    """
    lines = []
    for sample in samples[:n]:
        lines.append(f"{sample.name}: {len(sample.tokens)} tokens, {sample.num_targets} learned")
        edges = np.flatnonzero(np.diff(sample.mask)) + 1
        for part, learned in zip(
            np.split(sample.tokens, edges), np.split(sample.mask, edges), strict=True
        ):
            text = tokenizer.decode(part.tolist(), skip_special=False)
            lines.append(f"  {'learned' if learned[0] else 'context'} {_shortened(text)!r}")
    return "\n".join(lines) + ("\n" if lines else "")


def _format(file: Path, records: Sequence[Record], args: TuningArgs) -> Format:
    if args.format != "auto":
        kind = FORMATS[args.format]
    else:
        try:
            kind = recognise([record.value for record in records])
        except ValueError as error:
            raise ValueError(f"{file}, {records[0].place}: {error}") from error
    if args.use_chat_template and kind.name != "completions":
        raise ValueError(
            f"use_chat_template is for prompt and completion; {file} is in the format {kind.name}"
        )
    return kind


def _encode(record: Record, kind: Format, tokenizer: Tokenizer, args: TuningArgs) -> Row | None:
    """The ids and mask of a record; None for an empty text."""
    item = _read(record, kind, args)
    if isinstance(item, Chat):
        return _arrays(encode_chat(tokenizer, item), masked=args.mask_prompt)
    if not (item.prompt or item.answer):
        return None
    return _arrays(encode_text(tokenizer, item), masked=args.mask_prompt)


def _read(record: Record, kind: Format, args: TuningArgs) -> Text | Chat:
    fields = record.value
    item = kind.read(fields)  # checks them
    if args.use_chat_template:
        item = as_chat(fields["prompt"], fields["completion"])
    if not args.fix_text:
        return item
    if isinstance(item, Text):
        return Text(prompt=fix_text(item.prompt), answer=fix_text(item.answer))
    return Chat(messages=[{**m, "content": fix_text(m["content"])} for m in item.messages])


def _arrays(item: Tokens, *, masked: bool) -> Row:
    tokens = np.array(item.ids, dtype=np.int32)
    mask = np.full(len(tokens), not masked)
    if masked:
        for start, end in item.answers:
            mask[start:end] = True
    mask[:1] = False  # nothing stands before the first token
    return tokens, mask


def _say(file: Path, kind: Format, samples: Sequence[Sample], notes: list[str], empty: int) -> None:
    tokens = sum(len(sample.tokens) for sample in samples)
    targets = sum(sample.num_targets for sample in samples)
    logger.info(
        "%s: format %s, %d samples, %d tokens, %d of them learned",
        *(file, kind.name, len(samples), tokens, targets),
    )
    notes = notes + ([f"{empty} empty texts left out"] if empty else [])
    if notes:
        logger.warning("%s: %s", file, "; ".join(notes))


def _shortened(text: str, most: int = 400) -> str:
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} [...] {text[-half:]}"

"""Preference pairs: files -> a prompt with a chosen and a rejected answer, as ids, and batches.

Pairs are texts or messages (UltraFeedback's form). One BOS before the prompt, one EOS behind each
answer, nothing learned but the answers. P pairs, B = 2 P rows, L tokens.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from openelm_mlx.batches import Batch
from openelm_mlx.packing import lay_rows
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tuning_args import PairArgs as PairArgs
from openelm_mlx.tuning_batches import EpochBatches, Rows, digest_of
from openelm_mlx.tuning_data import Sample
from openelm_mlx.tuning_files import Record, find_split, read_records, refuse
from openelm_mlx.tuning_formats import Chat, Text, join, messages_of, text_of
from openelm_mlx.tuning_tokens import encode_chat, encode_text, ensure_chat_template, in_threads

logger = logging.getLogger(__name__)

SIDES = ("chosen", "rejected")


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Pair:
    """Two answers to one prompt.

    Attributes:
        chosen: prompt and the better answer, of which the answer is learned.
        rejected: prompt and the worse answer.
        name: file and line, for messages.
    """

    chosen: Sample
    rejected: Sample
    name: str


def load_pairs(path: str | Path, split: str, tokenizer: Tokenizer, args: PairArgs) -> list[Pair]:
    """Read, encode and cut one split of a preference data set, and say what it holds.

    Records have ``prompt``, ``chosen`` and ``rejected``: texts, or lists of messages. Where chosen
    and rejected are whole conversations, their last messages are the answers and the rest is the
    prompt.

    Args:
        path: a .jsonl or .json file (all of it training data), or a folder with train, valid, test.
        split: ``train``, ``valid`` or ``test``.
        tokenizer: of the model; one without a chat template gets Apple's if it needs one.
        args: lengths.

    Returns:
        The pairs in the file's order, those left out whose answers are equal or empty when cut;
        none where there is no such validation or test split.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming the damaged lines; or if no pair is left.
    """
    file = find_split(path, split)
    if file is None:
        logger.info("%s has no %s data", path, "validation" if split == "valid" else split)
        return []
    records = read_records(file)
    if any(_is_chat(record.value, args) for record in records):
        ensure_chat_template(tokenizer)
    encode = partial(_encode, file=file.name, tokenizer=tokenizer, args=args)
    pairs, problems, left_out, cut = [], [], 0, [0, 0]
    for record, sides in in_threads(encode, records):
        if isinstance(sides, ValueError):
            problems.append(f"{record.place}: {sides}")
            continue
        chosen, rejected = (side.sample for side in sides)
        if not (chosen.mask.any() and rejected.mask.any()) or np.array_equal(
            chosen.tokens, rejected.tokens
        ):
            left_out += 1
            continue
        pairs.append(Pair(chosen=chosen, rejected=rejected, name=chosen.name))
        cut[0] += any(side.prompt_cut for side in sides)
        cut[1] += sum(side.answer_cut for side in sides)
    refuse(file, problems)
    logger.info(
        "%s: %d preference pairs, %d prompts cut on the left, %d answers cut",
        *(file, len(pairs), *cut),
    )
    if left_out:
        logger.warning("%s: %d pairs left out, with equal or empty answers", file, left_out)
    if not pairs:
        raise ValueError(f"{file}: no pair has two different answers within the lengths allowed")
    return pairs


class PairBatches(EpochBatches):
    """Padded batches of pairs: the chosen rows, then the rejected ones in the same order.

    Args:
        pairs: from :func:`load_pairs`.
        batch_size: pairs of a global batch, over all ranks.
        seed: of the order.
        rank: of this process.
        world_size: number of ranks.
        epochs: None for endless.
        references: (P, 2) float32 log-probabilities of chosen and rejected answers under the
            reference model, put into each batch.

    Raises:
        ValueError: if there are no pairs, or a number is out of range.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        *,
        batch_size: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
        references: mx.array | None = None,
    ) -> None:
        # NumPy: batches are made in a thread, where MLX arrays are made but not computed with
        self._references = None if references is None else np.array(references)
        samples = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
        self._tokens = [sample.tokens for sample in samples]
        self._masks = [sample.mask for sample in samples]
        self._names = [pair.name for pair in pairs]
        self._widths = [max(len(p.chosen.tokens), len(p.rejected.tokens)) - 1 for p in pairs]
        self.digest = digest_of(samples)
        super().__init__(
            self._widths,
            self.digest,
            batch_size=batch_size,
            share_rows=False,
            seed=seed,
            rank=rank,
            world_size=world_size,
            epochs=epochs,
        )

    def _batch(self, rows: Rows, length: int) -> Batch:
        rejected = [[index + len(self._names) for index in row] for row in rows]
        batch = lay_rows([*rows, *rejected], length, self._tokens, self._masks)
        reference = None
        if self._references is not None:
            of_rows = self._references[[row[0] if row else 0 for row in rows]]
            reference = mx.array(of_rows.T.reshape(-1))  # chosen rows, then rejected
        return replace(
            batch,
            reference=reference,
            samples=tuple(self._names[index] for row in rows for index in row),
        )

    def all_pairs(self, size: int) -> Iterator[tuple[list[int], Batch]]:
        """Every pair once, ``size`` of about one length at a time, with their numbers."""
        order = sorted(range(len(self._names)), key=lambda i: self._widths[i])
        for start in range(0, len(order), size):
            chunk = order[start : start + size]
            width = max(self._widths[i] for i in chunk)
            yield chunk, self._batch([[i] for i in chunk], width)


class EvalPairBatches:
    """Each pair exactly once, as often as it is iterated; this rank's share of it.

    Args:
        pairs: from :func:`load_pairs`.
        batch_size: pairs of a global batch.
        rank: of this process.
        world_size: number of ranks.
        references: as those of :class:`PairBatches`.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        references: mx.array | None = None,
    ) -> None:
        self._source = PairBatches(
            pairs,
            batch_size=batch_size,
            rank=rank,
            world_size=world_size,
            references=references,
        )

    def __iter__(self) -> Iterator[Batch]:
        """All batches, always the same ones."""
        return self._source.once()


@dataclass(frozen=True, kw_only=True)
class _Side:
    """A prompt with one of its answers, and whether they were cut."""

    sample: Sample
    prompt_cut: bool
    answer_cut: bool


def _encode(record: Record, file: str, tokenizer: Tokenizer, args: PairArgs) -> tuple[_Side, _Side]:
    """Both sides of a record."""
    chosen, rejected = (
        _side(_read(record.value, side, args), record.name_in(file), tokenizer, args)
        for side in SIDES
    )
    return chosen, rejected


def _side(item: Text | Chat, name: str, tokenizer: Tokenizer, args: PairArgs) -> _Side:
    """Encode and cut; nothing is learned where the answer is empty."""
    if isinstance(item, Chat):
        answer_text, tokens = item.messages[-1]["content"], encode_chat(tokenizer, item)
    else:
        answer_text, tokens = item.answer, encode_text(tokenizer, item)
    start, end = tokens.answers[-1]
    prompt, answer = tokens.ids[:start], tokens.ids[start:end]
    over = len(prompt) - args.max_prompt_length
    if over > 0:
        bos = [index for index in prompt[:1] if index == tokenizer.bos_id]
        prompt = bos + prompt[over + len(bos) :]
    room = args.max_seq_length - len(prompt)
    ids = np.array(prompt + answer[:room], dtype=np.int32)
    mask = np.arange(len(ids)) >= max(len(prompt), 1)
    return _Side(
        sample=Sample(tokens=ids, mask=mask & bool(answer_text.strip()), name=name),
        prompt_cut=over > 0,
        answer_cut=len(answer) > room,
    )


def _is_chat(fields: Mapping[str, Any], args: PairArgs) -> bool:
    return args.use_chat_template or any(
        isinstance(fields.get(key), list) for key in ("prompt", *SIDES)
    )


def _read(fields: Mapping[str, Any], side: str, args: PairArgs) -> Text | Chat:
    """Prompt and one answer of a record."""
    if isinstance(fields.get(side), list):
        return _conversation(fields, side)
    answer = text_of(fields, side)
    if isinstance(fields.get("prompt"), list):
        return _answered(messages_of(fields, "prompt"), answer)
    prompt = text_of(fields, "prompt")
    if args.use_chat_template:
        return _answered([{"role": "user", "content": prompt}], answer)
    return Text(prompt=prompt, answer=join(prompt, answer))


def _conversation(fields: Mapping[str, Any], side: str) -> Chat:
    messages = messages_of(fields, side)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"the last message of {side!r} is not the assistant's")
    if len(messages) == 1:
        prompt = fields.get("prompt")
        if isinstance(prompt, list):
            return Chat(messages=[*messages_of(fields, "prompt"), *messages])
        return Chat(messages=[{"role": "user", "content": text_of(fields, "prompt")}, *messages])
    chosen, rejected = (fields.get(name) for name in SIDES)
    if isinstance(chosen, list) and isinstance(rejected, list) and chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected answer different conversations")
    return Chat(messages=messages)


def _answered(messages: Sequence[Mapping[str, Any]], answer: str) -> Chat:
    return Chat(messages=[*messages, {"role": "assistant", "content": answer}])

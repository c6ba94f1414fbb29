"""Documents -> batches for pretraining: packed without loss, or one piece a sequence as CoreNet.

B rows, L tokens. Files come from ``data_sources``, cleaning from ``text_filters``. Knows no model.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from openelm_mlx.batches import Batch, Batches
from openelm_mlx.data_corenet import CoreNetBatches
from openelm_mlx.data_encoding import Encoder, TextTokenizer, check_rows, nothing_left
from openelm_mlx.data_sources import find_sources, look_for
from openelm_mlx.document_stream import Document, DocumentStream, OnDamage, Source
from openelm_mlx.text_filters import TextFilters

__all__ = [
    "CoreNetBatches",
    "PackedBatches",
    "TokenStats",
    "find_sources",
    "look_for",
    "token_stats",
]

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class _Tokens:
    """One document in the buffer; ``start`` is the first token that no row has taken."""

    before: dict[str, Any]  # position of the stream before it
    name: str
    ids: Array  # int32
    begins: Array  # bool: first token of a document, or of a piece that stands for one
    start: int = 0


@dataclass(frozen=True, slots=True)
class _Row:
    """One row and its targets: up to L + 1 tokens."""

    ids: Array
    begins: Array
    name: str


class PackedBatches:
    """Rows of ``max_seq_length`` tokens cut from one endless row of documents; nothing is lost.

    Documents become BOS + tokens + EOS and follow one another through rows, batches and epochs;
    the target of a row's last token is the first token of the next row. Every rank reads and
    tokenises everything and keeps the rows rank, rank + world_size, ... of each batch, so that the
    order does not depend on how many ranks there are. The last batch of a finite source may have
    fewer rows; rows of padding make its number a multiple of ``world_size``.

    With ``separate_documents``, ``Batch.segments`` keeps documents from seeing each other, and the
    first token of a document (BOS) is not a target, since nothing before it can tell it. Without,
    a row is plain text with BOS and EOS in it and every token counts.

    Args:
        sources: of :func:`openelm_mlx.data_sources.find_sources`.
        tokenizer: makes ids of text; its BOS and EOS are put around each document.
        batch_size: rows of a global batch, over all ranks.
        max_seq_length: L, tokens of a row.
        rank: which rows are ours.
        world_size: number of ranks; divides ``batch_size``.
        separate_documents: see above.
        filters: what is dropped and cleaned; by default nothing.
        shuffle: draw another order of files and documents for each epoch.
        seed: of that order.
        epochs: how often to read everything; None for ever.
        on_damage: whether a damaged record is skipped or an error.

    Raises:
        ValueError: if a size is impossible, or from ``next``, at damage that is not skipped or if
            no document passes the filters.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: TextTokenizer,
        *,
        batch_size: int,
        max_seq_length: int,
        rank: int = 0,
        world_size: int = 1,
        separate_documents: bool = True,
        filters: TextFilters | None = None,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        on_damage: OnDamage = "fail",
    ) -> None:
        check_rows(batch_size, max_seq_length, rank, world_size)
        self._stream = DocumentStream(
            sources, shuffle=shuffle, seed=seed, epochs=epochs, on_damage=on_damage
        )
        self._encoder = Encoder(tokenizer, filters or TextFilters())
        self._rows, self._length = batch_size, max_seq_length
        self._rank, self._world = rank, world_size
        self._separate = separate_documents
        self._buffer: deque[_Tokens] = deque()
        self._buffered = 0  # tokens in it that no row has taken
        self._barren = self._tolerated = 0  # ends of epochs passed without a token

    @property
    def skipped(self) -> int:
        """Damaged records passed over so far."""
        return self._stream.skipped

    def __iter__(self) -> Iterator[Batch]:
        """The source itself."""
        return self

    def __next__(self) -> Batch:
        """The next batch."""
        rows: list[_Row] = []
        while len(rows) < self._rows and (row := self._next_row()):
            rows.append(row)
        if not rows:
            raise StopIteration
        while len(rows) % self._world:
            rows.append(_Row(np.zeros(0, np.int32), np.zeros(0, np.bool_), ""))
        return self._batch(rows[self._rank :: self._world])

    def state_dict(self) -> dict[str, Any]:
        """The document that the next row begins in, and how many of its tokens are taken."""
        if not self._buffer:
            return {"stream": self._stream.state_dict(), "taken": 0}
        first = self._buffer[0]
        return {"stream": first.before, "taken": first.start}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position, at the exact token.

        Raises:
            ValueError: if it belongs to other files or another seed, or the text has changed.
        """
        self._stream.load_state_dict(state["stream"])
        self._buffer.clear()
        self._buffered, self._barren, self._tolerated = 0, 0, 1
        if not state["taken"]:
            return
        tokens = self._read()
        if tokens is None or state["taken"] >= len(tokens.ids):
            raise ValueError(
                "the saved position is past the end of its document: the text, the tokenizer or "
                "the filters have changed since; start anew"
            )
        tokens.start = state["taken"]
        self._buffered -= tokens.start

    def _next_row(self) -> _Row | None:
        """Take L tokens; the row holds one more for the last target. None at the end."""
        while self._buffered <= self._length and self._read():
            continue
        if self._buffered < 2:
            return None
        parts, wanted = [], self._length + 1
        for tokens in self._buffer:
            parts.append(slice_ := slice(tokens.start, tokens.start + wanted))
            wanted -= len(tokens.ids[slice_])
            if not wanted:
                break
        used = list(zip(self._buffer, parts, strict=False))
        row = _Row(
            ids=np.concatenate([tokens.ids[part] for tokens, part in used]),
            begins=np.concatenate([tokens.begins[part] for tokens, part in used]),
            name=self._buffer[0].name,
        )
        self._take(min(self._length, self._buffered))
        return row

    def _take(self, count: int) -> None:
        self._buffered -= count
        while count:
            first = self._buffer[0]
            step = min(count, len(first.ids) - first.start)
            first.start, count = first.start + step, count - step
            if first.start == len(first.ids):
                self._buffer.popleft()

    def _read(self) -> _Tokens | None:
        """Put the next document that passes the filters into the buffer."""
        while True:
            before = self._stream.state_dict()
            document = next(self._stream, None)
            self._barren += self._stream.epoch > before["epoch"]
            if self._barren > self._tolerated:
                raise nothing_left(self._encoder.filters)
            if document is None:
                return None
            tokens = self._tokens(before, document)
            if tokens is not None:
                self._barren, self._tolerated = 0, 1
                self._buffer.append(tokens)
                self._buffered += len(tokens.ids)
                return tokens

    def _tokens(self, before: dict[str, Any], document: Document) -> _Tokens | None:
        pieces = list(self._encoder.encode(document.text))
        if not pieces:
            return None
        begins = np.zeros(sum(map(len, pieces)), np.bool_)
        begins[np.cumsum([0, *map(len, pieces[:-1])])] = True
        ids = np.array([index for piece in pieces for index in piece], np.int32)
        return _Tokens(before, document.name, ids, begins)

    def _batch(self, rows: Sequence[_Row]) -> Batch:
        """Arrays of rows, made without a graph: this may run in a thread."""
        shape = (len(rows), self._length + 1)
        ids, begins, real = np.zeros(shape, np.int32), np.zeros(shape, np.bool_), np.zeros(shape)
        for i, row in enumerate(rows):
            count = len(row.ids)
            ids[i, :count], begins[i, :count], real[i, :count] = row.ids, row.begins, 1
            begins[i, count : count + 1] = True  # padding is a segment of its own
        mask = real[:, 1:] * ~begins[:, 1:] if self._separate else real[:, 1:]
        segments = np.cumsum(begins[:, :-1], axis=1, dtype=np.int32) if self._separate else None
        return Batch(
            tokens=mx.array(np.ascontiguousarray(ids[:, :-1])),
            targets=mx.array(np.ascontiguousarray(ids[:, 1:])),
            mask=mx.array(mask.astype(np.float32)),
            segments=None if segments is None else mx.array(segments),
            samples=tuple(row.name for row in rows),
        )


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """How many of the processed tokens are trained on."""

    steps: int
    rows: int
    processed: int  # positions, padding included
    useful: int  # positions whose target counts
    shapes: tuple[tuple[int, int], ...]  # (B, L), each of which is traced once

    @property
    def share(self) -> float:
        """Useful / processed."""
        return self.useful / self.processed if self.processed else 0.0

    def describe(self) -> str:
        """One line for a person."""
        return (
            f"{self.steps} steps, {self.useful} of {self.processed} tokens useful "
            f"({100 * self.share:.1f} %), {self.useful / max(1, self.steps):.0f} a step, "
            f"shapes {', '.join(f'{rows} x {length}' for rows, length in self.shapes)}"
        )


def token_stats(batches: Batches, steps: int | None = None) -> TokenStats:
    """Count useful tokens of the next ``steps`` batches, or of all that are left."""
    count = rows = processed = 0
    useful: list[mx.array] = []
    shapes: dict[tuple[int, int], None] = {}
    while steps is None or count < steps:
        batch = next(batches, None)
        if batch is None:
            break
        B, L = batch.tokens.shape
        count, rows, processed = count + 1, rows + B, processed + B * L
        shapes[B, L] = None
        useful.append(batch.mask.sum())
        mx.async_eval(useful[-1])
    total = int(np.array(mx.stack(useful), np.int64).sum()) if useful else 0
    return TokenStats(
        steps=count, rows=rows, processed=processed, useful=total, shapes=tuple(shapes)
    )

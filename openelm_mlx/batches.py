"""What passes from data to trainer: batches of token ids, and sources of them that can resume.

B rows, L tokens. Knows neither text nor models.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from queue import Full, Queue
from threading import Event, Thread
from typing import Any, Protocol

import mlx.core as mx


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch of sequences; targets are shifted already.

    Attributes:
        tokens: (B, L) int32 inputs; padding may hold any id of the vocabulary.
        targets: (B, L) int32; position t holds the token after input t.
        mask: (B, L) float32, 1 where the target counts and 0 on prompt and padding. Made from
            lengths, never from ids.
        segments: (B, L) int32 number of the document that each token of a packed row belongs to,
            where documents must not see each other; None where each row is one document.
        reference: (B,) float32 log-probability of each row's targets under a reference model, for
            preference tuning, where the first half of the rows is chosen and the second rejected.
        samples: names of the samples (line or document numbers), for messages.
    """

    tokens: mx.array
    targets: mx.array
    mask: mx.array
    segments: mx.array | None = None
    reference: mx.array | None = None
    samples: tuple[str, ...] = ()

    def attention_mask(self) -> mx.array | None:
        """(B, 1, L, L) bool: causal within each segment; None where plain causal will do."""
        if self.segments is None:
            return None
        L = self.tokens.shape[1]
        causal = mx.arange(L)[:, None] >= mx.arange(L)[None]
        same = self.segments[:, :, None] == self.segments[:, None, :]
        return (same & causal)[:, None]


def stand_in(like: Batch | None) -> Batch:
    """What a rank computes on, and throws away, while it has no rows and others do.

    Args:
        like: a batch with the fields and the length wanted; None for 2 tokens and no more fields.

    Returns:
        Two rows (one pair, for preference tuning) of id 0 that all count, so nothing divides by 0.
    """
    length = max(2, like.tokens.shape[1]) if like is not None else 2
    zeros = mx.zeros((2, length), mx.int32)
    return Batch(
        tokens=zeros,
        targets=zeros,
        mask=mx.ones((2, length)),
        segments=None if like is None or like.segments is None else zeros,
        reference=None if like is None or like.reference is None else mx.zeros((2,)),
    )


class Batches(Protocol):
    """An endless or finite stream of batches whose position can be saved.

    A source yields *this rank's rows* of each global batch, so that the order of samples does not
    depend on how many ranks there are and a run can resume with another number of them. Where a
    small last batch has fewer rows than there are ranks, some get a batch of shape (0, L), or
    none: the run goes on until all sources have ended.
    """

    def __iter__(self) -> Iterator[Batch]:
        """The source itself."""

    def __next__(self) -> Batch:
        """The next batch; StopIteration at the end of a finite source."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready position *after* the last batch handed out, equal on all ranks."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position.

        Raises:
            ValueError: if it belongs to another data set or other settings.
        """


class Prefetch:
    """A source that prepares batches in a thread, so that the device never waits for text.

    Args:
        source: used by the thread alone from here on.
        ahead: batches to keep ready.

    Raises:
        ValueError: if ``ahead`` is not at least 1.
    """

    def __init__(self, source: Batches, ahead: int = 2) -> None:
        if ahead < 1:
            raise ValueError(f"at least 1 batch must be kept ready, got {ahead}")
        self._source, self._ahead = source, ahead
        self._state = source.state_dict()
        self._worker: _Worker | None = None
        self._moved = False  # whether the source may be ahead of the state
        self._ended = False

    def __iter__(self) -> Iterator[Batch]:
        """The source itself."""
        return self

    def __next__(self) -> Batch:
        """The next batch; errors of the thread are raised here."""
        if self._ended:
            raise StopIteration
        if self._worker is None:
            if self._moved:
                self._source.load_state_dict(self._state)
            self._moved = True
            self._worker = _Worker(self._source, self._ahead)
        item = self._worker.ready.get()
        if isinstance(item, BaseException):
            self.close()
            self._ended = isinstance(item, StopIteration)
            raise item
        batch, self._state = item
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was taken, not the last one prepared."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position; what was prepared is thrown away."""
        self.close()
        self._source.load_state_dict(state)
        self._state = self._source.state_dict()
        self._moved = self._ended = False

    def close(self) -> None:
        """End the thread; a later batch is the one after the last that was taken."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def __del__(self) -> None:
        worker = getattr(self, "_worker", None)
        if worker is not None:
            worker.stop.set()


class _Worker:
    """A thread that fills a queue with batches and positions, or with the error that ends it.

    It does not hold the :class:`Prefetch`, so that one that is forgotten ends it.
    """

    def __init__(self, source: Batches, ahead: int) -> None:
        self.ready: Queue[tuple[Batch, dict[str, Any]] | BaseException] = Queue(maxsize=ahead)
        self.stop = Event()
        self._thread = Thread(target=_fill, args=(source, self.ready, self.stop), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop and wait; the source is free then."""
        self.stop.set()
        self._thread.join()


def _fill(source: Batches, ready: "Queue[Any]", stop: Event) -> None:
    item: Any = None
    while not stop.is_set() and not isinstance(item, BaseException):
        try:
            batch = next(source)
            fields = (batch.tokens, batch.targets, batch.mask, batch.segments, batch.reference)
            mx.eval(*(field for field in fields if field is not None))  # streams are a thread's own
            item = batch, source.state_dict()
        except BaseException as error:  # handed to the consumer, StopIteration included
            item = error
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.05)
                break
            except Full:  # look whether to stop, then try again
                continue

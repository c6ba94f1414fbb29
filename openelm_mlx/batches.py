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
    """

    def __init__(self, source: Batches, ahead: int = 2) -> None:
        self._source, self._ahead = source, ahead
        self._state = source.state_dict()
        self._queue: Queue[Any] | None = None
        self._stop = Event()
        self._thread: Thread | None = None

    def __iter__(self) -> Iterator[Batch]:
        """The source itself."""
        return self

    def __next__(self) -> Batch:
        """The next batch; errors of the thread are raised here."""
        if self._queue is None:
            self._start()
        queue: Any = self._queue
        item = queue.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        batch, self._state = item
        taken: Batch = batch
        return taken

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that was taken, not the last one prepared."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position; what was prepared is thrown away."""
        self.close()
        self._source.load_state_dict(state)
        self._state = self._source.state_dict()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        while self._thread is not None and self._thread.is_alive():
            if self._queue is not None and not self._queue.empty():
                self._queue.get_nowait()
            self._thread.join(timeout=0.01)
        self._thread = self._queue = None
        self._stop.clear()

    def _start(self) -> None:
        self._queue = Queue(maxsize=self._ahead)
        self._thread = Thread(target=self._run, args=(self._queue,), daemon=True)
        self._thread.start()

    def _run(self, queue: "Queue[Any]") -> None:
        try:
            while not self._stop.is_set():
                batch = next(self._source)
                self._put(queue, (batch, self._source.state_dict()))
        except BaseException as error:  # handed to the consumer, StopIteration included
            self._put(queue, error)

    def _put(self, queue: "Queue[Any]", item: Any) -> None:
        while not self._stop.is_set():
            try:
                queue.put(item, timeout=0.05)
                return
            except Full:  # look whether to stop, then try again
                continue

"""Sources of documents -> one stream, shuffled if asked, that resumes at any document.

Keeps the order and the position, and reports damage by file and line. Knows no file formats.
Memory is bounded by a window of documents, and the position by a dozen numbers.
"""

import hashlib
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from openelm_mlx.text_formats import START, Place, Record

logger = logging.getLogger(__name__)

OnDamage = Literal["skip", "fail"]

_LANES = 8  # files read side by side when shuffling
_WINDOW = 1024  # documents shuffled among themselves
_WINDOW_CHARACTERS = 16 << 20  # or fewer, where they are long
_TOLD = 10  # damaged records told one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text and where it stands."""

    text: str
    source: str  # the file
    number: int  # line, item or row, from 1

    @property
    def name(self) -> str:
        """``file:line``."""
        return f"{self.source}:{self.number}"


class Source(Protocol):
    """Something that documents can be read from, from any place on."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def identity(self) -> str:
        """What tells it from others wherever it is kept; a position is valid for this."""

    def records(self, place: Place = START) -> Iterator[Record]:
        """Read on from a place."""


class DamageLog:
    """Reports damaged records: the first ones singly, the others by count.

    Args:
        on_damage: "fail" raises at the first, "skip" goes on.
    """

    def __init__(self, on_damage: OnDamage) -> None:
        if on_damage not in ("skip", "fail"):
            raise ValueError(f'on_damage must be "skip" or "fail", got {on_damage!r}')
        self.skipped = 0
        self._fail = on_damage == "fail"

    def report(self, source: str, record: Record) -> None:
        """Tell of one record.

        Raises:
            ValueError: naming file and line, if damage is not to be skipped.
        """
        message = f"{source}:{record.line}: {record.damage}"
        if self._fail:
            raise ValueError(
                f"{message}; mend or delete it, or skip such records (on_damage: skip)"
            )
        self.skipped += 1
        if self.skipped <= _TOLD:
            logger.warning("skipped %s", message)
        elif (self.skipped & (self.skipped - 1)) == 0:
            logger.warning("skipped %d damaged records so far, at last %s", self.skipped, message)


class DocumentStream:
    """Documents of many sources, as an iterator whose position can be saved.

    Unshuffled, sources are read one after another. Shuffled, their order is drawn anew for each
    epoch, eight are read side by side, and 1024 documents at a time are put in random order: all
    from ``seed`` and the epoch alone.

    Args:
        sources: where documents come from.
        shuffle: see above.
        seed: of the order.
        epochs: how often to read everything; None for ever.
        on_damage: whether a damaged record is skipped or ends the stream by an error.

    Raises:
        ValueError: if there are no sources, or from ``next``, naming file and line, at damage that
            is not skipped, or if a whole epoch holds no document.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        shuffle: bool = False,
        seed: int = 0,
        epochs: int | None = 1,
        on_damage: OnDamage = "fail",
    ) -> None:
        if not sources:
            raise ValueError("there are no files to read; name some")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs must be 1 or more, or none for ever; got {epochs}")
        self._sources, self._epochs = list(sources), epochs
        self._shuffle, self._seed = shuffle, seed
        self._settings = {
            "sources": fingerprint(sources),
            "count": len(sources),
            "shuffle": shuffle,
            "seed": seed,
        }
        self._damage = DamageLog(on_damage)
        self._window: list[Document] = []
        self._begin(epoch=0)

    @property
    def skipped(self) -> int:
        """Damaged records passed over so far."""
        return self._damage.skipped

    @property
    def epoch(self) -> int:
        """The epoch of the last document, from 0; at the end, the number of epochs."""
        return self._epoch

    def __iter__(self) -> Iterator[Document]:
        """The stream itself."""
        return self

    def __next__(self) -> Document:
        """The next document."""
        while self._index >= len(self._window):
            self._read_window()
        self._index += 1
        return self._window[self._index - 1]

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready position after the last document handed out: where its window began."""
        return {
            "settings": self._settings,
            "epoch": self._epoch,
            "windows": self._windows,
            "lanes": self._window_start,
            "index": self._index,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position.

        Raises:
            ValueError: if it belongs to other files, another order of them or another seed.
        """
        if state["settings"] != self._settings:
            raise ValueError(
                f"the saved position belongs to other data: {state['settings']}, and here are "
                f"{self._settings}; give the same files in the same order, or start anew"
            )
        self._begin(state["epoch"])
        self._windows = state["windows"] - 1
        self._lanes.load(state["lanes"])
        if state["index"]:
            self._read_window()
        else:
            self._windows += 1
        self._index = state["index"]

    def _begin(self, epoch: int) -> None:
        order = list(range(len(self._sources)))
        if self._shuffle:
            random.Random(f"{self._seed} {epoch}").shuffle(order)
        sources = [self._sources[i] for i in order]
        self._lanes = _Lanes(sources, _LANES if self._shuffle else 1, self._damage)
        self._epoch, self._windows, self._index = epoch, 0, 0
        self._window, self._window_start = [], self._lanes.state()

    def _read_window(self) -> None:
        """Read the next documents and shuffle them; begins the next epoch where there are none."""
        if self._epoch == self._epochs:
            raise StopIteration
        start, window, characters = self._lanes.state(), [], 0
        for document in self._lanes:
            window.append(document)
            characters += len(document.text)
            if not self._shuffle or len(window) == _WINDOW or characters > _WINDOW_CHARACTERS:
                break
        if not window and not self._windows:
            raise ValueError(
                f"no document in {len(self._sources)} files ({self._sources[0].name}, ...), "
                f"{self.skipped} damaged records skipped; give files with text"
            )
        if not window:
            self._begin(self._epoch + 1)
            return
        if self._shuffle:
            random.Random(f"{self._seed} {self._epoch} {self._windows}").shuffle(window)
        self._window, self._window_start, self._index = window, start, 0
        self._windows += 1


def fingerprint(sources: Sequence[Source]) -> str:
    """A short name for a list of sources, by their identities and order."""
    text = "\n".join(source.identity for source in sources)
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


class _Lanes:
    """Documents of several sources in turn; a source that ends gives its lane to the next one."""

    def __init__(self, sources: Sequence[Source], width: int, damage: DamageLog) -> None:
        self._sources, self._damage = sources, damage
        first = list(range(min(width, len(sources))))
        self.load({"open": [[i, *START] for i in first], "next": len(first), "turn": 0})

    def state(self) -> dict[str, Any]:
        """Sources being read, with their places; the next source and whose turn it is."""
        places = [[i, *place] for i, place, _ in self._open]
        return {"open": places, "next": self._next, "turn": self._turn}

    def load(self, state: Mapping[str, Any]) -> None:
        """Read on from a state."""
        self._open = [self._lane(i, (line, offset)) for i, line, offset in state["open"]]
        self._next, self._turn = state["next"], state["turn"]

    def _lane(self, index: int, place: Place = START) -> tuple[int, Place, Iterator[Record]]:
        return index, place, self._sources[index].records(place)

    def __iter__(self) -> Iterator[Document]:
        return self

    def __next__(self) -> Document:
        while self._open:
            index, _, records = self._open[self._turn]
            record = next(records, None)
            if record is None:
                self._replace()
                continue
            self._open[self._turn] = index, record.after, records
            if record.damage:
                self._damage.report(self._sources[index].name, record)
                continue
            self._turn = (self._turn + 1) % len(self._open)
            name = self._sources[index].name
            return Document(text=record.text, source=name, number=record.line)
        raise StopIteration

    def _replace(self) -> None:
        if self._next < len(self._sources):
            self._open[self._turn] = self._lane(self._next)
            self._next += 1
            return
        del self._open[self._turn]
        self._turn = self._turn % max(1, len(self._open))

"""CoreNet's own way from files to batches: whole files to each worker, one piece a sequence.

As apple/corenet ``general_lm.py`` at 1aa3acd with torch's DataLoader: for runs that are to see what
Apple's saw. Pieces are cut at L + 1 tokens, the rest is lost, or padded.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from openelm_mlx.batches import Batch
from openelm_mlx.data_encoding import Encoder, TextTokenizer, check_rows, nothing_left
from openelm_mlx.document_stream import DamageLog, OnDamage, Source, fingerprint
from openelm_mlx.text_filters import CORENET_FILTERS, TextFilters
from openelm_mlx.text_formats import START, Place


class FileOrder:
    """Which files one worker reads in which epoch.

    Args:
        files: number of files.
        worker: which of the workers of all ranks.
        workers: their number.
        shuffle: False leaves only the first epoch in order, as in CoreNet.
        seed: CoreNet's ``random_seed``.
    """

    def __init__(
        self, files: int, *, worker: int, workers: int, shuffle: bool = True, seed: int = 0
    ) -> None:
        self._rng = random.Random(seed)
        order = list(range(files))
        if shuffle:
            self._rng.shuffle(order)
        if files % workers:  # so that every worker has as many
            order += self._rng.choices(order, k=-files % workers)
        self._order = order[worker::workers]
        self._epoch = 0
        self._first = (self._rng.getstate(), list(self._order))

    def epoch(self, epoch: int) -> list[int]:
        """Indices of the files, in order of reading; each epoch reorders the one before."""
        if epoch < self._epoch:
            state, order = self._first
            self._rng.setstate(state)
            self._order, self._epoch = list(order), 0
        while self._epoch < epoch:
            self._rng.shuffle(self._order)
            self._epoch += 1
        return list(self._order)


class CoreNetBatches:
    """Endless batches in CoreNet's order, one document piece a sequence.

    Files are shared out over the workers of all ranks, whole; in turn, each of a rank's workers
    makes that rank's rows of one batch. Row i of a global batch belongs to CoreNet's rank
    ``i % ranks``. Every rank here reads everything and keeps the rows rank, rank + world_size, ...,
    so that a run can resume on another number of machines.

    Args:
        sources: of :func:`openelm_mlx.data_sources.find_sources`.
        tokenizer: as CoreNet's.
        batch_size: rows of a global batch: ``train_batch_size0`` x ranks.
        max_seq_length: L.
        rank: which rows are ours.
        world_size: number of machines; divides ``batch_size``.
        ranks: ranks of the run that is followed; by default ``world_size``, or what a loaded state
            says. Divides ``batch_size``.
        workers: data workers of each rank; CoreNet's recipes have 4.
        filters: by default those of Apple's recipes.
        shuffle: CoreNet's ``shuffle_data``.
        seed: CoreNet's ``random_seed``.
        pad_id: id of padding; by default the tokenizer's, which may be ``vocab_size`` as in
            CoreNet: give another where the model has no such row. Masks are made from lengths.
        bos: CoreNet's ``append_sot_token``.
        eos: CoreNet's ``append_eot_token``.
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
        ranks: int | None = None,
        workers: int = 1,
        filters: TextFilters = CORENET_FILTERS,
        shuffle: bool = True,
        seed: int = 0,
        pad_id: int | None = None,
        bos: bool = True,
        eos: bool = True,
        on_damage: OnDamage = "fail",
    ) -> None:
        check_rows(batch_size, max_seq_length, rank, world_size)
        if not sources:
            raise ValueError("there are no files to read; name some")
        if workers < 1:
            raise ValueError(f"workers must be 1 or more, got {workers}")
        self._sources = list(sources)
        self._encoder = Encoder(tokenizer, filters, bos=bos, eos=eos)
        self._batch_size, self._length = batch_size, max_seq_length
        self._rank, self._world = rank, world_size
        self._pad_id = tokenizer.pad_id if pad_id is None else pad_id
        self._damage = DamageLog(on_damage)
        self._settings: dict[str, Any] = {
            **{"sources": fingerprint(sources), "count": len(sources), "shuffle": shuffle},
            **{"seed": seed, "workers": workers},
        }
        self._begin(ranks or world_size)

    def _begin(self, ranks: int) -> None:
        check_rows(self._batch_size, self._length, 0, ranks)
        workers = self._settings["workers"]
        self._ranks, self._step = ranks, 0
        self._workers = [
            _Worker(
                self._sources,
                FileOrder(
                    len(self._sources),
                    worker=worker,
                    workers=ranks * workers,
                    shuffle=self._settings["shuffle"],
                    seed=self._settings["seed"],
                ),
                self._encoder,
                self._damage,
            )
            for worker in range(ranks * workers)
        ]

    @property
    def skipped(self) -> int:
        """Damaged records passed over so far."""
        return self._damage.skipped

    def __iter__(self) -> Iterator[Batch]:
        """The source itself."""
        return self

    def __next__(self) -> Batch:
        """The next batch."""
        count = self._settings["workers"]
        turn = self._workers[self._step % count :: count]  # one worker of each rank
        rows = [next(turn[i % self._ranks]) for i in range(self._batch_size)]
        self._step += 1
        return self._batch(rows[self._rank :: self._world])

    def state_dict(self) -> dict[str, Any]:
        """The places of all workers: epoch, file, line, byte and pieces taken of each."""
        return {
            "settings": self._settings,
            "ranks": self._ranks,
            "step": self._step,
            "workers": [worker.state() for worker in self._workers],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position, with as many ranks to follow as it says.

        Raises:
            ValueError: if it belongs to other files or settings.
        """
        if state["settings"] != self._settings:
            raise ValueError(
                f"the saved position belongs to other data: {state['settings']}, and here are "
                f"{self._settings}; give the same files and settings, or start anew"
            )
        self._begin(state["ranks"])
        self._step = state["step"]
        for worker, place in zip(self._workers, state["workers"], strict=True):
            worker.load(place)

    def _batch(self, rows: Sequence[tuple[list[int], str]]) -> Batch:
        """Arrays of rows, made without a graph: this may run in a thread."""
        ids = np.full((len(rows), self._length + 1), self._pad_id, np.int32)
        mask = np.zeros((len(rows), self._length), np.float32)
        for i, (tokens, _) in enumerate(rows):
            kept = tokens[: self._length + 1]
            ids[i, : len(kept)] = kept
            mask[i, : len(kept) - 1] = 1
        return Batch(
            tokens=mx.array(np.ascontiguousarray(ids[:, :-1])),
            targets=mx.array(np.ascontiguousarray(ids[:, 1:])),
            mask=mx.array(mask),
            samples=tuple(name for _, name in rows),
        )


class _Worker:
    """The pieces of one worker's files, for ever."""

    def __init__(
        self, sources: Sequence[Source], order: FileOrder, encoder: Encoder, damage: DamageLog
    ) -> None:
        self._sources, self._order = sources, order
        self._encoder, self._damage = encoder, damage
        self.load([0, 0, *START, 0])

    def state(self) -> list[int]:
        """Epoch, file of the epoch, place of the record, and how many of its pieces are taken."""
        return [self._epoch, self._file, *self._before, self._taken]

    def load(self, state: Sequence[int]) -> None:
        """Read on from a state."""
        self._epoch, self._file, line, offset, skip = state
        self._before: Place = (line, offset)
        self._taken = 0
        self._pieces = self._read()
        for _ in range(skip):
            next(self._pieces)

    def __next__(self) -> tuple[list[int], str]:
        return next(self._pieces)

    def _read(self) -> Iterator[tuple[list[int], str]]:
        place, barren = self._before, 0
        while True:
            order = self._order.epoch(self._epoch)
            while self._file < len(order):
                source = self._sources[order[self._file]]
                for record in source.records(place):
                    if record.damage:
                        self._damage.report(source.name, record)
                    for ids in () if record.damage else self._encoder.encode(record.text):
                        self._taken, barren = self._taken + 1, 0
                        yield ids, f"{source.name}:{record.line}"
                    self._before, self._taken = record.after, 0
                self._file, place = self._file + 1, START
                self._before = START
            self._epoch, self._file, barren = self._epoch + 1, 0, barren + 1
            if barren > 1:
                raise nothing_left(self._encoder.filters)

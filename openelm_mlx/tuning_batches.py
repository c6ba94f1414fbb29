"""Samples -> batches: every sample once an epoch, in an order that a seed decides.

Rows and shapes are ``packing``'s. The order depends on seed and epoch alone, never on the number of
ranks, so that a run resumes exactly, with as many ranks as there are.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openelm_mlx.batches import Batch
from openelm_mlx.packing import LengthBuckets, RowBatch, lay_rows
from openelm_mlx.tuning_data import Sample

Rows = Sequence[Sequence[int]]  # items of each row


class EpochBatches(ABC):
    """Batches of items of different lengths, epoch after epoch.

    Args:
        lengths: tokens that each item needs of a row.
        digest: of the items' contents; a position is valid for these alone.
        batch_size: items of a global batch, over all ranks; on average, where rows are shared.
        share_rows: whether short items share rows, kept apart by ``Batch.segments``.
        seed: of the order.
        rank: of this process, which gets the rows rank, rank + world_size, ... of each batch.
        world_size: number of ranks.
        epochs: None for endless.

    Raises:
        ValueError: if there are no items, or a number is out of range.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        digest: str,
        *,
        batch_size: int,
        share_rows: bool,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
    ) -> None:
        if batch_size < 1 or (epochs is not None and epochs < 1):
            raise ValueError(
                f"batch_size and epochs must be at least 1, got {batch_size} and {epochs}"
            )
        self.plan = LengthBuckets(lengths, batch_size=batch_size, share_rows=share_rows)
        self._seed, self._epochs = seed, epochs
        self._rank, self._world_size = rank, world_size
        self._identity = {
            **{"samples": len(lengths), "digest": digest},
            **{"batch_size": batch_size, "share_rows": share_rows, "seed": seed},
        }
        self._epoch = self._position = 0
        self._batches = self.plan.epoch(seed, 0)

    def __iter__(self) -> Iterator[Batch]:
        """The source itself."""
        return self

    def __next__(self) -> Batch:
        """This rank's rows of the next batch; StopIteration after the last epoch."""
        if self._position == len(self._batches):
            if self._epochs is not None and self._epoch + 1 >= self._epochs:
                raise StopIteration
            self._epoch, self._position = self._epoch + 1, 0
            self._batches = self.plan.epoch(self._seed, self._epoch)
        batch = self._batches[self._position]
        self._position += 1
        return self._of_rank(batch)

    def once(self) -> Iterator[Batch]:
        """Each item once, in the order of the first epoch, whatever the position is."""
        for batch in self.plan.epoch(self._seed, 0):
            yield self._of_rank(batch)

    def state_dict(self) -> dict[str, Any]:
        """Epoch and position in it, and what they are a position of."""
        return {**self._identity, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position.

        Raises:
            ValueError: if it is one of other samples, or of another batch size or seed.
        """
        for name, value in self._identity.items():
            if state.get(name) != value:
                what = (
                    "the data set (or how it is encoded) has changed"
                    if name in ("samples", "digest")
                    else f"{name} was {state.get(name)} and is now {value}"
                )
                raise ValueError(
                    f"this run cannot resume: {what} since its state was saved; restore it, or "
                    "start anew with another --output"
                )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._batches = self.plan.epoch(self._seed, self._epoch)

    @abstractmethod
    def _batch(self, rows: Rows, length: int) -> Batch:
        """A batch of these rows, padded to ``length``; a row may be empty."""

    def _of_rank(self, batch: RowBatch) -> Batch:
        return self._batch(batch.of_rank(self._rank, self._world_size), batch.length)


class TuningBatches(EpochBatches):
    """Batches of tuning samples; the last one of an epoch may be smaller.

    Args:
        samples: from :func:`openelm_mlx.tuning_data.load_split`.
        batch_size: samples of a global batch, over all ranks; on average, where rows are shared.
        max_seq_length: no sample is longer.
        share_rows: whether short samples share rows, kept apart by ``Batch.segments``.
        seed: of the order.
        rank: of this process.
        world_size: number of ranks.
        epochs: None for endless.

    Raises:
        ValueError: if there are no samples, one is too long, or a number is out of range.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        batch_size: int,
        max_seq_length: int,
        share_rows: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
    ) -> None:
        lengths = [len(sample.tokens) - 1 for sample in samples]
        if max(lengths, default=0) > max_seq_length:
            raise ValueError(
                f"a sample has {max(lengths)} tokens, more than max_seq_length {max_seq_length}"
            )
        self._tokens = [sample.tokens for sample in samples]
        self._masks = [sample.mask for sample in samples]
        self._names = [sample.name for sample in samples]
        super().__init__(
            lengths,
            digest_of(samples),
            batch_size=batch_size,
            share_rows=share_rows,
            seed=seed,
            rank=rank,
            world_size=world_size,
            epochs=epochs,
        )

    def _batch(self, rows: Rows, length: int) -> Batch:
        return lay_rows(
            rows,
            length,
            self._tokens,
            self._masks,
            self._names,
            separate=self.plan.share_rows,
        )


class EvalBatches:
    """Each sample exactly once, as often as it is iterated; this rank's share of it.

    Args:
        samples: from :func:`openelm_mlx.tuning_data.load_split`.
        batch_size: samples of a global batch; on average, where rows are shared.
        max_seq_length: no sample is longer.
        share_rows: see :class:`TuningBatches`.
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        batch_size: int,
        max_seq_length: int,
        share_rows: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._source = TuningBatches(
            samples,
            batch_size=batch_size,
            max_seq_length=max_seq_length,
            share_rows=share_rows,
            rank=rank,
            world_size=world_size,
        )

    def __iter__(self) -> Iterator[Batch]:
        """All batches, always the same ones."""
        return self._source.once()


def digest_of(samples: Sequence[Sample]) -> str:
    """A fingerprint of samples: their ids, masks and order."""
    state = hashlib.blake2b(digest_size=16)
    for sample in samples:
        state.update(len(sample.tokens).to_bytes(8, "little"))
        state.update(sample.tokens.tobytes())
        state.update(sample.mask.tobytes())
    return state.hexdigest()

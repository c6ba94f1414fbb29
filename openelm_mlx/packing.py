"""Samples of known lengths -> batches of few shapes with little padding, in an order of an epoch.

Rows hold one sample each, or several that may not see each other. Knows lengths and indices, and
how ids are laid into rows; not what the samples are.
"""

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from openelm_mlx.batches import Batch
from openelm_mlx.packing_plan import alone, shared

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class RowBatch:
    """A global batch: the samples of each row, and the length that rows are padded to."""

    rows: tuple[tuple[int, ...], ...]
    length: int

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, length)."""
        return len(self.rows), self.length

    def of_rank(self, rank: int, world_size: int) -> tuple[tuple[int, ...], ...]:
        """Rows rank, rank + world_size, ...; empty ones make all ranks have as many."""
        rows = self.rows + ((),) * (-len(self.rows) % world_size)
        return rows[rank::world_size]


class LengthBuckets:
    """A plan that uses every sample once an epoch.

    Which lengths stand together is settled once, so that the shapes and the number of batches are
    the same in every epoch; which samples, and in what order, is drawn from seed and epoch. Batches
    hold about the same number of tokens, so that the number of samples in one varies a little.

    Args:
        lengths: input positions of each sample: its tokens less one.
        batch_size: samples of a global batch, on average; an epoch has
            ceil(samples / batch_size) batches, and one more for each sample that is longer than
            a whole average batch.
        token_budget: or: positions of a global batch, padding included.
        share_rows: whether short samples share a row (their segments are kept apart by
            ``Batch.segments``). Otherwise each has a row of its own, padded to one of a few
            lengths; then ``batch_size`` is exact.
        max_shapes: most (rows, length) pairs, each of which is traced once.

    Attributes:
        share_rows: whether rows hold several samples; never with a ``batch_size`` of 1.
        shapes: those there are.
        share: tokens of samples / positions processed.

    Raises:
        ValueError: if there are no samples, an empty one, one that exceeds the budget, or not
            exactly one of ``batch_size`` and ``token_budget``.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        batch_size: int | None = None,
        token_budget: int | None = None,
        share_rows: bool = True,
        max_shapes: int = 8,
    ) -> None:
        self._lengths = [int(n) for n in lengths]
        _check(self._lengths, batch_size, token_budget, max_shapes)
        total, count = sum(self._lengths), len(self._lengths)
        budget = token_budget or max(1, round((batch_size or 1) * total / count))
        ordered = sorted(self._lengths)
        self.share_rows = share_rows and batch_size != 1
        if self.share_rows:
            split = bisect_left(ordered, budget + 1)
            self._groups = alone(ordered[split:], 1, budget, max_shapes - 2)
            self._groups += shared(ordered[:split], budget, limit=token_budget)
        else:
            self._groups = alone(ordered, batch_size, budget, max_shapes - 1)
        self.shapes = tuple(sorted(set().union(*(group.shapes for group in self._groups))))
        self.share = total / sum(len(group.rows) * group.length for group in self._groups)

    def __len__(self) -> int:
        """Batches of an epoch."""
        return sum(-(-len(group.rows) // group.rows_per_batch) for group in self._groups)

    def epoch(self, seed: int, epoch: int) -> list[RowBatch]:
        """The batches of an epoch, smaller ones last."""
        rng = random.Random(f"{seed} {epoch}")
        order = list(range(len(self._lengths)))
        rng.shuffle(order)
        pools: dict[int, list[int]] = {}
        for index in order:
            pools.setdefault(self._lengths[index], []).append(index)
        whole: list[RowBatch] = []
        smaller: list[RowBatch] = []
        for group in self._groups:
            rows = [tuple(pools[length].pop() for length in slots) for slots in group.rows]
            rng.shuffle(rows)
            for start in range(0, len(rows), group.rows_per_batch):
                part = tuple(rows[start : start + group.rows_per_batch])
                batch = RowBatch(part, group.length)
                (whole if len(part) == group.rows_per_batch else smaller).append(batch)
        rng.shuffle(whole)
        return whole + smaller


def length_buckets(
    lengths: Sequence[int],
    *,
    batch_size: int | None = None,
    token_budget: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    share_rows: bool = True,
    max_shapes: int = 8,
) -> list[RowBatch]:
    """The batches of one epoch; see :class:`LengthBuckets`."""
    plan = LengthBuckets(
        lengths,
        batch_size=batch_size,
        token_budget=token_budget,
        share_rows=share_rows,
        max_shapes=max_shapes,
    )
    return plan.epoch(seed, epoch)


def lay_rows(
    rows: Sequence[Sequence[int]],
    length: int,
    tokens: Sequence[Array],
    masks: Sequence[Array],
    names: Sequence[str] = (),
    *,
    separate: bool | None = None,
) -> Batch:
    """Lay samples into rows.

    Args:
        rows: indices of the samples of each row; a row may be empty.
        length: L, of a row.
        tokens: (n,) int32 ids of every sample, of which n - 1 are inputs.
        masks: (n,) of every sample, 1 where a token is learned; the first one never is.
        names: of every sample.
        separate: whether to give ``segments``; by default where rows hold several samples. Say
            :attr:`LengthBuckets.share_rows` to have the same fields in every batch.

    Returns:
        Arrays (B, L) made without a graph; padding is id 0.
    """
    shape = (len(rows), length)
    ids, targets, segments = (np.zeros(shape, np.int32) for _ in range(3))
    mask = np.zeros(shape, np.float32)
    for i, row in enumerate(rows):
        start = 0
        for number, index in enumerate(row, start=1):
            sample, end = tokens[index], start + len(tokens[index]) - 1
            ids[i, start:end], targets[i, start:end] = sample[:-1], sample[1:]
            mask[i, start:end] = masks[index][1:]
            segments[i, start:end] = number
            start = end
    if separate is None:
        separate = any(len(row) > 1 for row in rows)
    return Batch(
        tokens=mx.array(ids),
        targets=mx.array(targets),
        mask=mx.array(mask),
        segments=mx.array(segments) if separate else None,
        samples=tuple(names[index] for row in rows for index in row) if names else (),
    )


def _check(
    lengths: Sequence[int], batch_size: int | None, token_budget: int | None, max_shapes: int
) -> None:
    if not lengths or min(lengths) < 1:
        raise ValueError(
            "there are no samples to batch" if not lengths else "a sample has no input token"
        )
    if (batch_size is None) == (token_budget is None) or (batch_size or token_budget or 0) < 1:
        raise ValueError(
            f"give one of batch_size and token_budget, 1 or more; got {batch_size} and "
            f"{token_budget}"
        )
    if token_budget is not None and token_budget < max(lengths):
        raise ValueError(
            f"the longest sample has {max(lengths)} tokens, more than the budget of {token_budget} "
            "a batch; raise the budget or shorten samples with max_seq_length"
        )
    if max_shapes < 3:
        raise ValueError(f"max_shapes must be 3 or more, got {max_shapes}")

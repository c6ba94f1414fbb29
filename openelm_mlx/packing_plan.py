"""Lengths of samples -> rows of few lengths with little padding, and how many make a batch.

Knows lengths alone, each of which stands for some sample.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Slots = tuple[int, ...]  # lengths of the samples of one row

_TRIED = 2048  # lengths that plans are tried on
_TIGHT = 0.975  # share of useful tokens past which shorter rows are worth more


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of one length, cut into batches of so many."""

    length: int
    rows_per_batch: int
    rows: list[Slots]

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """(rows, length) of the whole batches and of a smaller last one."""
        whole, rest = divmod(len(self.rows), self.rows_per_batch)
        counts = [self.rows_per_batch] * (whole > 0) + [rest] * (rest > 0)
        return {(count, self.length) for count in counts}


def shared(ordered: Sequence[int], budget: int, *, limit: int | None) -> list[RowGroup]:
    """Several samples a row: of the numbers of rows and lengths to choose from, the tightest."""
    if not ordered:
        return []
    total, longest = sum(ordered), ordered[-1]
    tried = ordered[:: -(-len(ordered) // _TRIED)]
    most_rows = 1 << (budget // longest).bit_length() - 1
    best = (-1.0, 0, 0)
    for rows in filter(None, (most_rows, most_rows // 2, most_rows // 4)):
        even = -(-total // (-(-total // budget) * rows))  # length if nothing were lost
        least, most = (even, even * 3 // 2)
        if limit is not None:
            least, most = limit // rows * 3 // 4, limit // rows
        least = max(longest, least)
        for length in range(least, max(least, most) + 1, max(1, least // 128)):
            share = sum(tried) / (len(best_fit(tried, length)) * length)
            excess = 0 if limit else length / even - 1  # of tokens in a batch over the average
            best = max(best, (min(share, _TIGHT) - excess / 25, rows, -length))
    _, rows, length = best
    return [RowGroup(-length, rows, best_fit(ordered, -length))]


def best_fit(ordered: Sequence[int], length: int) -> list[Slots]:
    """Best-fit decreasing: each sample into the row with the least room that will do."""
    room: dict[int, list[list[int]]] = {}
    rooms: list[int] = []  # its keys, sorted
    for n in reversed(ordered):
        at = bisect_left(rooms, n)
        if at == len(rooms):
            row, left = [], length
        else:
            left = rooms[at]
            row = room[left].pop()
            if not room[left]:
                del room[left], rooms[at]
        row.append(n)
        left -= n
        if left not in room:
            room[left] = []
            insort(rooms, left)
        room[left].append(row)
    return [tuple(row) for left in rooms for row in room[left]]


def alone(ordered: Sequence[int], batch_size: int | None, budget: int, most: int) -> list[RowGroup]:
    """One sample a row: the lengths that waste least; what fills no batch moves up a length."""
    if not ordered:
        return []
    plans = [
        _promoted(ordered, lengths, batch_size, budget) for lengths in _best_lengths(ordered, most)
    ]
    return min(plans, key=lambda groups: sum(len(g.rows) * g.length for g in groups))


def _promoted(
    ordered: Sequence[int], lengths: Sequence[int], batch_size: int | None, budget: int
) -> list[RowGroup]:
    groups, start = [], 0
    for length in lengths:
        rows = batch_size or max(1, budget // length)
        end = bisect_left(ordered, length + 1)
        if length != lengths[-1]:
            end -= (end - start) % rows
        if end > start:
            groups.append(RowGroup(length, rows, [(n,) for n in ordered[start:end]]))
        start = end
    return groups


def _best_lengths(ordered: Sequence[int], most: int) -> list[list[int]]:
    """For 1, 2, ... ``most`` lengths those with the least padding, by dynamic programming."""
    values, counts = np.unique(np.array(ordered), return_counts=True)
    below = np.array([0, *accumulate(counts.tolist())])
    n = len(values)
    cost = np.full(n + 1, np.inf)
    cost[0] = 0
    choices: list[Array] = []
    found = []
    for _ in range(min(most, n)):
        following, choice = np.full(n + 1, np.inf), np.zeros(n + 1, np.int64)
        for i in range(1, n + 1):
            padded = cost[:i] + (below[i] - below[:i]) * values[i - 1]
            choice[i] = int(padded.argmin())
            following[i] = padded[choice[i]]
        cost = following
        choices.append(choice)
        lengths, i = [], n
        for chosen in reversed(choices):
            lengths.append(int(values[i - 1]))
            i = int(chosen[i])
        found.append(lengths[::-1])
    return found

"""Palettes: a few shared values for each group of output channels, by k-means in one dimension.

The float16 values of a group are counted first. With prefix sums over the sorted distinct values a
step of Lloyd's algorithm costs a handful of searches, whatever the size of the group.
"""

from dataclasses import dataclass

import numpy as np

GROUP = 16  # output channels that share a palette
_ROUNDS = 60  # of Lloyd's algorithm, at most
_ENOUGH = 1e-4  # relative gain of a round below which it ends
_WORTH = 1.2  # how many times its cost a move has to gain
_LOOK = 4  # rounds from one search for a move to the next, where the last found none
_CELLS = 256  # of equal weight, in which the density is looked at for a start


@dataclass(frozen=True, kw_only=True)
class Palettes:
    """A matrix as Core ML's ``constexpr_lut_to_dense`` stores it.

    Attributes:
        indices: (out, in) uint8, below 2^bits.
        bits: of an index.
        values: (row groups, column groups, 2^bits) float16.
    """

    indices: np.ndarray
    bits: int
    values: np.ndarray


@dataclass(frozen=True, kw_only=True)
class _Histogram:
    """Distinct values, ascending; prefix sums with a leading 0, (n + 1,) float64."""

    values: np.ndarray  # (n,)
    counts: np.ndarray
    sums: np.ndarray
    squares: float


def palettise(weight: np.ndarray, bits: int, group: int) -> Palettes:
    """Palettes of least squared error (a local optimum, as k-means finds it).

    Args:
        weight: (out, in) float16, finite.
        bits: of an index; a palette has 2^bits values.
        group: output channels under one palette; it divides out.
    """
    rows, columns = weight.shape
    keys = _ordered(weight).reshape(rows // group, group * columns)
    indices = np.empty(keys.shape, np.uint8)
    values = np.empty((rows // group, 1, 2**bits), np.float16)
    for number, part in enumerate(keys):
        values[number, 0], indices[number] = _one_group(part, 2**bits)
    return Palettes(indices=indices.reshape(rows, columns), bits=bits, values=values)


def _ordered(weight: np.ndarray) -> np.ndarray:
    """Float16 as uint16 that sort as the numbers do."""
    bits = np.ascontiguousarray(weight).view(np.uint16)
    return bits ^ np.where(bits >> 15, np.uint16(0xFFFF), np.uint16(0x8000))


def _from_ordered(keys: np.ndarray) -> np.ndarray:
    keys = keys.astype(np.uint16)
    return (keys ^ np.where(keys >> 15, np.uint16(0x8000), np.uint16(0xFFFF))).view(np.float16)


def _one_group(keys: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The palette (size,) float16, ascending, and the index of each weight."""
    counts = np.bincount(keys, minlength=1 << 16)
    present = np.flatnonzero(counts)
    found = _from_ordered(present).astype(np.float64)
    if len(present) <= size:
        palette = np.full(size, found[-1])
        palette[: len(found)] = found
    else:
        palette = np.sort(_lloyd(_histogram(found, counts[present]), size).astype(np.float16))
    nearest = np.zeros(1 << 16, np.uint8)
    nearest[present] = np.searchsorted(_borders(palette.astype(np.float64)), found)
    return palette.astype(np.float16), nearest[keys]


def _histogram(values: np.ndarray, counts: np.ndarray) -> _Histogram:
    weighted = counts * values
    start = np.zeros(1)
    return _Histogram(
        values=values,
        counts=np.concatenate([start, np.cumsum(counts)]),
        sums=np.concatenate([start, np.cumsum(weighted)]),
        squares=float(weighted @ values),
    )


def _borders(palette: np.ndarray) -> np.ndarray:
    return (palette[1:] + palette[:-1]) / 2


def _lloyd(histogram: _Histogram, size: int) -> np.ndarray:
    """Lloyd's algorithm, which moves a value from where it is idle to where it is missed.

    Without such moves it ends far from the best palette where a few weights lie far out.
    """
    palette, before = _start(histogram, size), np.inf
    cuts = np.zeros(size + 1, np.int64)
    cuts[-1] = len(histogram.values)
    moved: np.ndarray | None = None
    for number in range(_ROUNDS):
        cuts[1:-1] = np.searchsorted(histogram.values, _borders(palette))
        counts, sums = _between(histogram.counts, cuts), _between(histogram.sums, cuts)
        palette = np.where(counts > 0, sums / np.maximum(counts, 1), palette)
        error = histogram.squares - float(sums @ palette)
        settled = before - error <= _ENOUGH * error
        look = settled or moved is not None or number % _LOOK == 0
        moved = _moved(histogram, palette, cuts, counts) if look else None
        if settled and moved is None:
            break
        palette, before = palette if moved is None else moved, error
    return palette


def _moved(
    histogram: _Histogram, palette: np.ndarray, cuts: np.ndarray, counts: np.ndarray
) -> np.ndarray | None:
    """Two neighbours joined and another cell split in two, where that lowers the error."""
    both = counts[1:] + counts[:-1]
    cost = counts[1:] * counts[:-1] / np.maximum(both, 1) * (palette[1:] - palette[:-1]) ** 2
    middle = np.searchsorted(histogram.values, palette)
    left = histogram.counts[middle] - histogram.counts[cuts[:-1]]
    low = histogram.sums[middle] - histogram.sums[cuts[:-1]]
    right = counts - left
    away = np.where(left > 0, left * palette - low, 0)  # how far the halves' sums lie from it
    gain = away**2 * counts / np.maximum(left * right, 1)
    split = int(gain.argmax())
    cost[max(split - 1, 0) : split + 1] = np.inf  # its own borders stay
    joined = int(cost.argmin())
    if gain[split] <= _WORTH * cost[joined]:
        return None
    result = palette.copy()
    shift = away[split] / np.array([-left[split], right[split]])
    weights = counts[joined : joined + 2]
    result[joined] = (weights @ palette[joined : joined + 2]) / max(weights.sum(), 1)
    result = np.delete(result, [joined + 1, split])
    return np.sort(np.append(result, palette[split] + shift))


def _between(running: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    at_cuts = running[cuts]
    return at_cuts[1:] - at_cuts[:-1]


def _start(histogram: _Histogram, size: int) -> np.ndarray:
    """Values spread as the cube root of the density: best for many levels (Panter, Dite 1951)."""
    total = histogram.counts[-1]
    levels = np.linspace(0, total, _CELLS + 1)
    edges = histogram.values[
        np.minimum(np.searchsorted(histogram.counts[1:], levels), len(histogram.values) - 1)
    ]
    mass = np.cumsum(np.diff(edges) ** (2 / 3))  # of p^(1/3) over a cell of equal weight
    wanted = (np.arange(size) + 0.5) / size * mass[-1]
    return np.interp(wanted, np.concatenate([[0.0], mass]), edges)

"""Where the new tokens of a Core AI graph stand: rotary angles, causal mask, place in the cache.

T new tokens, S cached + new, R room in the cache, C context, E head_dim, K heads of one layer.
All follows from the shapes (1, T) and (1, S) of the inputs and the values of the positions.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from convert.coreai_api import Value
from convert.coreai_ops import Ops

_HIDDEN = -3e4  # added where a token may not look: exp gives 0, and float16 could hold it


class Span:
    """The last T of S positions.

    Args:
        ops: of the graph.
        ids: (1, T) int32.
        positions: (1, S) int32.
        table: (C, E) float32 from :func:`rotary_table`.

    Attributes:
        start: the first new position, (1,) int32.
        stop: S, likewise.
        mask: (T, S) float32, to be added to scores: 0 where a token may look.
    """

    def __init__(self, ops: Ops, ids: Value, positions: Value, table: Value) -> None:
        self._ops = ops
        self.stop = ops.size(positions, 1)
        self.start = ops.sub(self.stop, ops.size(ids, 1))
        every = ops.reshape(positions, -1)
        new = ops.reshape(ops.slice(every, [self.start], [self.stop]), -1, 1)  # (T, 1)
        self._half = table.type.shape[1] // 2
        angles = ops.face.gather_nd(table, new)  # (T, E)
        self._cos = ops.part(angles, 1, 0, self._half, 2)
        self._sin = ops.part(angles, 1, self._half, 2 * self._half, 2)
        self.mask = self._mask(new)

    def _mask(self, new: Value) -> Value:
        """(T, S) float32, to be added to scores: 0 where a token may look."""
        face = self._ops.face
        stop = face.reshape(self.stop, np.array([], np.int32))
        # Of rank 1: the optimiser breaks a comparison with a reshaped range.
        every = face.range_(np.array(0, np.int32), stop, np.array(1, np.int32))
        later = face.broadcasting_greater(every, new)
        return self._ops.mul(face.cast(later, np.float32), np.float32(_HIDDEN))

    def rotate(self, x: Value) -> Value:
        """RoPE on (1, heads, T, E) float32, the halves of a head as pairs."""
        ops = self._ops
        a = ops.part(x, 3, 0, self._half, 4)
        b = ops.part(x, 3, self._half, 2 * self._half, 4)
        rotated = (
            ops.sub(ops.mul(a, self._cos), ops.mul(b, self._sin)),
            ops.add(ops.mul(b, self._cos), ops.mul(a, self._sin)),
        )
        return ops.concat(rotated, 3)


class Memory:
    """The key-value cache of all layers during one pass.

    Layers read it and keep what is new to themselves; it is written once, at the end, since a
    write may copy the whole of it.

    Args:
        span: of the new tokens.
        caches: keys and values, (1, 1, sum of K, R, E) each.
    """

    def __init__(self, ops: Ops, span: Span, caches: Sequence[Value]) -> None:
        self._ops, self._span, self._caches = ops, span, caches
        self._new: list[tuple[Value, Value]] = []
        self._first = 0  # head of the next layer

    def extend(self, keys: Value, values: Value) -> list[Value]:
        """Add the next layer's (1, K, T, E); all its keys and values, (1, K, 1, S, E) each."""
        new, first = (keys, values), self._first
        self._new.append(new)
        self._first += keys.type.shape[1]
        return [self._past(c, first, x) for c, x in zip(self._caches, new, strict=True)]

    def written(self) -> list[Value]:
        """The caches with what is new of all layers."""
        return [
            self._write(cache, self._ops.concat(parts, 1))
            for cache, parts in zip(self._caches, zip(*self._new, strict=True), strict=True)
        ]

    def _past(self, cache: Value, first: int, new: Value) -> Value:
        """A layer's part of a cache, with ``new`` at its end."""
        ops, stop = self._ops, self._span.stop
        K, E = new.type.shape[1], new.type.shape[3]
        part = ops.slice(cache, (0, 0, first, 0, 0), (1, 1, first + K, stop, E))
        starts, stops = (0, 0, 0, self._span.start, 0), (1, K, 1, stop, E)
        update = ops.reshape(new, 1, K, 1, -1, E)
        whole = ops.write(ops.reshape(part, 1, K, 1, -1, E), starts, stops, update)
        return ops.reshape(whole, 1, K, 1, -1, E)

    def _write(self, cache: Value, new: Value) -> Value:
        """A cache with ``new`` (1, sum of K, T, E) in its place."""
        ops, heads, E = self._ops, new.type.shape[1], new.type.shape[3]
        starts, stops = (0, 0, 0, self._span.start, 0), (1, 1, heads, self._span.stop, E)
        return ops.write(cache, starts, stops, ops.reshape(new, 1, 1, heads, -1, E))


def rotary_table(context: int, head_dim: int, base: float) -> Any:
    """Cosines, then sines, of the angles of each position: (C, E) float32.

    A table is as exact on a GPU, whose own sine is not, as here.
    """
    frequencies = float(base) ** -(np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(context)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

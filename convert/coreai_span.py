"""Where the new tokens of a Core AI graph stand: rotary angles, causal mask, place in the cache.

T new tokens, S cached + new, R room in the cache, C context, E head_dim, K heads of one layer.
All follows from the shapes (1, T) and (1, S) of the inputs and the values of the positions.
"""

from typing import Any

import numpy as np

from convert.coreai_api import Value
from convert.coreai_ops import Index, Ops

_HIDDEN = -3e4  # added where a token may not look: exp gives 0, and float16 could hold it


class Span:
    """The last T of S positions.

    Args:
        ops: of the graph.
        ids: (1, T) int32.
        positions: (1, S) int32.
        table: (C, E) float32 from :func:`rotary_table`.
    """

    def __init__(self, ops: Ops, ids: Value, positions: Value, table: Value) -> None:
        self._ops = ops
        self._stop = ops.size(positions, 1)
        self._start = ops.sub(self._stop, ops.size(ids, 1))
        every = ops.reshape(positions, -1)
        new = ops.reshape(ops.slice(every, [self._start], [self._stop]), -1, 1)  # (T, 1)
        self._half = table.type.shape[1] // 2
        angles = ops.face.gather_nd(table, new)  # (T, E)
        self._cos = ops.part(angles, 1, 0, self._half, 2)
        self._sin = ops.part(angles, 1, self._half, 2 * self._half, 2)
        self.mask = self._mask(new)

    def _mask(self, new: Value) -> Value:
        """(T, S) float32, to be added to scores: 0 where a token may look."""
        face = self._ops.face
        stop = face.reshape(self._stop, np.array([], np.int32))
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

    def write(self, cache: Value, new: Value, first: int) -> Value:
        """The cache (1, 1, sum of K, R, E) with a layer's ``new`` (1, K, T, E) in its place."""
        K, E = new.type.shape[1], new.type.shape[3]
        update = self._ops.reshape(new, 1, 1, K, -1, E)
        starts: Index = (0, 0, first, self._start, 0)
        return self._ops.write(cache, starts, (1, 1, first + K, self._stop, E), update)

    def read(self, cache: Value, first: int, K: int, E: int) -> Value:
        """(1, K, 1, S, E): what a layer has in the cache, all K heads from ``first`` on."""
        found = self._ops.slice(cache, (0, 0, first, 0, 0), (1, 1, first + K, self._stop, E))
        return self._ops.reshape(found, 1, K, 1, -1, E)


def rotary_table(context: int, head_dim: int, base: float) -> Any:
    """Cosines, then sines, of the angles of each position: (C, E) float32.

    A table is as exact on a GPU, whose own sine is not, as here.
    """
    frequencies = float(base) ** -(np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(context)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)

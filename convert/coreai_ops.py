"""The tensor operations of a Core AI graph, in the few forms that a transformer needs.

Literals are int32, as the operations want them, or uint32 for the order of axes. Knows no model.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from convert.coreai_api import Program, Value, authoring

Index = Sequence[Value | int]  # places along each axis; a value is (1,) int32


class Ops:
    """Operations in one graph under construction.

    Args:
        program: receives the constants.
        dtype: ``np.float16`` or ``np.float32``: what matrices and the cache are kept in.
    """

    def __init__(self, program: Program, dtype: Any) -> None:
        self.program, self.dtype = program, dtype
        self.face = authoring()

    def wide(self, x: Value) -> Value:
        """``x`` in float32."""
        return x if self.dtype is np.float32 else self.face.cast(x, np.float32)

    def narrow(self, x: Value) -> Value:
        """A float32 ``x`` in ``dtype``."""
        return x if self.dtype is np.float32 else self.face.cast(x, self.dtype)

    def add(self, x: Value, y: Value) -> Value:
        """The sum, broadcast."""
        return self.face.broadcasting_add(x, y)

    def mul(self, x: Value, y: Value) -> Value:
        """The product, broadcast."""
        return self.face.broadcasting_mul(x, y)

    def sub(self, x: Value, y: Value) -> Value:
        """The difference, broadcast."""
        return self.face.broadcasting_sub(x, y)

    def matmul(self, x: Value, y: Value) -> Value:
        """The matrix product of the last two axes, broadcast over the others."""
        return self.face.broadcasting_batch_matmul(x, y)

    def reshape(self, x: Value, *shape: int) -> Value:
        """``x`` with other sizes, of which one may be -1."""
        return self.face.reshape(x, list(shape))

    def transpose(self, x: Value, *axes: int) -> Value:
        """``x`` with its axes in the given order."""
        return self.face.transpose(x, np.array(axes, np.uint32))

    def concat(self, parts: Sequence[Value], axis: int) -> Value:
        """Parts one after another along an axis."""
        return self.face.concat(np.array(axis, np.int32), list(parts))

    def softmax(self, x: Value) -> Value:
        """Along the last axis."""
        return self.face.softmax(x, np.array(-1, np.int32))

    def part(self, x: Value, axis: int, start: int, stop: int, rank: int) -> Value:
        """``x[..., start:stop, ...]`` of an array with ``rank`` axes."""
        starts, stops = [0] * rank, [_ALL] * rank
        starts[axis], stops[axis] = start, stop
        return self.slice(x, starts, stops)

    def slice(self, x: Value, starts: Index, stops: Index) -> Value:
        """``x`` from ``starts`` to ``stops``."""
        return self.face.slice_(x, self._index(starts), self._index(stops), [1] * len(starts))

    def write(self, x: Value, starts: Index, stops: Index, update: Value) -> Value:
        """``x`` with ``update`` in place of what lies from ``starts`` to ``stops``."""
        return self.face.slice_update(
            x, self._index(starts), self._index(stops), [1] * len(starts), update
        )

    def size(self, x: Value, axis: int) -> Value:
        """The size of an axis at run time, (1,) int32."""
        shape = self.face.cast(self.face.get_shape(x), np.int32)
        return self.face.slice_(shape, [axis], [axis + 1], [1])

    def rms_norm(self, x: Value, weight: np.ndarray, eps: float, name: str) -> Value:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last axis, float32 in and out."""
        mean = self.face.reduce_mean(self.mul(x, x), [-1])  # keeps the axis, whatever its text says
        scale = self.face.rsqrt(self.add(mean, np.float32(eps)))
        return self.mul(self.mul(x, scale), self.program.constant(weight, name))

    def _index(self, places: Index) -> Value | np.ndarray:
        if all(isinstance(place, int) for place in places):
            return np.array(places, np.int32)
        parts = [np.array([p], np.int32) if isinstance(p, int) else p for p in places]
        return self.concat(parts, 0)


_ALL = np.iinfo(np.int32).max  # past the end: the runtime stops at the last

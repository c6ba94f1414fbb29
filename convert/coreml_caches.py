"""Where a Core ML function keeps keys and values: all layers packed on the head axis.

``keyCache`` and ``valueCache`` are (1, T, C, E): T key-value heads of all layers, C context,
E head_dim; two arrays, however many layers, since the Neural Engine fails with more states.
K heads of one layer, q new tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convert.mil_tools import coremltools

Var = Any
NAMES = ("keyCache", "valueCache")


def ints(*values: int) -> np.ndarray:
    """Small int32 constants of a graph."""
    return np.array(values, np.int32)


class PackedCache:
    """Updated in place, a slice a layer.

    A state is read once and then threaded through the layers' updates: several reads would be
    merged into the first, and every write but the last lost (coremltools #2786).

    Args:
        inputs: the function's inputs; the two caches among them.
        kv_heads: key-value heads by layer.
        start: (1,) int32, position of the first new token.
        end: (1,) int32, position after the last.
        stateful: whether the caches are states; else they come back as outputs.
        ranged: whether only positions before ``end`` are attended to, not all C.
    """

    def __init__(
        self,
        inputs: Mapping[str, Var],
        kv_heads: Sequence[int],
        start: Var,
        end: Var,
        *,
        stateful: bool = True,
        ranged: bool = False,
    ) -> None:
        self._mb = coremltools("converters.mil").Builder
        self._offsets = np.cumsum([0, *kv_heads]).tolist()
        self._start, self._end = start, end
        self._ranged = ranged
        self._states = {name: inputs[name] for name in NAMES} if stateful else {}
        self._now = {
            name: self._mb.read_state(input=inputs[name], name=f"{name}_read")
            if stateful
            else inputs[name]
            for name in NAMES
        }

    def update(self, index: int, keys: Var, values: Var) -> tuple[Var, Var]:
        """Write (1, K, q, E) at the new positions; return the layer's (1, K, S, E) of both."""
        written = zip(NAMES, (keys, values), strict=True)
        first, second = (self._update(name, index, new) for name, new in written)
        return first, second

    def _update(self, name: str, index: int, new: Var) -> Var:
        mb, label = self._mb, f"layers_{index}_{name}"
        low, high = self._offsets[index], self._offsets[index + 1]
        head, zero = ints(0, low), ints(0)
        begin = mb.concat(values=[head, self._start, zero], axis=0, name=f"{label}_begin")
        end = mb.concat(
            values=[ints(1, high), self._end, ints(new.shape[-1])],
            axis=0,
            name=f"{label}_end",
        )
        whole = [True, False, False, True]
        cache = mb.slice_update(
            x=self._now[name],
            update=new,
            begin=begin,
            end=end,
            begin_mask=whole,
            end_mask=whole,
            name=f"{label}_updated",
        )
        if name in self._states:
            cache = mb.coreml_update_state(
                state=self._states[name], value=cache, name=f"{label}_written"
            )
        self._now[name] = cache
        return self._layer(cache, low, high, label)

    def _layer(self, cache: Var, low: int, high: int, label: str) -> Var:
        """One layer's heads; the static axis first, or its size would be lost."""
        mb = self._mb
        layer = mb.slice_by_index(
            x=cache,
            begin=[0, low, 0, 0],
            end=[1, high, 0, 0],
            begin_mask=[True, False, True, True],
            end_mask=[True, False, True, True],
            name=f"{label}_layer",
        )
        if not self._ranged:
            return layer
        zeros = ints(0, 0)
        stop = mb.concat(values=[zeros, self._end, ints(0)], axis=0, name=f"{label}_seen_end")
        return mb.slice_by_index(
            x=layer,
            begin=[0, 0, 0, 0],
            end=stop,
            begin_mask=[True] * 4,
            end_mask=[True, True, False, True],
            name=f"{label}_seen",
        )

    def outputs(self) -> list[Var]:
        """The caches to return; none where they are states."""
        if self._states:
            return []
        mb = self._mb
        return [
            mb.identity(x=self._now[name], name=f"new{name[0].upper()}{name[1:]}") for name in NAMES
        ]


class HostWrittenCache:
    """Written whole, once a call, at the positions that the caller's one-hot columns name.

    The Neural Engine compiles neither a partial update of a state nor several writes of one.

    Args:
        inputs: the function's inputs; the two states among them.
        kv_heads: key-value heads by layer.
        update: (1, 1, C, q) one-hot columns, fp16.
    """

    def __init__(self, inputs: Mapping[str, Var], kv_heads: Sequence[int], update: Var) -> None:
        self._mb = mb = coremltools("converters.mil").Builder
        self._kv_heads, self._update_mask = list(kv_heads), update
        written = mb.reduce_sum(x=update, axes=[3], keep_dims=True, name="written")
        self._keep = mb.sub(x=np.float16(1), y=written, name="kept")  # (1, 1, C, 1)
        self._states = {name: inputs[name] for name in NAMES}
        self._old = {
            name: mb.split(
                x=mb.read_state(input=inputs[name], name=f"{name}_read"),
                split_sizes=self._kv_heads,
                axis=1,
                name=f"{name}_layers",
            )
            for name in NAMES
        }
        if len(self._kv_heads) == 1:
            self._old = {name: [old] for name, old in self._old.items()}
        self._new: dict[str, list[Var]] = {name: [] for name in NAMES}

    def update(self, index: int, keys: Var, values: Var) -> tuple[Var, Var]:
        """Blend (1, K, q, E) into the layer's (1, K, C, E) of both; written by :meth:`outputs`."""
        for name, new in zip(NAMES, (keys, values), strict=True):
            self._new[name].append(self._blend(name, index, new))
        return self._new["keyCache"][index], self._new["valueCache"][index]

    def _blend(self, name: str, index: int, new: Var) -> Var:
        mb, label = self._mb, f"layers_{index}_{name}"
        kept = mb.mul(x=self._old[name][index], y=self._keep, name=f"{label}_kept")
        # each column holds one 1, so that the product copies and does not round
        placed = mb.matmul(x=self._update_mask, y=new, name=f"{label}_placed")  # (1, K, C, E)
        return mb.add(x=kept, y=placed, name=f"{label}_blended")

    def outputs(self) -> list[Var]:
        """Write both states; nothing is returned besides."""
        for name in NAMES:
            whole = self._mb.concat(values=self._new[name], axis=1, name=f"{name}_whole")
            self._mb.coreml_update_state(
                state=self._states[name], value=whole, name=f"{name}_written"
            )
        return []

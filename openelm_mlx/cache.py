"""The key-value cache of one attention layer, and the interface that mlx_lm's caches share with it.

B batch, K key-value heads, S cached tokens, E head_dim.  Keys are stored after RoPE.
"""

from typing import Any, Protocol

import mlx.core as mx

STEP = 256  # tokens by which the buffers grow


class Cache(Protocol):
    """What ``Attention`` needs of a cache; mlx_lm's caches have it too."""

    @property
    def offset(self) -> Any:
        """Tokens seen so far: an int, or (B,) int32 in a batch of unequal prompts."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append (B, K, L, E) keys and values; return all (B, K, S, E) that are cached."""


class KVCache:
    """A growing cache of one layer, all sequences of the batch equally long.

    The buffers grow by ``STEP`` tokens at a time and are trimmed by moving ``offset`` back.
    """

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append the keys and values of L new tokens.

        Args:
            keys: (B, K, L, E), rotated.
            values: (B, K, L, E).

        Returns:
            (B, K, S, E) keys and values, S counting the new tokens.
        """
        start, end = self.offset, self.offset + keys.shape[2]
        if self.keys is None or self.values is None:
            self.keys, self.values = _room(keys, end), _room(values, end)
        elif end > self.keys.shape[2]:
            self.keys = _grow(self.keys, start, end)
            self.values = _grow(self.values, start, end)
        self.offset = end
        self.keys[..., start:end, :] = keys
        self.values[..., start:end, :] = values
        return self.keys[..., :end, :], self.values[..., :end, :]

    @property
    def state(self) -> tuple[mx.array, ...]:
        """The buffers, to be evaluated or compiled over; empty before the first update."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    @state.setter
    def state(self, state: tuple[mx.array, ...]) -> None:
        if state:
            self.keys, self.values = state

    @property
    def nbytes(self) -> int:
        """Bytes that the buffers take, unused room included."""
        return sum(buffer.nbytes for buffer in self.state)

    def size(self) -> int:
        """Number of cached tokens."""
        return self.offset

    def empty(self) -> bool:
        """Whether nothing was cached yet."""
        return self.keys is None

    def is_trimmable(self) -> bool:
        """Whether the newest tokens can be dropped again: always."""
        return True

    def trim(self, n: int) -> int:
        """Drop the newest ``n`` tokens, or all there are; return how many were dropped."""
        n = min(n, self.offset)
        self.offset -= n
        return n


def make_cache(num_layers: int) -> list[KVCache]:
    """An empty cache for each of ``num_layers`` layers."""
    return [KVCache() for _ in range(num_layers)]


def trim(cache: list[KVCache], n: int) -> None:
    """Drop the newest ``n`` tokens of every layer."""
    for layer in cache:
        layer.trim(n)


def _room(like: mx.array, tokens: int) -> mx.array:
    B, K, _, E = like.shape
    return mx.zeros((B, K, -(-tokens // STEP) * STEP, E), like.dtype)


def _grow(buffer: mx.array, used: int, needed: int) -> mx.array:
    extra = _room(buffer, needed - used)
    return mx.concatenate([buffer[..., :used, :], extra], axis=2)

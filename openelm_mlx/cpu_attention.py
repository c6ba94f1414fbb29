"""Attention for x86 CPUs: only the scores that causal queries need, their exp by ``cpu_exp``.

MLX computes all L x S scores there and a slow exp of each: a third of the time of a prompt of 512
tokens. Scores are never kept, as the way back computes them again piece by piece, like
FlashAttention's (Dao et al. 2022, arXiv 2205.14135, appendix B).

B rows, H / K query / key-value heads, G = H / K, L new tokens, S cached + new, E head_dim;
b, k, n: rows, key-value heads and queries of a piece.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from openelm_mlx import cpu_exp
from openelm_mlx.recompute import Mask

_QUERIES = 64  # of a piece
_SCORES = 1 << 20  # of a piece, about: more leave the cache
_LOG2_E = 1 / math.log(2)  # scores are exponents of 2, which float32 has exactly
_MASKED = -1e30  # added to a score; a query without any key sees all alike, as in MLX


def pays(queries: mx.array, mask: Mask) -> bool:
    """Whether this way is quicker: several float32 queries on an x86 CPU, a mask for all heads."""
    one_for_all = not isinstance(mask, mx.array) or mask.ndim < 3 or mask.shape[-3] == 1
    return queries.shape[2] > 1 and one_for_all and cpu_exp.pays(queries)


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Mask
) -> mx.array:
    """Scaled dot-product attention, differentiable once with respect to all three.

    Args:
        queries: (B, H, L, E) float32.
        keys: (B, K, S, E).
        values: (B, K, S, E).
        scale: of the scores.
        mask: ``"causal"``: the last query looks at all keys, the one before at all but the last; or
            what broadcasts to (B, 1, L, S), bool (True where a query looks) or added to scores; or
            None.

    Returns:
        (B, H, L, E); a query that may look at no key gets the mean of all values and no gradient.
    """
    bias = _bias(mask, queries.shape[2], keys.shape[2])

    @mx.custom_function
    def forward(q: mx.array, k: mx.array, v: mx.array) -> tuple[mx.array, mx.array]:
        return _forward(_Scores(q, k, bias, scale), v)

    @forward.vjp
    def backward(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, ...]:
        q, k, v = primals
        return _backward(_Scores(q, k, bias, scale), v, outputs, cotangents[0])

    result: Any = forward(queries, keys, values)
    output: mx.array = result[0]
    return output


@dataclass(frozen=True, slots=True)
class _Bias:
    """What is added to scores.

    Attributes:
        array: (1 or B, 1, 1, L, S); of a causal mask (n, n), for the last keys of a piece; or none.
        causal: whether the keys behind the last query of a piece are left out.
    """

    array: mx.array | None
    causal: bool


def _bias(mask: Mask, length: int, width: int) -> _Bias:
    if mask is None:
        return _Bias(None, causal=False)
    if isinstance(mask, str):
        n = min(length, _QUERIES)
        return _Bias(_added(mx.tril(mx.ones((n, n), dtype=mx.bool_))), causal=True)
    added = _added(mask) if mask.dtype == mx.bool_ else mask.astype(mx.float32) * _LOG2_E
    rows = mask.shape[0] if mask.ndim == 4 else 1
    return _Bias(mx.broadcast_to(added, (rows, 1, length, width))[:, :, None], causal=False)


def _added(allowed: mx.array) -> mx.array:
    return mx.where(allowed, 0.0, _MASKED).astype(mx.float32)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows, key-value heads and queries, and the keys that these may see."""

    rows: slice
    heads: slice
    queries: slice
    keys: slice

    def of_queries(self, array: mx.array) -> mx.array:
        """Of (B, K, G, L, X): (b, k, G, n, X)."""
        return array[self.rows, self.heads, :, self.queries]

    def of_keys(self, array: mx.array) -> mx.array:
        """Of (B, K, S, E): (b, k, keys, E)."""
        return array[self.rows, self.heads, self.keys]


class _Scores:
    """Scores of queries (B, H, L, E) and keys (B, K, S, E), a piece at a time."""

    def __init__(self, queries: mx.array, keys: mx.array, bias: _Bias, scale: float) -> None:
        B, H, L, E = queries.shape
        self.grouped = (B, keys.shape[1], H // keys.shape[1], L, E)
        self.queries = (queries * (scale * _LOG2_E)).reshape(self.grouped)
        self.keys, self.bias, self.scale = keys, bias, scale

    def of(self, piece: _Piece) -> mx.array:
        """(b, k, G, n, keys)."""
        keys = piece.of_keys(self.keys)
        scores = _multiply(piece.of_queries(self.queries), keys.swapaxes(-1, -2))
        bias = self.bias.array
        if bias is None:
            return scores
        if self.bias.causal:
            n, width = scores.shape[-2:]
            return scores + mx.pad(bias[:n, :n], [(0, 0), (width - n, 0)])
        return scores + (bias if bias.shape[0] == 1 else bias[piece.rows])[..., piece.queries, :]

    def places(self) -> Iterator[list[tuple[slice, slice]]]:
        """Rows, and for some of them the parts of their heads that are computed together."""
        B, K, G, L, _ = self.grouped
        of_head = G * min(L, _QUERIES) * self.keys.shape[2]
        heads = max(1, _SCORES // of_head)
        rows = max(1, _SCORES // (of_head * K))
        for row in range(0, B, rows):
            yield [(slice(row, row + rows), slice(k, k + heads)) for k in range(0, K, heads)]

    def pieces(self, rows: slice, heads: slice) -> list[_Piece]:
        """The queries of some rows and heads, some after the others."""
        L, S = self.grouped[3], self.keys.shape[2]
        pieces = []
        for start in range(0, L, _QUERIES):
            stop = min(start + _QUERIES, L)
            keys = slice(0, S - L + stop if self.bias.causal else S)
            pieces.append(_Piece(rows, heads, slice(start, stop), keys))
        return pieces


def _multiply(a: mx.array, b: mx.array) -> mx.array:
    """(b, k, G, n, X) @ (b, k, X, Y): the queries of a group under each other, no key repeated."""
    *outer, G, n, X = a.shape
    return (a.reshape(*outer, G * n, X) @ b).reshape(*outer, G, n, b.shape[-1])


def _multiply_transposed(a: mx.array, b: mx.array) -> mx.array:
    """(b, k, G, n, X)^T @ (b, k, G, n, Y), summed over G and n: (b, k, X, Y)."""
    *outer, G, n, X = a.shape
    return a.reshape(*outer, G * n, X).swapaxes(-1, -2) @ b.reshape(*outer, G * n, b.shape[-1])


def _forward(scores: _Scores, values: mx.array) -> tuple[mx.array, mx.array]:
    """The output (B, H, L, E), and log2 of the sum of powers (B, K, G, L, 1)."""

    def attend(piece: _Piece) -> tuple[mx.array, mx.array]:
        exponents = scores.of(piece)
        highest = exponents.max(axis=-1, keepdims=True)
        powers = mx.power(2.0, exponents - highest)
        total = powers.sum(axis=-1, keepdims=True)
        return _multiply(powers, piece.of_keys(values)) / total, highest + mx.log2(total)

    outputs, sums = _joined(
        [
            [_columns([attend(piece) for piece in scores.pieces(*place)]) for place in row]
            for row in scores.places()
        ]
    )
    B, K, G, L, E = scores.grouped
    return outputs.reshape(B, K * G, L, E), sums


def _backward(
    scores: _Scores, values: mx.array, outputs: tuple[mx.array, mx.array], cotangent: mx.array
) -> tuple[mx.array, ...]:
    """Gradients of queries, keys and values, in their shapes."""
    B, K, G, L, E = scores.grouped
    output, sums = outputs
    wanted = cotangent.reshape(scores.grouped) * (sums > _MASKED / 2)
    means = (wanted * output.reshape(scores.grouped)).sum(axis=-1, keepdims=True)
    done: list[mx.array] = []

    def gradients(rows: slice, heads: slice) -> tuple[mx.array, ...]:
        nonlocal done
        of_queries: list[tuple[mx.array, ...]] = []
        of_keys = of_values = mx.zeros_like(values[rows, heads])
        for piece in scores.pieces(rows, heads):
            # one piece after the other, or all scores would be alive at once
            own = mx.depends(piece.of_queries(wanted), done) if done else piece.of_queries(wanted)
            shares = mx.power(2.0, scores.of(piece) - piece.of_queries(sums))
            v = piece.of_keys(values)
            slopes = shares * (_multiply(own, v.swapaxes(-1, -2)) - piece.of_queries(means))
            of_queries.append((_multiply(slopes, piece.of_keys(scores.keys)) * scores.scale,))
            behind = [(0, 0), (0, 0), (0, values.shape[2] - v.shape[2]), (0, 0)]
            queries = piece.of_queries(scores.queries)
            of_keys = of_keys + mx.pad(_multiply_transposed(slopes, queries), behind)
            of_values = of_values + mx.pad(_multiply_transposed(shares, own), behind)
            done = [of_queries[-1][0], of_keys, of_values]
        return *_columns(of_queries), of_keys / _LOG2_E, of_values

    found = _joined([[gradients(*place) for place in row] for row in scores.places()])
    return found[0].reshape(B, K * G, L, E), *found[1:]


def _columns(parts: list[tuple[mx.array, ...]]) -> tuple[mx.array, ...]:
    """Queries after queries: each (b, k, G, L, X)."""
    return tuple(mx.concatenate(list(arrays), axis=3) for arrays in zip(*parts, strict=True))


def _joined(parts: list[list[tuple[mx.array, ...]]]) -> tuple[mx.array, ...]:
    """Heads after heads, rows after rows: each (B, K, ...)."""
    rows = [[mx.concatenate(list(a), axis=1) for a in zip(*row, strict=True)] for row in parts]
    return tuple(mx.concatenate(list(arrays)) for arrays in zip(*rows, strict=True))

"""Attention whose scores are computed again in the backward pass, in place of being kept.

B rows, H / K query / key-value heads, G = H / K, L tokens, E head_dim. Scores are B H L L numbers a
layer, a good part of what training keeps, and cost little beside a layer's other products. The way
back is that of FlashAttention (Dao et al. 2022, arXiv 2205.14135, appendix B), some rows at a time.
On the way forward MLX may use its fused kernel, which it cannot differentiate.
"""

from typing import Any

import mlx.core as mx

from openelm_mlx.recompute import Mask, row_groups, rows_of


def attention_without_scores(
    queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: Mask
) -> mx.array:
    """Scaled dot-product attention, differentiable once with respect to all three.

    Args:
        queries: (B, H, L, E).
        keys: (B, K, L, E).
        values: (B, K, L, E).
        scale: of the scores.
        mask: ``"causal"``, or bool that broadcasts to (B, 1, L, L), True where a token looks; None
            for a single token.

    Returns:
        (B, H, L, E).
    """

    @mx.custom_function
    def forward(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    @forward.vjp
    def backward(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
        done: list[tuple[mx.array, ...]] = []
        for rows in row_groups(cotangent.shape[0], cotangent.shape[2]):
            # one group after the other, or all scores would be alive at once
            wanted = mx.depends(cotangent[rows], list(done[-1])) if done else cotangent[rows]
            q, k, v = (array[rows] for array in primals)
            done.append(_gradients(q, k, v, output[rows], wanted, rows_of(mask, rows), scale))
        return tuple(mx.concatenate(list(parts)) for parts in zip(*done, strict=True))

    result: Any = forward(queries, keys, values)
    array: mx.array = result
    return array


def _gradients(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    output: mx.array,
    cotangent: mx.array,
    mask: Mask,
    scale: float,
) -> tuple[mx.array, mx.array, mx.array]:
    """The gradients of queries, keys and values; scores and their gradient are float32."""
    B, H, L, E = queries.shape
    K = keys.shape[1]
    tall = (B, K, H // K * L, E)  # the queries of a group under each other: no key is repeated
    asked, wanted = queries.reshape(tall), cotangent.reshape(tall)
    scores = ((asked * scale) @ keys.swapaxes(-1, -2)).astype(mx.float32)
    if mask is not None:
        allowed = mx.tril(mx.ones((L, L), mx.bool_)) if isinstance(mask, str) else mask
        blocks = scores.reshape(B, H, L, L)
        scores = mx.where(allowed, blocks, -mx.inf).reshape(scores.shape)
    weights = mx.softmax(scores, axis=-1)
    means = (wanted * output.reshape(tall)).astype(mx.float32).sum(axis=-1, keepdims=True)
    slopes = weights * ((wanted @ values.swapaxes(-1, -2)).astype(mx.float32) - means)
    slopes, weights = (array.astype(queries.dtype) for array in (slopes * scale, weights))
    return (
        (slopes @ keys).reshape(queries.shape),
        slopes.swapaxes(-1, -2) @ asked,
        weights.swapaxes(-1, -2) @ wanted,
    )

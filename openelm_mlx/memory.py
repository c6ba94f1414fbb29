"""How much memory a model needs: weights, key-value cache, training. Estimates from shapes alone.

B batch, L tokens, D model_dim, H / K query / key-value heads, E head_dim, F feed-forward width.
"""

import os
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from openelm_mlx.config import ModelArgs
from openelm_mlx.recompute import GROUP

_LOSS_CHUNK = 256  # tokens whose logits exist at a time


def machine_memory() -> int:
    """Bytes of memory that MLX may fill: the GPU's recommended working set, else all RAM."""
    info: Any = mx.device_info()
    for key in ("max_recommended_working_set_size", "memory_size", "total_memory"):
        if info.get(key):
            return int(info[key])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes of one training step.

    Attributes:
        weights: of the model, in its own dtype.
        optimizer: gradients, AdamW's two moments and float32 master weights of what trains.
        activations: kept for the backward pass.
        loss: logits of one chunk and their gradient.
    """

    weights: int
    optimizer: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.weights + self.optimizer + self.activations + self.loss


def training_memory(
    args: ModelArgs,
    *,
    batch_size: int,
    max_seq_length: int,
    trainable: int,
    weight_bytes: int = 2,
    grad_checkpoint: bool = False,
) -> TrainingMemory:
    """Estimate the peak of one step.

    Args:
        args: the architecture.
        batch_size: sequences a forward pass.
        max_seq_length: tokens a sequence.
        trainable: parameters that move; for adapters far fewer than all.
        weight_bytes: of one stored weight: 2 for bf16, 4 for float32.
        grad_checkpoint: keep only each layer's input and recompute the rest.

    Returns:
        The parts, in bytes. Attention scores are counted: MLX has no fused attention for training.
    """
    tokens = batch_size * max_seq_length
    per_layer = [
        tokens * weight_bytes * values for values in _activation_values(args, max_seq_length)
    ]
    inputs = tokens * weight_bytes * args.model_dim
    at_a_time = min(tokens, max(GROUP, max_seq_length)) / tokens  # rows recomputed together
    kept = sum(per_layer)
    if grad_checkpoint:
        kept = inputs * len(per_layer) + int(max(per_layer) * at_a_time)
    master = 0 if weight_bytes == 4 else 4
    return TrainingMemory(
        weights=args.num_parameters * weight_bytes,
        optimizer=trainable * (weight_bytes + 8 + master),
        activations=kept,
        loss=3 * 4 * min(tokens, _LOSS_CHUNK) * args.vocab_size,
    )


def _activation_values(args: ModelArgs, length: int) -> list[int]:
    """Values a token that each layer keeps for its backward pass."""
    up = 2 if args.ffn_with_glu else 1
    return [
        4 * args.model_dim  # two norms' inputs and outputs
        + (q + 2 * k) * args.head_dim * 2  # projected, then normed and rotated
        + q * args.head_dim  # attention output
        + q * length  # attention probabilities
        + (up + 2) * ffn  # gate, value, activation, product
        for q, k, ffn in zip(args.num_query_heads, args.num_kv_heads, args.ffn_dims, strict=True)
    ]

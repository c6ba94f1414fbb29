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
    checkpoint: str = "none",
) -> TrainingMemory:
    """Estimate the peak of one step.

    Args:
        args: the architecture.
        batch_size: sequences a forward pass.
        max_seq_length: tokens a sequence.
        trainable: parameters that move; for adapters far fewer than all.
        weight_bytes: of one stored weight: 2 for bf16, 4 for float32.
        checkpoint: what is recomputed going backward: "none", "scores", "attention" or "layer".

    Returns:
        The parts, in bytes. Attention scores are counted: MLX has no fused attention for training.
    """
    tokens = batch_size * max_seq_length
    group = min(tokens, max(GROUP, max_seq_length))  # tokens recomputed together
    values = _activation_values(args, max_seq_length)
    kept = [sum(layer[part] for part in _KEPT[checkpoint]) for layer in values]
    again = [sum(layer.values()) - own for layer, own in zip(values, kept, strict=True)]
    activations = weight_bytes * (tokens * sum(kept) + group * max(again))
    master = 0 if weight_bytes == 4 else 4
    return TrainingMemory(
        weights=args.num_parameters * weight_bytes,
        optimizer=trainable * (weight_bytes + 8 + master),
        activations=activations,
        loss=3 * 4 * min(tokens, _LOSS_CHUNK) * args.vocab_size,
    )


# Parts of a layer that stay until its backward pass, by what is recomputed.
_KEPT = {
    "none": ("input", "attention", "scores", "ffn"),
    "scores": ("input", "attention", "ffn"),
    "attention": ("input", "ffn"),
    "layer": ("input",),
}


def _activation_values(args: ModelArgs, length: int) -> list[dict[str, int]]:
    """Values a token that each layer keeps for its backward pass, where all are kept."""
    up = 2 if args.ffn_with_glu else 1
    D = args.model_dim
    return [
        {
            "input": D,
            # norm; projected, normed and rotated; what attention gives
            "attention": D + (q + 2 * k) * args.head_dim * 2 + q * args.head_dim,
            "scores": q * length,
            "ffn": 2 * D + (up + 2) * ffn,  # input, norm; gate, value, activation, product
        }
        for q, k, ffn in zip(args.num_query_heads, args.num_kv_heads, args.ffn_dims, strict=True)
    ]

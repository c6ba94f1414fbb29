"""What training minimises on a batch: the language-modelling loss of a model, as a sum.

The seam of the trainer: ``loss_fn(model, batch) -> (loss_sum, n)``, both float32 scalars, so that
sums over micro-batches and ranks can be divided once by the total n.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.adapter_embeddings import LoRAEmbedding
from openelm_mlx.batches import Batch
from openelm_mlx.losses import LossArgs, chunked_cross_entropy, fused_cross_entropy, ignored_z_loss
from openelm_mlx.model import Model

LossFn = Callable[[Model, Batch], tuple[mx.array, mx.array]]


def language_model_loss(args: LossArgs | None = None) -> LossFn:
    """Next-token cross-entropy, z-loss and label smoothing over the targets that count.

    Args:
        args: of the loss; in eval mode only plain cross-entropy is computed, without z-loss and
            smoothing (CoreNet smooths there too, BEHAVIOURS 19).

    Returns:
        (model, batch) -> summed loss and number of targets.
    """
    settings = args or LossArgs()
    plain = LossArgs(loss_chunk=settings.loss_chunk)

    def loss(model: Model, batch: Batch) -> tuple[mx.array, mx.array]:
        hidden = model.transformer(batch.tokens, mask=batch.attention_mask())
        hidden = hidden.reshape(-1, hidden.shape[-1])
        targets, mask = batch.targets.reshape(-1), batch.mask.reshape(-1)
        if not model.training:
            total = chunked_cross_entropy(hidden, model.head, targets, mask, plain)
            return total, mask.sum()
        head = output_head(model)
        total = fused_cross_entropy(
            hidden, head, targets, mask, settings, head_trains=bool(head.trainable_parameters())
        )
        if settings.corenet_z_loss:
            ignored = mask.size - mask.sum()
            total = total + ignored_z_loss(ignored, model.args.vocab_size, settings)
        return total, mask.sum()

    return loss


def output_head(model: Model) -> nn.Module:
    """The module whose matrix makes the logits, below an embedding adapter that leaves it alone."""
    head: Any = model.lm_head if "lm_head" in model else model.transformer.token_embeddings
    if isinstance(head, LoRAEmbedding) and not head.adapt_head:
        head = head.embedding
    module: nn.Module = head
    return module

"""Direct preference optimisation: the loss on pairs, as sums over pairs.

Sources: Rafailov et al. 2023 (arXiv 2305.18290), eq. 7 (sigmoid); Zhao et al. 2023 (SLiC, arXiv
2305.10425) and Liu et al. 2024 (RSO, arXiv 2309.06657), hinge; Azar et al. 2023 (IPO, arXiv
2310.12036), eq. 17. Apple's Instruct models used hinge, the 1.1B sigmoid (OpenELM README-instruct).
"""

from typing import Any

import mlx.core as mx

from openelm_mlx.batches import Batch
from openelm_mlx.losses import fused_sequence_logprobs
from openelm_mlx.model import Model
from openelm_mlx.objectives import LossFn, output_head
from openelm_mlx.preference_args import PreferenceArgs as PreferenceArgs


def pair_losses(log_ratio_difference: mx.array, args: PreferenceArgs) -> mx.array:
    """Loss of each pair.

    Args:
        log_ratio_difference: (P,) float32,
            log pi(chosen) / ref(chosen) - log pi(rejected) / ref(rejected), in nats.
        args: loss and beta.

    Returns:
        (P,): ln 2, 1, 1 and (1 / (2 beta))^2 for sigmoid, hinge, rso and ipo where the difference
        is 0.
    """
    scaled = args.beta * log_ratio_difference
    if args.loss == "sigmoid":
        return mx.logaddexp(mx.zeros_like(scaled), -scaled)
    if args.loss == "ipo":
        return mx.square(log_ratio_difference - 1 / (2 * args.beta))
    return mx.maximum(1 - scaled, 0)


def preference_loss(args: PreferenceArgs) -> LossFn:
    """The objective on batches of pairs.

    Args:
        args: loss and beta.

    Returns:
        (model, batch) -> summed loss, number of pairs, and sums of: ``accuracy`` (chosen has the
        higher reward), ``margin`` (reward difference, beta times the log-ratio difference),
        ``chosen_reward`` and ``rejected_reward``. The batch's first half of rows is chosen, its
        second rejected; ``reference`` holds the reference model's log-probabilities.
    """

    def loss(model: Model, batch: Batch) -> Any:
        if batch.reference is None:
            raise ValueError("a preference batch needs the reference model's log-probabilities")
        ratios = sequence_logprobs_of(model, batch, args.loss_chunk) - batch.reference
        chosen, rejected = mx.split(ratios, 2)
        difference = chosen - rejected
        # a row without targets marks a pair that only fills up the batch
        counts = (mx.split(batch.mask.sum(axis=1), 2)[0] > 0).astype(mx.float32)
        sums = {
            "accuracy": (difference > 0).astype(mx.float32),
            "margin": args.beta * difference,
            "chosen_reward": args.beta * chosen,
            "rejected_reward": args.beta * rejected,
        }
        total = (pair_losses(difference, args) * counts).sum()
        return total, counts.sum(), {name: (v * counts).sum() for name, v in sums.items()}

    return loss


def sequence_logprobs_of(model: Model, batch: Batch, chunk: int = 256) -> mx.array:
    """(B,) float32 log-probability of each row's targets under a model, in nats."""
    hidden = model.transformer(batch.tokens, mask=batch.attention_mask())
    return fused_sequence_logprobs(
        hidden, output_head(model), batch.targets, batch.mask, chunk=chunk
    )

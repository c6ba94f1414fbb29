"""The end of a run whose loss or gradient is no longer a number, told alike on all ranks."""

from collections.abc import Sequence

import mlx.core as mx

from openelm_mlx.batches import Batch
from openelm_mlx.distributed import any_rank, texts_of_ranks
from openelm_mlx.training_step import StepResult

_SHOWN = 8  # samples a rank


class NonFiniteError(ValueError):
    """The loss or the gradient is no longer a number; the message names step and samples."""


def non_finite(
    step: int, result: StepResult, micro: Sequence[Batch | None], group: mx.distributed.Group
) -> NonFiniteError:
    """The error of a step that is not finite; called on all ranks.

    Args:
        step: counted from 1.
        result: of the step.
        micro: this rank's micro-batches.
        group: whose samples are named: those of the micro-batches whose loss is at fault, or all
            where no loss is, but the gradient.
    """
    losses = zip(micro, result.micro_losses, strict=True)
    bad = [batch for batch, loss in losses if not abs(loss) < float("inf")]
    faulty = any_rank(bool(bad), group)
    samples = [name for batch in (bad if faulty else micro) if batch for name in batch.samples]
    own = ", ".join(samples[:_SHOWN])
    own += f" and {len(samples) - _SHOWN} more" if samples[_SHOWN:] else ""
    shown = "; ".join(text for text in texts_of_ranks(own, group) if text)
    return NonFiniteError(
        f"step {step}: loss {result.loss}, gradient norm {result.grad_norm} are not finite; "
        f"samples: {shown or 'unnamed'}. The last saved state is intact: lower the learning rate "
        "or look at these samples, then --resume"
    )

"""A recipe replayed on given token batches, to hold a loss curve against another trainer's."""

from collections.abc import Iterable

import mlx.core as mx

from openelm_mlx.batches import Batch
from openelm_mlx.distributed import world
from openelm_mlx.losses import LossArgs
from openelm_mlx.model import Model
from openelm_mlx.objectives import language_model_loss
from openelm_mlx.optim import OptimizerArgs, ScheduleArgs
from openelm_mlx.training_args import TrainArgs
from openelm_mlx.training_step import StepResult, TrainStep
from openelm_mlx.validation import at_most


def replay(
    model: Model,
    batches: Iterable[tuple[mx.array, mx.array]],
    *,
    ignore_index: int,
    optimizer: OptimizerArgs,
    schedule: ScheduleArgs,
    loss: LossArgs,
    args: TrainArgs | None = None,
) -> list[StepResult]:
    """Train on given token batches under a recipe, to hold a loss curve against another trainer's.

    Args:
        model: trained in place.
        batches: (B, L) samples and (B, L) targets, shifted already, as CoreNet's data set gives
            them.
        ignore_index: target that does not count (CoreNet's padding id).
        optimizer: and its decay.
        schedule: learning rates; ``corenet_rounding`` applies CoreNet's eight decimals.
        loss: z-loss and smoothing; ``corenet_z_loss`` reports as CoreNet.
        args: accumulation, clipping; ``corenet_accumulation`` adds means.

    Returns:
        One result an update.
    """
    args = args or TrainArgs()
    model.train()
    step = TrainStep(
        model,
        optimizer.build(),
        language_model_loss(loss),
        max_grad_norm=args.max_grad_norm,
        group=world(),
        compiled=bool(args.compile),
        sum_of_means=args.corenet_accumulation,
    )
    source = (replayed_batch(samples, targets, ignore_index) for samples, targets in batches)
    results: list[StepResult] = []
    while micro := list(at_most(source, args.grad_accumulation_steps)):
        results.append(step(micro, schedule.at(len(results))))
    model.eval()
    return results


def replayed_batch(samples: mx.array, targets: mx.array, ignore_index: int) -> Batch:
    """A batch from CoreNet's two arrays; ids beyond the vocabulary stand only on ignored places."""
    counts = targets != ignore_index
    return Batch(
        tokens=samples.astype(mx.int32),
        targets=mx.where(counts, targets, 0).astype(mx.int32),
        mask=counts.astype(mx.float32),
    )

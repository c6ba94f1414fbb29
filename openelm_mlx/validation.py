"""Mean loss over batches, and taking a bounded number of them."""

from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx

from openelm_mlx.batches import Batch
from openelm_mlx.distributed import sum_scalars, world
from openelm_mlx.model import Model
from openelm_mlx.objectives import LossFn


def evaluate(
    model: Model,
    batches: Iterable[Batch],
    loss_fn: LossFn,
    most: int = -1,
    group: mx.distributed.Group | None = None,
) -> tuple[float, int]:
    """Mean loss over batches, each target counted once.

    Args:
        model: put into eval mode for it, and back.
        batches: this rank's; finite, or bounded by ``most``.
        loss_fn: (model, batch) -> (sum, n).
        most: batches at most; -1 takes all.
        group: ranks to add over.

    Returns:
        The mean in nats and the number of targets; (nan, 0) for none.
    """
    was_training = model.training
    model.eval()
    total = mx.zeros((2,))
    for batch in batches if most < 0 else at_most(iter(batches), most):
        outputs: Any = loss_fn(model, batch)
        total = total + mx.stack([outputs[0], outputs[1]]).astype(mx.float32)
        mx.eval(total)
    if was_training:
        model.train()
    values: Any = sum_scalars(total, group or world()).tolist()
    return (values[0] / values[1] if values[1] else float("nan")), int(values[1])


def at_most(source: Iterator[Any], count: int) -> Iterator[Any]:
    """Up to ``count`` items, none of the source's beyond them touched."""
    for _ in range(count):
        try:
            item = next(source)
        except StopIteration:
            return
        yield item

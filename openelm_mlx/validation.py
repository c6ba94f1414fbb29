"""Mean loss over batches, and taking a bounded number of them."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx

from openelm_mlx.batches import Batch, stand_in
from openelm_mlx.distributed import in_step, sum_scalars, world
from openelm_mlx.model import Model
from openelm_mlx.objectives import LossFn
from openelm_mlx.sharding import is_sharded


def evaluate(
    model: Model,
    batches: Iterable[Batch],
    loss_fn: LossFn,
    most: int = -1,
    group: mx.distributed.Group | None = None,
    alive: Callable[[], None] | None = None,
) -> tuple[float, int]:
    """Mean loss over batches, each target counted once.

    Args:
        model: put into eval mode for it, and back.
        batches: this rank's; finite, or bounded by ``most``. Ranks may have different numbers.
        loss_fn: (model, batch) -> (sum, n).
        most: batches at most; -1 takes all.
        group: ranks to add over.
        alive: called after each batch.

    Returns:
        The mean in nats and the number of targets; (nan, 0) for none.
    """
    was_training, group = model.training, group or world()
    model.eval()
    total = mx.zeros((2,))
    for batch in in_step(batches if most < 0 else at_most(iter(batches), most), group):
        total = total + _sums(model, batch, loss_fn)
        mx.eval(total)
        if alive is not None:
            alive()
    if was_training:
        model.train()
    values: Any = sum_scalars(total, group).tolist()
    return (values[0] / values[1] if values[1] else float("nan")), int(values[1])


def _sums(model: Model, batch: Batch | None, loss_fn: LossFn) -> mx.array:
    """(loss, n) of one batch, float32; zeros without rows, after a pass that others wait for."""
    idle = batch is None or batch.tokens.shape[0] == 0
    if idle and not is_sharded(model):
        return mx.zeros((2,))
    outputs: Any = loss_fn(model, stand_in(batch) if idle or batch is None else batch)
    sums = mx.stack([outputs[0], outputs[1]]).astype(mx.float32)
    return sums * 0 if idle else sums


def at_most(source: Iterator[Any], count: int) -> Iterator[Any]:
    """Up to ``count`` items, none of the source's beyond them touched."""
    for _ in range(count):
        try:
            item = next(source)
        except StopIteration:
            return
        yield item

"""One update: gradients of sums over micro-batches and ranks, divided once, clipped, applied.

Knows the model, an optimizer and one loss; not where batches come from or what is written. A rank
without rows takes part in every sum, as the others would wait for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as mlx_optim
from mlx.utils import tree_map

from openelm_mlx.batches import Batch, stand_in
from openelm_mlx.distributed import own_random_numbers, sum_scalars
from openelm_mlx.model import Attention, Model
from openelm_mlx.objectives import LossFn
from openelm_mlx.sharding import add_gradients, global_norm


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one update did.

    Attributes:
        loss: mean loss over all its targets (or pairs), before the update.
        micro_losses: mean loss of each micro-batch of this rank.
        tokens: targets it was taken over, on all ranks.
        grad_norm: global L2 norm of the gradient before clipping.
        finite: whether loss and gradient were; if not, nothing was updated.
        metrics: more means that the loss function reports (reward margins, for one).
    """

    loss: float
    micro_losses: tuple[float, ...]
    tokens: int
    grad_norm: float
    finite: bool
    metrics: dict[str, float]


class TrainStep:
    """Makes updates.

    Args:
        model: in training mode.
        optimizer: its learning rate is set before each update.
        loss_fn: (model, batch) -> (sum, n), or (sum, n, {name: sum}) with more sums over n.
        max_grad_norm: clip the global norm to this; 0 does not clip.
        group: ranks to add over.
        compiled: run gradient and update under ``mx.compile``; each new batch shape traces again.
        sum_of_means: CoreNet's accumulation: add the micro-batches' *means* and divide by nothing.
        alive: called after each micro-batch.
    """

    def __init__(
        self,
        model: Model,
        optimizer: mlx_optim.Optimizer,
        loss_fn: LossFn,
        *,
        max_grad_norm: float,
        group: mx.distributed.Group,
        compiled: bool = False,
        sum_of_means: bool = False,
        alive: Callable[[], None] | None = None,
    ) -> None:
        self._model, self._optimizer, self._loss_fn = model, optimizer, loss_fn
        self._max_norm, self._group, self._sum_of_means = max_grad_norm, group, sum_of_means
        self._alive = alive
        self._like: Batch | None = None  # the last batch, for one that stands in for none
        optimizer.init(model.trainable_parameters())
        random: Any = mx.random.state
        mx.eval(model.parameters(), optimizer.state, random)
        self._gradients: Any = self._micro
        self._update: Any = self._apply
        if compiled:
            state = [model.state, random]
            self._gradients = mx.compile(self._micro, inputs=state, outputs=state)
            state = [model.state, optimizer.state]
            self._update = mx.compile(self._apply, inputs=state, outputs=state)

    def __call__(self, batches: Sequence[Batch | None], learning_rate: float) -> StepResult:
        """Make one update from this rank's micro-batches.

        Args:
            batches: at least one, on all ranks as many; their gradients are added. None, or a batch
                without rows, where only other ranks have one.
            learning_rate: of this update.

        Returns:
            What it did; with ``finite`` False model and optimizer are as before.
        """
        with own_random_numbers(self._group):
            gradients, micro = self._accumulate(batches)
        total = sum_scalars(micro.sum(axis=0), self._group)
        gradients = add_gradients(gradients, self._group)
        count = mx.array(1.0) if self._sum_of_means else total[1]
        gradients = tree_map(lambda g: g / mx.maximum(count, 1).astype(g.dtype), gradients)
        norm = global_norm(gradients, self._group)
        mx.eval(gradients, norm, total, micro)
        held = [gradients]
        del gradients  # whoever holds them on keeps their memory from the update
        return self._finish(held, norm, total, micro, learning_rate)

    def _accumulate(self, batches: Sequence[Batch | None]) -> tuple[Any, mx.array]:
        """Gradients added over this rank's micro-batches, and (k, 2 + metrics) sums of each."""
        gradients: Any = None
        sums: list[mx.array] = []
        for batch in batches:
            self._like = batch or self._like
            idle = batch is None or batch.tokens.shape[0] == 0
            arrays = _arrays(stand_in(self._like) if idle or batch is None else batch)
            part, values = self._gradients(arrays, idle)
            gradients = part if gradients is None else tree_map(_add_in_float32, gradients, part)
            sums.append(values)
            mx.eval(gradients, values)  # one micro-batch's activations at a time
            if self._alive is not None:
                self._alive()
        return gradients, mx.stack(sums)

    def _finish(
        self,
        held: list[Any],
        norm: mx.array,
        total: mx.array,
        micro: mx.array,
        learning_rate: float,
    ) -> StepResult:
        """Update with the gradients that ``held`` gives away, unless something is not finite."""
        values: Any = total.tolist()
        rows: Any = micro.tolist()
        grad_norm: Any = norm.item()
        loss = values[0] / max(values[1], 1)
        finite = all(abs(x) < float("inf") for x in (loss, grad_norm))
        if finite and values[1] > 0:
            self._optimizer.learning_rate = learning_rate
            self._update(held.pop(), norm)
            mx.eval(self._model.trainable_parameters(), self._optimizer.state)
        return StepResult(
            loss=loss,
            micro_losses=tuple(row[0] / max(row[1], 1) for row in rows),
            tokens=int(values[1]) if finite else 0,
            grad_norm=grad_norm,
            finite=finite,
            metrics={
                name: value / max(values[1], 1)
                for name, value in zip(self._metric_names, values[2:], strict=True)
            },
        )

    _metric_names: tuple[str, ...] = ()

    def _micro(self, arrays: dict[str, Any], idle: bool = False) -> tuple[Any, mx.array]:
        """Gradients of the summed loss, and (sum, n, more sums...); all 0 where ``idle``."""
        batch = Batch(**arrays)

        def loss(model: Model, batch: Batch) -> tuple[mx.array, mx.array]:
            outputs: Any = self._loss_fn(model, batch)
            total, n, *rest = outputs
            more = rest[0] if rest else {}
            self._metric_names = tuple(more)
            values = mx.stack([v.astype(mx.float32) for v in (total, n, *more.values())])
            if self._sum_of_means:
                total = total / mx.maximum(n, 1)
            return (total * 0, values * 0) if idle else (total, values)

        (_, values), gradients = nn.value_and_grad(self._model, loss)(self._model, batch)
        return gradients, values

    def _apply(self, gradients: Any, norm: mx.array) -> None:
        if self._max_norm > 0:
            scale = mx.minimum(self._max_norm / (norm + 1e-6), 1.0)
            gradients = tree_map(lambda g: g * scale.astype(g.dtype), gradients)
        self._optimizer.update(self._model, gradients)


def _arrays(batch: Batch) -> dict[str, mx.array]:
    """The arrays of a batch, those that it has: what a compiled step takes."""
    names = ("tokens", "targets", "mask", "segments", "reference")
    values = {name: getattr(batch, name) for name in names}
    return {name: array for name, array in values.items() if array is not None}


def _add_in_float32(a: mx.array, b: mx.array) -> mx.array:
    return a.astype(mx.float32) + b.astype(mx.float32)


def set_grad_checkpoint(model: Model, mode: str) -> None:
    """Recompute nothing, attention's scores, attention, or whole layers in the backward pass.

    Args:
        model: whose own layers are told; other models are not touched.
        mode: "none", "scores", "attention" or "layer".
    """
    for layer in model.layers:
        layer.grad_checkpoint = mode
        for module in layer.modules():
            if isinstance(module, Attention):
                module.keep_scores = mode != "scores"

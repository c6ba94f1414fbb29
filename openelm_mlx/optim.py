"""Optimizers and learning-rate schedules as Apple's recipes use them.

The optimizers are MLX's own; added here are weight decay by number of dimensions, float32 state and
master weights for 16-bit models, and CoreNet's schedules. Sources: apple/corenet@1aa3acd
``corenet/optims/`` and ``corenet/optims/scheduler/cosine.py``.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.optimizers as mlx_optim

SCHEDULES = ("cosine", "linear", "constant")


@dataclass(frozen=True, kw_only=True)
class ScheduleArgs:
    """Learning rate over the updates.

    Raises:
        ValueError: listing what is out of range.
    """

    learning_rate: float = 5.3e-3  # the highest
    min_learning_rate: float = 0.0  # at the last update
    warmup_steps: int = 0
    warmup_init: float = 1e-6  # of the first update, where there is a warm-up
    lr_schedule: str = "cosine"
    iters: int = 1000  # updates in all
    corenet_rounding: bool = False  # eight decimals, as CoreNet applies it

    def __post_init__(self) -> None:
        problems = []
        if self.lr_schedule not in SCHEDULES:
            problems.append(
                f"lr_schedule {self.lr_schedule!r} is not one of {', '.join(SCHEDULES)}"
            )
        if not self.learning_rate > 0:
            problems.append(f"learning_rate must be positive, got {self.learning_rate}")
        if not 0 <= self.min_learning_rate <= self.learning_rate:
            problems.append(
                f"min_learning_rate must be between 0 and learning_rate {self.learning_rate}, got "
                f"{self.min_learning_rate}"
            )
        if self.iters < 1:
            problems.append(f"iters must be at least 1, got {self.iters}")
        if self.warmup_steps < 0:
            problems.append(f"warmup_steps must be 0 or more, got {self.warmup_steps}")
        if problems:
            raise ValueError("schedule: " + "; ".join(problems))

    def at(self, step: int) -> float:
        """The learning rate of update ``step``, counted from 0.

        Warm-up: init + step (max - init) / W for step < W. Cosine over a period of N - W + 1
        updates from there, as CoreNet's ``CosineScheduler``.
        """
        rate = self._rate(step)
        return round(rate, 8) if self.corenet_rounding else rate

    def fitted(self, step: int, seconds: float, limit: float) -> "ScheduleArgs":
        """The schedule with as many updates as a time limit has room for, at the speed so far.

        Args:
            step: updates made.
            seconds: that they took.
            limit: seconds for all updates; 0 sets none.
        """
        if not (limit and step and seconds > 0):
            return self
        room = max(int(step * limit / seconds), step + 1)
        return replace(self, iters=min(self.iters, room))

    def _rate(self, step: int) -> float:
        high, low, warmup = self.learning_rate, self.min_learning_rate, self.warmup_steps
        if step < warmup:
            return self.warmup_init + step * (high - self.warmup_init) / warmup
        if self.lr_schedule == "constant":
            return high
        period = max(self.iters - warmup + 1, 1)
        progress = min((step - warmup) / period, 1.0)
        if self.lr_schedule == "linear":
            return high + (low - high) * progress
        return low + 0.5 * (high - low) * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, kw_only=True)
class OptimizerArgs:
    """Which optimizer, and its settings.

    Raises:
        ValueError: naming an unknown optimizer's alternatives, or what is out of range.
    """

    optimizer: str = "adamw"
    weight_decay: float = 0.1  # on tensors of two or more dimensions, the embedding included
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    master_weights: bool = False  # float32 copies of 16-bit weights

    def __post_init__(self) -> None:
        problems = []
        if self.optimizer not in OPTIMIZERS:
            problems.append(f"optimizer {self.optimizer!r} is not one of {', '.join(OPTIMIZERS)}")
        if not 0 <= self.weight_decay < 1:
            problems.append(f"weight_decay must be in [0, 1), got {self.weight_decay}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if not self.eps > 0:
            problems.append(f"eps must be positive, got {self.eps}")
        if problems:
            raise ValueError("optimizer: " + "; ".join(problems))

    def build(self) -> mlx_optim.Optimizer:
        """The optimizer, its learning rate 0 until the trainer sets it each step."""
        optimizer: Any = OPTIMIZERS[self.optimizer](self)
        optimizer.decay = 0.0 if self.optimizer == "adam" else self.weight_decay
        optimizer.master_weights = self.master_weights
        built: mlx_optim.Optimizer = optimizer
        return built


class _Float32State(mlx_optim.Optimizer):
    """Mixin: float32 state, decay by dimensions, and master weights where asked for."""

    decay: float  # not MLX's ``weight_decay``, which stays 0 and knows no dimensions
    master_weights: bool

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        """Make the state of one parameter in float32."""
        wide = parameter.astype(mx.float32)
        super().init_single(wide, state)
        if self.master_weights and parameter.dtype != mx.float32:
            state["master"] = wide

    def apply_single(
        self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]
    ) -> mx.array:
        """Update one parameter in float32; returns it in its own dtype."""
        wide = state.get("master")
        if wide is None:
            wide = parameter.astype(mx.float32)
        if self.decay and parameter.ndim > 1:
            wide = wide * (1 - self.learning_rate * self.decay)
        new = super().apply_single(gradient.astype(mx.float32), wide, state)
        if "master" in state:
            state["master"] = new
        return new.astype(parameter.dtype)


class AdamW(_Float32State, mlx_optim.Adam):
    """Adam with decoupled decay and bias correction, as ``torch.optim.AdamW`` (BEHAVIOURS 20)."""


class _SGD(_Float32State, mlx_optim.SGD):
    pass


class _Lion(_Float32State, mlx_optim.Lion):
    pass


class _Adamax(_Float32State, mlx_optim.Adamax):
    pass


class _Adafactor(_Float32State, mlx_optim.Adafactor):
    pass


class _Muon(_Float32State, mlx_optim.Muon):
    pass


def _adam(args: OptimizerArgs) -> Any:
    return AdamW(0.0, betas=[args.beta1, args.beta2], eps=args.eps, bias_correction=True)


OPTIMIZERS: dict[str, Callable[[OptimizerArgs], Any]] = {
    "adamw": _adam,
    "adam": _adam,  # differs by its decay of 0
    "adamax": lambda args: _Adamax(0.0, betas=[args.beta1, args.beta2], eps=args.eps),
    "adafactor": lambda _: _Adafactor(0.0, scale_parameter=False, relative_step=False),
    "lion": lambda args: _Lion(0.0, betas=[args.beta1, args.beta2]),
    "muon": lambda args: _Muon(0.0, momentum=args.beta2, weight_decay=0.0),
    "sgd": lambda args: _SGD(0.0, momentum=args.beta1),
}

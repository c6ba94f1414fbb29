"""The one training loop: pretraining, tuning and DPO differ in model, batches and loss alone.

It never tokenizes and knows no format but its own states. Steps, validation, states, metrics and
endings are each one method of ``_Run``.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as mlx_optim

from openelm_mlx.batches import Batch, Batches
from openelm_mlx.distributed import (
    attempt,
    backend_name,
    fail_together,
    lost_rank,
    max_over_ranks,
    together,
    world,
)
from openelm_mlx.interrupts import NotedSignals
from openelm_mlx.metrics import MetricsLog
from openelm_mlx.model import Model
from openelm_mlx.non_finite import NonFiniteError as NonFiniteError
from openelm_mlx.non_finite import non_finite
from openelm_mlx.objectives import LossFn
from openelm_mlx.optim import ScheduleArgs
from openelm_mlx.progress import Progress
from openelm_mlx.rank_checks import check_equal_runs
from openelm_mlx.replay import replay as replay
from openelm_mlx.sharding import check_fully_shard, join_layers, shard_layers
from openelm_mlx.training_args import TrainArgs as TrainArgs
from openelm_mlx.training_state import TrainState, load_latest, save_best, save_state
from openelm_mlx.training_step import TrainStep, set_grad_checkpoint
from openelm_mlx.validation import at_most, evaluate
from openelm_mlx.watchdog import Watchdog

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended.

    Attributes:
        state: where it stands.
        reason: "finished", "data" (a finite source ran out), "time" (that of ``max_seconds`` is
            up), "early" or "interrupted".
    """

    state: TrainState
    reason: str


def train(
    model: Model,
    optimizer: mlx_optim.Optimizer,
    batches: Batches,
    loss_fn: LossFn,
    args: TrainArgs,
    state: TrainState | None = None,
    *,
    schedule: ScheduleArgs,
    validation: Callable[[], Iterable[Batch]] | None = None,
    run_folder: Path | None = None,
    resume: bool = False,
    settings: Mapping[str, Any] | None = None,
    reporters: Sequence[Any] = (),
) -> Outcome:
    """Train until ``schedule.iters`` updates are made, data or time end, or Ctrl-C.

    Args:
        model: its trainable parameters move; left in eval mode.
        optimizer: from :meth:`OptimizerArgs.build`.
        batches: this rank's rows of each batch; its position is saved with every state.
        loss_fn: (model, batch) -> (sum, n).
        args: of the loop.
        state: where to begin; None at the start, or from ``run_folder`` with ``resume``.
        schedule: learning rate of each update, and their number; with ``args.max_seconds`` as many
            as fit, by the speed so far, so that the rate depends on the clock.
        validation: called for fresh batches at each validation; None does not validate.
        run_folder: for states, metrics and the best weights, which rank 0 writes; None writes
            nothing.
        resume: continue from the newest whole state in ``run_folder``; without one start anew.
        settings: kept with each state.
        reporters: more objects with ``write(line)`` and ``close()``.

    Returns:
        The last state and why it is the last. "interrupted" means that Ctrl-C or SIGTERM was seen,
        on any rank, the step finished and the state saved.

    Raises:
        NonFiniteError: at the first loss or gradient that is no finite number; the weights are
            those before it, and the last state on disk is untouched.
        RankError: if another rank failed or was lost.
        ValueError: if the ranks cannot be joined, train different things, or ``fully_shard`` is
            not possible.
    """
    group = world(args.backend)
    if args.fully_shard:
        check_fully_shard(
            *(model, optimizer, backend_name(), group.size()), checkpoint=args.grad_checkpoint
        )
    mx.random.seed(args.seed)
    model.train()
    set_grad_checkpoint(model, args.grad_checkpoint)
    run = _Run(
        model=model,
        optimizer=optimizer,
        batches=batches,
        loss_fn=loss_fn,
        args=args,
        schedule=schedule,
        state=replace(state) if state is not None else TrainState(),
        validation=validation,
        keeps=run_folder is not None,
        folder=run_folder if group.rank() == 0 else None,
        group=group,
        settings=settings,
        reporters=reporters if group.rank() == 0 else (),
    )
    try:
        with Watchdog(args.stall_timeout if group.size() > 1 else 0, group.rank()) as watchdog:
            step = run.prepare(watchdog)
            if resume and run_folder is not None:
                run.restore(run_folder)
            outcome = run.loop(step, watchdog)
            join_layers(model, group)
            return outcome
    except RuntimeError as error:
        lost = lost_rank(error)
        raise lost or error from error
    finally:
        set_grad_checkpoint(model, "none")
        model.eval()


@dataclass(kw_only=True)
class _Run:
    """One call of :func:`train`."""

    model: Model
    optimizer: mlx_optim.Optimizer
    batches: Batches
    loss_fn: LossFn
    args: TrainArgs
    schedule: ScheduleArgs
    state: TrainState
    validation: Callable[[], Iterable[Batch]] | None
    keeps: bool  # whether states are written at all
    folder: Path | None  # None on ranks other than 0
    group: mx.distributed.Group
    settings: Mapping[str, Any] | None
    reporters: Sequence[Any]
    _stop: list[int] = field(default_factory=list)  # signals seen

    def prepare(self, watchdog: Watchdog) -> TrainStep:
        """Make sure that all ranks begin alike, cut the layers where asked for, and compile."""
        args = self.args
        check_equal_runs(self.model, (args, self.schedule), self.group)
        if args.fully_shard:
            shard_layers(self.model, self.group)
        on_gpu = mx.default_device().type == mx.gpu and not args.fully_shard
        return TrainStep(
            self.model,
            self.optimizer,
            self.loss_fn,
            max_grad_norm=args.max_grad_norm,
            group=self.group,
            compiled=on_gpu if args.compile is None else args.compile,
            sum_of_means=args.corenet_accumulation,
            alive=watchdog.alive,
        )

    def restore(self, folder: Path) -> None:
        """Continue from rank 0's newest state, if there is one."""
        restored = load_latest(folder, self.model, self.optimizer)
        if restored is not None:
            self.state = state = restored[0]
            together(lambda: self.batches.load_state_dict(state.data), self.group)
        elif self.group.rank() == 0:
            logger.warning("%s holds no state to resume from: starting anew", folder)

    def loop(self, step: TrainStep, watchdog: Watchdog) -> Outcome:
        state, args = self.state, self.args
        sinks: list[Any] = [MetricsLog(self.folder, from_step=state.step), *self.reporters]
        progress = Progress(self.schedule.iters, state.step, show=self.group.rank() == 0)
        started_at = saved_at = state.step
        began = time.perf_counter() - state.seconds
        reason = "finished"
        try:
            with NotedSignals(self._stop):
                while state.step < self.schedule.iters:
                    if args.early_stopping and state.stale_evals >= args.early_stopping:
                        reason = "early"
                        break
                    micro, ended = self._take(args.grad_accumulation_steps, began)
                    if ended:
                        reason = ended
                        break
                    schedule = self.schedule.fitted(state.step, state.seconds, args.max_seconds)
                    line = self._step(step, micro, schedule.at(state.step))
                    watchdog.alive()
                    progress.step(line, schedule.iters)
                    for sink in sinks:
                        sink.write(line)
                    if self._due(args.steps_per_eval):
                        self._validate(sinks, progress, watchdog)
                    if self._due(args.save_every):
                        self._save()
                        saved_at = state.step
                        watchdog.alive()
                moved = state.step != started_at  # a finished run that is resumed stays as it is
                if moved and reason != "interrupted" and not self._due(args.steps_per_eval):
                    self._validate(sinks, progress, watchdog)
                if moved and (saved_at != state.step or reason in ("early", "time")):
                    self._save()
        finally:
            progress.close()
            for sink in sinks:
                sink.close()
        return Outcome(state=state, reason=reason)

    def _take(self, count: int, began: float) -> tuple[list[Batch | None], str]:
        """The micro-batches of one update, and why there is none: alike on all ranks.

        Fewer where a finite source ends; as many as on the rank that has most, filled with None.
        """
        limit = self.args.max_seconds
        taken, error = attempt(lambda: list(at_most(self.batches, count)))
        micro: list[Batch | None] = [*(taken or ())]
        spent = int(100 * (time.perf_counter() - began)) if limit else 0
        failed, most, stopped, spent = max_over_ranks(
            [error is not None, len(micro), bool(self._stop), spent], self.group
        )
        if failed:
            fail_together(error, self.group)
        ended = "interrupted" if stopped else "" if most else "data"
        if limit:
            self.state.seconds = spent / 100
            ended = ended or ("time" if spent >= 100 * limit else "")
        return micro + [None] * (most - len(micro)), ended

    def _step(self, step: TrainStep, micro: list[Batch | None], rate: float) -> dict[str, Any]:
        state = self.state
        start = time.perf_counter()
        mx.reset_peak_memory()
        result = step(micro, rate)
        seconds = time.perf_counter() - start
        if not result.finite:
            raise non_finite(state.step + 1, result, micro, self.group)
        state.step += 1
        state.tokens += result.tokens
        state.data = self.batches.state_dict()
        return {
            "step": state.step,
            "loss": result.loss,
            "learning_rate": rate,
            "grad_norm": result.grad_norm,
            "tokens": state.tokens,
            **result.metrics,
            "seconds": seconds,
            "tokens_per_second": result.tokens / seconds,
            "peak_memory_gb": mx.get_peak_memory() / 1e9,
        }

    def _validate(self, sinks: list[Any], progress: Progress, watchdog: Watchdog) -> None:
        if self.validation is None:
            return
        batches = together(self.validation, self.group)
        loss, tokens = evaluate(
            self.model, batches, self.loss_fn, self.args.val_batches, self.group, watchdog.alive
        )
        state = self.state
        line = {"step": state.step, "val_loss": loss, "val_tokens": tokens}
        for sink in sinks:
            sink.write(line)
        progress.say(f"step {state.step}: validation loss {loss:.4f}")
        if state.best_loss is None or loss < state.best_loss:
            state.best_loss, state.best_step, state.stale_evals = loss, state.step, 0
            if self.keeps:
                together(lambda: save_best(self.folder, state, self.model), self.group)
        else:
            state.stale_evals += 1

    def _save(self) -> None:
        save = partial(save_state, self.folder, self.state, self.model, self.optimizer)
        if self.keeps:
            keep, settings = self.args.keep_states, self.settings
            together(lambda: save(keep=keep, settings=settings), self.group)

    def _due(self, every: int) -> bool:
        return every > 0 and self.state.step > 0 and self.state.step % every == 0

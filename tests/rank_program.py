"""What each rank in test_distributed.py runs: ``python rank_program.py CASE FOLDER``.

With one rank the same cases are what several are compared with.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from training_makers import CountingBatches, make_batch, make_model, weights_of

from openelm_mlx.batches import Batch, Prefetch
from openelm_mlx.distributed import world
from openelm_mlx.objectives import language_model_loss
from openelm_mlx.optim import OptimizerArgs, ScheduleArgs
from openelm_mlx.trainer import Outcome, train
from openelm_mlx.training_args import TrainArgs
from openelm_mlx.validation import evaluate

EXIT = {"finished": 0, "data": 0, "time": 0, "interrupted": 130}


def rows_of(batch: Batch, mine: slice) -> Batch:
    """Some rows of a batch."""
    return Batch(
        tokens=batch.tokens[mine],
        targets=batch.targets[mine],
        mask=batch.mask[mine],
        samples=batch.samples[mine],
    )


class OwnRows(CountingBatches):
    """Rows rank, rank + size, ... of global batches of the given numbers of rows."""

    def __init__(self, rows: list[int] | int = 5, *, leave_out_empty: bool = False) -> None:
        super().__init__()
        self.sizes, self.seen = rows, list[str]()
        self.leave_out_empty = leave_out_empty

    def __next__(self) -> Batch:
        if isinstance(self.sizes, list) and self.position >= len(self.sizes):
            raise StopIteration
        rows = self.sizes[self.position] if isinstance(self.sizes, list) else self.sizes
        own = rows_of(make_batch(self.position, rows), slice(world().rank(), None, world().size()))
        if self.leave_out_empty and not own.samples:
            raise StopIteration
        self.position += 1
        self.seen += own.samples
        return own


class Trouble(OwnRows):
    """Does something on one rank when it is asked for batch ``at``."""

    def __init__(self, rank: int, at: int, trouble: Callable[[Batch], Batch]) -> None:
        super().__init__()
        self.rank, self.at, self.trouble = rank, at, trouble

    def __next__(self) -> Batch:
        batch = super().__next__()
        if world().rank() == self.rank and self.position == self.at:
            return self.trouble(batch)
        return batch


class Noted:
    """A source that says each step on standard output, after a wait."""

    def __init__(self, source: OwnRows) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        time.sleep(0.1)
        sys.stdout.write(f"step {self.source.position}\n")
        sys.stdout.flush()
        return next(self.source)

    def state_dict(self) -> dict[str, Any]:
        return self.source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.source.load_state_dict(state)


def run(folder: Path, batches: Any = None, *, seed: int = 3, **settings: Any) -> Outcome:
    """Train, keep states in this rank's own folder, and leave weights and sample names behind."""
    rank, source = world().rank(), batches or OwnRows()
    resume, iters = settings.pop("resume", False), settings.pop("iters", 12)
    validation = settings.pop("validation", None)
    model = make_model(seed)
    args = TrainArgs(**{"save_every": 4, "steps_per_eval": 0, "stall_timeout": 20, **settings})
    outcome = train(
        model,
        OptimizerArgs().build(),
        source,
        language_model_loss(),
        args,
        schedule=ScheduleArgs(learning_rate=0.02, warmup_steps=2, iters=iters),
        validation=validation or _validation,
        run_folder=folder / f"run{rank}",
        resume=resume,
    )
    mx.save_safetensors(str(folder / f"weights{rank}.safetensors"), weights_of(model))
    (folder / f"seen{rank}.json").write_text(json.dumps(getattr(source, "seen", [])))
    return outcome


def _validation() -> list[Batch]:
    """Three batches of three, two and one rows; a rank may have fewer."""
    return [own for i in range(3) if (own := _own(100 + i, 3 - i)).samples]


def _own(seed: int, rows: int) -> Batch:
    return rows_of(make_batch(seed, rows), slice(world().rank(), None, world().size()))


def plain(folder: Path) -> Outcome:
    """Two micro-batches an update, of five rows, with validations."""
    return run(folder, grad_accumulation_steps=2, steps_per_eval=3)


def prefetch(folder: Path) -> Outcome:
    """Batches from a thread."""
    return run(folder, Prefetch(OwnRows()))


def small_last_batch(folder: Path) -> Outcome:
    """The second update has one row, in its first micro-batch."""
    return run(folder, OwnRows([5, 4, 1]), grad_accumulation_steps=2)


def ends_early(folder: Path) -> Outcome:
    """As above, but a rank without rows says that its data has ended."""
    batches = OwnRows([5, 4, 1, 1], leave_out_empty=True)
    return run(folder, batches, grad_accumulation_steps=2)


def bounded_by_time(folder: Path) -> Outcome:
    """Ranks whose clocks differ: each begins to count when it has come so far."""
    time.sleep(0.1 * world().rank())
    return run(folder, iters=1_000_000, max_seconds=0.7, save_every=0)


def evaluation(folder: Path) -> Outcome:
    """Five validation batches of one row: a rank's may be empty."""
    loss = evaluate(make_model(), [_own(i, 1) for i in range(5)], language_model_loss())
    (folder / f"loss{world().rank()}.json").write_text(json.dumps(loss))
    sys.exit(0)


def other_weights(folder: Path) -> Outcome:
    """Each rank draws other weights."""
    return run(folder, seed=3 + world().rank())


def other_settings(folder: Path) -> Outcome:
    """Each rank trains for another number of steps."""
    return run(folder, iters=12 + world().rank())


def not_finite(folder: Path) -> Outcome:
    """A loss that is no number, on rank 1 alone."""
    return run(folder, Trouble(1, 6, _nan))


def _nan(batch: Batch) -> Batch:
    return Batch(
        tokens=batch.tokens,
        targets=batch.targets,
        mask=batch.mask * float("nan"),
        samples=batch.samples,
    )


def bad_data(folder: Path) -> Outcome:
    """A line of rank 1 that cannot be read."""
    return run(folder, Trouble(1, 6, _unreadable))


def _unreadable(_: Batch) -> Batch:
    raise ValueError("shard.jsonl line 7: no JSON")


def cannot_save(folder: Path) -> Outcome:
    """A file where rank 0's states should go."""
    if world().rank() == 0:
        (folder / "run0").mkdir()
        (folder / "run0" / "states").write_text("in the way")
    return run(folder)


def dies(folder: Path) -> Outcome:
    """Rank 1 is killed."""
    return run(folder, Trouble(1, 6, lambda _: _signal(signal.SIGKILL)))


def hangs(folder: Path) -> Outcome:
    """Rank 1 stops answering."""
    return run(folder, Trouble(1, 6, lambda _: _signal(signal.SIGSTOP)), stall_timeout=2)


def stopped_at_the_end(folder: Path) -> Outcome:
    """Told to stop in the last validation, after the last step."""

    def validation() -> list[Batch]:
        os.kill(os.getpid(), signal.SIGTERM)
        return [make_batch(100)]

    return run(folder, iters=10, validation=validation)


def _signal(number: int) -> Batch:
    os.kill(os.getpid(), number)
    raise AssertionError("still running")


def slow(folder: Path) -> Outcome:
    """Long enough to be interrupted."""
    return run(folder, Noted(OwnRows()), iters=24)


def resumed(folder: Path) -> Outcome:
    """The same schedule without waits, from rank 0's newest state or from the start."""
    return run(folder, iters=24, resume=True)


def command(folder: Path) -> Outcome:
    """``openelm`` with the arguments in ``argv.json``; rank 1 cannot see rank 0's run."""
    from openelm_mlx import cli

    words = json.loads((folder / "argv.json").read_text())
    if world().rank():
        words[words.index("--output") + 1] += str(world().rank())
    sys.exit(cli.main(words))


def fully_sharded(folder: Path) -> Outcome:
    """Pieces of layers, where the backend can."""
    return run(folder, fully_shard=True)


def sharded_on_ring(folder: Path) -> Outcome:
    """MLX's fully_shard over a ring, with a reduce-scatter made of all_sum."""
    from openelm_mlx import sharding

    calls = []

    def sum_scatter(x: mx.array, group: Any) -> mx.array:
        calls.append(x.shape)
        return mx.split(mx.distributed.all_sum(x, group=group), group.size())[group.rank()]

    mx.distributed.sum_scatter = sum_scatter
    sharding.REDUCE_SCATTER = (*sharding.REDUCE_SCATTER, "ring")
    checkpoint = "layer" if (folder / "checkpoint").exists() else "none"
    outcome = run(
        folder,
        OwnRows([5, 5, 5, 1, 5, 1, 5, 5, 5, 5, 5, 5]),
        fully_shard=world().size() > 1,
        steps_per_eval=3,
        grad_checkpoint=checkpoint,
    )
    if world().size() > 1 and not calls:
        raise ValueError("nothing was reduced and scattered")
    return outcome


if __name__ == "__main__":
    try:
        ended = globals()[sys.argv[1]](Path(sys.argv[2]))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)
    sys.exit(EXIT[ended.reason])

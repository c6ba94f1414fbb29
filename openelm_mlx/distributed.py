"""Ranks: sums over machines, and an end to a run in which one of them has stopped.

MLX's own ``mx.distributed`` (ring, JACCL, MPI, NCCL), started by ``mlx.launch`` or ``mpirun``. On
one machine everything here is a no-op.
"""

import logging
import os
import sys
import threading
import time
from typing import Any

import mlx.core as mx
import mlx.nn as nn

logger = logging.getLogger(__name__)

STALLED = 75  # exit code of a run that its watchdog ended (EX_TEMPFAIL)


def world() -> mx.distributed.Group:
    """All ranks of this run; one where nothing was launched."""
    return mx.distributed.init()


def sum_gradients(gradients: Any, group: mx.distributed.Group) -> Any:
    """Gradients added over the ranks, grouped into few messages, the same on all of them.

    Args:
        gradients: tree of arrays, equally shaped on all ranks.
        group: the ranks.
    """
    if group.size() == 1:
        return gradients
    averaged = nn.average_gradients(gradients, group)
    return nn.utils.tree_map(lambda g: g * group.size(), averaged)


def sum_scalars(values: mx.array, group: mx.distributed.Group) -> mx.array:
    """A small array added over the ranks; on the CPU stream, where all backends can."""
    if group.size() == 1:
        return values
    return mx.distributed.all_sum(values, group=group, stream=mx.cpu)


def any_rank(flag: bool, group: mx.distributed.Group) -> bool:
    """Whether the flag is set on any rank, known to all."""
    if group.size() == 1:
        return flag
    total: Any = sum_scalars(mx.array(float(flag)), group).item()
    return bool(total)


class Watchdog:
    """Ends the process when no step is reported for too long: another rank has died or hangs.

    A collective that waits for a dead rank cannot be interrupted, so the process is ended, which
    ``mlx.launch`` and ``mpirun`` pass on to the others.

    Args:
        seconds: without a sign of life; 0 turns it off.
        rank: for the message.
    """

    def __init__(self, seconds: float, rank: int) -> None:
        self._seconds, self._rank = seconds, rank
        self._last = time.monotonic()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        if self._seconds > 0:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()

    def alive(self) -> None:
        """Report a finished step."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        while not self._end.wait(min(self._seconds / 4, 5.0)):
            if time.monotonic() - self._last > self._seconds:
                sys.stderr.write(
                    f"error: rank {self._rank}: no step finished in {self._seconds:.0f} s; another "
                    "rank has died or hangs. Start again with --resume (--stall-timeout changes "
                    "the limit)\n"
                )
                sys.stderr.flush()
                os._exit(STALLED)

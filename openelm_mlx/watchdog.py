"""An end to a run whose ranks wait for one that does not answer."""

import os
import sys
import threading
import time
from collections.abc import Callable

STALLED = 75  # exit code of a run that its watchdog ended (EX_TEMPFAIL)


class Watchdog:
    """Ends the process when no step is reported for too long: another rank has died or hangs.

    A collective that waits for a dead rank cannot be interrupted, so the process is ended, which
    ``mlx.launch`` and ``mpirun`` pass on to the others.

    Args:
        seconds: without a sign of life; 0 turns it off.
        rank: for the message.
        end: what ends the process; takes the exit code.
    """

    def __init__(self, seconds: float, rank: int, end: Callable[[int], object] = os._exit) -> None:
        self._seconds, self._rank, self._exit = seconds, rank, end
        self._last = time.monotonic()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Watchdog":
        self._last = time.monotonic()
        if self._seconds > 0:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()

    def alive(self) -> None:
        """Report progress: a micro-batch, a validation batch, a finished step."""
        self._last = time.monotonic()

    def _watch(self) -> None:
        while not self._end.wait(min(self._seconds / 4, 5.0)):
            if time.monotonic() - self._last > self._seconds:
                sys.stderr.write(
                    f"error: rank {self._rank}: no progress in {self._seconds:g} s; another "
                    "rank has died or hangs. Start again with --resume (--stall-timeout changes "
                    "the limit)\n"
                )
                sys.stderr.flush()
                self._exit(STALLED)
                return

"""The course of the demo: step after step, on from where it stopped, and the report at the end."""

import logging
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from openelm_mlx import blas
from openelm_mlx.demo_report import advice, write_report
from openelm_mlx.demo_room import DemoArgs, Done, Room, program
from openelm_mlx.demo_steps import STEPS, Step, slow_blas

logger = logging.getLogger(__name__)


def demo(
    folder: str | Path, settings: DemoArgs, *, overwrite: bool, steps: Sequence[Step] = STEPS
) -> int:
    """Walk the whole road, or what is left of it.

    Args:
        folder: of the report and all else.
        settings: what is bounded how.
        overwrite: throw away a demo that is there.
        steps: in order; each is kept when it is done.

    Returns:
        The exit code.

    Raises:
        FileExistsError: if the folder holds what no demo has written.
        ValueError: if a demo with other settings is there.
        KeyboardInterrupt: after saying how to go on.
    """
    room = Room.enter(folder, settings, overwrite=overwrite)
    left = [step for step in steps if step.name not in room.done]
    if not left:
        sys.stdout.write(
            f"{room.folder} holds a finished demo: {room.path('report.md')}\n--overwrite runs it "
            "anew, another --output beside it\n"
        )
        return 0
    if len(left) < len(steps):
        sys.stdout.write(f"{room.folder}: going on with step {len(steps) - len(left) + 1}\n")
    if slow_blas():
        logger.warning("training is slow here: OpenBLAS is %s", blas.status)
    for step in left:
        _do(room, step, list(steps).index(step) + 1, len(steps))
    report = write_report(room)
    seconds = sum(step.seconds for step in room.done.values())
    sys.stdout.write(f"\n{report}  ({seconds:.0f} s in all)\n")
    sys.stdout.write("".join(f"{line}\n" for line in advice(room)))
    return 0


def _do(room: Room, step: Step, number: int, count: int) -> None:
    """Do one step and keep it."""
    room.step, flags = Done(step.title), room.settings.flags()
    sys.stdout.write(f"\n{number}/{count}  {step.title}\n")
    sys.stdout.flush()
    began = time.perf_counter()
    try:
        step.work(room)
    except KeyboardInterrupt:
        again = shlex.join([*program(), "demo", "--output", str(room.folder), *flags])
        logger.warning("stopped in step %d; the same command goes on from there: %s", number, again)
        raise
    room.step.seconds = time.perf_counter() - began
    room.done[step.name] = room.step
    room.keep()

"""Starts ``rank_program.py`` on one rank or several of this machine, and reports how each ended."""

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROGRAM = Path(__file__).with_name("rank_program.py")
LAUNCH = Path(sys.executable).with_name("mlx.launch")
MPIRUN = shutil.which("mpirun")
LIMIT = 60  # seconds; a test takes a few


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one rank, or a launcher, ended."""

    code: int
    out: str
    err: str


def free_ports(count: int) -> int:
    """The first of some ports in a row that nobody listens on."""
    while True:
        first = random.randrange(20000, 60000)
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return first


def alone(case: str, folder: Path) -> Ended:
    """One process."""
    folder.mkdir(exist_ok=True)
    return _ended(_start(case, folder, os.environ))


def start_ring(case: str, folder: Path, ranks: int = 2) -> list["subprocess.Popen[str]"]:
    """Ranks joined as mlx.launch joins them, but each our own child."""
    folder.mkdir(exist_ok=True)
    port = free_ports(ranks)
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port + i}"] for i in range(ranks)]))
    return [
        _start(case, folder, {**os.environ, "MLX_HOSTFILE": str(hosts), "MLX_RANK": str(i)})
        for i in range(ranks)
    ]


def ring(case: str, folder: Path, ranks: int = 2) -> list[Ended]:
    """Ranks joined by the ring backend, to their end."""
    return finish(start_ring(case, folder, ranks))


def finish(processes: list["subprocess.Popen[str]"]) -> list[Ended]:
    """Wait for all; none outlives the test."""
    try:
        return [_ended(process) for process in processes]
    finally:
        end(processes)


def end(processes: list["subprocess.Popen[str]"]) -> None:
    """Kill what still runs, and close its pipes."""
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


def launched(launcher: list[str], case: str, folder: Path, **environment: str) -> Ended:
    """Ranks started by ``mlx.launch`` or ``mpirun``."""
    folder.mkdir(exist_ok=True)
    words = [*launcher, sys.executable, str(PROGRAM), case, str(folder)]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return Ended(code=done.returncode, out=done.stdout, err=done.stderr)


def _start(case: str, folder: Path, environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), case, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _ended(process: "subprocess.Popen[str]") -> Ended:
    out, err = process.communicate(timeout=LIMIT)
    return Ended(code=process.returncode, out=out, err=err)

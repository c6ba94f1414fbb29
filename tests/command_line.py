"""Runs ``openelm`` in this process, or in one of its own, and gives back what a shell would see."""

import logging
import os
import subprocess
import sys
from typing import NamedTuple

import pytest

from openelm_mlx import cli


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of a failed command; more than that, notes aside, fails the test."""
        notes = ("info: ", "warning: ")
        lines = [line for line in self.err.splitlines() if not line.startswith(notes)]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("error: ")
        assert self.code in (1, 2)
        return lines[0].removeprefix("error: ")


def run_here(capsys: pytest.CaptureFixture[str], *arguments: object) -> Outcome:
    """In this process: quick, and other tests' logging is left alone."""
    root, loggers = logging.getLogger(), [logging.getLogger(n) for n in ("openelm_mlx", "convert")]
    handlers, levels = root.handlers[:], [logger.level for logger in (root, *loggers)]
    capsys.readouterr()
    try:
        code = cli.main([str(argument) for argument in arguments])
    finally:
        root.handlers[:] = handlers
        for logger, level in zip((root, *loggers), levels, strict=True):
            logger.setLevel(level)
    return Outcome(code, *capsys.readouterr())


def run_apart(*arguments: object, stdin: str = "", code: str | None = None) -> Outcome:
    """In a process of its own: the command, or Python code."""
    start = [sys.executable, *(["-c", code] if code else ["-m", "openelm_mlx.cli"])]
    result = subprocess.run(
        [*start, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "MLX_DISABLE_COMPILE": "1"},
    )
    return Outcome(result.returncode, result.stdout, result.stderr)

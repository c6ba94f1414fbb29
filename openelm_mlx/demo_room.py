"""The folder of a demo, and commands run in it as a person would type them.

What the commands print goes to ``log.txt``; what is done, and what was said of it, is kept in
``demo.json`` after each step.
"""

import argparse
import io
import json
import logging
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from openelm_mlx.atomic import atomic_file
from openelm_mlx.weight_files import read_json

RECORD, LOG = "demo.json", "log.txt"
# Command -> module, and suffix of its two functions: those of `openelm` that the demo uses.
STAGES = {
    "tokenizer": ("openelm_mlx.tokenizer_training", "_tokenizer"),
    "pretrain": ("openelm_mlx.pretrain", ""),
    "finetune": ("openelm_mlx.finetune", ""),
    "generate": ("openelm_mlx.generate", ""),
    "fuse": ("openelm_mlx.fuse", ""),
    "evaluate": ("openelm_mlx.evaluate", ""),
    "plot": ("openelm_mlx.plot_command", ""),
    "convert quantize": ("convert.quantize", "_quantize"),
    "convert coreml": ("convert.coreml", "_coreml"),
    "convert run-coreml": ("convert.coreml_run", ""),
}


@dataclass(frozen=True, kw_only=True)
class DemoArgs:
    """Settings of a demo.

    Raises:
        ValueError: for values out of range.
    """

    pretrain_seconds: float | None = None  # wall time; None takes the recipe's
    finetune_seconds: float | None = None
    limit: int | None = None  # texts and questions; None takes all
    vocab_size: int = 1024

    def __post_init__(self) -> None:
        for name, least in (("pretrain_seconds", 0), ("finetune_seconds", 0), ("limit", 99)):
            value = getattr(self, name)
            if value is not None and not value > least:
                raise ValueError(f"demo: {name} must be more than {least}, got {value:g}")

    def flags(self) -> list[str]:
        """The flags that ask for these settings."""
        given = {
            f"--{f.name.replace('_', '-')}": getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != f.default
        }
        return [word for flag, value in given.items() for word in (flag, str(value))]


@dataclass
class Done:
    """A step that is done.

    Attributes:
        title: what it did.
        seconds: wall time.
        commands: that do the same by hand.
        lines: what came of it, for a person.
        facts: the same, for the report.
    """

    title: str
    seconds: float = 0.0
    commands: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class Room:
    """The folder of a demo.

    Args:
        folder: of the demo; has to be there.
        settings: of the demo.
    """

    def __init__(self, folder: Path, settings: DemoArgs) -> None:
        self.folder, self.settings = folder, settings
        self.done: dict[str, Done] = {}
        self.step = Done("")  # under way

    @classmethod
    def enter(cls, folder: str | Path, settings: DemoArgs, *, overwrite: bool) -> "Room":
        """Make the folder, or open that of a demo which was begun.

        Raises:
            FileExistsError: if it holds what no demo has written.
            ValueError: if the demo there was begun with other settings, or its record is damaged.
        """
        folder = Path(folder).expanduser()
        begun = (folder / RECORD).is_file()
        if folder.exists() and not begun and (folder.is_file() or any(folder.iterdir())):
            raise FileExistsError(
                f"{folder} holds something that no demo has written; give another --output"
            )
        if begun and overwrite:
            shutil.rmtree(folder)
            begun = False
        folder.mkdir(parents=True, exist_ok=True)
        room = cls(folder, settings)
        if begun:
            room._read()
        else:
            room.keep()
        return room

    def _read(self) -> None:
        record = read_json(self.folder / RECORD)
        if record.get("settings") != asdict(self.settings):
            raise ValueError(
                f"{self.folder} holds a demo with other settings; give the same, --overwrite to "
                "begin anew, or another --output"
            )
        self.done = {name: Done(**step) for name, step in record.get("steps", {}).items()}

    def keep(self) -> None:
        """Write down what is done."""
        record = {
            "settings": asdict(self.settings),
            "steps": {name: asdict(step) for name, step in self.done.items()},
        }
        with atomic_file(self.folder / RECORD) as file:
            file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def path(self, name: str) -> Path:
        """A file or folder of the demo."""
        return self.folder / name

    def openelm(self, *words: object) -> str:
        """Show a command, run it, and return what it printed.

        Args:
            words: after ``openelm``.

        Raises:
            KeyboardInterrupt: where it was interrupted.
            RuntimeError: if it failed without an error.
        """
        command = [str(word) for word in words]
        self.show_command([*program(), *command])
        count = 2 if command[0] == "convert" else 1
        module, suffix = STAGES[" ".join(command[:count])]
        stage: Any = import_module(module)
        parser = argparse.ArgumentParser(prog=f"openelm {command[0]}")
        getattr(stage, f"add{suffix}_arguments")(parser)
        args = parser.parse_args(command[count:])
        printed = io.StringIO()
        try:
            with redirect_stdout(printed), warnings_alone():
                code = getattr(stage, f"run{suffix}")(args)
        finally:
            with self.path(LOG).open("a", encoding="utf-8") as log:
                log.write(f"$ {shlex.join([*program(), *command])}\n{printed.getvalue()}\n")
        if code == 130:
            raise KeyboardInterrupt
        if code:
            raise RuntimeError(f"openelm {command[0]} ended with {code}; see {self.path(LOG)}")
        return printed.getvalue()

    def show_command(self, words: list[str]) -> None:
        """Show what a person would type."""
        line = shlex.join(words)
        self.step.commands.append(line)
        sys.stdout.write(f"  $ {line}\n")
        sys.stdout.flush()

    def say(self, *lines: str) -> None:
        """Show what came of the step, and keep it."""
        self.step.lines += lines
        sys.stdout.write("".join(f"    {line}\n" for line in lines))
        sys.stdout.flush()


@contextmanager
def warnings_alone() -> Iterator[None]:
    """Leave out what is said for information: the demo has its own words."""
    loggers = [logging.getLogger(name) for name in ("openelm_mlx", "convert")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def program() -> list[str]:
    """How a person starts ``openelm`` here: from PATH, by its place, or as a module."""
    script = Path(sys.executable).with_name("openelm")
    found = shutil.which("openelm")
    if found and script.is_file() and Path(found).samefile(script):
        return ["openelm"]
    return [_near(script)] if script.is_file() else [*python(), "-m", "openelm_mlx.cli"]


def python() -> list[str]:
    """How a person starts this Python."""
    found = shutil.which("python")
    own = Path(sys.executable)
    if found and Path(found) == own:
        return ["python"]
    return [_near(own)]


def _near(path: Path) -> str:
    """Relative to the working folder where it lies in it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)

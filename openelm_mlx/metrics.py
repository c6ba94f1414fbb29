"""The record of a run: one JSON line a step, a progress bar, and W&B where asked for."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

METRICS_FILE = "metrics.jsonl"
# Depend on the machine and the hour; all other values of a resumed run equal an uninterrupted one's
WALL_CLOCK = ("seconds", "tokens_per_second", "peak_memory_gb")


class MetricsLog:
    """Appends lines to ``metrics.jsonl``, each flushed at once.

    Args:
        folder: of the run; None keeps nothing (ranks other than 0).
        from_step: a resumed run's step; lines of later steps are cut off.
    """

    def __init__(self, folder: Path | None, *, from_step: int = 0) -> None:
        self._file: IO[str] | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS_FILE
        kept = [line for line in read_metrics(folder) if line["step"] <= from_step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        temporary.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append one line."""
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run; one that a killed process left half-written is passed over."""
    path = folder / METRICS_FILE
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines


class Progress:
    """A bar on standard error with loss, speed and memory; silent where that is no terminal.

    Args:
        total: updates in all.
        done: updates made before.
        show: False on ranks other than 0.
    """

    def __init__(self, total: int, done: int, *, show: bool) -> None:
        self._bar = tqdm(
            total=total,
            initial=done,
            unit="step",
            dynamic_ncols=True,
            disable=not (show and sys.stderr.isatty()),
        )

    def step(self, line: Mapping[str, Any]) -> None:
        """Show one training step."""
        self._bar.update(1)
        self._bar.set_postfix_str(
            f"loss {line['loss']:.4f}, {line['tokens_per_second']:.0f} tokens/s, "
            f"{line['peak_memory_gb']:.2f} GB"
        )

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._bar.disable:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


class WandbReporter:
    """Sends every line to Weights & Biases through its own library.

    Args:
        project: name of the project there.
        settings: kept with the run.

    Raises:
        ValueError: where ``wandb`` is not installed.
    """

    def __init__(self, project: str, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError("--report-to wandb needs it installed: pip install wandb") from error
        self._run = wandb.init(project=project, config=dict(settings))

    def write(self, line: Mapping[str, Any]) -> None:
        """Send one line."""
        self._run.log({k: v for k, v in line.items() if k != "step"}, step=line["step"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()

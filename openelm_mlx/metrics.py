"""The record of a run: one JSON line a step, each flushed at once."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

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

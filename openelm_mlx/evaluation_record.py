"""The result of an evaluation on disk, and the partial sums that an interruption leaves.

Result files appear whole. Beside one lies, while it is being computed, a file of partial sums.
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from openelm_mlx.answer_memory import AnswerMemory
from openelm_mlx.atomic import atomic_file
from openelm_mlx.evaluation_args import PerplexityArgs, TaskArgs
from openelm_mlx.text_files import find_files
from openelm_mlx.weight_files import write_json

logger = logging.getLogger(__name__)

_SAVE_EVERY = 5.0  # seconds between two writes of partial sums


def record_of(
    text: PerplexityArgs | None, tasks: TaskArgs | None, **settings: Any
) -> dict[str, Any]:
    """What a result depends on beside the weights, ready for JSON.

    Args:
        text: what text is scored; its files are hashed.
        tasks: which tasks are scored; local files of theirs are hashed.
        settings: more of them.

    Raises:
        FileNotFoundError: if a file of text is missing.
    """
    files: list[Path] = []
    if text is not None:
        settings = asdict(text) | settings
        files += find_files(text.data)
    if tasks is not None:
        settings = asdict(tasks) | settings
        files += sorted(Path(tasks.data_dir).glob("*/test.json")) if tasks.data_dir else []
        files += [Path(task) for task in tasks.tasks if Path(task).is_file()]
    hashes = {"data": {str(file): sha256_of([file]) for file in files}}
    more = ["lm-eval"] if tasks is not None else []
    return {"settings": settings, "versions": versions("mlx-lm", *more), "hashes": hashes}


def versions(*more: str) -> dict[str, str]:
    """Versions of what computes the result, as far as installed.

    Args:
        more: distributions beside ours and MLX.
    """
    found = {}
    for name in ("openelm-mlx", "mlx", *more):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def sha256_of(files: Iterable[Path]) -> str:
    """One hash over the bytes of files, in order."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def folder_bytes(folder: Path) -> int:
    """Size of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def write_text(path: Path, text: str, *, overwrite: bool) -> None:
    """Write a text file, whole or not at all."""
    with atomic_file(path, overwrite=overwrite) as temporary:
        temporary.write_text(text, encoding="utf-8")


def today() -> str:
    """The date, as ISO 8601 has it."""
    return time.strftime("%Y-%m-%d", time.gmtime())


def write_result(path: str | Path, result: Mapping[str, Any], *, overwrite: bool) -> None:
    """Write a result as JSON, whole or not at all.

    Raises:
        FileExistsError: if the file is there and may not be replaced.
    """
    with atomic_file(path, overwrite=overwrite) as temporary:
        write_json(temporary, result)


class Partial:
    """Partial sums beside a result file, by which an interrupted evaluation goes on.

    Args:
        output: the result file; None keeps nothing.
        work: everything that the sums depend on; sums of other work are not used.
    """

    def __init__(self, output: str | Path | None, work: Mapping[str, Any]) -> None:
        self._path = None if output is None else partial_file(output)
        text = json.dumps(work, sort_keys=True, default=str)
        self._key = hashlib.sha256(text.encode()).hexdigest()
        self._saved = time.monotonic()

    def load(self, name: str, *, key: str) -> dict[str, Any] | None:
        """What was saved under a name; None where there is nothing of this work.

        Args:
            name: of the part.
            key: hash of the weights it belongs to.
        """
        part = self._read()["parts"].get(name)
        if part is None or part["key"] != key:
            return None
        logger.info("%s: continuing an evaluation that was interrupted (%s)", self._path, name)
        return dict(part["state"])

    def save(self, state: Mapping[str, Any], name: str, *, key: str, now: bool = False) -> None:
        """Keep a state under a name; without ``now``, at most every 5 seconds."""
        if self._path is None or (not now and time.monotonic() - self._saved < _SAVE_EVERY):
            return
        kept = self._read()
        kept["parts"][name] = {"key": key, "state": dict(state)}
        write_text(self._path, json.dumps(kept), overwrite=True)
        self._saved = time.monotonic()

    def answers(self, *, key: str) -> AnswerMemory | None:
        """What a model has answered to tasks so far; None where nothing is kept.

        Args:
            key: hash of its weights.
        """
        if self._path is None:
            return None
        return AnswerMemory(self._answers_file(self._path), work=self._key, key=key)

    def remove(self) -> None:
        """The result is written: the partial sums have served."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._answers_file(self._path).unlink(missing_ok=True)

    @staticmethod
    def _answers_file(partial: Path) -> Path:
        return partial.with_suffix(".answers")

    def _read(self) -> dict[str, Any]:
        empty: dict[str, Any] = {"work": self._key, "parts": {}}
        if self._path is None or not self._path.is_file():
            return empty
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            same = kept["work"] == self._key and isinstance(kept["parts"], dict)
        except (ValueError, KeyError, TypeError):
            same = False
        if same:
            return dict(kept)
        logger.warning("%s is of another evaluation; starting anew", self._path)
        self._path.unlink()
        return empty


def partial_file(output: str | Path) -> Path:
    """Where the partial sums of a result file lie."""
    output = Path(output)
    return output.with_name(f".{output.name}.partial")

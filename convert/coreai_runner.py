"""Runs a Core AI bundle in Apple's runtime, in a process of its own, on Linux or macOS.

V vocabulary, n tokens. Knows bundles and processes, not what is asked of the model.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

METADATA = "metadata.json"
METADATA_VERSION = "0.2"  # Apple's Swift package refuses any other
_ENGINE = "convert.coreai_engine"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle on disk.

    Attributes:
        folder: of the bundle.
        name: as its metadata have it.
        asset: the ``.aimodel`` folder.
        vocab_size: columns of the logits.
        context: tokens that the model can hold.
    """

    folder: Path
    name: str
    asset: Path
    vocab_size: int
    context: int

    @classmethod
    def open(cls, folder: str | Path) -> "Bundle":
        """Read a bundle's metadata and look for its parts.

        Raises:
            FileNotFoundError: if the folder, its metadata, asset or tokenizer is missing.
            ValueError: if the metadata are damaged or of another version.
        """
        folder = Path(folder).expanduser()
        file = folder / METADATA
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} is no Core AI bundle: it has no {METADATA}; give a folder that "
                "`openelm convert coreai` wrote"
            )
        try:
            entries = json.loads(file.read_text(encoding="utf-8"))
            language, main = entries["language"], entries["assets"]["main"]
            name, version = str(entries["name"]), entries["metadata_version"]
            sizes = {k: int(language[k]) for k in ("vocab_size", "max_context_length")}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} does not describe a language model: {error!r}") from error
        if version != METADATA_VERSION:
            raise ValueError(f"{file} has version {version}; expected {METADATA_VERSION}")
        for part in (f"{main}/main.mlirb", "tokenizer/tokenizer.json"):
            if not (folder / part).is_file():
                raise FileNotFoundError(
                    f"{folder} lacks {part}, without which an app cannot use it; export it again"
                )
        return cls(
            folder=folder,
            name=name,
            asset=folder / main,
            vocab_size=sizes["vocab_size"],
            context=sizes["max_context_length"],
        )


class Runner:
    """One sequence of tokens going through a bundle; use it as a context manager.

    Args:
        bundle: what to run.

    Raises:
        ImportError: if the extra ``coreai`` is not installed.
        RuntimeError: if Apple's runtime cannot load the asset.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        # The compiled copy that the runtime writes goes too where the process dies.
        self._room = tempfile.TemporaryDirectory(prefix="openelm-coreai-")
        self._log = (Path(self._room.name) / "log").open("w+")
        command = [sys.executable, "-P", "-m", _ENGINE, bundle.asset, bundle.context]
        self._process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "TMPDIR": self._room.name},
        )
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Runner":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def reset(self) -> None:
        """Begin a new sequence."""
        self._ask(None)

    def feed_all(self, ids: Sequence[int]) -> np.ndarray:
        """Append n tokens.

        Returns:
            (n, V) logits, in the type that the bundle gives.

        Raises:
            ValueError: if an id does not exist, there are none, or the context is full.
            RuntimeError: if the runtime fails.
        """
        tokens, vocab_size = np.array(ids, dtype=np.int32), self.bundle.vocab_size
        wrong = tokens[(tokens < 0) | (tokens >= vocab_size)].tolist()
        if tokens.ndim != 1 or not tokens.size or wrong:
            raise ValueError(
                f"a bundle takes one sequence of ids below {vocab_size} (batch 1), got shape "
                f"{tokens.shape}" + (f" with {wrong[0]}" if wrong else "")
            )
        logits: np.ndarray = self._ask(tokens)
        return logits

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens; the (V,) logits after the last of them."""
        last: np.ndarray = self.feed_all(ids)[-1]
        return last

    def close(self) -> None:
        """End the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._room.cleanup()

    def _ask(self, request: np.ndarray | None) -> Any:
        assert self._process.stdin is not None
        try:
            pickle.dump(request, self._process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
            self._process.stdin.flush()
        except BrokenPipeError:
            self._raise_death()
        return self._receive()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        try:
            answer = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError):
            self._raise_death()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _raise_death(self) -> NoReturn:
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self._log.seek(0)
        last = ([line.strip() for line in self._log if line.strip()] or ["it said nothing"])[-1]
        raise RuntimeError(f"Apple's Core AI runtime ended with {how}: {last}")

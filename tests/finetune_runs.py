"""A small base model and data set to tune on, and ``openelm finetune`` run on them."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_tokenizer as tiny
from command_line import Outcome, run_here
from folder_makers import small_folder
from tuning_makers import write

from openelm_mlx.metrics import WALL_CLOCK, read_metrics
from openelm_mlx.tokenizer import Tokenizer

QUICK = ["--batch-size", "4", "--max-seq-length", "64", "--warmup-steps", "0"]


def make_base(folder: Path, tokenizer: Tokenizer) -> Path:
    """A model folder with a tokenizer."""
    return small_folder(folder / "base", tokenizer)


def make_data(folder: Path) -> Path:
    """Thirteen prompts with always the same completion, four to validate on, two to test on."""
    records = [
        {"prompt": sentence, "completion": "the wolf saw a girl."}
        for sentence in tiny.sentences(17, seed=5)
    ]
    write(folder, *records[:13])
    write(folder, *records[13:], name="valid.jsonl")
    return write(folder, *records[13:15], name="test.jsonl")


def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no loss curve, which takes longer than the run; test_plots draws some."""
    monkeypatch.setattr("openelm_mlx.run_folder.try_plot_losses", lambda *_, **__: None)


class Tuner:
    """Runs the command; later flags win over earlier ones."""

    def __init__(self, capsys: pytest.CaptureFixture[str], base: Path, data: Path) -> None:
        self._capsys, self.base, self.data = capsys, base, data

    def __call__(self, *argv: object) -> Outcome:
        """Run with small settings on the base and the data."""
        start = ["--model", self.base, "--data", self.data, *QUICK]
        return run_here(self._capsys, "finetune", *start, *argv)

    def run(self, folder: Path, *argv: object) -> str:
        """Run into a folder; returns what was printed."""
        outcome = self(*argv, "--output", folder)
        assert outcome.code == 0, outcome.err
        return outcome.out


def comparable(folder: Path) -> list[dict[str, Any]]:
    """Metric lines without what depends on the hour."""
    return [{k: v for k, v in m.items() if k not in WALL_CLOCK} for m in read_metrics(folder)]


def losses(folder: Path) -> list[float]:
    """Training losses, step by step."""
    return [line["loss"] for line in read_metrics(folder) if "loss" in line]


def adapters(folder: Path) -> dict[str, mx.array]:
    """The adapters that a run wrote."""
    read: Any = mx.load(str(folder / "adapters.safetensors"))
    return dict(read)

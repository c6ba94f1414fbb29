"""Preference pairs that a small model can learn, and ``openelm dpo`` run on them."""

from pathlib import Path

import pytest
import tiny_tokenizer as tiny
from command_line import Outcome, run_here
from tuning_makers import write

CHOSEN, REJECTED = "the wolf saw a girl.", "red river under house and forest"
QUICK = [
    *("--batch-size", 4, "--max-seq-length", 96, "--max-prompt-length", 64, "--beta", 0.1),
    *("--grad-accumulation-steps", 1, "--learning-rate", 1e-2, "--warmup-steps", 0),
]


def make_pairs(folder: Path) -> Path:
    """Thirteen prompts to train on and four others, always with the same two answers."""
    records = [
        {"prompt": sentence, "chosen": CHOSEN, "rejected": REJECTED}
        for sentence in tiny.sentences(17, seed=5)
    ]
    write(folder, *records[:13])
    return write(folder, *records[13:], name="valid.jsonl")


class Preferring:
    """Runs the command; later flags win over earlier ones."""

    def __init__(self, capsys: pytest.CaptureFixture[str], base: Path, data: Path) -> None:
        self._capsys, self.base, self.data = capsys, base, data

    def words(self, *argv: object) -> list[object]:
        """The command line."""
        return ["dpo", "--model", self.base, "--data", self.data, *QUICK, *argv]

    def __call__(self, *argv: object) -> Outcome:
        """Run with small settings on the base and the pairs."""
        return run_here(self._capsys, *self.words(*argv))

    def run(self, folder: Path, *argv: object) -> str:
        """Run into a folder; returns what was printed."""
        outcome = self(*argv, "--output", folder)
        assert outcome.code == 0, outcome.err
        return outcome.out

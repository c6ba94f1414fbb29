"""A little text and a recipe for a model of two layers, and ``openelm pretrain`` run on them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer as tiny
from command_line import Outcome, run_here

RECIPE: dict[str, Any] = {
    **{"num_transformer_layers": 2, "model_dim": 32, "head_dim": 8, "num_gqa_groups": 2},
    **{"ffn_multipliers": [0.5, 1.0], "ffn_dim_divisor": 8, "max_context_length": 64},
    **{"batch_size": 4, "max_seq_length": 24, "iters": 12, "learning_rate": 0.01},
    **{"save_every": 4, "keep_states": 9, "steps_per_eval": 5},
}
# the sizes of Apple's recipes, brought down to the little text
SMALL = [
    *("--no-fix-text", "--min-tokens", 0, "--min-characters", 0, "--batch-size", 2),
    *("--max-seq-length", 16, "--grad-accumulation-steps", 1),
]


def write_text(folder: Path) -> Path:
    """``train.jsonl`` with 120 sentences and ``valid.jsonl`` with 20 others."""
    folder.mkdir(exist_ok=True)
    texts = tiny.sentences(140, seed=9)
    for name, part in (("train", texts[:120]), ("valid", texts[120:])):
        lines = [json.dumps({"text": text}) + "\n" for text in part]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


class Pretrainer:
    """Runs the command; later flags win over earlier ones."""

    def __init__(
        self, capsys: pytest.CaptureFixture[str], folder: Path, text: Path, tokenizer: Path
    ) -> None:
        self.capsys, self.text, self.tokenizer = capsys, text, tokenizer
        self.recipe = folder / "tiny.yaml"
        self.recipe.write_text(json.dumps(RECIPE))

    def __call__(self, *argv: object, recipe: object = None) -> Outcome:
        """Run a recipe, by default the small one, on the text."""
        start = ["--recipe", recipe or self.recipe, "--data", self.text / "train.jsonl"]
        start += ["--valid-data", self.text / "valid.jsonl", "--tokenizer", self.tokenizer]
        return run_here(self.capsys, "pretrain", *start, *argv)

    def run(self, folder: Path, *argv: object) -> str:
        """Run into a folder; returns what was printed."""
        outcome = self(*argv, "--output", folder)
        assert outcome.code == 0, outcome.err
        return outcome.out

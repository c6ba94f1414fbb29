"""The whole road on real text, as a user walks it: tokenizer, pretraining, LoRA, DPO, generation.

The text is what any Python installation has. Under two minutes on two quiet cores.
"""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from command_line import Outcome, run_here

from openelm_mlx import blas
from openelm_mlx.checkpoint import load
from openelm_mlx.metrics import read_metrics
from openelm_mlx.preference import PreferenceArgs, preference_loss
from openelm_mlx.python_text import documents, preferences, question_answers, write_split
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tuning_pairs import EvalPairBatches, PairArgs, load_pairs
from openelm_mlx.validation import evaluate

MODEL = {
    **{"num_transformer_layers": 3, "model_dim": 128, "head_dim": 32, "num_gqa_groups": 2},
    **{"ffn_dim_divisor": 32, "max_context_length": 128, "dtype": "float32"},
}
PRETRAIN = {
    **{"iters": 340, "batch_size": 8, "max_seq_length": 64, "learning_rate": 8e-3},
    **{"warmup_steps": 15, "steps_per_eval": 85, "val_batches": -1, "save_every": 0},
}
FINETUNE = {
    **{"iters": 36, "batch_size": 16, "max_seq_length": 96, "mask_prompt": True},
    **{"learning_rate": 5e-3, "warmup_steps": 5, "rank": 8, "steps_per_eval": 12},
    **{"val_batches": 4, "save_every": 0, "grad_checkpoint": "none", "dropout": 0},
}
DPO = {
    **{"fine_tune_type": "lora", "iters": 20, "batch_size": 8, "grad_accumulation_steps": 1},
    **{"max_seq_length": 96, "max_prompt_length": 48, "learning_rate": 1e-3, "rank": 8},
    **{"warmup_steps": 3, "beta": 0.1, "loss": "sigmoid", "steps_per_eval": 10},
    **{"val_batches": 4, "save_every": 0, "grad_checkpoint": "none", "dropout": 0},
}


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text, questions and pairs, each with a part for validation."""
    if blas.mlx_backend() == "cpu" and not blas.status.startswith("loaded"):
        pytest.skip(f"would take long: {blas.status}")
    folder = tmp_path_factory.mktemp("road")
    write_split(folder / "text", ({"text": text} for text in documents()), every=100)
    write_split(folder / "questions", question_answers())
    write_split(folder / "pairs", list(preferences())[:300])
    for name, recipe in (("pretrain", MODEL | PRETRAIN), ("finetune", FINETUNE), ("dpo", DPO)):
        (folder / f"{name}.yaml").write_text(json.dumps(recipe))
    return folder


def unigram_entropy(file: Path, tokenizer: Tokenizer) -> float:
    """Nats a token that no model without context can go below on this very text."""
    counts = Counter[int]()
    for line in file.read_text().splitlines():
        counts.update(tokenizer.encode(json.loads(line)["text"], bos=False, eos=True))
    shares = np.array(list(counts.values())) / counts.total()
    return float(-(shares * np.log(shares)).sum())


def validation(folder: Path) -> list[float]:
    return [line["val_loss"] for line in read_metrics(folder) if "val_loss" in line]


def preferred(model_folder: Path, adapters: Path, data: Path) -> float:
    """Share of unseen pairs whose better answer has gained more than the worse one."""
    model, tokenizer = load(model_folder, adapter_path=adapters)
    assert tokenizer is not None
    args = PairArgs(max_seq_length=96, max_prompt_length=48)
    train, valid = (load_pairs(data, split, tokenizer, args) for split in ("train", "valid"))
    read: Any = mx.load(str(adapters / "reference.safetensors"))
    (reference,) = read.values()
    batches = EvalPairBatches(valid, batch_size=8, references=reference[len(train) :])
    loss = preference_loss(PreferenceArgs(beta=0.1))

    def accuracy(model: Any, batch: Any) -> Any:
        _, count, sums = loss(model, batch)
        return sums["accuracy"], count

    share, count = evaluate(model, batches, accuracy)
    assert count == len(valid)
    return share


@pytest.mark.slow
def test_a_model_learns_real_text_then_answers_then_preferences(
    road: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: object) -> Outcome:
        outcome = run_here(capsys, *words)
        assert outcome.code == 0, outcome.err
        return outcome

    text, tokenizer = road / "text", road / "tokenizer"
    train = ["--data", text / "train.jsonl"]
    command("tokenizer", "train", *train, "--vocab-size", 1024, "--output", tokenizer)
    argv = [*train, "--valid-data", text / "valid.jsonl", "--tokenizer", tokenizer]
    command("pretrain", "--recipe", road / "pretrain.yaml", *argv, "--output", road / "base")
    entropy = unigram_entropy(text / "valid.jsonl", Tokenizer.from_path(road / "base"))
    learned = validation(road / "base")
    assert learned[-1] < entropy - 0.6, (learned, entropy)
    assert learned == sorted(learned, reverse=True)

    argv = ["--recipe", road / "finetune.yaml", "--model", road / "base"]
    command("finetune", *argv, "--data", road / "questions", "--output", road / "lora")
    tuned = validation(road / "lora")
    assert tuned[-1] < tuned[0] - 0.1, tuned

    command(
        "fuse",
        "--model",
        road / "base",
        "--adapter-path",
        road / "lora",
        "--output",
        road / "answering",
    )
    argv = ["--recipe", road / "dpo.yaml", "--model", road / "answering"]
    command("dpo", *argv, "--data", road / "pairs", "--output", road / "dpo")
    steps = [line for line in read_metrics(road / "dpo") if "loss" in line]
    assert steps[0]["loss"] == pytest.approx(math.log(2), rel=1e-3)
    assert validation(road / "dpo")[-1] < 0.9 * math.log(2)
    assert preferred(road / "answering", road / "dpo", road / "pairs") > 0.8

    prompt = "What does os.path.join do?"
    argv = ["generate", "--model", road / "answering", "--adapter-path", road / "dpo"]
    written = command(*argv, "--prompt", prompt, "--max-tokens", 24).out
    assert re.search(r"[A-Z][a-z]+ [a-z]+", written.removeprefix(prompt)), written

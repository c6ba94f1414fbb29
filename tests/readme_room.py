"""A folder with small things under the names that the README's commands use."""

import json
from pathlib import Path

import tiny_tokenizer as tiny
from dpo_runs import make_pairs
from finetune_runs import make_data
from folder_makers import small_folder

from convert.corenet import to_corenet
from openelm_mlx.cli import main
from openelm_mlx.tokenizer import Tokenizer


def furnish(room: Path, tokenizer: Path) -> None:
    """Make everything that the table of stand-ins names."""
    loaded = Tokenizer.from_path(tokenizer)
    small_folder(room / "openelm-270m", loaded, instruct=True)
    small_folder(room / "tiny", loaded)
    small_folder(room / "tok", loaded)
    (room / "tokenizer.model").write_bytes(tokenizer.read_bytes())
    make_data(room / "my-data")
    make_pairs(room / "pairs")
    _text(room)
    to_corenet(room / "tiny", room / "checkpoint_average.pt")
    (room / "checkpoint_average.yaml").write_text((room / "tiny" / "config.json").read_text())
    _run("finetune", "--model", room / "tiny", "--data", room / "my-data", "--iters", 2,
         "--max-seq-length", 64, "--output", room / "adapters")  # fmt: skip
    _run("convert", "to-peft", room / "adapters", "--output", room / "peft-adapters",
         "--model", room / "tiny")  # fmt: skip
    _run("convert", "coreml", room / "tiny", "--output", room / "package.mlpackage",
         "--context", 64, "--prefill", 8, "--no-verify")  # fmt: skip


def _text(room: Path) -> None:
    """Documents, those to train on long enough for Apple's filters, a recipe, and prompts."""
    (room / "corpus").mkdir()
    for name, seed, long in (("train", 1, 120), ("valid", 2, 2)):
        texts = [" ".join(tiny.sentences(long, seed=seed * 100 + i)) for i in range(8)]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (room / "corpus" / f"{name}.jsonl").write_text("".join(lines))
    recipe = {
        **{"num_transformer_layers": 2, "model_dim": 32, "head_dim": 8, "num_gqa_groups": 2},
        **{"ffn_multipliers": [0.5, 1.0], "ffn_dim_divisor": 8, "max_context_length": 64},
        **{"batch_size": 4, "max_seq_length": 24, "iters": 2, "tokenizer": "tok"},
        **{"data": ["corpus/train.jsonl"], "valid_data": ["corpus/valid.jsonl"]},
    }
    (room / "tiny.yaml").write_text(json.dumps(recipe))
    prompts = [json.dumps({"prompt": text}) + "\n" for text in tiny.sentences(3)]
    (room / "prompts.jsonl").write_text("".join(prompts))
    (room / "dataset" / "boolq").mkdir(parents=True)
    instruction = "was it old?\n\nAnswer format: true/false"
    items = [{"instruction": instruction, "answer": "true"}]
    (room / "dataset" / "boolq" / "test.json").write_text(json.dumps(items))
    row = {"case": "decode", "who": "openelm", "unit": "tokens/s", "median": 2, "ratio": None}
    numbers = {"model": "270M", "rows": [{**row, "low": 1, "high": 3}]}
    (room / "numbers.json").write_text(json.dumps(numbers))


def _run(*words: object) -> None:
    assert main([str(word) for word in words]) == 0, words

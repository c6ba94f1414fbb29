"""Little tuning data sets for tests, and what is learned of their samples."""

import json
from pathlib import Path
from typing import Any

from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tuning_data import Sample, TuningArgs, load_split

CHAT = [
    {"role": "user", "content": "the old king"},
    {"role": "assistant", "content": "went to forest"},
    {"role": "user", "content": "and the wolf"},
    {"role": "assistant", "content": "saw a girl"},
]


def write(folder: Path, *records: Any, name: str = "train.jsonl") -> Path:
    """A folder with these records, one a line; text is written as it is."""
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def load(path: Path, tokenizer: Tokenizer, **settings: Any) -> list[Sample]:
    """The training samples of a data set."""
    return load_split(path, "train", tokenizer, TuningArgs(**settings))


def learned(sample: Sample, tokenizer: Tokenizer) -> str:
    """Text of the tokens that are learned."""
    return tokenizer.decode(sample.tokens[sample.mask].tolist(), skip_special=False)


def whole(sample: Sample, tokenizer: Tokenizer) -> str:
    """Text of all tokens."""
    return tokenizer.decode(sample.tokens.tolist(), skip_special=False)

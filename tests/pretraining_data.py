"""A byte tokenizer and files of documents, for tests of batches."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openelm_mlx.batches import Batch
from openelm_mlx.text_files import FileSource

BOS, EOS = 1, 2


class ByteTokenizer:
    """id = byte + 3; BOS 1, EOS 2, pad 259 (one past the last)."""

    bos_id: int | None = BOS
    eos_id: int | None = EOS
    pad_id = 259

    def encode(self, text: str, *, bos: bool = True, eos: bool = False) -> list[int]:
        assert not bos
        assert not eos
        return [byte + 3 for byte in text.encode()]


def ids_of(text: str) -> list[int]:
    return [BOS, *(byte + 3 for byte in text.encode()), EOS]


def write_documents(folder: Path, files: Sequence[Sequence[str]]) -> list[FileSource]:
    """One .jsonl a list of texts."""
    sources = []
    for i, texts in enumerate(files):
        path = folder / f"{i:02d}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        sources.append(FileSource(path))
    return sources


def arrays(batch: Batch) -> dict[str, Any]:
    """A batch's arrays as lists, and its names."""
    fields = {"tokens": batch.tokens, "targets": batch.targets, "mask": batch.mask}
    found: dict[str, Any] = {name: np.array(array).tolist() for name, array in fields.items()}
    segments = None if batch.segments is None else np.array(batch.segments).tolist()
    return found | {"segments": segments, "samples": list(batch.samples)}


def rows_of(batches: Iterable[Batch]) -> list[list[int]]:
    return [row for batch in batches for row in np.array(batch.tokens).tolist()]

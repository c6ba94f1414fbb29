"""A small model folder with a tokenizer, for the workflow's check of the Swift runner."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import golden_set  # noqa: F401  # imports openelm_mlx, so that OpenBLAS comes before mlx.core
import tiny_tokenizer
from folder_makers import small_model

from openelm_mlx.checkpoint import save_model
from openelm_mlx.tokenizer import Tokenizer


def make(folder: Path) -> None:
    """Unequal layers, 320 rows; special and byte pieces are seldom the likeliest."""
    model = small_model(head_dim=32)
    model.transformer.token_embeddings.weight[:259] *= 0.1
    with TemporaryDirectory() as temporary:
        path = tiny_tokenizer.train(Path(temporary) / "tokenizer.model")
        save_model(model, folder, tokenizer=Tokenizer.from_path(path))


if __name__ == "__main__":
    make(Path(sys.argv[1]))

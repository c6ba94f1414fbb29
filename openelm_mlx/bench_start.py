"""Start-up cases of ``openelm bench``: loading a model folder, and a new process's first token."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx

from openelm_mlx.bench_shared import OURS, Bench, Case, Contender, beside
from openelm_mlx.checkpoint import load_model, save_model
from openelm_mlx.model import Model


def start_cases() -> dict[str, Case]:
    """The cases by name."""
    return {
        "load": Case(
            title="load the model, files cached", unit="s", prepare=_load, higher_is_better=False
        ),
        "cold": Case(
            title="new process to first token", unit="s", prepare=_cold, higher_is_better=False
        ),
    }


def _load(bench: Bench) -> dict[str, Contender]:
    """From a folder to evaluated weights, within this process."""
    folder = _folder(bench)

    def ours() -> float:
        start = time.perf_counter()
        mx.eval(load_model(folder).parameters())
        return time.perf_counter() - start

    def stock() -> float:
        from mlx_lm.utils import load_model as stock_load_model

        start = time.perf_counter()
        model: Any = stock_load_model(folder)[0]
        mx.eval(model.parameters())
        return time.perf_counter() - start

    return beside(bench, {OURS: ours}, stock)


def _cold(bench: Bench) -> dict[str, Contender]:
    """Start a process, load the folder, print one token."""
    folder = _folder(bench)

    def run(module: list[str]) -> float:
        command = [sys.executable, *module, "--model", str(folder), "--prompt", "Once upon a time"]
        start = time.perf_counter()
        done = subprocess.run([*command, "--max-tokens", "1"], capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
            raise RuntimeError(f"python {' '.join(module)} failed: {last}")
        return seconds

    ours = {OURS: lambda: run(["-m", "openelm_mlx.cli", "generate"])}
    return beside(bench, ours, lambda: run(["-m", "mlx_lm", "generate"]))


def _folder(bench: Bench) -> Path:
    """The model saved with its tokenizer, or a small one, once a bench."""
    if bench.folder is not None:
        return bench.folder / "model"
    room = bench.make_folder()
    if bench.tokenizer is not None:
        save_model(bench.model, room / "model", tokenizer=bench.tokenizer)
    else:
        _save_speaking(bench.model, room / "model", _small_tokenizer(room))
    return room / "model"


def _save_speaking(model: Model, folder: Path, tokenizer: Any) -> None:
    """Save a model whose likeliest token is one that the tokenizer has, whatever its weights."""
    head: Any = model.lm_head if "lm_head" in model else model.transformer.token_embeddings
    known = mx.arange(model.args.vocab_size)[:, None] < tokenizer.vocab_size
    names = [name for name in ("scales", "biases") if name in head] or ["weight"]
    saved = {name: head[name] for name in names}
    try:
        for name, array in saved.items():  # rows of 0 for all other tokens, quantised or not
            head[name] = mx.where(known, array, mx.zeros_like(array))
        save_model(model, folder, tokenizer=tokenizer)
    finally:
        for name, array in saved.items():
            head[name] = array


def _small_tokenizer(folder: Path) -> Any:
    """A SentencePiece model of some 300 pieces, trained in a moment: any tokenizer will do here."""
    from sentencepiece import SentencePieceTrainer

    from openelm_mlx.tokenizer import Tokenizer

    sentences = [f"Once upon a time there were {i} words in a line of text." for i in range(200)]
    SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return Tokenizer.from_path(folder / "tokenizer.model")

"""What ``openelm bench`` measures: each case prepares contenders that return one number."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from openelm_mlx.bench_shared import COMPILED, OURS, STOCK, Bench, Case, Contender
from openelm_mlx.bench_training import training_cases
from openelm_mlx.cache import make_cache
from openelm_mlx.checkpoint import save_model
from openelm_mlx.decoding import CompiledStep, EagerStep, decode, prefill
from openelm_mlx.generation_settings import GenerateArgs
from openelm_mlx.graph_count import count_kernels, host_seconds
from openelm_mlx.model import Model


def _prefill(tokens: int) -> Callable[[Bench], dict[str, Contender]]:
    def prepare(bench: Bench) -> dict[str, Contender]:
        ids = mx.array(bench.prompt(tokens))

        def run(model: Any, caches: Callable[[], list[Any]]) -> float:
            cache = caches()
            start = time.perf_counter()
            mx.eval(prefill(model, ids, cache, step=tokens))
            return tokens / (time.perf_counter() - start)

        def stock() -> float:
            from mlx_lm.models.cache import make_prompt_cache

            cache = make_prompt_cache(bench.stock)
            start = time.perf_counter()
            # as mlx_lm.generate: all but the last token first, then the last one's logits
            bench.stock(ids[None, :-1], cache=cache)
            mx.eval([layer.state for layer in cache])
            mx.eval(bench.stock(ids[None, -1:], cache=cache)[:, -1])
            return tokens / (time.perf_counter() - start)

        layers = len(bench.model.layers)
        return _with(bench, {OURS: lambda: run(bench.model, lambda: make_cache(layers))}, stock)

    return prepare


def _decode(bench: Bench) -> dict[str, Contender]:
    ids = bench.prompt(bench.prompt_tokens)

    def ours(compiled: bool) -> float:
        return _rate(decode(bench.model, ids, max_tokens=bench.new_tokens, compiled=compiled))

    def stock() -> float:
        from mlx_lm.generate import generate_step

        return _rate(generate_step(mx.array(ids), bench.stock, max_tokens=bench.new_tokens))

    return _with(bench, {OURS: lambda: ours(False), COMPILED: lambda: ours(True)}, stock)


def _rate(tokens: Any) -> float:
    """Tokens a second after the first."""
    next(tokens)
    start = time.perf_counter()
    count = sum(1 for _ in tokens)
    return count / (time.perf_counter() - start)


def _batch(size: int) -> Callable[[Bench], dict[str, Contender]]:
    def prepare(bench: Bench) -> dict[str, Contender]:
        prompts = [bench.prompt(bench.prompt_tokens, seed) for seed in range(size)]

        def run(model: Any) -> float:
            from mlx_lm.generate import BatchGenerator

            generator = BatchGenerator(model, max_tokens=bench.new_tokens)
            generator.insert(prompts)
            count, start = 0, time.perf_counter()
            while responses := generator.next_generated():
                count += len(responses)
            generator.close()
            return count / (time.perf_counter() - start)

        return _with(bench, {OURS: lambda: run(bench.model)}, lambda: run(bench.stock))

    return prepare


def _host(bench: Bench) -> dict[str, Contender]:
    ids = mx.array(bench.prompt(64))

    def run(model: Any, caches: list[Any], compiled: bool) -> float:
        mx.eval(model(ids[None], caches))
        step = CompiledStep(model, caches) if compiled else EagerStep(model, caches)
        mx.eval(step(ids[:1]))
        return 1e3 * host_seconds(step)

    def stock() -> float:
        from mlx_lm.models.cache import make_prompt_cache

        return run(bench.stock, make_prompt_cache(bench.stock), False)

    layers = len(bench.model.layers)
    return _with(
        bench,
        {
            OURS: lambda: run(bench.model, make_cache(layers), False),
            COMPILED: lambda: run(bench.model, make_cache(layers), True),
        },
        stock,
    )


def _kernels(bench: Bench) -> dict[str, Contender]:
    ids = mx.array(bench.prompt(64))

    def run(model: Any, caches: list[Any], step: Callable[[mx.array], mx.array]) -> float:
        mx.eval(model(ids[None], caches))
        return sum(count_kernels(step, caches).values())

    def ours() -> float:
        caches = make_cache(len(bench.model.layers))
        return run(bench.model, caches, EagerStep(bench.model, caches))

    def stock() -> float:
        from mlx_lm.models.cache import make_prompt_cache

        caches = make_prompt_cache(bench.stock)
        step = EagerStep(bench.stock, caches)

        def logprobs(token: mx.array) -> mx.array:  # what mlx_lm.generate_step hands its sampler
            logits = step(token)
            return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

        return run(bench.stock, caches, logprobs)

    return _with(bench, {OURS: ours}, stock)


def _cold(bench: Bench) -> dict[str, Contender]:
    """Start a process, load the folder, print one token."""
    temporary = tempfile.TemporaryDirectory(prefix="openelm-bench-")
    path = Path(temporary.name) / "model"
    tokenizer = _small_tokenizer(Path(temporary.name))
    _save_speaking(bench.model, path, tokenizer)

    def run(module: list[str]) -> float:
        command = [sys.executable, *module, "--model", str(path), "--prompt", "Once upon a time"]
        start = time.perf_counter()
        subprocess.run([*command, "--max-tokens", "1"], check=True, capture_output=True)
        return time.perf_counter() - start

    def ours() -> float:
        _ = temporary  # the folder lives as long as the contender
        return run(["-m", "openelm_mlx.cli", "generate"])

    return _with(bench, {OURS: ours}, lambda: run(["-m", "mlx_lm", "generate"]))


def _save_speaking(model: Model, folder: Path, tokenizer: Any) -> None:
    """Save a model whose likeliest token is one that the tokenizer has, whatever its weights."""
    table = model.transformer.token_embeddings
    known = mx.arange(model.args.vocab_size)[:, None] < tokenizer.vocab_size
    saved = table.weight
    if "scales" not in table and "lm_head" not in model:
        table.weight = mx.where(known, saved, mx.zeros_like(saved))
    try:
        save_model(model, folder, tokenizer=tokenizer)
    finally:
        table.weight = saved


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


def _lookup(copies: bool) -> Callable[[Bench], dict[str, Contender]]:
    """Prompt lookup against plain decoding, on a text that repeats itself or one that does not."""

    def prepare(bench: Bench) -> dict[str, Contender]:
        from openelm_mlx.speculative import speculative_decode

        model, count = bench.model, max(bench.new_tokens, 48)
        ids = bench.prompt(bench.prompt_tokens)
        if copies:
            ids = ids + list(decode(model, ids, max_tokens=2 * count))
        settings = GenerateArgs()

        def lookup() -> float:
            return _rate(
                speculative_decode(
                    model,
                    ids,
                    draft_model=None,
                    num_draft_tokens=8,
                    max_tokens=count,
                    sampler=settings.sampler(),
                    processors=[],
                    cache=make_cache(len(model.layers)),
                    prefill_step=settings.prefill_step,
                )
            )

        def plain() -> float:
            return _rate(decode(model, ids, max_tokens=count))

        return {"prompt lookup": lookup, "plain": plain}

    return prepare


def _with(bench: Bench, ours: dict[str, Contender], stock: Contender) -> dict[str, Contender]:
    return {**ours, STOCK: stock} if bench.against else ours


CASES: dict[str, Case] = {
    "kernels": Case(
        title="kernels a decoded token",
        unit="kernels",
        prepare=_kernels,
        higher_is_better=False,
        exact=True,
    ),
    "host": Case(title="host time a token", unit="ms", prepare=_host, higher_is_better=False),
    "prefill-512": Case(title="prefill 512", unit="tokens/s", prepare=_prefill(512)),
    "prefill-2048": Case(title="prefill 2048", unit="tokens/s", prepare=_prefill(2048)),
    "decode": Case(title="decode, {prompt} + {new} tokens", unit="tokens/s", prepare=_decode),
    "batch-4": Case(title="batch 4, {prompt} + {new} tokens", unit="tokens/s", prepare=_batch(4)),
    "batch-16": Case(
        title="batch 16, {prompt} + {new} tokens", unit="tokens/s", prepare=_batch(16)
    ),
    "cold": Case(
        title="new process to first token", unit="s", prepare=_cold, higher_is_better=False
    ),
    "lookup-copies": Case(
        title="prompt lookup, near-copies",
        unit="tokens/s",
        prepare=_lookup(True),
        reference="plain",
    ),
    "lookup-new": Case(
        title="prompt lookup, no repeats",
        unit="tokens/s",
        prepare=_lookup(False),
        reference="plain",
    ),
    **training_cases(),
}

"""What ``openelm bench`` measures: each case prepares contenders that return one number."""

import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from openelm_mlx.bench_evaluation import evaluation_cases
from openelm_mlx.bench_loss import loss_cases
from openelm_mlx.bench_shared import COMPILED, OURS, Bench, Case, Contender, beside
from openelm_mlx.bench_start import start_cases
from openelm_mlx.bench_training import training_cases
from openelm_mlx.bench_work import Work, decode_work, prefill_work
from openelm_mlx.cache import make_cache
from openelm_mlx.decoding import CompiledStep, EagerStep, decode, prefill
from openelm_mlx.generation_settings import GenerateArgs
from openelm_mlx.graph_count import count_kernels, host_seconds
from openelm_mlx.model import Model
from openelm_mlx.sampling import Processor


def _prefill(tokens: int) -> Callable[[Bench], dict[str, Contender]]:
    def prepare(bench: Bench) -> dict[str, Contender]:
        ids, model = mx.array(bench.prompt(tokens)), bench.arranged()

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

        layers = len(model.layers)
        return beside(bench, {OURS: lambda: run(model, lambda: make_cache(layers))}, stock)

    return prepare


def _decode(bench: Bench) -> dict[str, Contender]:
    return _decoding_with(bench.arranged(), bench)


def _decoding_with(model: Model, bench: Bench) -> dict[str, Contender]:
    ids = bench.prompt(bench.prompt_tokens)

    def ours(compiled: bool) -> float:
        return _rate(decode(model, ids, max_tokens=bench.new_tokens, compiled=compiled))

    def stock() -> float:
        from mlx_lm.generate import generate_step

        return _rate(generate_step(mx.array(ids), bench.stock, max_tokens=bench.new_tokens))

    return beside(bench, {OURS: lambda: ours(False), COMPILED: lambda: ours(True)}, stock)


def _memory(bench: Bench) -> dict[str, Contender]:
    """Weights, cache and what a prompt and its continuation need besides, at their highest."""
    contenders = _decoding_with(bench.model, bench)  # arranged, the weights would be there twice

    def peak(run: Contender) -> Contender:
        def measure() -> float:
            mx.clear_cache()
            mx.reset_peak_memory()
            run()
            return mx.get_peak_memory() / 1e9

        return measure

    return {name: peak(run) for name, run in contenders.items()}


def _rate(tokens: Any) -> float:
    """Tokens a second after the first."""
    next(tokens)
    start = time.perf_counter()
    count = sum(1 for _ in tokens)
    return count / (time.perf_counter() - start)


def _batch(size: int) -> Callable[[Bench], dict[str, Contender]]:
    """Decoding of several prompts at a time through mlx_lm's batch generator, prompts not timed."""

    def prepare(bench: Bench) -> dict[str, Contender]:
        prompts = [bench.prompt(bench.prompt_tokens, seed) for seed in range(size)]

        def run(model: Any) -> float:
            from mlx_lm.generate import BatchGenerator

            generator = BatchGenerator(
                model,
                max_tokens=bench.new_tokens,
                prefill_batch_size=size,
                completion_batch_size=size,
            )
            generator.insert(prompts)
            responses = generator.next_generated()  # of all rows: they begin together
            count, start = 0, time.perf_counter()
            while responses := generator.next_generated():
                count += len(responses)
            seconds = time.perf_counter() - start
            generator.close()
            return count / seconds

        arranged = bench.arranged()
        return beside(bench, {OURS: lambda: run(arranged)}, lambda: run(bench.stock))

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
    return beside(
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

    return beside(bench, {OURS: ours}, stock)


def _lookup(copies: bool) -> Callable[[Bench], dict[str, Contender]]:
    """Prompt lookup against plain decoding, on a text that repeats itself or one that does not."""

    def prepare(bench: Bench) -> dict[str, Contender]:
        from openelm_mlx.speculative import speculative_decode

        model, count = bench.arranged(), max(bench.new_tokens, 128 if copies else 48)
        ids = bench.prompt(bench.prompt_tokens)
        # random weights copy nothing of their own: both sides are made to write a near-copy
        processors = [_dictated([*ids, *_near_copy(ids, count)])] if copies else []
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
                    processors=processors,
                    cache=make_cache(len(model.layers)),
                    prefill_step=settings.prefill_step,
                )
            )

        def plain() -> float:
            return _rate(decode(model, ids, max_tokens=count, processors=processors))

        return {"prompt lookup": lookup, "plain": plain}

    return prepare


def _near_copy(ids: list[int], count: int) -> list[int]:
    """``ids`` over and over, one token in twenty replaced."""
    rng = random.Random(1)
    text = [ids[i % len(ids)] for i in range(count)]
    return [rng.choice(ids) if rng.random() < 0.05 else token for token in text]


def _dictated(text: list[int]) -> Processor:
    """Makes the next token of ``text`` the likeliest, whatever the model says."""
    tokens = mx.array(text, dtype=mx.int32)

    def dictate(history: mx.array, logits: mx.array) -> mx.array:
        likeliest = mx.arange(logits.shape[-1], dtype=mx.int32) == tokens[history.size]
        return mx.where(likeliest, logits.max() + 1, logits)

    return dictate


def _decoding(bench: Bench, *, batch: int) -> Work:
    prompt, new = bench.prompt_tokens, bench.new_tokens
    return decode_work(bench.model, prompt=prompt, new=new, batch=batch)


def _prefilling(bench: Bench, *, tokens: int) -> Work:
    return prefill_work(bench.model, tokens=tokens)


CASES: dict[str, Case] = {
    "kernels": Case(
        title="kernels a decoded token",
        unit="kernels",
        prepare=_kernels,
        higher_is_better=False,
        exact=True,
    ),
    "host": Case(title="host time a token", unit="ms", prepare=_host, higher_is_better=False),
    **{
        f"prefill-{n}": Case(
            title=f"prefill {n}",
            unit="tokens/s",
            prepare=_prefill(n),
            work=partial(_prefilling, tokens=n),
        )
        for n in (512, 2048)
    },
    "decode": Case(
        title="decode, {prompt} + {new} tokens",
        unit="tokens/s",
        prepare=_decode,
        work=partial(_decoding, batch=1),
    ),
    **{
        f"batch-{n}": Case(
            title=f"batch {n}, {{prompt}} + {{new}} tokens",
            unit="tokens/s",
            prepare=_batch(n),
            work=partial(_decoding, batch=n),
        )
        for n in (4, 16)
    },
    "memory": Case(
        title="peak memory, {prompt} + {new} tokens",
        unit="GB",
        prepare=_memory,
        higher_is_better=False,
        exact=True,
    ),
    **start_cases(),
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
    **loss_cases(),
    **evaluation_cases(),
}

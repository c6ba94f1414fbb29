"""What prompt lookup is worth (PERFORMANCE.md, target 6); run with ``pytest -n 0 -m benchmark``."""

import random
import time
from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest

from openelm_mlx.cache import make_cache
from openelm_mlx.config import ModelArgs
from openelm_mlx.decoding import decode
from openelm_mlx.model import Model
from openelm_mlx.speculative import speculative_decode

COUNT = 120  # tokens
ROUNDS = 5


@pytest.fixture(scope="module")
def model() -> Model:
    """Four layers as wide as 270M's."""
    args = ModelArgs.from_scaling(
        num_transformer_layers=4,
        model_dim=1280,
        head_dim=64,
        qkv_multipliers=(0.5, 1.0),
        ffn_multipliers=(0.5, 4.0),
        num_gqa_groups=4,
        vocab_size=32000,
    )
    model = Model(args)
    model.eval()
    mx.eval(model.parameters())
    return model


def saying(wanted: list[int]) -> Callable[[mx.array], mx.array]:
    """A sampler that pays for the logits and then says what it is told."""
    tokens = iter(wanted)
    return lambda logits: mx.argmax(logits, axis=-1) * 0 + next(tokens)


def seconds(run: Callable[[], Iterator[int]], wanted: list[int]) -> float:
    start = time.process_time()  # other programs' work does not count
    assert list(run()) == wanted
    return time.process_time() - start


def speedup(model: Model, prompt: list[int], wanted: list[int]) -> float:
    """Best of plain over best of lookup, taken in turns."""

    def plain() -> Iterator[int]:
        return decode(model, prompt, max_tokens=COUNT, sampler=saying(wanted))

    def lookup() -> Iterator[int]:
        return speculative_decode(
            model,
            prompt,
            num_draft_tokens=10,
            max_tokens=COUNT,
            sampler=saying(wanted),
            cache=make_cache(4),
        )

    times = [(seconds(plain, wanted), seconds(lookup, wanted)) for _ in range(ROUNDS)]
    return min(t for t, _ in times) / min(t for _, t in times)


@pytest.mark.benchmark
def test_near_copies_come_twice_as_fast(model: Model) -> None:
    rng = random.Random(0)
    prompt = [rng.randrange(3, 32000) for _ in range(COUNT)]
    copy = list(prompt)
    for _ in range(4):  # one word in thirty is another
        copy[rng.randrange(COUNT)] = rng.randrange(3, 32000)
    assert speedup(model, prompt, copy) >= 2


@pytest.mark.benchmark
def test_text_without_repeats_is_no_slower(model: Model) -> None:
    rng = random.Random(1)  # common words as often as in English: pairs of them do come again
    common = [*range(3, 60)] * 12 + [*range(60, 32000, 37)]
    text = [rng.choice(common) for _ in range(2 * COUNT)]
    assert speedup(model, text[:COUNT], text[COUNT:]) >= 0.97

"""The decoding loop, judged by Apple's greedy tokens, the NumPy reference and itself resumed."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import golden_set
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import reference
from slow_params import slow

from openelm_mlx.cache import make_cache
from openelm_mlx.checkpoint import load_model
from openelm_mlx.config import ModelArgs
from openelm_mlx.decoding import CompiledStep, decode, make_step, prefill
from openelm_mlx.model import Model
from openelm_mlx.sampling import make_sampler, repetition_penalty
from openelm_mlx.speculative import speculative_decode

PROMPT = [1, 17, 4, 9, 33, 21, 8, 2, 40, 12, 5]


@pytest.fixture
def uncompiled() -> Iterator[None]:
    """The fixed-shape path without the C++ compiler, which takes seconds on a CPU."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def reference_greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens by the NumPy forward pass over the whole text each time."""
    config, weights, ids = model.args.to_dict(), golden_set.numpy_weights(model), list(prompt)
    for _ in range(count):
        ids.append(int(reference.forward(config, weights, np.array([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("compiled", [False, *slow(True)])
def test_apple_s_greedy_tokens_come_out(
    golden_model: str, golden: Callable[[str], Path], compiled: bool, uncompiled: None
) -> None:
    model = load_model(golden(f"hf/{golden_model}"))
    io = golden_set.read_numpy(golden(f"io/{golden_model}.safetensors"))
    for prompt, wanted in zip(io["greedy_prompt"], io["greedy_tokens"], strict=True):
        found = decode(model, prompt.tolist(), max_tokens=len(wanted), compiled=compiled)
        assert list(found) == wanted.tolist()


@pytest.mark.slow
def test_the_compiled_graph_gives_the_same_tokens(tiny_model: Model) -> None:
    eager = list(decode(tiny_model, PROMPT, max_tokens=30, compiled=False))
    assert list(decode(tiny_model, PROMPT, max_tokens=30, compiled=True)) == eager


def test_greedy_tokens_equal_the_reference(tiny_model: Model) -> None:
    found = list(decode(tiny_model, PROMPT, max_tokens=12))
    assert found == reference_greedy(tiny_model, PROMPT, 12)
    assert list(decode(tiny_model, mx.array(PROMPT), max_tokens=12)) == found


@pytest.mark.parametrize("step", [3, 11, *slow(1, 10, 512)])
def test_prefill_in_chunks_changes_nothing(tiny_model: Model, step: int) -> None:
    cache = make_cache(2)
    logits = prefill(tiny_model, mx.array(PROMPT), cache, step=step)
    whole = tiny_model(mx.array([PROMPT]))[:, -1]
    np.testing.assert_allclose(np.array(logits), np.array(whole), atol=1e-5)
    assert [layer.offset for layer in cache] == [len(PROMPT)] * 2
    tokens = list(decode(tiny_model, PROMPT, max_tokens=12, prefill_step=step))
    assert tokens == list(decode(tiny_model, PROMPT, max_tokens=12))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("stop_after", [4, *slow(1, 9)])
def test_after_a_stop_the_cache_can_be_continued(
    tiny_model: Model, stop_after: int, compiled: bool, uncompiled: None
) -> None:
    whole = list(decode(tiny_model, PROMPT, max_tokens=20))
    cache: list[Any] = list(make_cache(2))
    stream = decode(tiny_model, PROMPT, max_tokens=20, cache=cache, compiled=compiled)
    first = list(islice(stream, stop_after))
    stream.close()
    assert first == whole[:stop_after]
    assert cache[0].offset == len(PROMPT) + stop_after  # the newest token is in it too
    for layer in cache:
        layer.trim(1)
    rest = decode(
        tiny_model, first[-1:], max_tokens=20 - stop_after, cache=cache, compiled=compiled
    )
    assert list(rest) == whole[stop_after:]


def test_at_the_end_the_last_token_is_not_in_the_cache(tiny_model: Model) -> None:
    cache: list[Any] = list(make_cache(2))
    list(decode(tiny_model, PROMPT, max_tokens=5, cache=cache))
    assert cache[0].offset == len(PROMPT) + 4


@pytest.mark.parametrize("length", [505, *slow(250, 1020)])
def test_fixed_buffers_grow_without_a_change(
    tiny_model: Model, length: int, uncompiled: None
) -> None:
    prompt = [1 + i * 7 % 60 for i in range(length)]
    eager = list(decode(tiny_model, prompt, max_tokens=14, compiled=False))
    assert list(decode(tiny_model, prompt, max_tokens=14, compiled=True)) == eager


def test_fixed_buffers_have_few_sizes(tiny_model: Model, uncompiled: None) -> None:
    sizes = set()
    for length in (3, 300, 511, 512, 700, 1023):
        cache = make_cache(2)
        prefill(tiny_model, mx.zeros(length, mx.int32), cache)
        step = make_step(tiny_model, cache, compiled=True)
        assert isinstance(step, CompiledStep)
        step(mx.array([1]))
        step.finish()
        assert cache[0].offset == length + 1
        sizes.add(cache[0].state[0].shape[2])
    assert sizes == {512, 1024}


def test_a_step_can_be_taken_up_after_others_used_the_cache(
    tiny_model: Model, uncompiled: None
) -> None:
    cache = make_cache(2)
    prefill(tiny_model, mx.array(PROMPT), cache)
    step = make_step(tiny_model, cache, compiled=True)
    step(mx.array([3]))
    step.finish()
    step.finish()  # twice is no harm
    tiny_model(mx.array([[7, 8, 9]]), cache)
    for layer in cache:
        layer.trim(2)
    found = step(mx.array([5]))
    whole = tiny_model(mx.array([[*PROMPT, 3, 7, 5]]))[:, -1]
    np.testing.assert_allclose(np.array(found), np.array(whole), atol=1e-5)


@pytest.mark.slow  # importing mlx_lm takes seconds
def test_rotating_cache_equals_a_plain_one_while_there_is_room(tiny_model: Model) -> None:
    from mlx_lm.models.cache import RotatingKVCache

    cache: list[Any] = [RotatingKVCache(max_size=64, keep=4) for _ in range(2)]
    plain = list(decode(tiny_model, PROMPT, max_tokens=20))
    assert list(decode(tiny_model, PROMPT, max_tokens=20, cache=cache)) == plain


@pytest.mark.parametrize("step", [4, 512])
@pytest.mark.slow  # importing mlx_lm takes seconds
def test_rotating_cache_is_as_long_after_prefill_as_after_decoding(
    tiny_model: Model, step: int
) -> None:  # REPORTS D15
    from mlx_lm.models.cache import RotatingKVCache

    prompt = [1 + i * 7 % 60 for i in range(40)]
    cache: list[Any] = [RotatingKVCache(max_size=16, keep=4) for _ in range(2)]
    lengths = []
    for _ in decode(tiny_model, prompt, max_tokens=20, cache=cache, prefill_step=step):
        lengths.append((cache[0].size(), cache[0].keys.shape[2]))
    assert set(lengths) == {(16, 16)}
    assert cache[0].offset == 40 + 19


@pytest.mark.slow  # importing mlx_lm takes seconds
def test_quantised_cache_gives_nearly_the_same() -> None:
    from mlx_lm.models.cache import QuantizedKVCache

    wide = Model(_wide())
    wide.eval()
    cache: list[Any] = [QuantizedKVCache(group_size=32, bits=8) for _ in range(2)]
    plain = prefill(wide, mx.array(PROMPT), make_cache(2))
    quantised = prefill(wide, mx.array(PROMPT), cache, step=4)
    difference = np.abs(np.array(plain) - np.array(quantised)).max()
    assert 0 < difference < 0.05  # 0.006 on 270M (PERFORMANCE.md)
    assert len(list(decode(wide, PROMPT, max_tokens=8, cache=cache))) == 8


def _wide() -> ModelArgs:
    """Unequal layers with heads wide enough for mlx's quantisation groups."""
    return ModelArgs.from_scaling(
        num_transformer_layers=2,
        model_dim=64,
        head_dim=32,
        qkv_multipliers=(0.5, 1.0),
        ffn_multipliers=(0.5, 1.0),
        num_gqa_groups=1,
        ffn_dim_divisor=8,
        vocab_size=61,
    )


def test_a_quantised_model_with_a_tied_embedding_generates(uncompiled: None) -> None:
    mx.random.seed(2)  # REPORTS A9
    args = _wide()
    model = Model(args)
    model.eval()
    plain = prefill(model, mx.array(PROMPT), make_cache(2))
    nn.quantize(model, group_size=32, bits=8)
    assert args.share_input_output_layers
    found = prefill(model, mx.array(PROMPT), make_cache(2))
    assert 0 < np.abs(np.array(found) - np.array(plain)).max() < 0.2
    eager = list(decode(model, PROMPT, max_tokens=20, compiled=False))
    assert list(decode(model, PROMPT, max_tokens=20, compiled=True)) == eager
    ahead = speculative_decode(
        model, PROMPT, num_draft_tokens=4, max_tokens=20, cache=make_cache(2)
    )
    assert list(ahead) == eager


def test_processors_see_prompt_and_output(tiny_model: Model) -> None:
    seen: list[list[int]] = []

    def watch(tokens: mx.array, logits: mx.array) -> mx.array:
        ids: Any = tokens.tolist()
        seen.append(ids)
        return logits

    out = list(decode(tiny_model, PROMPT, max_tokens=4, processors=[watch]))
    assert seen == [PROMPT + out[:n] for n in range(4)]


def test_a_strong_penalty_forbids_repeats(tiny_model: Model) -> None:
    out = list(decode(tiny_model, [1], max_tokens=40, processors=[repetition_penalty(1e6)]))
    values = reference.forward(
        tiny_model.args.to_dict(), golden_set.numpy_weights(tiny_model), np.array([[1, *out]])
    )[0]
    for n, token in enumerate(out):  # repeats only where no unseen token scores above zero
        unseen = [v for v in range(61) if v not in {1, *out[:n]}]
        assert token in unseen or values[n, unseen].max() <= 0


@pytest.mark.parametrize("compiled", [False, True])
def test_seeded_samples_repeat(tiny_model: Model, compiled: bool, uncompiled: None) -> None:
    def run(seed: int) -> list[int]:
        sampler = make_sampler(1.0, seed=seed)
        return list(decode(tiny_model, PROMPT, max_tokens=20, sampler=sampler, compiled=compiled))

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_exactly_max_tokens_come_out(tiny_model: Model) -> None:
    for count in (1, 2, 7):
        assert len(list(decode(tiny_model, PROMPT, max_tokens=count))) == count


def test_an_empty_prompt_is_refused(tiny_model: Model) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        next(decode(tiny_model, [], max_tokens=1))

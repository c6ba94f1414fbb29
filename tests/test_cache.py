"""Our key-value cache: what goes in comes out, in order, across growth and trimming."""

import mlx.core as mx
import numpy as np
import pytest
from model_makers import random_tokens

from openelm_mlx.cache import STEP, KVCache, make_cache, trim
from openelm_mlx.model import Model


def rows(start: int, end: int, batch: int = 1, heads: int = 2, width: int = 4) -> mx.array:
    """(batch, heads, end - start, width), position t filled with t and told apart by head."""
    positions = mx.arange(start, end, dtype=mx.float32)[None, None, :, None]
    return positions + mx.arange(heads)[None, :, None, None] * 0.25 + mx.zeros((batch, 1, 1, width))


@pytest.mark.parametrize(
    "sizes",
    [
        [1] * 5,
        [STEP],
        [STEP + 1],
        [STEP - 1, 1, 1],
        [STEP - 1, 3],
        [10, 2 * STEP, 1],
        [3 * STEP, STEP, 1],
    ],
    ids=str,
)
def test_what_goes_in_comes_out_in_order(sizes: list[int]) -> None:
    cache, end = KVCache(), 0
    for size in sizes:
        new = rows(end, end + size)
        end += size
        keys, values = cache.update_and_fetch(new, -new)
        assert cache.offset == cache.size() == end
        assert mx.array_equal(keys, rows(0, end)).item()
        assert mx.array_equal(values, -rows(0, end)).item()


def test_buffers_grow_by_steps_and_no_more() -> None:
    cache = KVCache()
    assert cache.empty()
    assert cache.state == ()
    assert cache.nbytes == 0
    cache.update_and_fetch(rows(0, 1), rows(0, 1))
    assert not cache.empty()
    assert [buffer.shape for buffer in cache.state] == [(1, 2, STEP, 4)] * 2
    assert cache.nbytes == 2 * 2 * STEP * 4 * 4
    cache.update_and_fetch(rows(1, STEP), rows(1, STEP))
    assert cache.state[0].shape[2] == STEP
    cache.update_and_fetch(rows(STEP, STEP + 1), rows(STEP, STEP + 1))
    assert cache.state[0].shape[2] == 2 * STEP


def test_keys_and_values_keep_their_dtype() -> None:
    cache = KVCache()
    for start in (0, STEP):
        half = rows(start, start + STEP).astype(mx.bfloat16)
        keys, values = cache.update_and_fetch(half, half)
        assert keys.dtype == values.dtype == mx.bfloat16


@pytest.mark.parametrize("drop", [1, 3, 7])
@pytest.mark.parametrize("length", [10, STEP + 2])
def test_trimmed_tokens_have_never_been(length: int, drop: int) -> None:
    cache = KVCache()
    cache.update_and_fetch(rows(0, length), rows(0, length))
    assert cache.is_trimmable()
    assert cache.trim(drop) == drop
    assert cache.size() == length - drop
    end = length - drop + 2 * STEP
    keys, _ = cache.update_and_fetch(rows(length - drop, end), rows(length - drop, end))
    assert mx.array_equal(keys, rows(0, end)).item()


def test_no_more_is_trimmed_than_there_is() -> None:
    cache = KVCache()
    assert cache.trim(5) == 0
    cache.update_and_fetch(rows(0, 3), rows(0, 3))
    assert cache.trim(5) == 3
    assert cache.size() == 0
    keys, _ = cache.update_and_fetch(rows(0, 2), rows(0, 2))
    assert mx.array_equal(keys, rows(0, 2)).item()


def test_growing_after_trimming_copies_only_what_is_cached() -> None:
    cache = KVCache()
    cache.update_and_fetch(rows(0, 4 * STEP), rows(0, 4 * STEP))
    cache.trim(4 * STEP - 10)
    end = 4 * STEP + 5
    keys, _ = cache.update_and_fetch(rows(10, end), rows(10, end))
    assert mx.array_equal(keys, rows(0, end)).item()
    assert cache.state[0].shape[2] < end + STEP


def test_state_carries_the_contents_to_another_cache() -> None:
    cache, other = KVCache(), KVCache()
    other.state = cache.state
    assert other.empty()
    cache.update_and_fetch(rows(0, 3), -rows(0, 3))
    other.state, other.offset = tuple(buffer + 0 for buffer in cache.state), cache.offset
    keys, values = other.update_and_fetch(rows(3, 5), -rows(3, 5))
    assert mx.array_equal(keys, rows(0, 5)).item()
    assert mx.array_equal(values, -rows(0, 5)).item()


def test_a_model_goes_on_after_trimming_as_if_nothing_had_been(tiny_model: Model) -> None:
    tokens = random_tokens(2, 20, 61)
    wrong = (tokens + 1) % 61
    cache = make_cache(2)
    tiny_model(mx.concatenate([tokens[:, :12], wrong[:, 12:17]], axis=1), cache)
    trim(cache, 5)
    assert [layer.offset for layer in cache] == [12, 12]
    after = np.array(tiny_model(tokens[:, 12:], cache))
    never = np.array(tiny_model(tokens))[:, 12:]
    np.testing.assert_allclose(after, never, atol=1e-5, rtol=0)


def test_a_model_steps_over_the_end_of_the_buffers(tiny_model: Model) -> None:
    tokens = random_tokens(1, STEP + 6, 61)
    cache = make_cache(2)
    pieces = [tiny_model(tokens[:, : STEP - 2], cache)]
    pieces += [tiny_model(tokens[:, t : t + 1], cache) for t in range(STEP - 2, STEP + 6)]
    stepped = np.array(mx.concatenate(pieces, axis=1))
    np.testing.assert_allclose(stepped, np.array(tiny_model(tokens)), atol=2e-5, rtol=0)

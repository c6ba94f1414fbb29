import gc
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import pytest

from openelm_mlx.batches import Batch, Prefetch


class Counting:
    """Batches of one number, made with MLX as a careless source might; some numbers raise."""

    def __init__(self, count: int | None = 6, *, fails_at: int | None = None) -> None:
        self.position, self.count, self.fails_at = 0, count, fails_at
        self.threads: set[int] = set()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        self.threads.add(threading.get_ident())
        if self.position == self.count:
            raise StopIteration
        if self.position == self.fails_at:
            raise ValueError(f"line {self.position} is damaged")
        self.position += 1
        number = mx.full((1, 2), self.position, dtype=mx.int32) + mx.zeros((1, 2), mx.int32)
        return Batch(tokens=number, targets=number + 1, mask=mx.ones((1, 2)))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def number(batch: Batch) -> int:
    return int(batch.tokens[0, 0].item())


def numbers(batches: Iterator[Batch]) -> list[int]:
    return [number(batch) for batch in batches]


def wait_for(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "nothing happened for 10 s"
        time.sleep(0.005)


@pytest.mark.parametrize("ahead", [1, 2, 7, 50])
def test_batches_come_in_order_from_another_thread(ahead: int) -> None:
    source = Counting(30)
    assert numbers(Prefetch(source, ahead)) == list(range(1, 31))
    assert threading.get_ident() not in source.threads


def test_arrays_made_in_the_thread_can_be_used_outside_it() -> None:
    batch = next(Prefetch(Counting()))
    assert (batch.tokens + batch.targets).tolist() == [[3, 3]]  # a graph of the thread could not
    assert batch.mask.sum().item() == 2


def test_batches_are_prepared_ahead_but_not_without_end() -> None:
    source = Counting(None)
    batches = Prefetch(source, ahead=3)
    next(batches)
    wait_for(lambda: source.position == 5)  # one taken, three ready, one waiting to be put
    time.sleep(0.15)
    assert source.position == 5
    batches.close()


def test_the_position_is_that_of_the_last_batch_taken() -> None:
    source = Counting()
    batches = Prefetch(source)
    assert batches.state_dict() == {"position": 0}
    assert [number(next(batches)), number(next(batches))] == [1, 2]
    wait_for(lambda: source.position > 2)
    assert batches.state_dict() == {"position": 2}
    batches.close()


def test_a_run_resumes_from_a_position() -> None:
    batches = Prefetch(Counting())
    for _ in range(4):
        next(batches)
    resumed = Prefetch(Counting())
    resumed.load_state_dict(batches.state_dict())
    assert resumed.state_dict() == {"position": 4}
    assert numbers(resumed) == numbers(batches) == [5, 6]


def test_going_back_throws_away_what_was_prepared() -> None:
    source = Counting()
    batches = Prefetch(source)
    next(batches)
    wait_for(lambda: source.position > 2)
    batches.load_state_dict({"position": 0})
    assert numbers(batches) == [1, 2, 3, 4, 5, 6]
    batches.load_state_dict({"position": 4})
    assert numbers(batches) == [5, 6]


def test_closing_loses_no_batch() -> None:  # it went on behind those thrown away
    source = Counting()
    batches = Prefetch(source)
    assert number(next(batches)) == 1
    wait_for(lambda: source.position > 2)
    batches.close()
    batches.close()
    assert numbers(batches) == [2, 3, 4, 5, 6]


def test_an_error_of_the_thread_comes_after_the_batches_before_it() -> None:
    batches = Prefetch(Counting(fails_at=3))
    assert [number(next(batches)) for _ in range(3)] == [1, 2, 3]
    for _ in range(2):  # and again if asked again
        with pytest.raises(ValueError, match="line 3 is damaged"):
            next(batches)
    assert batches.state_dict() == {"position": 3}


def test_the_end_stays_the_end_until_another_position_is_loaded() -> None:
    batches = Prefetch(Counting(2))
    assert numbers(batches) == [1, 2]
    assert numbers(batches) == []
    batches.load_state_dict({"position": 1})
    assert numbers(batches) == [2]


def test_the_thread_ends_with_a_forgotten_prefetch() -> None:
    before = threading.active_count()
    batches = Prefetch(Counting(None))
    next(batches)
    assert threading.active_count() == before + 1
    del batches
    gc.collect()
    wait_for(lambda: threading.active_count() == before)


def test_closing_waits_for_the_source_to_be_free() -> None:
    class Slow(Counting):
        busy = False

        def __next__(self) -> Batch:
            self.busy = True
            time.sleep(0.05)
            batch = super().__next__()
            self.busy = False
            return batch

    source = Slow(None)
    batches = Prefetch(source)
    next(batches)
    wait_for(lambda: source.busy)
    batches.close()
    assert not source.busy


def test_at_least_one_batch_is_kept_ready() -> None:
    with pytest.raises(ValueError, match="at least 1 batch must be kept ready, got 0"):
        Prefetch(Counting(), ahead=0)


def test_a_token_sees_those_before_it_in_its_own_segment() -> None:
    tokens = mx.zeros((1, 5), mx.int32)
    batch = Batch(
        tokens=tokens,
        targets=tokens,
        mask=mx.ones((1, 5)),
        segments=mx.array([[1, 1, 2, 2, 0]], dtype=mx.int32),
    )
    mask = batch.attention_mask()
    assert mask is not None
    assert mask.shape == (1, 1, 5, 5)
    assert mask.dtype == mx.bool_
    assert mask[0, 0].astype(mx.int32).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    assert next(Counting()).attention_mask() is None

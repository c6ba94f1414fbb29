import random
from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from slow_params import slow

from openelm_mlx.packing import LengthBuckets, RowBatch, lay_rows, length_buckets


def lengths_like(kind: str, count: int, seed: int = 0) -> list[int]:
    """Lengths as in instruction data (a few dozen tokens, a long tail), or worse."""
    rng = random.Random(seed)
    draw: Any = {
        "short": lambda: rng.lognormvariate(4.4, 0.4),
        "mixed": lambda: rng.lognormvariate(5.5, 0.8),
        "uniform": lambda: rng.uniform(20, 400),
        "narrow": lambda: rng.uniform(600, 700),
        "equal": lambda: 100,
        "tail": lambda: rng.lognormvariate(4, 1.5),
    }[kind]
    return [max(5, min(2048, round(draw()))) for _ in range(count)]


KINDS = ["short", "mixed", "uniform", "narrow", "equal", "tail"]
SOME = ["mixed", *slow("tail", "short", "uniform", "narrow", "equal")]


def used(batches: list[RowBatch]) -> list[int]:
    return sorted(index for batch in batches for row in batch.rows for index in row)


def share(batches: list[RowBatch], lengths: list[int]) -> float:
    """Useful / processed, counted from the batches themselves."""
    return sum(lengths) / sum(len(batch.rows) * batch.length for batch in batches)


def fits(batch: RowBatch, lengths: list[int]) -> bool:
    return all(sum(lengths[i] for i in row) <= batch.length for row in batch.rows)


@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("batch_size", [4, *slow(16)])
def test_thousands_of_samples_waste_three_percent_at_most(kind: str, batch_size: int) -> None:
    lengths = lengths_like(kind, 3000)
    epochs = [length_buckets(lengths, batch_size=batch_size, epoch=epoch) for epoch in range(2)]
    for batches in epochs:
        assert share(batches, lengths) >= 0.97
        assert used(batches) == list(range(3000))
        assert all(fits(batch, lengths) for batch in batches)
    assert len({batch.shape for batches in epochs for batch in batches}) <= 8


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_64_samples_at_batch_16_waste_five_percent_at_most(kind: str, seed: int) -> None:
    lengths = lengths_like(kind, 64, seed)
    batches = length_buckets(lengths, batch_size=16)
    assert share(batches, lengths) >= 0.95
    assert used(batches) == list(range(64))
    assert len({batch.shape for batch in batches}) <= 8


@pytest.mark.parametrize("kind", SOME)
def test_a_batch_holds_the_samples_asked_for_on_average(kind: str) -> None:
    lengths = lengths_like(kind, 3000)
    batches = length_buckets(lengths, batch_size=16)
    assert len(batches) == pytest.approx(3000 / 16, rel=0.08)
    tokens = sorted(sum(lengths[i] for row in batch.rows for i in row) for batch in batches[:-1])
    assert tokens[-1] < 1.2 * tokens[1]  # but for the row that is left over


@pytest.mark.parametrize(
    "settings",
    [
        *({"batch_size": 1}, {"batch_size": 4}, {"batch_size": 100}, {"token_budget": 900}),
        {"batch_size": 4, "share_rows": False},
        {"token_budget": 900, "share_rows": False},
    ],
)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 50])
def test_every_sample_is_used_once_whatever_the_numbers(
    settings: dict[str, Any], count: int
) -> None:
    lengths = [min(n, 900) for n in lengths_like("mixed", count, count)]
    plan = LengthBuckets(lengths, **settings)
    for epoch in range(3):
        batches = plan.epoch(seed=1, epoch=epoch)
        assert used(batches) == list(range(count))
        assert all(fits(batch, lengths) for batch in batches)
        assert {batch.shape for batch in batches} == set(plan.shapes)
        assert len(batches) == len(plan)
        assert plan.share == pytest.approx(share(batches, lengths))
    assert len(plan.shapes) <= 8


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    lengths = lengths_like("short", 300)
    same = length_buckets(lengths, batch_size=8, seed=3, epoch=2)
    assert same == length_buckets(lengths, batch_size=8, seed=3, epoch=2)
    others = [
        length_buckets(lengths, batch_size=8, seed=4, epoch=2),
        length_buckets(lengths, batch_size=8, seed=3, epoch=3),
    ]
    for other in others:
        assert other != same
        together = [{frozenset(row) for batch in b for row in batch.rows} for b in (same, other)]
        assert len(together[0] & together[1]) < 0.5 * len(together[0])  # others share rows now


def test_a_token_budget_is_never_exceeded_and_nearly_used() -> None:
    lengths = lengths_like("short", 2000)
    for share_rows in (True, False):
        batches = length_buckets(lengths, token_budget=2048, share_rows=share_rows)
        sizes = [len(batch.rows) * batch.length for batch in batches]
        assert max(sizes) <= 2048
        assert sum(sizes[:-1]) / len(sizes[:-1]) > 0.7 * 2048


def test_samples_alone_in_rows_come_in_exact_batches_of_few_lengths() -> None:
    lengths = lengths_like("short", 1003)
    batches = length_buckets(lengths, batch_size=8, share_rows=False)
    assert Counter(len(batch.rows) for batch in batches) == {8: 125, 3: 1}
    assert len(batches[-1].rows) == 3  # the smaller one comes last
    assert len({batch.shape for batch in batches}) <= 8
    assert share(batches, lengths) > 0.8


def test_ranks_get_as_many_rows_and_all_of_them() -> None:
    batch = RowBatch(((0, 3), (1,), (2,)), 9)
    assert batch.of_rank(0, 1) == batch.rows
    assert batch.of_rank(0, 2) == ((0, 3), (2,))
    assert batch.of_rank(1, 2) == ((1,), ())
    assert [batch.of_rank(r, 4) for r in range(4)] == [((0, 3),), ((1,),), ((2,),), ((),)]


@pytest.mark.parametrize(
    ("lengths", "settings", "message"),
    [
        ([], {"batch_size": 2}, "there are no samples to batch"),
        ([3, 0], {"batch_size": 2}, "a sample has no input token"),
        ([3], {}, "give one of batch_size and token_budget"),
        ([3], {"batch_size": 2, "token_budget": 9}, "give one of batch_size and token_budget"),
        ([3], {"batch_size": 0}, "give one of batch_size and token_budget"),
        ([3, 12], {"token_budget": 9}, "the longest sample has 12 tokens, more than .* 9"),
        ([3], {"batch_size": 2, "max_shapes": 2}, "max_shapes must be 3 or more"),
    ],
)
def test_impossible_plans_are_refused(
    lengths: list[int], settings: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        length_buckets(lengths, **settings)  # type: ignore[arg-type]


def laid(rows: Any, **settings: Any) -> dict[str, Any]:
    tokens = [np.array(ids, np.int32) for ids in ([1, 5, 6, 2], [1, 7, 2], [1, 8, 9, 9, 2])]
    masks = [np.array(m, np.bool_) for m in ([0, 0, 1, 1], [0, 1, 1], [1, 1, 1, 1, 1])]
    batch = lay_rows(rows, 6, tokens, masks, ["a", "b", "c"], **settings)
    assert batch.tokens.dtype == batch.targets.dtype == mx.int32
    assert batch.mask.dtype == mx.float32
    segments = None if batch.segments is None else batch.segments.tolist()
    return {
        **{"tokens": batch.tokens.tolist(), "targets": batch.targets.tolist()},
        **{"mask": batch.mask.tolist(), "segments": segments, "samples": batch.samples},
    }


def test_samples_share_a_row_with_targets_and_masks_of_their_own() -> None:
    found = laid([(0, 1), (2,)])
    assert found["tokens"] == [[1, 5, 6, 1, 7, 0], [1, 8, 9, 9, 0, 0]]
    assert found["targets"] == [[5, 6, 2, 7, 2, 0], [8, 9, 9, 2, 0, 0]]
    assert found["mask"] == [[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]
    assert found["segments"] == [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 0, 0]]
    assert found["samples"] == ("a", "b", "c")


def test_rows_of_one_sample_need_no_segments_unless_asked_for() -> None:
    assert laid([(1,), ()])["segments"] is None
    assert laid([(1,), ()])["mask"][1] == [0] * 6
    assert laid([(1,)], separate=True)["segments"] == [[1, 1, 0, 0, 0, 0]]

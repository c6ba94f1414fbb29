"""Batches of samples and pairs: nothing lost, nothing twice, and exact resumption."""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from model_makers import model_of

from openelm_mlx.batches import Batch
from openelm_mlx.config import ModelArgs
from openelm_mlx.objectives import language_model_loss
from openelm_mlx.tuning_batches import EvalBatches, TuningBatches
from openelm_mlx.tuning_data import Sample
from openelm_mlx.tuning_pairs import EvalPairBatches, Pair, PairBatches

LENGTH = 64


def sample(name: str, n: int, *, seed: int = 0, prompt: int = 1) -> Sample:
    tokens = np.random.default_rng([seed, n]).integers(3, 61, n).astype(np.int32)
    return Sample(tokens=tokens, mask=np.arange(n) >= prompt, name=name)


def samples(count: int, *, seed: int = 0) -> list[Sample]:
    lengths = np.random.default_rng(seed).integers(2, 20, count)
    return [sample(str(i), int(n), seed=i, prompt=1 + i % 2) for i, n in enumerate(lengths)]


def pairs(count: int) -> list[Pair]:
    return [
        Pair(
            chosen=sample(f"c{i}", 5 + i % 7, seed=i, prompt=2),
            rejected=sample(f"r{i}", 4 + i % 3, seed=100 + i, prompt=2),
            name=str(i),
        )
        for i in range(count)
    ]


def batches(items: list[Sample], batch_size: int, **settings: Any) -> TuningBatches:
    return TuningBatches(items, batch_size=batch_size, max_seq_length=LENGTH, **settings)


def names(made: Iterable[Batch]) -> list[str]:
    return [name for batch in made for name in batch.samples]


def targets(batch: Batch) -> int:
    total: Any = batch.mask.sum().item()
    return int(total)


def content(made: Iterable[Batch]) -> list[Any]:
    return [(b.tokens.tolist(), b.targets.tolist(), b.mask.tolist(), b.samples) for b in made]


@pytest.mark.parametrize("share_rows", [True, False])
@pytest.mark.parametrize(("count", "batch_size", "number"), [(7, 2, 4), (3, 4, 1), (1, 4, 1)])
def test_b6_every_sample_is_seen_each_epoch(
    count: int, batch_size: int, number: int, share_rows: bool
) -> None:
    items = samples(count)
    source = batches(items, batch_size, share_rows=share_rows, epochs=3)
    epochs = [[next(source) for _ in range(number)] for _ in range(3)]
    for epoch in epochs:
        assert sorted(names(epoch)) == sorted(item.name for item in items)
        assert sum(map(targets, epoch)) == sum(item.num_targets for item in items)
    with pytest.raises(StopIteration):
        next(source)


def test_a_batch_without_shared_rows_has_as_many_rows_as_asked() -> None:
    rows = [batch.tokens.shape[0] for batch in batches(samples(7), 2, share_rows=False, epochs=1)]
    assert rows == [2, 2, 2, 1]


def test_b3_targets_are_counted_by_length_never_by_padding() -> None:
    items = [sample("a", 4), sample("b", 5)]
    for share_rows in (True, False):
        (batch,) = batches(items, 2, share_rows=share_rows, epochs=1)
        assert targets(batch) == 7


def test_b26_padding_and_end_ids_do_not_decide_the_mask() -> None:
    tokens = np.array([0, 5, 0, 0], dtype=np.int32)  # bos = eos = pad = 0
    item = Sample(tokens=tokens, mask=np.array([False, True, True, True]), name="a")
    (batch,) = batches([item, sample("b", 9)], 2, share_rows=False, epochs=1)
    row = list(batch.samples).index("a")
    assert batch.mask[row].tolist() == [1, 1, 1] + [0] * 5


@pytest.mark.parametrize("share_rows", [True, False])
def test_b33_the_loss_does_not_depend_on_batching_or_padding(
    share_rows: bool, tiny_args: ModelArgs
) -> None:
    model = model_of(tiny_args, seed=1)
    loss = language_model_loss()
    items = samples(9)

    def mean(batch_size: int) -> float:
        made = batches(items, batch_size, share_rows=share_rows, epochs=1)
        sums = [loss(model, batch) for batch in made]
        total: Any = mx.stack([s for s, _ in sums]).sum() / mx.stack([n for _, n in sums]).sum()
        return float(total.item())

    alone = mean(1)
    # float32 sums in another order
    assert [mean(n) for n in (2, 4, 9)] == pytest.approx([alone] * 3, rel=1e-5)


@pytest.mark.parametrize("share_rows", [True, False])
def test_the_rows_of_all_ranks_are_the_batch(share_rows: bool) -> None:
    items = samples(11)
    alone = list(batches(items, 4, share_rows=share_rows, epochs=2, seed=3))
    ranks = [
        list(batches(items, 4, share_rows=share_rows, epochs=2, seed=3, rank=r, world_size=3))
        for r in range(3)
    ]
    for i, whole in enumerate(alone):
        parts = [rank[i] for rank in ranks]
        assert sorted(names(parts)) == sorted(whole.samples)
        assert sum(map(targets, parts)) == targets(whole)


def test_b31_the_order_follows_from_the_seed_and_differs_by_epoch() -> None:
    items = samples(40)
    first, again, other = (
        content(batches(items, 4, seed=seed, epochs=1, share_rows=False)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    two = content(batches(items, 4, seed=1, epochs=2, share_rows=False))
    assert two[: len(first)] == first
    assert two[len(first) :] != first


@pytest.mark.parametrize("share_rows", [True, False])
@pytest.mark.parametrize("done", [0, 1, 4, 6, 9, 12])
def test_b9_a_restored_position_gives_the_same_batches(done: int, share_rows: bool) -> None:
    items = samples(15)
    source = batches(items, 4, epochs=3, share_rows=share_rows)
    for _ in range(done):
        next(source)
    state = json.loads(json.dumps(source.state_dict()))
    rest = content(source)
    resumed = batches(items, 4, epochs=3, share_rows=share_rows)
    next(resumed)
    resumed.load_state_dict(state)
    assert content(resumed) == rest
    assert len(rest) == 12 - done


def test_a_run_resumes_with_another_number_of_ranks() -> None:
    items = samples(15)
    alone = batches(items, 4, epochs=1)
    next(alone)
    two = [batches(items, 4, epochs=1, rank=r, world_size=2) for r in range(2)]
    for rank in two:
        rank.load_state_dict(alone.state_dict())
    assert sorted(names(alone)) == sorted(names(two[0]) + names(two[1]))


def test_a_changed_data_set_is_refused_on_resume() -> None:
    items = samples(6)
    state = batches(items, 2).state_dict()
    masked = Sample(tokens=items[0].tokens, mask=items[0].mask * False, name="0")
    for changed in (items[:-1], items[::-1], [masked, *items[1:]]):
        with pytest.raises(ValueError, match=r"data set .* has changed since its state was saved"):
            batches(changed, 2).load_state_dict(state)
    with pytest.raises(ValueError, match="batch_size was 2 and is now 3"):
        batches(items, 3).load_state_dict(state)
    with pytest.raises(ValueError, match="seed was 0 and is now 1"):
        batches(items, 2, seed=1).load_state_dict(state)
    with pytest.raises(ValueError, match="share_rows was True and is now False"):
        batches(items, 2, share_rows=False).load_state_dict(state)


def test_an_endless_source_goes_on() -> None:
    source = batches(samples(3), 2)
    seen = Counter(names(next(source) for _ in range(20)))
    assert set(seen.values()) == {10}


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_b5_evaluation_takes_each_sample_exactly_once(world_size: int) -> None:
    items = samples(7)
    for _ in range(2):  # as often as it is iterated
        seen = [
            name
            for rank in range(world_size)
            for name in names(
                EvalBatches(
                    items, batch_size=2, max_seq_length=LENGTH, rank=rank, world_size=world_size
                )
            )
        ]
        assert sorted(seen) == sorted(item.name for item in items)
    evaluation = EvalBatches(items, batch_size=2, max_seq_length=LENGTH)
    assert content(evaluation) == content(evaluation)


def test_a_rank_without_rows_has_nothing_that_counts() -> None:
    (batch,) = batches([sample("a", 5)], 1, epochs=1, rank=1, world_size=2)
    assert targets(batch) == 0
    assert batch.samples == ()


@pytest.mark.slow
def test_most_tokens_of_a_batch_are_useful_and_shapes_are_few() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(4, 0.6, 2000), 8, 500).astype(int)
    items = [sample(str(i), int(n)) for i, n in enumerate(lengths)]
    source = TuningBatches(items, batch_size=16, max_seq_length=512, epochs=1)
    made = list(source)
    used = sum(len(item.tokens) - 1 for item in items)
    assert used / sum(batch.tokens.size for batch in made) > 0.97
    assert len({tuple(batch.tokens.shape) for batch in made}) <= 8


def test_pairs_are_chosen_rows_then_rejected_rows() -> None:
    items = pairs(5)
    seen: list[str] = []
    for batch in PairBatches(items, batch_size=2, epochs=1):
        half = batch.tokens.shape[0] // 2
        assert half == len(batch.samples)
        for row, name in enumerate(batch.samples):
            for item, at in (
                (items[int(name)].chosen, row),
                (items[int(name)].rejected, half + row),
            ):
                n = len(item.tokens) - 1
                assert batch.tokens[at].tolist()[:n] == item.tokens[:-1].tolist()
                assert batch.targets[at].tolist()[:n] == item.tokens[1:].tolist()
                counted: Any = batch.mask[at].tolist()
                assert counted == [0.0] + [1.0] * (n - 1) + [0.0] * (len(counted) - n)
        seen += batch.samples
    assert sorted(seen) == sorted(item.name for item in items)


def test_pairs_resume_and_are_evaluated_once() -> None:
    items = pairs(7)
    source = PairBatches(items, batch_size=2, epochs=2)
    next(source)
    state = source.state_dict()
    rest = content(source)
    again = PairBatches(items, batch_size=2, epochs=2)
    again.load_state_dict(state)
    assert content(again) == rest
    shares = [names(EvalPairBatches(items, batch_size=3, rank=r, world_size=2)) for r in range(2)]
    assert sorted(shares[0] + shares[1]) == sorted(item.name for item in items)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        batches([], 2)
    with pytest.raises(ValueError, match="batch_size and epochs must be at least 1, got 0"):
        batches(samples(2), 0)
    with pytest.raises(ValueError, match="a sample has 100 tokens, more than max_seq_length 64"):
        batches([sample("a", 101)], 1)

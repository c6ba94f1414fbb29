"""Speculative decoding gives the tokens of plain decoding, in fewer passes where text repeats."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import mlx.core as mx
import pytest
from chain_model import chain, chain_model
from slow_params import slow_cases

from openelm_mlx.cache import make_cache
from openelm_mlx.config import ModelArgs
from openelm_mlx.decoding import decode
from openelm_mlx.model import Model, OpenELMModel
from openelm_mlx.proposals import Lookup, Pace
from openelm_mlx.sampling import Processor, Sampler, greedy, make_sampler, repetition_penalty
from openelm_mlx.speculative import speculative_decode

PROMPT = [1, 17, 4, 9, 33, 21, 17, 4, 9, 33, 2, 40, 12, 17, 4]
DRAFTS = ["lookup", "other", "itself"]


@pytest.fixture
def uncompiled() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture
def drafts(tiny_model: Model, tiny_args: ModelArgs) -> dict[str, Model | None]:
    """No draft (prompt lookup), a draft that is mostly wrong, and one that is always right."""
    mx.random.seed(9)
    other = Model(tiny_args)
    other.eval()
    return {"lookup": None, "other": other, "itself": tiny_model}


def speculate(model: Model, draft: Model | None, n: int, **settings: Any) -> list[int]:
    settings = {"max_tokens": 30, "cache": make_cache(len(model.layers)), **settings}
    return list(
        speculative_decode(model, PROMPT, draft_model=draft, num_draft_tokens=n, **settings)
    )


def samplers(temp: float) -> Iterator[Sampler]:
    while True:  # a fresh one for each run: samplers keep a key
        yield make_sampler(temp, top_p=0.95, seed=3) if temp else greedy


@pytest.mark.parametrize(
    ("n", "compiled"), [(4, False), *slow_cases((1, False), (1, True), (4, True))]
)
@pytest.mark.parametrize("kind", DRAFTS)
def test_greedy_tokens_are_those_of_plain_decoding(
    tiny_model: Model,
    drafts: dict[str, Model | None],
    kind: str,
    n: int,
    compiled: bool,
    uncompiled: None,
) -> None:  # REPORTS D11
    plain = list(decode(tiny_model, PROMPT, max_tokens=30))
    assert speculate(tiny_model, drafts[kind], n, max_tokens=30, compiled=compiled) == plain


@pytest.mark.slow
def test_so_they_are_for_every_draft_length(
    tiny_model: Model, drafts: dict[str, Model | None]
) -> None:
    plain = list(decode(tiny_model, PROMPT, max_tokens=64))
    for n in range(1, 17):
        for draft in drafts.values():
            assert speculate(tiny_model, draft, n, max_tokens=64) == plain, n


@pytest.mark.parametrize(
    ("processors", "temp"),
    [
        ([repetition_penalty(1.3)], 1.0),
        *slow_cases(([repetition_penalty(1.3)], 0.0), ([], 0.0), ([], 1.0)),
    ],
    ids=["penalty-1", "penalty-0", "plain-0", "plain-1"],
)
@pytest.mark.parametrize("kind", DRAFTS)
def test_seeded_samples_are_those_of_plain_decoding(
    tiny_model: Model,
    drafts: dict[str, Model | None],
    kind: str,
    temp: float,
    processors: list[Processor],
) -> None:
    sampler = samplers(temp)
    plain = decode(tiny_model, PROMPT, max_tokens=24, sampler=next(sampler), processors=processors)
    found = speculate(
        tiny_model,
        drafts[kind],
        4,
        max_tokens=24,
        sampler=next(sampler),
        processors=processors,
    )
    assert found == list(plain)


def test_a_sampler_of_the_user_s_own_is_called_once_a_token(tiny_model: Model) -> None:
    calls = []

    def sampler(logits: mx.array) -> mx.array:
        calls.append(logits.shape)
        return mx.argmax(logits, axis=-1)

    out = speculate(tiny_model, tiny_model, 4, max_tokens=21, sampler=sampler)
    assert len(calls) == len(out) == 21
    assert set(calls) == {(1, 61)}


def count_passes(monkeypatch: pytest.MonkeyPatch, model: Model) -> list[int]:
    """A list that grows by the number of tokens of each forward pass of ``model``."""
    passes: list[int] = []
    call = OpenELMModel.__call__

    def counted(self: OpenELMModel, inputs: mx.array, cache: Any = None) -> mx.array:
        if self is model.transformer:
            passes.append(inputs.shape[1])
        return call(self, inputs, cache)

    monkeypatch.setattr(OpenELMModel, "__call__", counted)
    return passes


@pytest.mark.slow
def test_a_right_draft_saves_passes(tiny_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Model(tiny_model.args)
    twin.update(tiny_model.parameters())
    twin.eval()
    for temp in (0.0, 1.0):  # sampled too: the draft draws with the same random numbers
        passes = count_passes(monkeypatch, tiny_model)
        sampler = next(samplers(temp))
        assert len(speculate(tiny_model, twin, 4, max_tokens=61, sampler=sampler)) == 61
        assert len(passes) - 1 <= 60 / 5 + 1  # five tokens a pass after prefill
        monkeypatch.undo()


SENTENCE = [*range(10, 55)]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_copy_takes_few_passes(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, uncompiled: None
) -> None:
    model = chain_model(chain(SENTENCE), vocab_size=64)
    passes = count_passes(monkeypatch, model)
    prompt = [1, *SENTENCE, 3, 10, 11, 12]
    found = speculative_decode(
        model,
        prompt,
        num_draft_tokens=10,
        max_tokens=42,
        cache=make_cache(2),
        compiled=compiled,
    )
    assert list(found) == SENTENCE[3:]
    assert len(passes) - 1 <= 42 / 6


def test_a_loop_is_copied_beyond_its_own_length(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain_model(chain([10, 11, 12, 10]), vocab_size=64)
    passes = count_passes(monkeypatch, model)
    found = speculative_decode(
        model, [1, 10, 11, 12, 10], num_draft_tokens=10, max_tokens=90, cache=make_cache(2)
    )
    assert list(found) == [11, 12, 10] * 30
    assert len(passes) < 90 / 6


def test_hopeless_proposals_become_rare() -> None:
    pace = Pace(8, 2.0)
    tried = 0
    for _ in range(400):
        if pace.size():
            tried += 1
            pace.record(pace.size(), 0)
        else:
            pace.wait()
    assert tried < 40
    for _ in range(40):  # and come back when they are right again
        if pace.size():
            pace.record(pace.size(), pace.size())
        pace.wait()
    assert pace.size() == 8


def test_without_repeats_every_pass_is_plain(
    tiny_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    successors = list(range(3, 60))
    model = chain_model(chain(successors), vocab_size=64)
    passes = count_passes(monkeypatch, model)
    out = speculative_decode(model, [1, 3], num_draft_tokens=10, max_tokens=56, cache=make_cache(2))
    assert list(out) == successors[1:]
    assert passes == [2, *[1] * 55]


def test_lookup_proposes_what_followed_the_longest_match() -> None:
    lookup = Lookup([1, 2, 3, 4, 50, 60, 9, 3, 4, 70, 80, 1, 2, 3], limit=3)
    lookup.took([4])  # 1 2 3 4 was followed by 50, the newer 3 4 by 70
    assert lookup.ready()
    assert lookup.propose(3, mx.array([])).tolist() == [50, 60, 9]
    assert lookup.propose(2, mx.array([])).tolist() == [50, 60]
    assert lookup.propose(0, mx.array([])).tolist() == []


def test_lookup_takes_a_long_copy_up_again_behind_a_replaced_token() -> None:
    text = list(range(10, 40))
    lookup = Lookup([1, *text], limit=8)
    lookup.took([10])
    lookup.took([11])
    assert lookup.propose(9, mx.array([])).tolist() == [12, 13, 14]
    lookup.took([12, 13, 14, 15])
    assert lookup.propose(9, mx.array([])).tolist()[:2] == [16, 17]
    lookup.took([16, 99])  # 17 was replaced
    assert lookup.ready()
    assert lookup.propose(3, mx.array([])).tolist() == [18, 19, 20]


def test_lookup_does_not_take_up_a_copy_that_was_short() -> None:
    lookup = Lookup([1, *range(10, 40)], limit=8)
    lookup.took([10])
    lookup.took([11])
    lookup.propose(4, mx.array([]))
    lookup.took([12, 13, 99])
    assert not lookup.ready()


@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_exactly_max_tokens_come_out_and_the_cache_is_left_as_decode_leaves_it(
    tiny_model: Model, drafts: dict[str, Model | None], kind: str, count: int
) -> None:
    cache = make_cache(2)
    out = speculate(tiny_model, drafts[kind], 4, max_tokens=count, cache=cache)
    assert len(out) == count
    assert [layer.offset for layer in cache] == [len(PROMPT) + count - 1] * 2


@pytest.mark.parametrize(
    ("stop_after", "compiled"),
    [(6, True), *slow_cases((3, False), *((n, n % 2 == 0) for n in range(1, 13)))],
)
@pytest.mark.parametrize("kind", DRAFTS)
def test_after_a_stop_the_cache_can_be_continued(
    tiny_model: Model,
    drafts: dict[str, Model | None],
    kind: str,
    stop_after: int,
    compiled: bool,
    uncompiled: None,
) -> None:
    whole = list(decode(tiny_model, PROMPT, max_tokens=24))
    cache: list[Any] = list(make_cache(2))
    stream = speculative_decode(
        tiny_model,
        PROMPT,
        draft_model=drafts[kind],
        num_draft_tokens=4,
        max_tokens=24,
        cache=cache,
        compiled=compiled,
    )
    first = list(islice(stream, stop_after))
    stream.close()
    assert first == whole[:stop_after]
    assert cache[0].offset == len(PROMPT) + stop_after
    for layer in cache:
        layer.trim(1)
    rest = decode(tiny_model, first[-1:], max_tokens=24 - stop_after, cache=cache)
    assert list(rest) == whole[stop_after:]


def test_a_cache_that_holds_a_prefix_is_continued(tiny_model: Model) -> None:
    cache = make_cache(2)
    tiny_model(mx.array([PROMPT[:6]]), cache)
    found = speculative_decode(
        tiny_model, PROMPT[6:], num_draft_tokens=4, max_tokens=20, cache=cache
    )
    assert list(found) == list(decode(tiny_model, PROMPT, max_tokens=20))


@pytest.mark.parametrize("kind", ["plain", "quantised"])
@pytest.mark.slow  # importing mlx_lm takes seconds
def test_mlx_lm_s_caches_that_can_go_back_work(kind: str) -> None:
    from mlx_lm.models.cache import KVCache, QuantizedKVCache

    model = chain_model(chain(SENTENCE), vocab_size=64)
    cache: list[Any] = [
        KVCache() if kind == "plain" else QuantizedKVCache(group_size=32, bits=8) for _ in range(2)
    ]
    prompt = [1, *SENTENCE, 3, 10, 11, 12]
    found = speculative_decode(model, prompt, num_draft_tokens=10, max_tokens=42, cache=cache)
    assert list(found) == SENTENCE[3:]
    assert cache[0].offset == len(prompt) + 41


@pytest.mark.slow  # importing mlx_lm takes seconds
def test_a_rotating_cache_is_refused_before_any_work(tiny_model: Model) -> None:
    from mlx_lm.models.cache import RotatingKVCache

    cache = [RotatingKVCache(max_size=64, keep=4) for _ in range(2)]
    with pytest.raises(ValueError, match=r"can go back.*leave out max_kv_size"):
        speculative_decode(tiny_model, PROMPT, num_draft_tokens=2, max_tokens=4, cache=cache)
    assert cache[0].empty()


def test_a_draft_with_another_vocabulary_is_refused_with_both_sizes(tiny_model: Model) -> None:
    draft = chain_model({}, vocab_size=64)  # REPORTS D12
    with pytest.raises(ValueError, match="vocabulary has 64 tokens and the model's 61") as error:
        speculate(tiny_model, draft, 4)
    assert "\n" not in str(error.value)


def test_bad_calls_are_refused_at_once(tiny_model: Model) -> None:
    settings: Any = {"max_tokens": 4, "cache": make_cache(2)}
    with pytest.raises(ValueError, match="prompt is empty"):
        speculative_decode(tiny_model, [], num_draft_tokens=2, **settings)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        speculative_decode(tiny_model, PROMPT, num_draft_tokens=0, **settings)

"""Prompt in, text out: BOS, stop texts, ends, streams; the model says what a test wants."""

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from chain_model import PIECES, TEXT, chain, chain_model, ids_of
from slow_params import slow
from tiny_tokenizer import TinyTokenizer

from openelm_mlx.cache import make_cache
from openelm_mlx.generate import Response, generate, report, stream_generate
from openelm_mlx.generation_settings import GenerateArgs, make_generation_cache, prompt_ids
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import Tokenizer

EMOJI = ["▁a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "."]


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: TinyTokenizer) -> Tokenizer:
    return Tokenizer.from_path(tiny_tokenizer.path)


def saying(tokenizer: Tokenizer, pieces: list[str], **settings: Any) -> Model:
    """A model that continues any prompt of one BOS with the pieces, then EOS."""
    ids = ids_of(tokenizer, pieces)
    return chain_model(chain([1, *ids, 2]), vocab_size=tokenizer.vocab_size, **settings)


@pytest.fixture(scope="module")
def talker(tokenizer: Tokenizer) -> Model:
    return saying(tokenizer, PIECES)


@pytest.fixture(scope="module")
def babbler(tokenizer: Tokenizer) -> Model:
    """Random weights: sampled text with bytes, control pieces and padding rows."""
    mx.random.seed(0)
    model = Model(chain_model({}, vocab_size=tokenizer.vocab_size + 8).args)
    model.eval()
    return model


def ending(parts: list[Response]) -> tuple[str | None, int]:
    assert all(part.finish_reason is None for part in parts[:-1])
    return parts[-1].finish_reason, parts[-1].generation_tokens


def test_text_ends_at_the_end_token_which_gives_none(talker: Model, tokenizer: Tokenizer) -> None:
    parts = list(stream_generate(talker, tokenizer, ""))
    assert "".join(part.text for part in parts) == TEXT
    assert [part.token for part in parts] == [*ids_of(tokenizer, PIECES), None]
    assert ending(parts) == ("stop", len(PIECES) + 1)
    assert parts[-1].prompt_tokens == 1  # an empty prompt is one BOS
    assert parts[-1].generation_tps > 0
    assert parts[-1].peak_memory_gb > 0


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3, 4, 5)])
def test_the_stream_joined_is_the_decoded_ids(
    babbler: Model, tokenizer: Tokenizer, seed: int
) -> None:  # REPORTS D1 to D3
    parts = list(stream_generate(babbler, tokenizer, "A", temp=1.0, seed=seed, max_tokens=60))
    ids = [part.token for part in parts if part.token is not None]
    assert "".join(part.text for part in parts) == tokenizer.decode(ids)


def test_a_character_of_several_bytes_comes_whole(tokenizer: Tokenizer) -> None:  # REPORTS D2
    model = saying(tokenizer, EMOJI)
    parts = [part.text for part in stream_generate(model, tokenizer, "")]
    assert "".join(parts) == "a\U0001f600."
    assert all("\ufffd" not in part for part in parts)
    assert generate(model, tokenizer, "", max_tokens=3) == "a\ufffd\ufffd"  # cut for good


@pytest.mark.parametrize("start", [0, 6, *slow(3, 9, 12, 15, 18)])
def test_stop_texts_end_the_text_wherever_tokens_end(
    talker: Model, tokenizer: Tokenizer, start: int
) -> None:  # REPORTS D8
    for length in (1, 2, 5):
        stop = TEXT[start : start + length]
        shown = ""
        for part in stream_generate(talker, tokenizer, "", stop=[stop]):
            shown += part.text
            assert stop not in shown
            assert TEXT.startswith(shown)  # nothing is taken back
        assert shown == TEXT[: TEXT.index(stop)]
        assert part.finish_reason == "stop"


def test_text_held_back_for_a_stop_that_does_not_come_is_shown(
    talker: Model, tokenizer: Tokenizer
) -> None:
    assert generate(talker, tokenizer, "", stop=["onc. And then", "zebra"]) == TEXT
    parts = list(stream_generate(talker, tokenizer, "", stop=["house!"], max_tokens=4))
    assert [part.text for part in parts] == ["the", " ", "", "", "hous"]
    assert ending(parts) == ("length", 4)


def test_of_several_stop_texts_the_first_to_come_counts(
    talker: Model, tokenizer: Tokenizer
) -> None:
    assert generate(talker, tokenizer, "", stop=["onc", "said", "zebra"]) == "the house "


def test_every_end_token_counts(talker: Model, tiny_tokenizer: TinyTokenizer) -> None:
    tokenizer = Tokenizer.from_path(tiny_tokenizer.path)  # REPORTS D7
    tokenizer.add_eos_ids(ids_of(tokenizer, ["▁sa"]))
    parts = list(stream_generate(talker, tokenizer, ""))
    assert "".join(part.text for part in parts) == "the house"
    assert ending(parts) == ("stop", 6)


def test_exactly_max_tokens_come_out(talker: Model, tokenizer: Tokenizer) -> None:
    for count in (1, 5, len(PIECES)):
        parts = list(stream_generate(talker, tokenizer, "", max_tokens=count))
        assert ending(parts) == ("length", count)
        assert len(parts) == count + 1


def test_a_full_context_ends_the_text_and_is_said(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    model = saying(tokenizer, PIECES, context=6)
    parts = list(stream_generate(model, tokenizer, ""))
    assert ending(parts) == ("context", 5)
    with caplog.at_level(logging.WARNING):
        report(parts[-1], verbose=False)
    assert "the model's context is full; --max-kv-size" in caplog.text
    assert ending(list(stream_generate(model, tokenizer, "", max_tokens=5))) == ("length", 5)


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(
    tokenizer: Tokenizer,
) -> None:
    model = saying(tokenizer, PIECES, context=6)
    with pytest.raises(ValueError, match="prompt has 6 tokens and the model's context is 6"):
        stream_generate(model, tokenizer, [1, 5, 6, 7, 8, 9])


@pytest.mark.parametrize("ids", [[9, 10], [1, 9, 10], [1, 1, 9, 10]])
def test_ids_get_exactly_one_bos(tokenizer: Tokenizer, ids: list[int]) -> None:  # REPORTS C13
    assert prompt_ids(tokenizer, ids) == [1, 9, 10]


@pytest.mark.parametrize("text", ["The king", "<s>The king"])
def test_text_gets_exactly_one_bos(talker: Model, tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode("The king", bos=False)
    assert prompt_ids(tokenizer, text) == [1, *ids]
    parts = list(stream_generate(talker, tokenizer, text, max_tokens=1))
    assert parts[-1].prompt_tokens == len(ids) + 1


def test_without_a_tokenizer_one_line_says_what_to_do(talker: Model) -> None:  # REPORTS A2
    with pytest.raises(ValueError, match=r"no tokenizer; .*--tokenizer.*32000 pieces") as error:
        generate(talker, None, "x")
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_penalty_breaks_a_loop(babbler: Model, tokenizer: Tokenizer) -> None:
    def distinct(**settings: float) -> int:  # REPORTS D10, D18
        parts = list(stream_generate(babbler, tokenizer, "A", max_tokens=40, **settings))
        assert ending(parts)[1] == 40
        return len({part.token for part in parts[:40]})

    assert distinct() < 30  # it falls into a loop
    assert distinct(repetition_penalty=100.0) == 40
    assert distinct(repetition_penalty=100.0, repetition_window=2) < 40


def test_seeds_repeat_and_differ(babbler: Model, tokenizer: Tokenizer) -> None:
    def text(seed: int) -> str:
        return generate(babbler, tokenizer, "A", temp=1.0, top_p=0.95, seed=seed, max_tokens=30)

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_settings_may_come_as_one_object(talker: Model, tokenizer: Tokenizer) -> None:
    args = GenerateArgs(max_tokens=3)
    parts = list(stream_generate(talker, tokenizer, "", args=args, stop=["zebra"]))
    assert ending(parts) == ("length", 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temp": -1, "top_p": 0}, "temp must be .*top_p must be"),
        ({"prompt_lookup": -1}, "prompt_lookup must be 0"),
        ({"kv_bits": 5}, "kv_bits must be one of 2, 3, 4, 6, 8, got 5"),
        ({"kv_bits": 8, "max_kv_size": 64}, "cannot be combined"),  # REPORTS D14
        ({"max_kv_size": 4}, "at least 8 tokens"),
        ({"max_kv_size": 64, "prompt_lookup": 4}, "leave out max_kv_size"),
        ({"stop": [""]}, "stop text is empty"),
        ({"prefill_step": 0, "num_draft_tokens": 0}, "num_draft_tokens .*prefill_step"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        GenerateArgs(**settings)
    assert "\n" not in str(error.value)


@pytest.mark.slow  # importing mlx_lm takes seconds
def test_a_rotating_cache_goes_on_beyond_the_context(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, PIECES)
    model = chain_model(chain([1, *ids, ids[0]]), vocab_size=tokenizer.vocab_size, context=16)
    parts = list(stream_generate(model, tokenizer, ids * 3, max_kv_size=16, max_tokens=40))
    assert ending(parts) == ("length", 40)  # REPORTS D15: prompt and output both past the size
    assert [part.token for part in parts[:40]] == (ids * 4)[:40]
    with pytest.raises(ValueError, match="max_kv_size 17 is beyond the model's context of 16"):
        stream_generate(model, tokenizer, ids, max_kv_size=17)


@pytest.mark.slow  # importing mlx_lm takes seconds
def test_a_rotating_cache_recalls_what_it_still_holds(tokenizer: Tokenizer, babbler: Model) -> None:
    plain = generate(babbler, tokenizer, "The king", max_tokens=20)
    assert generate(babbler, tokenizer, "The king", max_tokens=20, max_kv_size=64) == plain


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.slow  # importing mlx_lm takes seconds
def test_a_quantised_cache_keeps_the_prompt(talker: Model, tokenizer: Tokenizer, bits: int) -> None:
    assert generate(talker, tokenizer, "", kv_bits=bits, kv_group_size=32) == TEXT
    cache = make_generation_cache(talker, GenerateArgs(kv_bits=bits, kv_group_size=32))
    list(stream_generate(talker, tokenizer, "The king", cache=cache, max_tokens=3))
    assert cache[0].bits == bits
    assert cache[0].offset >= 5


@pytest.mark.slow  # importing mlx_lm takes seconds
def test_heads_that_cannot_be_quantised_are_refused(talker: Model, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"groups of 64 .*this model's have 32; choose another"):
        stream_generate(talker, tokenizer, "", kv_bits=8)


def test_speculation_changes_nothing(talker: Model, tokenizer: Tokenizer) -> None:
    twin = chain_model(chain(ids_of(tokenizer, PIECES[4:])), vocab_size=tokenizer.vocab_size)
    for settings in ({"prompt_lookup": 8}, {"draft_model": twin}, {"draft_model": talker}):
        assert generate(talker, tokenizer, "the house", **settings) == generate(
            talker, tokenizer, "the house"
        )
        assert generate(talker, tokenizer, "", stop=["aid"], **settings) == "the house s"


@pytest.mark.parametrize("settings", [{"prompt_lookup": 4}, {"max_kv_size": 64}])
def test_a_draft_refuses_what_it_cannot_go_with(
    talker: Model, tokenizer: Tokenizer, settings: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="a draft model"):
        stream_generate(talker, tokenizer, "", draft_model=talker, **settings)


def test_breaking_off_leaves_a_cache_that_goes_on(talker: Model, tokenizer: Tokenizer) -> None:
    cache: list[Any] = list(make_cache(2))
    stream = stream_generate(talker, tokenizer, "", cache=cache)
    for part in stream:
        if part.generation_tokens == 3:
            break
    stream.close()
    assert cache[0].offset == 1 + 3
    next_ids = ids_of(tokenizer, PIECES[3:4])
    rest = stream_generate(talker, tokenizer, next_ids, cache=cache)  # ids as they are, no BOS
    parts = list(rest)
    assert parts[-1].prompt_tokens == 1
    assert [part.token for part in parts[:-1]] == ids_of(tokenizer, PIECES[4:])


def test_nothing_of_mlx_lm_is_needed_for_plain_generation(tmp_path: Path) -> None:
    from command_line import run_apart

    code = """
import sys
import openelm_mlx
from openelm_mlx.generate import generate
from openelm_mlx.model import Model, ModelArgs
from openelm_mlx.speculative import speculative_decode
heavy = {"mlx_lm", "transformers", "torch", "huggingface_hub", "tokenizers", "numpy"}
print(sorted(heavy & set(sys.modules)))
"""
    assert run_apart(code=code).out == "[]\n"

"""Preference pairs: forms of records, one BOS and EOS, cutting, and what is left out."""

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer as tiny
from tuning_makers import learned, whole, write

from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tuning_pairs import Pair, PairArgs, load_pairs

SHARED = Path(__file__).parent.parent.parent / "shared" / "data"
ASKED = [{"role": "user", "content": "the old king"}]
TEXTS = {"prompt": "the old king", "chosen": "went to forest", "rejected": "saw a wolf"}


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


@pytest.fixture
def tokenizer(tiny_tokenizer: tiny.TinyTokenizer) -> Tokenizer:
    """A tokenizer of its own, as a chat template may be put into it."""
    return Tokenizer.from_path(tiny_tokenizer.path)


def load(path: Path, tokenizer: Tokenizer, **settings: Any) -> list[Pair]:
    return load_pairs(path, "train", tokenizer, PairArgs(**settings))


def test_texts_get_bos_before_the_prompt_and_eos_behind_each_answer(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (pair,) = load(write(tmp_path, TEXTS), tokenizer)
    assert whole(pair.chosen, tokenizer) == "<s>the old king went to forest</s>"
    assert whole(pair.rejected, tokenizer) == "<s>the old king saw a wolf</s>"
    assert learned(pair.chosen, tokenizer) == "went to forest</s>"
    assert learned(pair.rejected, tokenizer) == "saw a wolf</s>"
    assert pair.name == "train.jsonl:1"


@pytest.mark.parametrize(
    "record",
    [
        {  # UltraFeedback: whole conversations beside the bare prompt
            "prompt": "the old king",
            "chosen": ASKED + said("went to forest"),
            "rejected": ASKED + said("saw a wolf"),
        },
        {"chosen": ASKED + said("went to forest"), "rejected": ASKED + said("saw a wolf")},
        {"prompt": ASKED, "chosen": said("went to forest"), "rejected": said("saw a wolf")},
        {
            "prompt": "the old king",
            "chosen": said("went to forest"),
            "rejected": said("saw a wolf"),
        },
        {"prompt": ASKED, "chosen": "went to forest", "rejected": "saw a wolf"},
    ],
)
def test_messages_get_apples_template_with_an_empty_system_message(
    record: dict[str, Any], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (pair,) = load(write(tmp_path, record), tokenizer)
    prompt = "<s><|system|>\n</s>\n<|user|>\nthe old king</s>\n<|assistant|>\n"
    assert whole(pair.chosen, tokenizer) == prompt + "went to forest</s>"
    assert whole(pair.rejected, tokenizer) == prompt + "saw a wolf</s>"
    assert learned(pair.chosen, tokenizer) == "went to forest</s>"
    assert learned(pair.rejected, tokenizer) == "saw a wolf</s>"


def test_texts_can_go_through_the_chat_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (pair,) = load(write(tmp_path, TEXTS), tokenizer, use_chat_template=True)
    assert "<|user|>\nthe old king</s>" in whole(pair.chosen, tokenizer)
    assert learned(pair.rejected, tokenizer) == "saw a wolf</s>"


def test_only_the_last_answer_of_a_conversation_is_learned(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    before = ASKED + said("what") + [{"role": "user", "content": "and the girl"}]
    record = {"chosen": before + said("went"), "rejected": before + said("saw")}
    (pair,) = load(write(tmp_path, record), tokenizer)
    assert learned(pair.chosen, tokenizer) == "went</s>"
    assert "what</s>" in whole(pair.chosen, tokenizer)


def test_a_long_prompt_loses_its_beginning_and_keeps_bos(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    record = {**TEXTS, "prompt": "the young queen " * 30 + "saw a river"}
    (pair,) = load(write(tmp_path, record), tokenizer, max_prompt_length=8, max_seq_length=64)
    prompts = [side.tokens[~side.mask].tolist() for side in (pair.chosen, pair.rejected)]
    assert prompts[0] == prompts[1]
    assert len(prompts[0]) == 8
    assert prompts[0] == [1, *tokenizer.encode(record["prompt"])[-7:]]
    assert learned(pair.chosen, tokenizer) == "went to forest</s>"
    assert "1 prompts cut on the left, 0 answers cut" in caplog.text


def test_a_long_answer_loses_its_end(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    record = {**TEXTS, "chosen": "went to forest " * 30}
    (pair,) = load(write(tmp_path, record), tokenizer, max_prompt_length=16, max_seq_length=24)
    assert len(pair.chosen.tokens) == 24
    assert learned(pair.chosen, tokenizer).startswith("went to forest we")
    assert pair.chosen.tokens[-1] != tokenizer.eos_id
    assert learned(pair.rejected, tokenizer) == "saw a wolf</s>"
    assert "0 prompts cut on the left, 1 answers cut" in caplog.text


def test_pairs_without_a_difference_or_an_answer_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    start = "went to forest " * 30
    path = write(
        tmp_path,
        TEXTS,
        {**TEXTS, "rejected": TEXTS["chosen"]},
        {**TEXTS, "rejected": "  "},
        {**TEXTS, "chosen": ""},
        {**TEXTS, "chosen": start + "king", "rejected": start + "queen"},  # equal when cut
    )
    kept = load(path, tokenizer, max_prompt_length=16, max_seq_length=24)
    assert [pair.name for pair in kept] == ["train.jsonl:1"]
    assert "4 pairs left out, with equal or empty answers" in caplog.text
    with pytest.raises(ValueError, match="no pair has two different answers"):
        load(write(tmp_path / "b", {**TEXTS, "chosen": ""}), tokenizer)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "line 2: has no key 'rejected'"),
        ({"chosen": "a", "rejected": "b"}, "line 2: has no key 'prompt'"),
        ({**TEXTS, "chosen": 3}, "line 2: 'chosen' must be text, got 3"),
        ({**TEXTS, "chosen": []}, "line 2: 'chosen' must be a list of messages"),
        ({**TEXTS, "chosen": ASKED}, "line 2: the last message of 'chosen' is not the assistant"),
        (
            {"chosen": ASKED + said("a"), "rejected": ASKED * 2 + said("b")},
            "line 2: chosen and rejected answer different conversations",
        ),
    ],
)
def test_damaged_pairs_are_named_by_line(
    record: Any, message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, TEXTS, record), tokenizer)


def test_lengths_that_leave_no_answer_are_refused() -> None:
    with pytest.raises(ValueError, match="max_prompt_length 64 must be at least 2 and less than"):
        PairArgs(max_prompt_length=64, max_seq_length=64)


def test_a_missing_validation_split_gives_no_pairs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert load_pairs(write(tmp_path, TEXTS), "valid", tokenizer, PairArgs()) == []


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not here")
def test_a_real_set_is_read_whole(tokenizer: Tokenizer) -> None:
    found = load_pairs(SHARED / "prefs", "valid", tokenizer, PairArgs())
    assert len(found) == 100
    assert all(pair.chosen.tokens[-1] == 2 for pair in found)
    for pair in found:
        assert (
            pair.chosen.tokens[~pair.chosen.mask] == pair.rejected.tokens[~pair.rejected.mask]
        ).all()

"""Samples longer than a row: cut, split or left out, and counted."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizer as tiny
from tuning_makers import learned, load, whole, write

from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tuning_data import TuningArgs


@pytest.fixture
def tokenizer(tiny_tokenizer: tiny.TinyTokenizer) -> Tokenizer:
    """A tokenizer of its own, as a chat template may be put into it."""
    return Tokenizer.from_path(tiny_tokenizer.path)


def test_b1_prompts_that_fill_the_row_are_skipped_and_counted(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    long = {"prompt": "the old king went to forest " * 20, "completion": "and saw"}
    short = {"prompt": "the old", "completion": "king"}
    path = write(tmp_path, long, short, long)
    samples = load(path, tokenizer, mask_prompt=True, max_seq_length=32)
    assert [learned(sample, tokenizer) for sample in samples] == ["king</s>"]
    assert "2 samples left out: nothing to learn within max_seq_length 32" in caplog.text
    with pytest.raises(ValueError, match="no sample has anything to learn"):
        load(write(tmp_path / "b", long), tokenizer, mask_prompt=True, max_seq_length=32)


def test_b1_long_prompts_can_be_cut_on_the_left(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    record = {"prompt": "the old king went to forest " * 20, "completion": "and saw"}
    (sample,) = load(
        write(tmp_path, record),
        tokenizer,
        mask_prompt=True,
        max_seq_length=32,
        long_prompts="cut",
    )
    assert len(sample.tokens) == 33
    assert sample.tokens[0] == tokenizer.bos_id
    assert learned(sample, tokenizer).strip() == "and saw</s>"
    assert whole(sample, tokenizer).endswith("went to forest and saw</s>")
    lost = len(tokenizer.encode(record["prompt"] + "and saw", eos=True)) - 33
    assert f"1 prompts cut on the left, {lost} tokens lost" in caplog.text


def test_an_answer_longer_than_the_row_keeps_its_beginning(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    record = {"prompt": "the old king", "completion": "went to forest " * 20}
    (sample,) = load(
        write(tmp_path, record),
        tokenizer,
        mask_prompt=True,
        max_seq_length=32,
        long_prompts="cut",
    )
    assert len(sample.tokens) == 33
    assert sample.num_targets == 32  # nothing of the prompt but BOS is left
    assert learned(sample, tokenizer).startswith("went to forest went")


def test_b28_long_samples_are_cut_with_one_summary(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    text = "the young queen saw a wolf " * 10
    n = len(tokenizer.encode(text, eos=True))
    samples = load(write(tmp_path, *[{"text": text}] * 3), tokenizer, max_seq_length=16)
    assert [len(sample.tokens) for sample in samples] == [17] * 3
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert f"3 samples are longer than max_seq_length 16: {3 * (n - 17)} tokens cut" in warnings[0]


@pytest.mark.parametrize("length", [5, 16, 31])
def test_b28_split_long_learns_every_token_once(
    length: int, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    text = "the young queen saw a wolf " * 10
    ids = tokenizer.encode(text, eos=True)
    samples = load(
        write(tmp_path, {"text": text}), tokenizer, max_seq_length=length, split_long=True
    )
    assert all(len(sample.tokens) <= length + 1 for sample in samples)
    assert all(sample.tokens[0] == tokenizer.bos_id for sample in samples)
    assert not any(sample.mask[0] for sample in samples)
    assert np.concatenate([s.tokens[s.mask] for s in samples]).tolist() == ids[1:]


def test_split_long_drops_pieces_of_prompt_alone(tmp_path: Path, tokenizer: Tokenizer) -> None:
    record = {"prompt": "the old king went to forest " * 10, "completion": "and saw a girl"}
    settings = {"mask_prompt": True, "split_long": True, "max_seq_length": 16}
    samples = load(write(tmp_path, record), tokenizer, **settings)
    assert "".join(learned(s, tokenizer) for s in samples).replace(" ", "") == "andsawagirl</s>"


def test_a_sample_that_just_fits_is_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    n = len(tokenizer.encode("the young queen", eos=True))
    path = write(tmp_path, {"text": "the young queen"})
    (fits,) = load(path, tokenizer, max_seq_length=n - 1)
    assert len(fits.tokens) == n
    (cut,) = load(path, tokenizer, max_seq_length=n - 2)
    assert cut.tokens.tolist() == fits.tokens[:-1].tolist()


def test_empty_texts_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(load(write(tmp_path, {"text": ""}, {"text": "a"}), tokenizer)) == 1
    assert "1 empty texts left out" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_seq_length": 1}, "max_seq_length must be at least 2"),
        ({"long_prompts": "cut"}, "only with mask_prompt"),
        ({"long_prompts": "cut", "mask_prompt": True, "split_long": True}, "without split_long"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TuningArgs(**settings)


def test_a_tokenizer_without_bos_learns_from_the_second_token(tmp_path: Path) -> None:
    path = tiny.train_byte_level(tmp_path / "bytes")
    tokenizer = Tokenizer.from_path(path.parent)
    tokenizer.bos_id = None
    samples = load(
        write(tmp_path, {"text": "a wolf " * 9}), tokenizer, max_seq_length=8, split_long=True
    )
    ids = tokenizer.encode("a wolf " * 9, eos=True)
    assert np.concatenate([s.tokens[s.mask] for s in samples]).tolist() == ids[1:]

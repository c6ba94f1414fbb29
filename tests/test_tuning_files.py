"""Files of records: kinds, splits, and damage named by file and line."""

import logging
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer as tiny
from tuning_makers import CHAT, load, write

from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tuning_data import TuningArgs, load_split


@pytest.fixture
def tokenizer(tiny_tokenizer: tiny.TinyTokenizer) -> Tokenizer:
    """A tokenizer of its own, as a chat template may be put into it."""
    return Tokenizer.from_path(tiny_tokenizer.path)


@pytest.mark.parametrize(
    "content", ['[{"text": "a"}, {"text": "b"}]', '{"text": "a"}\n{"text": "b"}']
)
@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_a_list_and_lines_are_read_whatever_the_files_name(
    content: str, name: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + content.encode() + b"\r\n\n")
    assert len(load(path, tokenizer)) == 2


def test_b7_a_missing_validation_split_is_said_and_no_error(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = write(tmp_path, {"text": "a"})
    assert load_split(folder, "valid", tokenizer, TuningArgs()) == []
    assert load_split(folder / "train.jsonl", "test", tokenizer, TuningArgs()) == []
    assert caplog.text.count("has no validation data") == 1
    assert caplog.text.count("has no test data") == 1


def test_damaged_lines_are_one_error_with_file_and_line(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    good = {"prompt": "a", "completion": "b"}
    path = write(
        tmp_path,
        good,
        '{"prompt": "a", "compl',
        {"prompt": "a", "completion": 3},
        "[1]",
        {"prompt": "a", "answer": "b"},
    )
    with pytest.raises(
        ValueError, match=r"train\.jsonl: 2 damaged records: line 2 is not"
    ) as caught:
        load(path, tokenizer)
    assert "line 4 is no JSON object" in str(caught.value)
    path = write(tmp_path, good, {**good, "completion": 3}, {"prompt": "a"}, good)
    with pytest.raises(ValueError, match=r"train\.jsonl: 2 damaged records") as caught:
        load(path, tokenizer)
    assert "line 2: 'completion' must be text, got 3" in str(caught.value)
    assert "line 3: has no key 'completion' (it has prompt)" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": []}, "must be a list of messages"),
        ({"messages": [{"role": "user"}]}, "message 1 of 'messages': has no key 'content'"),
        ({"messages": [{"role": "user", "content": None}]}, "'content' must be text, got nothing"),
        ({"messages": CHAT[:1]}, "has no message of the assistant"),
        ({"messages": [{"role": "tool", "content": "x"}, CHAT[1]]}, "roles are system, user"),
        ({"text": ["a"]}, r"'text' must be text, got \['a'\]"),
        ('{"text": "\\ud800"}', "half of a surrogate pair"),
        ({"chosen": "a", "rejected": "b", "prompt": "c"}, "preference pairs; .*openelm dpo"),
        ({"question": "a"}, "no format has the keys question"),
    ],
)
def test_what_is_wrong_with_a_record_is_said(
    record: Any, message: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load(write(tmp_path, record), tokenizer)
    assert "line 1" in str(caught.value)


def test_many_damaged_lines_are_counted_not_listed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="9 damaged records") as caught:
        load(write(tmp_path, {"text": "a"}, *["{"] * 9), tokenizer)
    assert str(caught.value).endswith("; and 6 more")


def test_bytes_that_are_no_text_are_named_by_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"line 2 is not JSON \(not UTF-8"):
        load(path, tokenizer)


def test_paths_that_cannot_be_read_are_explained(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(FileNotFoundError, match=r"does not exist; give a \.jsonl"):
        load(tmp_path / "none", tokenizer)
    (tmp_path / "valid.jsonl").write_text("{}")
    with pytest.raises(
        FileNotFoundError, match=r"has no train\.jsonl or train\.json; it has valid"
    ):
        load(tmp_path, tokenizer)
    (tmp_path / "train.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no records"):
        load(tmp_path, tokenizer)
    (tmp_path / "train.json").write_text("[]")
    with pytest.raises(ValueError, match=r"has both train\.jsonl and train\.json"):
        load(tmp_path, tokenizer)
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"x\.csv is no tuning data"):
        load(tmp_path / "x.csv", tokenizer)

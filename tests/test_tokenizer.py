"""Ids, special tokens and files of both kinds of tokenizer."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest
import tiny_tokenizer as tiny
from golden_set import read_json
from sentencepiece import SentencePieceProcessor

from openelm_mlx.tokenizer import Tokenizer, check_tokenizer
from openelm_mlx.tokenizer_search import APPLE_KNOWN_IDS

LLAMA = Path(__file__).parent.parent.parent / "shared" / "data" / "tokenizer"
TEXTS = ["The king went home.", " two  spaces ", "", "naïve 😀 e\u0301", "a\n\n\tb", "2024"]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_path(tiny.train_byte_level(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(params=["sentencepiece", "tokenizers"])
def any_kind(
    request: pytest.FixtureRequest, tiny_tokenizer: tiny.TinyTokenizer, byte_level: Tokenizer
) -> Tokenizer:
    return tiny_tokenizer.tokenizer if request.param == "sentencepiece" else byte_level


def write(path: Path, value: object) -> None:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def test_corenets_tokenizer_is_read_with_its_special_ids(golden: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.from_path(golden("data/tokenizer.model"))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (1, 2, 400)
    assert tokenizer.pad_id == 400  # CoreNet pads with one past the last piece
    assert tokenizer.kind == "sentencepiece"


def test_corenets_own_token_ids_come_out(golden: Callable[[str], Path]) -> None:
    tokenizer = Tokenizer.from_path(golden("data/tokenizer.model"))
    for case in read_json(golden("data/tokenize_cases.json"))["cases"]:
        assert tokenizer.encode(case["ftfy_fix_text"], eos=True) == case["tokens"]


@pytest.mark.skipif(not LLAMA.is_dir(), reason="the rebuilt LLaMA tokenizer is not here")
@pytest.mark.parametrize("file", ["tokenizer.model", "tokenizer.json"])
def test_llama_gives_the_ids_apple_published(file: str) -> None:
    tokenizer = Tokenizer.from_path(LLAMA / file)
    check_tokenizer(tokenizer, 32000, APPLE_KNOWN_IDS)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 32000)


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_has_sentencepieces_ids_after_one_bos(
    text: str, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    judge = SentencePieceProcessor(model_file=str(tiny_tokenizer.path))
    assert tiny_tokenizer.tokenizer.encode(text) == [1, *judge.encode(text)]
    assert tiny_tokenizer.tokenizer.encode(text, bos=False, eos=True) == [*judge.encode(text), 2]


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(text: str, any_kind: Tokenizer) -> None:
    assert any_kind.decode(any_kind.encode(text, eos=True)) == text


def test_a_text_that_begins_with_the_bos_string_gets_no_second_bos(any_kind: Tokenizer) -> None:
    bos = any_kind.piece(any_kind.bos_id or 0)
    assert any_kind.encode(f"{bos}The king") == any_kind.encode("The king")
    assert any_kind.encode("The king").count(any_kind.bos_id or 0) == 1


def test_token_input_gets_exactly_one_bos(any_kind: Tokenizer) -> None:
    bos = any_kind.bos_id
    assert bos is not None
    for start in ([], [bos], [bos, bos]):
        assert any_kind.with_bos([*start, 9, bos, 8]) == [bos, 9, bos, 8]
    assert any_kind.with_bos([]) == any_kind.with_bos([bos]) == [bos]


def test_special_strings_in_text_stay_text(tiny_tokenizer: tiny.TinyTokenizer) -> None:
    ids = tiny_tokenizer.tokenizer.encode("a </s> and <s> b")
    assert 2 not in ids
    assert ids.count(1) == 1
    assert tiny_tokenizer.tokenizer.decode(ids) == "a </s> and <s> b"


def test_eos_is_added_once(byte_level: Tokenizer) -> None:
    eos = byte_level.eos_id
    assert byte_level.encode("The king", eos=True).count(eos or 0) == 2  # <|endoftext|> is both
    assert byte_level.encode("The king<|endoftext|>", eos=True)[-2:].count(eos or 0) == 1
    assert byte_level.encode("", eos=True) == [eos, eos]


def test_special_tokens_are_shown_when_asked_for(tiny_tokenizer: tiny.TinyTokenizer) -> None:
    ids = tiny_tokenizer.tokenizer.encode("The king", eos=True)
    assert tiny_tokenizer.tokenizer.decode(ids, skip_special=False) == "<s>The king</s>"


def test_padding_rows_of_a_model_decode_to_nothing(any_kind: Tokenizer) -> None:
    ids = any_kind.encode("The king")
    assert any_kind.decode([*ids, any_kind.vocab_size, 10**6]) == "The king"


def test_ids_may_come_as_an_array(any_kind: Tokenizer) -> None:
    ids = mx.array(any_kind.encode("The king"), dtype=mx.int32)
    assert any_kind.decode(ids) == "The king"  # type: ignore[arg-type]  # an array is no Sequence


def test_ids_outside_are_refused(any_kind: Tokenizer) -> None:
    with pytest.raises(ValueError, match="start at 0, got -1"):
        any_kind.decode([5, -1])
    for index in (-1, any_kind.vocab_size):
        with pytest.raises(ValueError, match=f"run from 0 to {any_kind.vocab_size - 1}"):
            any_kind.piece(index)


def test_added_tokens_beyond_the_vocabulary_work(byte_level: Tokenizer) -> None:
    extra = byte_level.encode("<|extra|>", bos=False)  # guards mlx-examples#1077
    assert extra == [byte_level.vocab_size - 1]
    assert byte_level.piece(extra[0]) == "<|extra|>"
    assert byte_level.decode([*extra, *byte_level.encode("king")]) == "king"


def test_truncation_kept_in_the_file_does_not_cut(byte_level: Tokenizer) -> None:
    assert len(byte_level.encode("The old king went to the forest and saw the wolf")) > 4


@pytest.mark.parametrize(
    ("config", "bos", "eos"),
    [
        ({}, "<|endoftext|>", "<|endoftext|>"),  # by its common name
        ({"bos_token": "<|extra|>"}, "<|extra|>", "<|endoftext|>"),
        ({"bos_token": None, "eos_token": {"content": "<|extra|>"}}, None, "<|extra|>"),
    ],
)
def test_bos_and_eos_of_a_tokenizer_json_are_derived_and_said(
    config: dict[str, object],
    bos: str | None,
    eos: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiny.train_byte_level(tmp_path)
    write(tmp_path / "tokenizer_config.json", config)
    with caplog.at_level(logging.INFO):
        tokenizer = Tokenizer.from_path(tmp_path / "tokenizer.json")
    assert (None if tokenizer.bos_id is None else tokenizer.piece(tokenizer.bos_id)) == bos
    assert (None if tokenizer.eos_id is None else tokenizer.piece(tokenizer.eos_id)) == eos
    assert caplog.messages == [
        f"{tmp_path / 'tokenizer.json'}: tokenizers, {tokenizer.vocab_size} pieces, "
        f"bos {tokenizer.bos_id}, eos {tokenizer.eos_id}, pad {tokenizer.vocab_size} "
        "(one past the last piece)"
    ]
    if bos is None:
        assert tokenizer.encode("king") == tokenizer.encode("king", bos=False)


def test_special_tokens_map_is_read_where_the_config_is_silent(tmp_path: Path) -> None:
    tiny.train_byte_level(tmp_path)
    write(tmp_path / "special_tokens_map.json", {"pad_token": {"content": "<|extra|>"}})
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer.piece(tokenizer.pad_id) == "<|extra|>"


def test_end_ids_are_the_union_of_all_that_state_some(
    tmp_path: Path, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizer.path.read_bytes())
    write(tmp_path / "config.json", {"eos_token_id": 5})
    write(tmp_path / "generation_config.json", {"eos_token_id": [7, 8]})
    tokenizer = Tokenizer.from_path(tmp_path)
    tokenizer.add_eos_ids([11])
    assert tokenizer.eos_ids == {2, 5, 7, 8, 11}
    assert tokenizer.eos_id == 2


def test_a_folder_with_both_files_is_read_with_sentencepiece(
    tmp_path: Path, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    tiny.train_byte_level(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizer.path.read_bytes())
    assert Tokenizer.from_path(tmp_path).kind == "sentencepiece"


def test_tokens_added_only_to_the_json_are_not_lost(
    tmp_path: Path, tiny_tokenizer: tiny.TinyTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    tiny.train_byte_level(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizer.path.read_bytes())
    added = {"added_tokens_decoder": {"1": {"content": "<s>"}, "320": {"content": "<|extra|>"}}}
    write(tmp_path / "tokenizer_config.json", added)
    assert Tokenizer.from_path(tmp_path).kind == "tokenizers"
    (tmp_path / "tokenizer.json").unlink()
    assert Tokenizer.from_path(tmp_path).kind == "sentencepiece"
    assert "no tokenizer.json, so no <|extra|>" in caplog.text


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("tokenizer.model", b"not a model", "is not a SentencePiece model; give a file"),
        ("tokenizer.model", b"", "is not a SentencePiece model: the file is empty"),
        ("tokenizer.model", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("tokenizer.json", b"{", "is not a tokenizer of the tokenizers library .EOF"),
        ("tokenizer.json", b'{"model": {}}', "is not a tokenizer of the tokenizers library"),
        ("chat_template.json", b"[", "chat_template.json is not valid JSON"),
        ("config.json", b"[]", "config.json holds no JSON object"),
        ("tokenizer_config.json", b"\xff", "tokenizer_config.json is not valid JSON"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(
    name: str, contents: bytes, message: str, tmp_path: Path, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    if not name.startswith("tokenizer."):
        (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizer.path.read_bytes())
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(ValueError, match=message) as caught:
        Tokenizer.from_path(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither tokenizer\.model nor tokenizer\.json"):
        Tokenizer.from_path(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"absent does not exist; give a tokenizer\.model"):
        Tokenizer.from_path(tmp_path / "absent")


def test_importing_the_tokenizer_loads_nothing_heavy() -> None:
    heavy = ["sentencepiece", "tokenizers", "transformers", "jinja2", "huggingface_hub", "numpy"]
    code = f"import openelm_mlx.tokenizer, sys; print({{*{heavy}}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

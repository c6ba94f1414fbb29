"""A saved tokenizer: complete by itself, and with equal ids in the programs that will read it."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer as tiny
from sentencepiece import SentencePieceProcessor

from openelm_mlx.sentencepiece_json import merges, read_spec
from openelm_mlx.tokenizer import APPLE_INSTRUCT_TEMPLATE, Tokenizer

SHARED = Path(__file__).parent.parent.parent / "shared" / "data"
ORDINARY = [
    *tiny.sentences(60, seed=7),
    "Two  spaces, and   three; ends in one ",
    "naïve café 😀 日本語 e\u0301 \u2581 ½ \u00a0 \u200d",
    "a\n\nb\t\tc\r\n",
    "ends \n and starts",
    "x=3.14159; f(x)**2 # 2024-01-31",
    "aaaaaaaaa aaaaaaaa bbbbbbbb --------- ........",
    "CamelCase and_snake AND SHOUTING",
]
ODD = [" leading space", "   three", "", " ", "\n"]  # LlamaTokenizer's class treats these otherwise
CHAT = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": " Why?\nSay it."},
]


def texts() -> list[str]:
    corpus = SHARED / "corpus" / "stories_valid.jsonl"
    lines = corpus.read_text(encoding="utf-8").splitlines() if corpus.is_file() else []
    return ORDINARY + [part for line in lines for part in json.loads(line)["text"].split("\n")]


def models(tmp_path: Path) -> dict[str, Path]:
    """SentencePiece models of several makes: name to file."""
    found = {name: SHARED / name / "tokenizer.model" for name in ("tokenizer", "tokenizer_small")}
    found = {name: path for name, path in found.items() if path.is_file()}
    return {"tiny": tiny.train(tmp_path / "tiny.model"), **found}


def test_a_saved_tokenizer_is_complete(tmp_path: Path, tiny_tokenizer: tiny.TinyTokenizer) -> None:
    tiny_tokenizer.tokenizer.save(tmp_path / "new", chat_template=APPLE_INSTRUCT_TEMPLATE)
    folder = tmp_path / "new"
    assert sorted(p.name for p in folder.iterdir()) == [
        *("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    ]
    assert (folder / "tokenizer.model").read_bytes() == tiny_tokenizer.path.read_bytes()
    again = Tokenizer.from_path(folder)
    assert again.chat_template == APPLE_INSTRUCT_TEMPLATE
    assert again.encode("The king") == tiny_tokenizer.tokenizer.encode("The king")
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "legacy": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": APPLE_INSTRUCT_TEMPLATE,
    }


def test_a_chat_template_is_saved_only_when_given(
    tmp_path: Path, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    tiny_tokenizer.tokenizer.save(tmp_path)
    assert Tokenizer.from_path(tmp_path).chat_template is None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"vocab_size": 80, "byte_fallback": False},
        {"vocab_size": 70, "byte_fallback": False, "add_dummy_prefix": False},
        {"vocab_size": 80, "byte_fallback": False, "normalization_rule_name": "nmt_nfkc"},
        {"vocab_size": 80, "byte_fallback": False, "remove_extra_whitespaces": True},
        {"model_type": "unigram", "vocab_size": 320},
        {"bos_id": -1, "unk_id": 0, "eos_id": 1},
    ],
)
def test_the_json_made_of_a_model_gives_its_ids(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tiny.train(tmp_path / "tokenizer.model", **settings)
    judge = SentencePieceProcessor(model_file=str(path))
    Tokenizer.from_path(path).save(tmp_path / "saved")
    fast = Tokenizer.from_path(tmp_path / "saved" / "tokenizer.json")
    for text in [*tiny.sentences(200, seed=9), *ORDINARY, *ODD]:
        if "\r" in text and settings.get("normalization_rule_name") == "nmt_nfkc":
            continue  # the tokenizers library normalises the pair \r\n as one character
        ids = judge.encode(text)
        assert fast.encode(text, bos=False) == ids, text
        if judge.unk_id() not in ids:  # shown as " \u2047 " by SentencePiece alone
            assert fast.decode(ids) == judge.decode(ids), text
    bos, eos = judge.bos_id(), judge.eos_id()
    assert fast.bos_id == (bos if bos >= 0 else None)
    assert (fast.eos_id, fast.vocab_size) == (eos, judge.get_piece_size())


def test_the_class_for_transformers_fits_the_model(tmp_path: Path) -> None:
    path = tiny.train(tmp_path / "tokenizer.model", normalization_rule_name="nmt_nfkc")
    Tokenizer.from_path(path).save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"  # LlamaTokenizer normalises not


def test_a_saved_tokenizer_json_adds_bos_and_keeps_added_tokens(tmp_path: Path) -> None:
    first = Tokenizer.from_path(tiny.train_byte_level(tmp_path / "first"))
    first.save(tmp_path / "second")
    second = Tokenizer.from_path(tmp_path / "second")
    assert second.kind == "tokenizers"
    for text in [*ORDINARY, "a<|extra|>b", *ODD]:
        assert second.encode(text) == first.encode(text)
    assert (second.bos_id, second.eos_id, second.pad_id) == (
        *(first.bos_id, first.eos_id, first.pad_id),
    )


def test_models_of_other_kinds_are_refused_when_saved(tmp_path: Path) -> None:
    path = tiny.train(tmp_path / "w.model", model_type="word", byte_fallback=False, vocab_size=30)
    with pytest.raises(ValueError, match="cuts text into words or characters"):
        Tokenizer.from_path(path).save(tmp_path / "saved")


def test_a_cut_model_is_said_to_be_damaged(tiny_tokenizer: tiny.TinyTokenizer) -> None:
    with pytest.raises(ValueError, match="ends inside a number"):
        read_spec(b"\x0a\x80")
    with pytest.raises(ValueError, match="wire type 3 at byte 1"):
        read_spec(b"\x0b" + tiny_tokenizer.path.read_bytes())


@pytest.mark.skipif(not (SHARED / "tokenizer").is_dir(), reason="no LLaMA tokenizer here")
@pytest.mark.slow
def test_llamas_json_is_the_one_in_use() -> None:
    spec = read_spec((SHARED / "tokenizer" / "tokenizer.model").read_bytes())
    judge = json.loads((SHARED / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))
    assert merges(spec) == judge["model"]["merges"]
    assert {p.text: i for i, p in enumerate(spec.pieces)} == judge["model"]["vocab"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_and_mlx_lm_read_saved_folders_with_equal_ids(tmp_path: Path) -> None:
    from mlx_lm.tokenizer_utils import load
    from transformers import AutoTokenizer

    for name, path in models(tmp_path).items():
        ours, folder = Tokenizer.from_path(path), tmp_path / name
        ours.save(folder, chat_template=APPLE_INSTRUCT_TEMPLATE)
        (folder / "config.json").write_text('{"model_type": "openelm"}')
        ours.chat_template = APPLE_INSTRUCT_TEMPLATE
        theirs, streaming = AutoTokenizer.from_pretrained(folder), load(folder)
        for text in texts():
            ids = ours.encode(text)
            assert theirs.encode(text) == ids, text
            assert streaming.encode(text) == ids, text
            assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids), text
        assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)
        assert streaming.eos_token_ids == {ours.eos_id}
        for messages in (CHAT, CHAT[:1], [{"role": "system", "content": "Be brief."}, *CHAT]):
            chat = theirs.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, return_dict=False
            )
            assert chat == ours.render_chat(messages)
            ids = theirs.encode(chat, add_special_tokens=False)
            assert ids == ours.encode_chat(messages)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_a_saved_byte_level_tokenizer_with_equal_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours = Tokenizer.from_path(tiny.train_byte_level(tmp_path / "first"))
    ours.save(tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text('{"model_type": "openelm"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in [*texts(), *ODD, "a<|extra|>b"]:
        assert theirs.encode(text) == ours.encode(text), text

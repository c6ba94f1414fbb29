import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from golden_set import read_json

from openelm_mlx.text_filters import (
    CORENET_FILTERS,
    TextFilters,
    characters,
    fix_text,
    split_document,
)
from openelm_mlx.tokenizer import Tokenizer

Golden = Callable[[str], Path]


def test_cuts_and_lengths_of_apples_documents_are_corenets(golden: Golden) -> None:
    documents = {}
    for line in golden("data/docs.jsonl").read_bytes().splitlines():
        record = json.loads(line)
        documents[record["id"]] = record["text"]
    for run in read_json(golden("data/expected.json")).values():
        words = run["settings"]["document_split_size"]
        for piece in run["pieces"]:
            texts = list(split_document(documents[piece["doc"]], words))
            text = texts[piece["piece"]]
            assert characters(text) == piece["processed_chars"]
            assert len(text.split(" ")) == piece["n_words"]


def test_pieces_below_200_characters_are_dropped_and_at_200_kept() -> None:
    assert CORENET_FILTERS.min_characters == 200
    assert list(CORENET_FILTERS.pieces("a" * 199 + ".;!?  \n ")) == []
    assert list(TextFilters(min_characters=200).pieces("a" * 200)) == ["a" * 200]


@pytest.mark.parametrize(
    ("text", "length"),
    [
        *(("", 0), (" \t\n ", 0), ("...!?", 0), ("a.b", 2), ("a - b", 3), ("  a \n\n b  ", 3)),
        ("İ", 2),  # in lower case an i and a dot above
        ("“a”", 3),  # only ASCII punctuation is taken out
    ],
)
def test_characters_are_counted_in_bare_text(text: str, length: int) -> None:
    assert characters(text) == length


def test_line_ends_do_not_part_words() -> None:
    text = "a\nb c\td  e"
    assert list(split_document(text, 2)) == ["a\nb c\td", " e"]
    assert " ".join(split_document(text, 1)) == text
    assert list(split_document(text, None)) == [text]
    assert list(split_document("", 5)) == [""]


def test_clean_up_and_tokens_are_corenets(golden: Golden) -> None:
    pytest.importorskip("ftfy")
    tokenizer = Tokenizer.from_path(golden("data/tokenizer.model"))
    for case in read_json(golden("data/tokenize_cases.json"))["cases"]:
        fixed = fix_text(case["text"])
        assert fixed == case["ftfy_fix_text"]
        ids = tokenizer.encode(fixed, bos=False)
        assert [tokenizer.bos_id, *ids, tokenizer.eos_id] == case["tokens"]


def test_by_default_a_text_stays_as_it_is() -> None:
    assert list(TextFilters().pieces("“ﬁ &amp;  x\r\n")) == ["“ﬁ &amp;  x\r\n"]


def test_cleaning_without_ftfy_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(ImportError, match=r'pip install "openelm-mlx\[data\]"'):
        list(TextFilters(fix_text=True).pieces("x"))


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="min_tokens must be 0 or more, got -1"):
        TextFilters(min_tokens=-1)
    with pytest.raises(ValueError, match="split_words must be 1 or more, got 0"):
        TextFilters(split_words=0)

import json
from pathlib import Path

import pytest
import tiny_tokenizer
from command_line import run_here

from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tokenizer_training import train_tokenizer

SENTENCES = tiny_tokenizer.sentences(400)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder of two files: lines of JSON, and plain text with digits and double spaces."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = [json.dumps({"text": text, "id": 1}) for text in SENTENCES[:300]]
    (folder / "a.jsonl").write_text("\n".join(lines))
    plain = [f"{text}  In 1{i} the  wolf." for i, text in enumerate(SENTENCES[300:])]
    (folder / "b.txt").write_text("\n".join(plain))
    return folder


def test_the_tokenizer_has_llamas_settings(corpus: Path, tmp_path: Path) -> None:
    trained = train_tokenizer(str(corpus), tmp_path / "out", vocab_size=340)
    tokenizer = Tokenizer.from_path(tmp_path / "out")
    assert trained.pieces == tokenizer.vocab_size == 340
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 340)
    assert tokenizer.piece(0) == "<unk>"
    assert tokenizer.piece(3 + 10) == "<0x0A>"  # bytes stand behind the special pieces
    digits = tokenizer.encode("2024", bos=False)
    assert [tokenizer.piece(i) for i in digits][-4:] == ["2", "0", "2", "4"]
    for text in ("  two  spaces and\n\na line ", "never seen: 漢 🙂 é", "a <s> </s>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    texts, plain = SENTENCES[:300], (corpus / "b.txt").read_text()
    assert trained.documents == 301
    assert trained.characters == sum(map(len, texts)) + len(plain)
    tokens = sum(len(tokenizer.encode(text, bos=False)) for text in [*texts, plain])
    assert trained.characters_per_token == pytest.approx(trained.characters / tokens)


def test_a_tokenizer_from_any_number_of_files_suits_transformers_too(
    corpus: Path, tmp_path: Path
) -> None:
    fast = pytest.importorskip("tokenizers")
    train_tokenizer(
        [str(corpus / "a.jsonl"), str(corpus / "b.txt")], tmp_path / "out", vocab_size=320
    )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"tokenizer.model", "tokenizer.json", "tokenizer_config.json", "openelm.json"}
    text = "The young wolf, 17 years old."
    ids = fast.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).encode(text).ids
    assert ids == Tokenizer.from_path(tmp_path / "out").encode(text)


def test_the_same_text_gives_the_same_bytes_even_where_lines_are_drawn(
    corpus: Path, tmp_path: Path
) -> None:
    def model(name: str, lines: int) -> bytes:
        train_tokenizer(str(corpus), tmp_path / name, vocab_size=340, max_lines=lines)
        return (tmp_path / name / "tokenizer.model").read_bytes()

    assert model("a", 1000) == model("b", 1000)
    assert model("c", 150) == model("d", 150) != model("a2", 1000)


def test_long_lines_are_learned_from_too(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("zyxw " * 40_000 + "q" * 9000)
    train_tokenizer(str(path), tmp_path / "out", vocab_size=272)
    tokenizer = Tokenizer.from_path(tmp_path / "out")
    assert len(tokenizer.encode("zyxw zyxw", bos=False)) == 2


def test_the_command_says_what_came_out(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    flags = ("tokenizer", "train", "--data", corpus, "--vocab-size", 320, "--output", out)
    result = run_here(capsys, *flags)
    assert result.code == 0
    assert result.out.startswith(f"{out}: 320 pieces from 301 documents with ")
    assert result.out.endswith(" characters a token\n")
    again = run_here(capsys, *flags)
    assert "out is not empty; add --overwrite to replace it" in again.error
    assert run_here(capsys, *flags, "--overwrite").code == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vocab-size", "90000"], "too large for this text of .* makes at most "),
        (["--vocab-size", "262"], "a vocabulary of 262 is too small: the special pieces, "),
        (["--vocab-size", "259"], "vocab_size must be more than 259"),
        (["--max-lines", "100"], "max_lines must be more than 100"),
        (["--character-coverage", "0"], "character_coverage from 0.9 to 1"),
        (["--text-key", "body"], r'a\.jsonl:1: has no key "body"; its keys are: text, id'),
        (["--data", "none.jsonl"], "none.jsonl does not exist"),
        (["--data", "EMPTY"], "the text is empty"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_folder(
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    import re

    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": "\\n\\n"}\n')
    flags = [flag.replace("EMPTY", str(empty)) for flag in flags]
    given = ["tokenizer", "train", "--data", corpus, "--vocab-size", 320]
    result = run_here(capsys, *given, "--output", tmp_path / "out", *flags)
    assert result.code == 1
    assert re.search(message, result.error)
    assert not list(tmp_path.glob("*out*"))


def test_the_size_that_is_named_as_the_largest_works(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too large") as error:
        train_tokenizer(str(corpus), tmp_path / "out", vocab_size=90_000)
    most = int(str(error.value).rpartition(" ")[2])
    assert train_tokenizer(str(corpus), tmp_path / "out", vocab_size=most).pieces == most


def test_damaged_lines_can_be_skipped(corpus: Path, tmp_path: Path) -> None:
    with (corpus / "a.jsonl").open("a") as file:
        file.write("\n{broken\n")
    with pytest.raises(ValueError, match=r"a\.jsonl:301: not a line of JSON"):
        train_tokenizer(str(corpus), tmp_path / "out", vocab_size=340)
    trained = train_tokenizer(str(corpus), tmp_path / "out", vocab_size=340, on_damage="skip")
    assert (trained.documents, trained.skipped) == (301, 1)
    assert "1 damaged records skipped" in trained.describe()

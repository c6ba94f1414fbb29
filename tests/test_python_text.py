"""The text that a Python installation brings: read, never imported, each piece once."""

import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from openelm_mlx import python_text

SOURCES = {
    "os.py": "raise SystemExit('imported')\n",
    "posixpath.py": '''"""Paths. And more."""
def join(a, *p):
    """Join two or more
    pathname components.  Absolute ones win."""
def _hidden(a):
    """A sentence that is long enough to count."""
def curt(a):
    """Too short."""
def unfinished(a):
    """This sentence never ends in a full stop"""
''',
    "glob.py": '''"""Patterns."""
class Finder:
    """Finds files by their names."""
    def find(self):
        """Join two or more pathname components."""
    async def wait(self):
        """Wait until a file with that name appears."""
''',
    "json/__init__.py": '"""Encode and decode text."""\n',
    "idlelib/editor.py": '"""Skipped."""\n',
    "json/test/check.py": '"""Skipped."""\n',
    "site-packages/other.py": '"""Not of the library."""\n',
    "ast.py": "this is no Python\n",
    "pydoc_data/topics.py": "topics = {'if': 'The if statement\\n' 'decides.', 'else': ''}\n",
}


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    python_text.docstrings.cache_clear()
    yield tmp_path
    python_text.docstrings.cache_clear()


@pytest.mark.usefixtures("library")
def test_documents_are_the_reference_and_docstrings_with_their_names() -> None:
    found = list(python_text.documents())
    names = ["glob", "glob.Finder", "glob.Finder.find", "glob.Finder.wait", "json", "os.path"]
    assert found[0] == "The if statement\ndecides."
    assert [text.partition("\n")[0] for text in found[1:7]] == names
    assert found[4] == "glob.Finder.wait\nWait until a file with that name appears."
    assert "os.path.join\nJoin two or more\npathname components.  Absolute ones win." in found
    assert not any("Skipped" in text or "Not of the library" in text for text in found)


def test_the_reference_is_cut_between_paragraphs(library: Path) -> None:
    paragraphs = [f"{i} " + "word " * 60 + "end." for i in range(7)]
    topics = {"long": "\n\n".join(paragraphs)}
    (library / "pydoc_data" / "topics.py").write_text(f"topics = {topics!r}\n")
    found = list(python_text.documents())[:3]
    assert "\n\n".join(found) == topics["long"]
    assert [text.count("end.") for text in found] == [3, 3, 1]


@pytest.mark.usefixtures("library")
def test_questions_are_about_public_functions_with_a_whole_sentence() -> None:
    join, wait = (
        "Join two or more pathname components.",
        "Wait until a file with that name appears.",
    )
    assert list(python_text.question_answers()) == [
        {"prompt": "What does glob.Finder.find do?", "completion": join},
        {"prompt": "What does glob.Finder.wait do?", "completion": wait},
    ]  # os.path.join has the same answer as the first


@pytest.mark.usefixtures("library")
def test_a_rejected_answer_has_the_words_of_the_true_one() -> None:
    answers = {r["prompt"]: r["completion"] for r in python_text.question_answers()}
    found = list(python_text.preferences())
    assert found == list(python_text.preferences())
    assert len(found) == 2
    for record in found:
        assert record["chosen"] == answers[record["prompt"]] != record["rejected"]
        assert sorted(record["chosen"].split()) == sorted(record["rejected"].split())


def test_a_split_holds_every_record_once_and_one_of_so_many_for_validation(tmp_path: Path) -> None:
    records = [{"text": f"ä {i}\nline"} for i in range(7)]
    folder = python_text.write_split(tmp_path / "new" / "text", records, every=3)
    read = {
        name: [
            json.loads(line)
            for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        for name in ("train", "valid")
    }
    assert read["valid"] == [records[0], records[3], records[6]]
    assert read["train"] == [records[1], records[2], records[4], records[5]]


def test_an_installation_without_sources_is_one_line(library: Path) -> None:
    (library / "os.py").unlink()
    with pytest.raises(FileNotFoundError, match="holds no sources of Python's standard library"):
        list(python_text.documents())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Return x. Or y.", "Return x."),
        ("Version 3.11 of\n it.", "Version 3.11 of it."),
        ("One\n\nTwo.", ""),
        ("", ""),
    ],
)
def test_first_sentence(text: str, sentence: str) -> None:
    assert python_text.first_sentence(text) == sentence


@pytest.mark.slow  # parses all of the standard library
def test_this_installation_has_megabytes_of_text_and_none_of_it_is_imported() -> None:
    before = set(sys.modules)
    documents = list(python_text.documents())
    assert len(set(documents)) == len(documents) > 200
    assert sum(map(len, documents)) > 1_000_000
    assert len(list(python_text.question_answers())) > 1000
    assert "antigravity" not in set(sys.modules) - before


def test_the_module_writes_what_the_training_commands_read_and_replaces_what_is_there(
    library: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = library / "made"
    for limit in ("9", "2"):
        assert python_text.main([str(folder), "--limit", limit]) == 0
    assert "2 texts, 2 questions" in capsys.readouterr().out
    found = {
        str(path.relative_to(folder)): path.read_text().splitlines()
        for path in folder.rglob("*.jsonl")
    }
    split = {"train.jsonl", "valid.jsonl"}
    names = {f"{part}/{name}" for part in ("text", "questions") for name in split}
    assert set(found) == names | {"text/questions.jsonl"}
    for part in ("text", "questions"):
        assert sum(len(found[f"{part}/{name}"]) for name in split) == 2
    (line,) = found["questions/valid.jsonl"]
    record, (text,) = json.loads(line), map(json.loads, found["text/questions.jsonl"])
    assert text == {"text": f"{record['prompt']} {record['completion']}"}

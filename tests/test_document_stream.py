import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from openelm_mlx import document_stream
from openelm_mlx.document_stream import DocumentStream
from openelm_mlx.text_files import FileSource, documents, find_files


def write_files(folder: Path, counts: list[int]) -> list[FileSource]:
    """Files a.jsonl, b.jsonl, ... of so many documents "a0", "a1", ..."""
    sources = []
    for letter, count in zip("abcdefghijklmnop", counts, strict=False):
        path = folder / f"{letter}.jsonl"
        path.write_text("".join(f'{{"text": "{letter}{i}"}}\n' for i in range(count)))
        sources.append(FileSource(path))
    return sources


def texts(stream: DocumentStream) -> list[str]:
    return [document.text for document in stream]


def through_json(state: dict[str, Any]) -> Any:
    return json.loads(json.dumps(state))


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_stream, "_LANES", 3)
    monkeypatch.setattr(document_stream, "_WINDOW", 5)


def test_unshuffled_documents_come_in_order_with_their_places(tmp_path: Path) -> None:
    found = list(DocumentStream(write_files(tmp_path, [2, 0, 3]), epochs=2))
    assert [d.text for d in found] == ["a0", "a1", "c0", "c1", "c2"] * 2
    assert found[3].name == f"{tmp_path}/c.jsonl:2"


@pytest.mark.usefixtures("small_windows")
def test_each_epoch_has_every_document_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    sources = write_files(tmp_path, [7, 1, 0, 12, 3, 5])
    got = texts(DocumentStream(sources, shuffle=True, seed=4, epochs=3))
    epochs = [got[i : i + 28] for i in range(0, 84, 28)]
    whole = sorted(texts(DocumentStream(sources)))
    assert [sorted(epoch) for epoch in epochs] == [whole] * 3
    assert len({tuple(epoch) for epoch in [*epochs, whole]}) == 4


@pytest.mark.usefixtures("small_windows")
def test_shuffled_files_are_read_side_by_side(tmp_path: Path) -> None:
    got = texts(DocumentStream(write_files(tmp_path, [15] * 3), shuffle=True))
    for start in range(0, 45, 5):
        assert len({text[0] for text in got[start : start + 5]}) == 3


@pytest.mark.usefixtures("small_windows")
def test_the_order_depends_on_the_seed_alone(tmp_path: Path) -> None:
    sources = write_files(tmp_path, [7, 4, 9])
    same = [texts(DocumentStream(sources, shuffle=True, seed=4)) for _ in range(2)]
    assert same[0] == same[1] != texts(DocumentStream(sources, shuffle=True, seed=5))


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_resumes_at_every_document(tmp_path: Path, shuffle: bool) -> None:
    sources = write_files(tmp_path, [7, 1, 0, 12, 3])
    settings: Any = {"shuffle": shuffle, "seed": 2, "epochs": 2}
    stream = DocumentStream(sources, **settings)
    whole = texts(DocumentStream(sources, **settings))
    for i in range(len(whole) + 1):
        resumed = DocumentStream(sources, **settings)
        resumed.load_state_dict(through_json(stream.state_dict()))
        assert resumed.state_dict() == stream.state_dict()
        assert texts(resumed) == whole[i:]
        assert next(stream, None) is not None or i == len(whole)


def test_a_position_is_small_and_holds_no_text(tmp_path: Path) -> None:
    stream = DocumentStream(write_files(tmp_path, [900] * 12), shuffle=True, seed=1)
    for _ in range(3000):
        next(stream)
    assert len(json.dumps(stream.state_dict())) < 600


def test_positions_of_other_data_are_refused(tmp_path: Path) -> None:
    sources = write_files(tmp_path, [3, 3])
    state = DocumentStream(sources, shuffle=True, seed=1).state_dict()
    others = [
        DocumentStream(sources[::-1], shuffle=True, seed=1),
        DocumentStream(sources[:1], shuffle=True, seed=1),
        DocumentStream(sources, shuffle=True, seed=2),
        DocumentStream(sources, shuffle=False, seed=1),
    ]
    for other in others:
        with pytest.raises(ValueError, match="the saved position belongs to other data"):
            other.load_state_dict(state)


def test_a_position_is_valid_where_the_files_have_moved(tmp_path: Path) -> None:
    state = DocumentStream(write_files(tmp_path, [3])).state_dict()
    (tmp_path / "new").mkdir()
    DocumentStream(write_files(tmp_path / "new", [3])).load_state_dict(state)


def test_a_long_document_ends_its_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_stream, "_WINDOW_CHARACTERS", 10)
    sources = write_files(tmp_path, [40])
    got = texts(DocumentStream(sources, shuffle=True, seed=3))
    places = [int(text[1:]) for text in got]
    assert sorted(places) == list(range(40)) != places
    assert max(abs(place - i) for i, place in enumerate(places)) < 6  # windows of 4 to 6


def damaged(tmp_path: Path, bad: int = 1) -> FileSource:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "one"}\n' + "{\n" * bad + '{"text": "two"}\n')
    return FileSource(path)


def test_damage_ends_the_stream_with_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: not a line of JSON.*on_damage: skip"):
        texts(DocumentStream([damaged(tmp_path)]))


def test_damage_is_skipped_if_asked_told_singly_and_then_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = DocumentStream([damaged(tmp_path, 40)], on_damage="skip")
    with caplog.at_level(logging.WARNING, "openelm_mlx"):
        assert texts(stream) == ["one", "two"]
    assert stream.skipped == 40
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 10 + 2  # and at the 16th and the 32nd
    assert "bad.jsonl:2: not a line of JSON" in messages[0]
    assert "32 damaged records so far" in messages[-1]


def test_a_stream_without_any_document_is_an_error_even_if_endless(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no document in 2 files"):
        next(DocumentStream(write_files(tmp_path, [0, 0]), epochs=None))
    with pytest.raises(ValueError, match="there are no files to read"):
        DocumentStream([])


def test_impossible_settings_are_refused(tmp_path: Path) -> None:
    sources = write_files(tmp_path, [1])
    with pytest.raises(ValueError, match='on_damage must be "skip" or "fail", got \'mend\''):
        DocumentStream(sources, on_damage="mend")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epochs must be 1 or more"):
        DocumentStream(sources, epochs=0)


def test_a_file_that_has_gone_is_named(tmp_path: Path) -> None:
    [source] = write_files(tmp_path, [1])
    stream = DocumentStream([source], on_damage="skip")
    source.path.unlink()
    with pytest.raises(FileNotFoundError) as error:
        next(stream)
    assert error.value.filename in (source.path, str(source.path))


def test_files_are_found_by_name_folder_and_pattern(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl.gz", "notes.csv", ".hidden.txt", "sub/c.txt", ".git/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()

    def names(*given: str) -> list[str]:
        return [str(p.relative_to(tmp_path)) for p in find_files([tmp_path / g for g in given])]

    assert names(".") == ["a.jsonl.gz", "b.jsonl", "sub/c.txt"]
    assert names("b.jsonl", "b.jsonl", "sub") == ["b.jsonl", "b.jsonl", "sub/c.txt"]
    assert names("*.jsonl*") == ["a.jsonl.gz", "b.jsonl"]
    assert names("**/*.txt") == ["sub/c.txt"]


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").touch()
    assert find_files([tmp_path / "a[1].txt"]) == [tmp_path / "a[1].txt"]


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("none.jsonl", FileNotFoundError, "none.jsonl does not exist; known are .jsonl"),
        ("*.parquet", FileNotFoundError, "does not exist"),
        ("empty", FileNotFoundError, "holds no files of documents"),
        ("a.csv", ValueError, "a.csv is in no known format; known are .jsonl"),
    ],
)
def test_what_stands_for_nothing_is_refused(
    tmp_path: Path, name: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.csv").touch()
    with pytest.raises(error, match=message):
        documents([tmp_path / name])


def test_documents_reads_everything_once(tmp_path: Path) -> None:
    write_files(tmp_path, [3, 2])
    (tmp_path / "t.txt").write_text("plain")
    found = Counter(document.text for document in documents([tmp_path]))
    assert found == Counter(["a0", "a1", "a2", "b0", "b1", "plain"])

import gzip
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from openelm_mlx import text_formats
from openelm_mlx.text_formats import START, Record, is_readable, read_records

TEXTS = ["one", "zwei é", "", "drei\nvier", "漢字 🙂", "six " * 2000]


def jsonl(texts: list[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({key: t, "id": 1}).encode() + b"\n" for t in texts)


def zst(data: bytes) -> bytes:
    compressed: bytes = pytest.importorskip("zstandard").ZstdCompressor().compress(data)
    return compressed


def parquet(path: Path, texts: list[Any], *, group: int = 2, key: str = "text") -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(
        pa.table({"id": list(range(len(texts))), key: texts}), path, row_group_size=group
    )


def write(folder: Path, name: str, texts: list[str] = TEXTS) -> Path:
    path, lines = folder / name, jsonl(texts)
    array = json.dumps([{"text": t} for t in texts], indent=1).encode()
    contents: dict[str, Callable[[], bytes]] = {
        "a.jsonl": lambda: lines,
        "a.ndjson": lambda: b"\xef\xbb\xbf" + lines.replace(b"\n", b"\r\n"),  # as Windows writes
        "lines.json": lambda: b"\n\n" + lines + b"  \n",
        "array.json": lambda: array,
        "a.json.gz": lambda: gzip.compress(lines),
        "array.json.gz": lambda: gzip.compress(array),
        "a.jsonl.zst": lambda: zst(lines),
        "frames.jsonl.zst": lambda: zst(lines[:10]) + zst(lines[10:40]) + zst(lines[40:]),
    }
    if name.endswith(".parquet"):
        parquet(path, texts)
    else:
        path.write_bytes(contents[name]())
    return path


NAMES = [
    *("a.jsonl", "a.ndjson", "lines.json", "array.json", "a.json.gz", "array.json.gz"),
    *("a.jsonl.zst", "frames.jsonl.zst", "a.parquet"),
]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_texts(tmp_path: Path, name: str) -> None:
    records = list(read_records(write(tmp_path, name), "text"))
    assert [(r.text, r.damage) for r in records] == [(text, None) for text in TEXTS]
    first = 3 if name == "lines.json" else 1  # two blank lines come before
    assert [r.line for r in records] == list(range(first, first + len(TEXTS)))


@pytest.mark.parametrize("name", NAMES)
def test_reading_goes_on_from_the_place_of_any_record(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name)
    whole = list(read_records(path, "text"))
    for i, record in enumerate(whole):
        assert list(read_records(path, "text", record.after)) == whole[i + 1 :]


@pytest.mark.parametrize("block", [7, 64, 4096])
def test_an_array_may_be_cut_anywhere_by_the_blocks_it_is_read_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(text_formats, "_CHUNK", block)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": t} for t in TEXTS] * 5, ensure_ascii=False), "utf-8")
    assert [r.text for r in read_records(path, "text")] == TEXTS * 5


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\n  three ")
    [record] = read_records(path, "text")
    assert (record.text, record.line) == ("one\ntwo\n\n  three ", 1)
    (tmp_path / "empty.txt").touch()
    assert list(read_records(tmp_path / "empty.txt", "text")) == []


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_long_text_file_is_cut_between_paragraphs_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(text_formats, "TEXT_BLOCK", 50)
    text = "".join(f"paragraph {i} é\nline {i}\n\n" for i in range(20)) + "x" * 120 + "漢" * 40
    path = tmp_path / name
    path.write_bytes(text.encode() if name == "a.txt" else gzip.compress(text.encode()))
    records = list(read_records(path, "text"))
    assert "".join(r.text for r in records) == text
    assert all(r.text.endswith("\n\n") for r in records[:8])
    assert all(len(r.text.encode()) <= 50 for r in records)
    lines = text.split("\n")
    assert all(r.text.startswith(lines[r.line - 1]) for r in records[:8])
    for i, record in enumerate(records):
        assert list(read_records(path, "text", record.after)) == records[i + 1 :]


def damage(path: Path, key: str = "text") -> list[tuple[int, str | None]]:
    return [(r.line, r.damage) for r in read_records(path, key) if r.damage]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not a line of JSON"),
        (b'{"text": "\xff"}', "not a line of JSON"),
        (b"[" * 100_000, "not a line of JSON"),
        (b'{"content": "x", "id": 3}', 'has no key "text"; its keys are: content, id'),
        (b'{"text": null}', '"text" should be a string and is null'),
        (b'{"text": 12}', '"text" should be a string and is a number'),
        (b'{"text": ["a"]}', '"text" should be a string and is a list'),
        (b'"text"', 'expected an object with the key "text", got a string'),
        (b'{"text": "\\ud83d"}', "the text holds half a character"),
    ],
)
def test_a_damaged_line_is_told_and_the_others_are_read(
    tmp_path: Path, line: bytes, reason: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["one"]) + line + b"\n" + jsonl(["three"]))
    assert [r.text for r in read_records(path, "text") if not r.damage] == ["one", "three"]
    [(number, said)] = damage(path)
    assert number == 2
    assert reason in str(said)


def test_an_endless_line_is_damage_of_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_formats, "MAX_LINE", 1 << 20)
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["one"]) + b"x" * (3 << 20) + b"\n" + jsonl(["three"]))
    assert damage(path) == [(2, "the line is longer than 1 MiB")]
    records = list(read_records(path, "text"))
    assert [r.text for r in records] == ["one", "", "three"]
    assert [r.text for r in read_records(path, "text", records[1].after)] == ["three"]


@pytest.mark.parametrize("name", ["a.json.gz", "a.jsonl.zst"])
def test_a_compressed_file_that_ends_early_is_told_after_what_can_be_read(
    tmp_path: Path, name: str
) -> None:
    texts = [str(i) * 50 for i in range(3000)]
    path = write(tmp_path, name, texts)
    path.write_bytes(path.read_bytes()[:-200])
    *records, last = read_records(path, "text")
    assert [r.text for r in records] == texts[: len(records)]
    assert "nothing can be read from here on" in str(last.damage)
    assert "end" in str(last.damage)
    assert last.line == len(records) + 1


@pytest.mark.parametrize("name", ["a.json.gz", "a.jsonl.zst", "a.parquet", "array.json"])
def test_a_file_of_other_bytes_is_one_damaged_record(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"[\x00 no such file \xff" * 20)
    [(number, said)] = damage(path)
    assert number == 1
    assert "nothing can be read from here on" in str(said)
    assert "\n" not in str(said)


def test_damage_within_a_compressed_block_is_told(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl.zst")
    data = bytearray(path.read_bytes())
    data[-8:] = b"\xff" * 8
    path.write_bytes(data)
    assert "nothing can be read from here on" in str(damage(path)[-1][1])


def test_an_array_that_ends_early_is_told_with_its_item(tmp_path: Path) -> None:
    path = write(tmp_path, "array.json")
    path.write_bytes(path.read_bytes().rstrip()[:-1])
    assert [r.text for r in read_records(path, "text") if not r.damage] == TEXTS
    [(number, said)] = damage(path)
    assert number == len(TEXTS) + 1
    assert "not JSON" in str(said)


def test_bad_utf8_in_a_text_file_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\nthr\xffee\n")
    assert damage(path) == [(3, "not UTF-8: invalid start byte")]


def test_parquet_rows_without_text_are_told_and_a_missing_column_names_those_there(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.parquet"
    parquet(path, ["one", None, "three"])
    assert damage(path) == [(2, '"text" should be a string and is null')]
    [(_, said)] = damage(path, "content")
    assert 'no column "content"; there are: id, text' in str(said)


def test_parquet_reads_the_row_groups_it_needs_only(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [str(i) * 1000 for i in range(400)]
    parquet(path, texts, group=100)
    start = path.read_bytes()[4:2000]
    path.write_bytes(path.read_bytes().replace(start, b"\xff" * len(start), 1))
    assert [r.text for r in read_records(path, "text", (250, 0))] == texts[250:]
    assert damage(path)[0][0] == 1  # the first group is gone


@pytest.mark.slow
def test_memory_stays_flat_whatever_the_size_of_the_file(tmp_path: Path) -> None:
    import tracemalloc

    def peak(lines: int) -> int:
        path = tmp_path / f"{lines}.jsonl.gz"
        with gzip.open(path, "wb", compresslevel=1) as file:
            for _ in range(lines // 100):
                file.write(jsonl(["word " * 200]) * 100)
        tracemalloc.start()
        assert sum(1 for _ in read_records(path, "text")) == lines
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(100)  # imports
    assert peak(10_000) < 1.2 * peak(2_000) + (1 << 20)


@pytest.mark.parametrize(
    ("name", "package"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard")]
)
def test_a_missing_extra_is_one_line_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    import sys

    path = tmp_path / name
    path.touch()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'needs {package}: pip install "openelm-mlx\[data\]"'):
        list(read_records(path, "text"))


@pytest.mark.parametrize(
    ("name", "known"),
    [
        *((name, True) for name in NAMES),
        *(("a.TXT", True), ("a.md.zst", True), ("v1.5.jsonl", True)),
        *(("a.parquet.gz", False), ("a.gz", False), ("a.csv", False), ("jsonl", False)),
    ],
)
def test_formats_are_known_by_name(name: str, known: bool) -> None:
    assert is_readable(Path(name)) is known


def test_a_reader_that_is_given_up_closes_its_file(tmp_path: Path) -> None:
    records: Iterator[Record] = read_records(write(tmp_path, "a.json.gz"), "text", START)
    assert len(list(islice(records, 2))) == 2
    records.close()  # type: ignore[attr-defined]  # an unclosed file would warn, an error here

"""One file of documents -> its records in order, from any place; damage is told, not raised.

JSON lines, JSON arrays, parquet and plain text, as they are or compressed by gzip or zstandard.
Memory stays within one record and one read-ahead block, whatever the size of the file. Knows one
file at a time, not which files there are.
"""

import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, cast

from openelm_mlx.compressed import BROKEN, DamagedFileError, open_bytes
from openelm_mlx.compressed import SUFFIXES as COMPRESSED

Place = tuple[int, int]  # lines (items, rows) read so far; bytes read, before compression
START: Place = (0, 0)

MAX_LINE = 256 << 20  # bytes; a longer line is damage, so that memory stays bounded
TEXT_BLOCK = 8 << 20  # bytes; a longer text file is several documents
_CHUNK = 1 << 20
_ROWS = 256  # of a parquet file, decoded at once

_LINES = (".jsonl", ".ndjson")
_TEXTS = (".txt", ".text", ".md")
SUFFIXES = (*_LINES, ".json", *_TEXTS, ".parquet")
KNOWN = f"known are {' '.join(SUFFIXES)}, all but parquet also with .gz or .zst"
_SEPARATORS = re.compile(r"[\s,]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One document of a file, or what is wrong with it."""

    line: int  # where it stands, from 1: line, item of an array or row
    after: Place  # where to read on
    text: str = ""
    damage: str | None = None


def record_of(value: object, key: str, line: int, after: Place) -> Record:
    """The text under a key, or what is wrong.

    Args:
        value: what was read: a mapping, if all is well.
        key: of the text.
        line: of the record.
        after: where to read on.
    """
    text, damage = "", None
    if not isinstance(value, dict):
        damage = f'expected an object with the key "{key}", got {_json_type(value)}'
    elif key not in value:
        keys = ", ".join(map(str, value)) or "none"
        damage = f'has no key "{key}"; its keys are: {keys[:200]}'
    elif not isinstance(value[key], str):
        damage = f'"{key}" should be a string and is {_json_type(value[key])}'
    else:
        text = value[key]
        damage = _surrogate(text)
    return Record(line=line, after=after, text="" if damage else text, damage=damage)


def is_readable(path: Path) -> bool:
    """Whether the name says a format that :func:`read_records` knows."""
    return _kind(path) in SUFFIXES


def read_records(path: Path, text_key: str, place: Place = START) -> Iterator[Record]:
    """Read a file's documents.

    A ``.txt`` file is one document; past 8 MiB it is cut between paragraphs, lines or words.

    Args:
        path: its name tells the format: .jsonl .json .txt .parquet, with .gz or .zst after it.
        text_key: key (column) that holds the text; plain text has none.
        place: the ``after`` of the last record that was read.

    Yields:
        Records, damaged ones too. Where nothing more can be read, a damaged one is the last.

    Raises:
        ImportError: naming the extra, if the format needs a package that is not installed.
        OSError: if the file cannot be opened.
    """
    after, line = place, place[0]
    try:
        for record in _reader(path)(path, text_key, place):
            after, line = record.after, record.line
            yield record
    except BROKEN as error:
        said = " ".join(str(error).split())
        yield Record(line=line + 1, after=after, damage=f"nothing can be read from here on: {said}")


def _reader(path: Path) -> Callable[[Path, str, Place], Iterator[Record]]:
    kind = _kind(path)
    if kind == ".parquet":
        return _parquet_rows
    if kind in _TEXTS:
        return _text_blocks
    return _json_array if kind == ".json" and _is_array(path) else _json_lines


def _kind(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        return suffixes[-2] if len(suffixes) > 1 and suffixes[-2] != ".parquet" else ""
    return suffixes[-1] if suffixes else ""


def _json_lines(path: Path, key: str, place: Place) -> Iterator[Record]:
    line, offset = place
    with open_bytes(path, offset) as file:
        while data := file.readline(MAX_LINE):
            line, offset, rest = line + 1, offset + len(data), 0
            while len(data) == MAX_LINE and not data.endswith(b"\n"):
                data = file.readline(MAX_LINE)
                rest += len(data)
            offset += rest
            if rest:
                damage = f"the line is longer than {MAX_LINE >> 20} MiB"
                yield Record(line=line, after=(line, offset), damage=damage)
            elif data.strip():
                yield _line_record(data, key, line, (line, offset))


def _line_record(data: bytes, key: str, line: int, after: Place) -> Record:
    try:
        value = json.loads(data.decode("utf-8-sig" if line == 1 else "utf-8"))
    except (ValueError, RecursionError) as error:  # bad UTF-8 too
        return Record(line=line, after=after, damage=f"not a line of JSON: {error}")
    return record_of(value, key, line, after)


def _surrogate(text: str) -> str | None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return r"the text holds half a character (a lone \ud800 to \udfff)"
    return None


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")


def _is_array(path: Path) -> bool:
    try:
        with open_bytes(path) as file:
            return file.read(_CHUNK).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    except BROKEN:  # told when it is read
        return False


def _json_array(path: Path, key: str, place: Place) -> Iterator[Record]:
    with io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig") as file:
        for item, value in enumerate(_array_values(file), start=1):
            if item > place[0]:
                yield record_of(value, key, item, (item, 0))


def _array_values(file: IO[str]) -> Iterator[object]:
    """Values of a JSON array, read a block at a time."""
    decode = json.JSONDecoder().raw_decode
    buffer, position, ended = file.read(_CHUNK).lstrip()[1:], 0, False
    while True:
        position = cast("re.Match[str]", _SEPARATORS.match(buffer, position)).end()
        if buffer.startswith("]", position):
            return
        try:
            value, stop = decode(buffer, position)
        except (ValueError, RecursionError) as error:
            if ended or len(buffer) - position > MAX_LINE:
                raise DamagedFileError(f"not JSON: {error}") from error
            stop = len(buffer)
        if stop < len(buffer) or ended:
            position = stop
            yield value
        else:  # the value may go on in the next block
            more = file.read(max(_CHUNK, len(buffer)))
            buffer, position, ended = buffer[position:] + more, 0, not more


def _text_blocks(path: Path, _: str, place: Place) -> Iterator[Record]:
    line, offset = place
    rest = b""
    with open_bytes(path, offset) as file:
        while block := rest + file.read(TEXT_BLOCK - len(rest)):
            cut = _cut(block) if len(block) == TEXT_BLOCK else len(block)
            block, rest = block[:cut], block[cut:]
            first, lines = line + 1, block.count(b"\n")
            line, offset = line + lines, offset + cut
            try:
                text = block.decode("utf-8-sig" if first == 1 else "utf-8")
            except UnicodeDecodeError as error:
                bad = first + block.count(b"\n", 0, error.start)
                damage = f"not UTF-8: {error.reason}"
                yield Record(line=bad, after=(line, offset), damage=damage)
                continue
            yield Record(line=first, after=(line, offset), text=text.replace("\r\n", "\n"))


def _cut(block: bytes) -> int:
    """Where to end a text of which more follows: after a paragraph, else a line, else a word."""
    for end in (b"\n\n", b"\n", b" "):
        found = block.rfind(end)
        if found > 0:
            return found + len(end)
    cut = len(block) - 1
    while cut > 1 and block[cut] & 0xC0 == 0x80:  # not within a character
        cut -= 1
    return cut


def _parquet_rows(path: Path, key: str, place: Place) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            f'reading {path} needs pyarrow: pip install "openelm-mlx[data]"', name="pyarrow"
        ) from error
    done = place[0]
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if key not in names:
                raise DamagedFileError(f'no column "{key}"; there are: {", ".join(names)}')
            counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
            ends = list(accumulate(counts))
            groups = [i for i, end in enumerate(ends) if end > done]
            row = ends[groups[0]] - counts[groups[0]] if groups else 0
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=[key]):
                for value in batch.column(0).to_pylist():
                    row += 1
                    if row > done:
                        yield record_of({key: value}, key, row, (row, 0))
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise DamagedFileError(str(error)) from error

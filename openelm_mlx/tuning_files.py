"""Records of a tuning data set: a .jsonl or .json file, or a folder with train, valid and test.

Knows JSON, not what the records mean. All damage of a file is said at once, by line.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPLITS = ("train", "valid", "test")
_SUFFIXES = (".jsonl", ".json")
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Record:
    """One JSON object and where it stands.

    Attributes:
        value: the object.
        place: ``line 12``, or ``item 12`` of a list, counted from 1.
    """

    value: Mapping[str, Any]
    place: str

    def name_in(self, file: str) -> str:
        """``train.jsonl:12``."""
        return f"{file}:{self.place.split()[-1]}"


def find_split(path: str | Path, split: str) -> Path | None:
    """The file of a split.

    Args:
        path: a file, which is all training data, or a folder with ``train.jsonl``, ``valid.jsonl``
            and ``test.jsonl`` (or ``.json``).
        split: ``train``, ``valid`` or ``test``.

    Returns:
        The file; None where there is no such validation or test split.

    Raises:
        FileNotFoundError: if there is nothing at ``path``, or no training data in the folder.
        ValueError: if it is a file of another kind, or a folder that has a split twice.
    """
    path = Path(path).expanduser()
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise ValueError(f"{path} is no tuning data: give a .jsonl or .json file, or a folder")
        return path if split == "train" else None
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} does not exist; give a .jsonl or .json file, or a folder with train.jsonl"
        )
    found = [path / f"{split}{suffix}" for suffix in _SUFFIXES]
    found = [file for file in found if file.is_file()]
    if len(found) > 1:
        raise ValueError(f"{path} has both {found[0].name} and {found[1].name}; remove one")
    if not found and split == "train":
        names = sorted(entry.name for entry in path.iterdir())[:5]
        raise FileNotFoundError(
            f"{path} has no train.jsonl or train.json"
            + (f"; it has {', '.join(names)}" if names else "; it is empty")
        )
    return found[0] if found else None


def read_records(path: Path) -> list[Record]:
    """All objects of a file: a JSON list, or one object a line, whatever the file is called.

    Raises:
        ValueError: naming the first lines that are damaged, and how many there are; or that the
            file is empty.
    """
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    records: list[Record] = []
    problems: list[str] = []
    is_list = data.lstrip()[:1] == b"["
    for place, value in _list(data, path) if is_list else _lines(data):
        if isinstance(value, ValueError):
            problems.append(f"{place} is not JSON ({value})")
        elif not isinstance(value, dict):
            problems.append(f"{place} is no JSON object")
        else:
            records.append(Record(value=value, place=place))
    refuse(path, problems)
    if not records:
        raise ValueError(f"{path} holds no records")
    return records


def refuse(path: Path, problems: Sequence[str]) -> None:
    """Raise one error for all damaged records of a file, if there are any.

    Raises:
        ValueError: with the first few problems and their number.
    """
    if not problems:
        return
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    raise ValueError(
        f"{path}: {len(problems)} damaged record{'s' if len(problems) > 1 else ''}: "
        + "; ".join(problems[:_SHOWN])
        + more
    )


def _lines(data: bytes) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield f"line {number}", _parsed(line)


def _list(data: bytes, path: Path) -> Iterator[tuple[str, Any]]:
    values = _parsed(data)
    if isinstance(values, ValueError):
        raise ValueError(f"{path} is not JSON: {values}")
    for number, value in enumerate(values, start=1):
        yield f"item {number}", value


def _parsed(data: bytes) -> Any:
    """The value, or the error as a value."""
    try:
        return json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8: {error.reason} at byte {error.start}")
    except ValueError as error:
        return error
    except RecursionError:
        return ValueError("nested too deeply")

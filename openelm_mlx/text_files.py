"""Paths -> files of documents -> documents: finds files by name, folder or pattern.

Knows no tokenizer; the formats are ``text_formats``', order and position ``document_stream``'s.
"""

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from openelm_mlx.document_stream import Document, DocumentStream, OnDamage
from openelm_mlx.text_formats import KNOWN, START, Place, Record, is_readable, read_records

__all__ = ["Document", "DocumentStream", "FileSource", "OnDamage", "documents", "find_files"]


@dataclass(frozen=True, slots=True)
class FileSource:
    """A file; see :func:`openelm_mlx.text_formats.read_records`."""

    path: Path
    text_key: str = "text"

    @property
    def name(self) -> str:
        """The path."""
        return str(self.path)

    @property
    def identity(self) -> str:
        """The name without its folder, which may move."""
        return f"{self.path.name}:{self.text_key}"

    def records(self, place: Place = START) -> Iterator[Record]:
        """Read on from a place."""
        return read_records(self.path, self.text_key, place)


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """Files of documents: named ones, all below a folder, or those that a pattern finds.

    Args:
        paths: files, folders and patterns (``*``, ``**``); what a folder or a pattern stands for
            is sorted by name, hidden files left out.

    Raises:
        FileNotFoundError: if one of them stands for nothing.
        ValueError: if a named file has no format that is known.
    """
    found: list[Path] = []
    for given in map(str, paths):
        path = Path(given).expanduser()
        if path.is_file():
            if not is_readable(path):
                raise ValueError(f"{path} is in no known format; {KNOWN}")
            found.append(path)
            continue
        below = path.rglob("*") if path.is_dir() else _matches(path)
        files = sorted(p for p in below if is_readable(p) and p.is_file() and not _hidden(p, path))
        if not files:
            said = "holds no files of documents" if path.is_dir() else "does not exist"
            raise FileNotFoundError(f"{given} {said}; {KNOWN}")
        found.extend(files)
    return found


def documents(
    paths: Sequence[str | Path], *, text_key: str = "text", on_damage: OnDamage = "fail"
) -> Iterator[Document]:
    """All documents of files, once, in order; see :func:`find_files` and :class:`DocumentStream`.

    Raises:
        FileNotFoundError: if a path stands for nothing; before anything is read.
        ValueError: if a file has no known format, or as :class:`DocumentStream`.
    """
    return DocumentStream(
        [FileSource(path, text_key) for path in find_files(paths)], on_damage=on_damage
    )


def _matches(path: Path) -> list[Path]:
    return [Path(name) for name in glob.glob(str(path), recursive=True)]


def _hidden(path: Path, folder: Path) -> bool:
    parts = path.relative_to(folder).parts if path.is_relative_to(folder) else (path.name,)
    return any(part.startswith(".") for part in parts)

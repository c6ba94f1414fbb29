"""What a recipe's ``data`` says -> sources of documents, and which of their files are missing.

Paths, patterns, Hugging Face data sets and CoreNet's ``train_data_info``. Reads no documents but
those of Hugging Face data sets.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from openelm_mlx.document_stream import Source
from openelm_mlx.text_files import FileSource, find_files
from openelm_mlx.text_formats import KNOWN, START, Place, Record, is_readable, record_of

Entry = str | Path | Mapping[str, Any]

_KEYS = {
    "file_name": {"text_key", "file_id_range", "source"},
    "path": {"text_key", "source"},
    "dataset": {"text_key", "subset", "split", "source"},
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_EXAMPLE = '{file_name: "books/books-{file_id:04d}.json.gz", text_key: text, file_id_range: [0, 3]}'


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """A data set for the ``datasets`` library, streamed: a Hub id or a folder it can load."""

    dataset: str
    subset: str | None = None
    split: str = "train"
    text_key: str = "text"

    @property
    def name(self) -> str:
        """As it is written in a command."""
        return ":".join(["hf", self.dataset, *filter(None, [self.subset]), self.split])

    @property
    def identity(self) -> str:
        """Everything that chooses the rows."""
        return f"{self.dataset}:{self.subset}:{self.split}:{self.text_key}"

    def records(self, place: Place = START) -> Iterator[Record]:
        """Rows from a place on; ``datasets`` reads again what comes before it.

        Raises:
            ImportError: naming the extra, if ``datasets`` is not installed.
        """
        try:
            import datasets
        except ImportError as error:
            raise ImportError(
                f'reading {self.name} needs datasets: pip install "openelm-mlx[data]"',
                name="datasets",
            ) from error
        rows = datasets.load_dataset(self.dataset, self.subset, split=self.split, streaming=True)
        for number, row in enumerate(rows.skip(place[0]), start=place[0] + 1):
            yield record_of(row, self.text_key, number, (number, 0))


@dataclass(frozen=True, kw_only=True)
class EntryFiles:
    """One entry of a mixture, looked for on disk."""

    name: str
    text_key: str
    files: tuple[Path, ...]  # all that the entry names, there or not
    missing: tuple[Path, ...]
    size: int  # bytes of those that are there
    hub: HubSource | None = None  # a data set of the Hub, of which no files are counted

    def describe(self) -> str:
        """One line for a person."""
        if self.hub:
            return f"{self.name}: a Hugging Face data set, not looked for"
        there = len(self.files) - len(self.missing)
        line = f"{self.name}: {there} of {len(self.files)} files, {self.size / 1e9:.1f} GB"
        if not self.missing:
            return line
        shown = ", ".join(map(str, self.missing[:3])) + (", ..." if len(self.missing) > 3 else "")
        return f"{line}; {len(self.missing)} missing: {shown}"


def look_for(
    data: Entry | Sequence[Entry], *, text_key: str = "text", root: str | Path = ""
) -> list[EntryFiles]:
    """Count the files of every entry and find those that are missing: ``pretrain --dry-run``.

    Args:
        data: as :func:`find_sources`.
        text_key: where an entry names none.
        root: folder that relative ``file_name`` and ``path`` entries are in.

    Raises:
        ValueError: if an entry is malformed.
        FileNotFoundError: if a plain path or pattern stands for nothing.
    """
    return [_look_for(entry, text_key, Path(root).expanduser()) for entry in _entries(data)]


def find_sources(
    data: Entry | Sequence[Entry], *, text_key: str = "text", root: str | Path = ""
) -> list[Source]:
    """Sources of all entries, in order.

    Args:
        data: one or several of: a file, folder or pattern; a Hugging Face data set ``owner/name``
            or ``hf:owner/name:subset:split``; a YAML file that holds entries, CoreNet's training
            YAML among them; CoreNet's mapping of ``file_name`` (with ``{file_id:05d}``),
            ``text_key`` and ``file_id_range`` (the end is not included); a mapping of ``path`` or
            of ``dataset``, ``subset`` and ``split``, with ``text_key``.
        text_key: where an entry names none.
        root: folder that relative ``file_name`` and ``path`` entries are in.

    Raises:
        ValueError: if an entry is malformed.
        FileNotFoundError: saying how many of an entry's files are missing.
    """
    entries = look_for(data, text_key=text_key, root=root)
    short = [entry.describe() for entry in entries if entry.missing]
    if short:
        raise FileNotFoundError(
            f"{'; '.join(short[:3])}{'; ...' if len(short) > 3 else ''}: fetch them or take the "
            "entry out; `openelm pretrain --dry-run` lists all"
        )
    return [
        source
        for entry in entries
        for source in (
            [entry.hub] if entry.hub else [FileSource(path, entry.text_key) for path in entry.files]
        )
    ]


def read_entries(path: str | Path) -> list[Entry]:
    """Entries of a YAML file: a list, ``train_data_info``, or CoreNet's whole training YAML.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it holds no entries.
    """
    import yaml

    try:
        value = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    for key in ("dataset", "language_modeling", "general_lm", "train_data_info"):
        if isinstance(value, Mapping) and key in value:
            value = value[key]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{path} holds no train_data_info; expected a list like [{_EXAMPLE}]")
    return value


def _entries(data: Entry | Sequence[Entry]) -> Iterator[Entry]:
    for entry in [data] if isinstance(data, str | Path | Mapping) else data:
        if isinstance(entry, str | Path) and Path(entry).suffix in (".yaml", ".yml"):
            yield from read_entries(entry)
        else:
            yield entry


def _look_for(entry: Entry, text_key: str, root: Path) -> EntryFiles:
    if not isinstance(entry, Mapping):
        return _look_for_path(str(entry), text_key)
    kinds = [key for key in _KEYS if key in entry]
    if len(kinds) != 1 or set(entry) - {kinds[0]} - _KEYS[kinds[0]]:
        raise ValueError(
            f"a data entry needs one of {', '.join(_KEYS)} and may have "
            f"{', '.join(sorted(set().union(*_KEYS.values())))}; got {dict(entry)}; "
            f"an example: {_EXAMPLE}"
        )
    key = str(entry.get("text_key", text_key))
    if kinds == ["dataset"]:
        split = str(entry.get("split", "train"))
        hub = HubSource(
            dataset=entry["dataset"], subset=entry.get("subset"), split=split, text_key=key
        )
        return _of_hub(hub)
    if kinds == ["path"]:
        return _of_files(str(entry["path"]), key, find_files([root / str(entry["path"])]))
    files = [root / name for name in _numbered(entry)]
    return _of_files(str(entry["file_name"]), key, files)


def _look_for_path(given: str, text_key: str) -> EntryFiles:
    named = given.startswith("hf:")
    bare = _HUB_ID.fullmatch(given) and not Path(given).exists() and not is_readable(Path(given))
    if not named and not bare:
        return _of_files(given, text_key, find_files([given]))
    dataset, *rest = given.removeprefix("hf:").split(":")
    subset, split = rest[0] if rest else None, rest[1] if len(rest) > 1 else "train"
    if not dataset or len(rest) > 2:
        raise ValueError(f"{given}: expected hf:OWNER/NAME, hf:OWNER/NAME:SUBSET or ...:SPLIT")
    return _of_hub(
        HubSource(dataset=dataset, subset=subset or None, split=split, text_key=text_key)
    )


def _of_hub(hub: HubSource) -> EntryFiles:
    return EntryFiles(name=hub.name, text_key=hub.text_key, files=(), missing=(), size=0, hub=hub)


def _of_files(name: str, text_key: str, files: Sequence[Path]) -> EntryFiles:
    unknown = next((path for path in files if not is_readable(path)), None)
    if unknown is not None:
        raise ValueError(f"{unknown} is in no known format; {KNOWN}")
    missing = tuple(path for path in files if not path.is_file())
    size = sum(path.stat().st_size for path in files if path.is_file())
    return EntryFiles(name=name, text_key=text_key, files=tuple(files), missing=missing, size=size)


def _numbered(entry: Mapping[str, Any]) -> list[str]:
    """File names of one of CoreNet's entries."""
    name, span = str(entry["file_name"]), entry.get("file_id_range", [0, 1])
    try:
        first, end = span
        names = [name.format(file_id=i) for i in range(first, end)]
        fields = {field for _, field, _, _ in Formatter().parse(name)} - {None}
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise ValueError(
            f"cannot number the files of {dict(entry)}; an example: {_EXAMPLE}"
        ) from error
    if not names or (len(names) > 1 and not fields):
        raise ValueError(
            f"{name} with file_id_range {list(span)} names "
            f"{'one file many times' if names else 'no file'}; an example: {_EXAMPLE}"
        )
    return names

"""The licence of a checkpoint, as its own files state it, and the files that go along with it."""

import shutil
from pathlib import Path
from typing import Any

_FILES = ("LICENSE*", "LICENCE*", "NOTICE*")
_PHRASES = {  # how the texts name themselves
    "Apple Machine Learning Research Model": "apple-amlr",
    "This Apple software is supplied to you by Apple": "apple-sample-code-license",
}
_HEAD_BYTES = 1 << 16  # of a file; licence texts and model cards say what they are at the top


def licence_name(folder: Path) -> str | None:
    """The licence's name by the model card's front matter, else by the text of LICENSE.

    Returns:
        A Hub name such as ``apple-amlr``, None where neither file says.
    """
    card = _front_matter(folder / "README.md")
    stated = card.get("license")
    if stated == "other":
        stated = card.get("license_name") or stated
    if isinstance(stated, str) and stated not in ("other", "unknown"):
        return stated
    for file in licence_files(folder):
        text = " ".join(_head(file).split())
        for phrase, name in _PHRASES.items():
            if phrase in text:
                return name
    return None


def licence_files(folder: Path) -> list[Path]:
    """LICENSE, NOTICE and the like."""
    return sorted(f for kind in _FILES for f in folder.glob(kind) if f.is_file())


def copy_licence(source: Path, target: Path) -> list[str]:
    """Copy the licence files of one folder into another; return their names."""
    files = licence_files(source)
    for file in files:
        shutil.copyfile(file, target / file.name)
    return [file.name for file in files]


def _front_matter(card: Path) -> dict[str, Any]:
    """The YAML between the first two ``---`` lines of a model card, empty if there is none."""
    import yaml

    if not card.is_file():
        return {}
    first, *parts = _head(card).split("---\n")
    if first.strip() or len(parts) < 2:
        return {}
    try:
        values = yaml.safe_load(parts[0])
    except yaml.YAMLError:
        return {}
    return values if isinstance(values, dict) else {}


def _head(file: Path) -> str:
    with file.open("rb") as stream:
        return stream.read(_HEAD_BYTES).decode("utf-8", errors="replace").replace("\r\n", "\n")

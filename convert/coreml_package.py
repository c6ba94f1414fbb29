"""A MIL program written as an ``.mlpackage``: specification, weight file, manifest, metadata.

coremltools translates the program; the folder is written here, so that two exports of one model
are equal byte for byte.
"""

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.mil_tools import coremltools

SPECIFICATION = 9  # iOS 18, macOS 15: states, functions, blockwise codes
_DATA = Path("Data/com.apple.CoreML")
_AUTHOR = "com.apple.CoreML"


def write_package(program: Any, folder: Path, *, metadata: Mapping[str, str], about: str) -> None:
    """Write a program.

    Args:
        program: a coremltools MIL ``Program``.
        folder: the ``.mlpackage``, there and empty.
        metadata: user-defined keys.
        about: one line of description.

    Raises:
        OSError: if it cannot be written.
    """
    load = coremltools("converters.mil.backend.mil.load").load
    weights = folder / _DATA / "weights"
    weights.mkdir(parents=True)
    spec = load(
        program,
        str(weights),
        specification_version=SPECIFICATION,
        convert_to="mlprogram",
        convert_from="milinternal",
    )
    spec.description.metadata.shortDescription = about
    spec.description.metadata.userDefined.update(metadata)
    (folder / _DATA / "model.mlmodel").write_bytes(spec.SerializeToString(deterministic=True))
    if not any(weights.iterdir()):
        weights.rmdir()
    _write_manifest(folder, with_weights=weights.is_dir())


def _write_manifest(package: Path, *, with_weights: bool) -> None:
    model = {
        "author": _AUTHOR,
        "description": "CoreML Model Specification",
        "name": "model.mlmodel",
        "path": "com.apple.CoreML/model.mlmodel",
    }
    weights = {
        "author": _AUTHOR,
        "description": "CoreML Model Weights",
        "name": "weights",
        "path": "com.apple.CoreML/weights",
    }
    entries = {_identifier(e["path"]): e for e in ([model, weights] if with_weights else [model])}
    manifest = {
        "fileFormatVersion": "1.0.0",
        "itemInfoEntries": entries,
        "rootModelIdentifier": _identifier(model["path"]),
    }
    (package / "Manifest.json").write_text(json.dumps(manifest, indent=4) + "\n", encoding="utf-8")


def _identifier(path: str) -> str:
    """The same for each export: nothing depends on it beyond this one package."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, path)).upper()


def weight_bytes(package: Path) -> int:
    """Size of a package's weight file."""
    weights = package / _DATA / "weights" / "weight.bin"
    return weights.stat().st_size if weights.is_file() else 0


def package_bytes(package: Path) -> int:
    """Size of all files of a package: what an app downloads."""
    return sum(file.stat().st_size for file in package.rglob("*") if file.is_file())

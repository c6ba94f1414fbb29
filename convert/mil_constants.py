"""Constants of a package, decoded when first needed and once for all its functions."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert.mil_ops_compressed import COMPRESSED
from convert.mil_package import Message, SavedProgram, immediate, tensor_type
from convert.mil_types import FLOATS, Array, TensorType


@dataclass(frozen=True)
class Immediate:
    """A constant written in the program."""

    value: Array | str = field(compare=False)
    key: Any  # what makes two of them equal


@dataclass(frozen=True)
class Stored:
    """A constant in a weight file."""

    file: str
    offset: int
    type: TensorType


@dataclass(frozen=True)
class Expanded:
    """A constant that a `constexpr_` operation makes of others."""

    op: str
    inputs: tuple[tuple[str, "Source"], ...]
    type: TensorType


Source = Immediate | Stored | Expanded


def constant(package: SavedProgram, value: Message) -> Source:
    """The constant of a `MILSpec.Value`; one in a weight file is checked, not read.

    Raises:
        FileNotFoundError: if its weight file is missing.
        ValueError: if it does not fit its declared type.
    """
    if value.WhichOneof("value") == "blobFileValue":
        stored = value.blobFileValue
        declared = tensor_type(value.type)
        package.blob(stored.fileName).check(int(stored.offset), declared)
        return Stored(stored.fileName, int(stored.offset), declared)
    found = immediate(value)
    if isinstance(found, str):
        return Immediate(found, found)
    return Immediate(found, (found.dtype.str, found.shape, found.tobytes()))


def to_float16(values: Array) -> Array:
    """Float32 values that float16 can hold, the nearest ones; beyond 65504 they are infinite."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


class Constants:
    """Values of constants: floats as float32, the others as stored; read-only.

    Args:
        package: where the stored ones are.
        keep: whether stored and expanded constants stay in memory once decoded.
    """

    def __init__(self, package: SavedProgram, *, keep: bool) -> None:
        self._package = package
        self._keep = keep
        self._kept: dict[Source, Array | str] = {}

    @property
    def kept_bytes(self) -> int:
        """Memory of decoded weights, those written in the program not counted."""
        return sum(
            kept.nbytes
            for source, kept in self._kept.items()
            if not isinstance(source, Immediate) and not isinstance(kept, str)
        )

    def value(self, source: Source) -> Array | str:
        """Decode a constant, or return what was decoded before.

        Raises:
            ValueError: if it is damaged or its parts do not fit each other.
        """
        if source in self._kept:
            return self._kept[source]
        found = self._decode(source)
        if isinstance(found, str):
            return found
        wide = found.astype(np.float32) if found.dtype.kind == "f" else found
        wide.flags.writeable = False
        if self._keep or isinstance(source, Immediate):
            self._kept[source] = wide
        return wide

    def _decode(self, source: Source) -> Array | str:
        if isinstance(source, Immediate):
            return source.value
        if isinstance(source, Stored):
            return self._package.blob(source.file).read(source.offset, source.type)
        return self._expand(source)

    def _expand(self, source: Expanded) -> Array:
        inputs = {name: self._decode(part) for name, part in source.inputs}
        rounds = source.type.dtype == "FLOAT16"  # whatever the precision: it is what is stored
        result = COMPRESSED[source.op](to_float16 if rounds else np.asarray, **inputs)
        is_float = result.dtype.kind == "f"
        if not source.type.fits(result.shape) or is_float != (source.type.dtype in FLOATS):
            got = f"{result.dtype} {list(result.shape)}"
            raise ValueError(f"{source.op} gives {got}, the program declares {source.type}")
        return result

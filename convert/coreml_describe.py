"""What a saved ``.mlpackage`` says of itself: functions, inputs, outputs, states, metadata.

Reads the description at the head of the specification, neither program nor weights.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.mil_package import SavedProgram


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One input, output or state.

    Attributes:
        name: as the program has it.
        dtype: "int32", "float16" and the like.
        shape: an int, or (least, most) for an axis of any length in that range; empty where the
            package does not say.
    """

    name: str
    dtype: str
    shape: tuple[int | tuple[int, int], ...]

    @property
    def shape_text(self) -> str:
        """For a person: ``[1, 1..1024]``."""
        axes = (f"{s[0]}..{s[1]}" if isinstance(s, tuple) else str(s) for s in self.shape)
        return f"[{', '.join(axes)}]"


@dataclass(frozen=True, kw_only=True)
class FunctionDescription:
    """What goes into one function and what comes out."""

    inputs: dict[str, Feature]
    outputs: dict[str, Feature]
    states: dict[str, Feature]


@dataclass(frozen=True, kw_only=True)
class PackageDescription:
    """A package without its program.

    Attributes:
        functions: by name.
        default: the function that runs where none is named.
        named: whether Core ML is to be told the function's name.
        metadata: user-defined keys.
        bytes: of all its files.
    """

    functions: dict[str, FunctionDescription]
    default: str
    named: bool
    metadata: dict[str, str] = field(repr=False)
    bytes: int

    @property
    def vocab_size(self) -> int | None:
        """Rows of the logits; None where the package does not say."""
        logits = self.functions[self.default].outputs.get("logits")
        rows = logits.shape[-1] if logits is not None and logits.shape else None
        return rows if isinstance(rows, int) else None

    def cache(self, name: str = "keyCache") -> Feature | None:
        """A cache, state or input; None where the package has none of that name."""
        function = self.functions[self.default]
        return function.states.get(name) or function.inputs.get(name)


def describe(package: str | Path) -> PackageDescription:
    """Read a package's description.

    Raises:
        FileNotFoundError: if there is no such package, or a part of it is missing.
        ValueError: if it is no Core ML program, or damaged.
    """
    package = Path(package)
    if not package.is_dir():
        raise FileNotFoundError(f"{package} does not exist; give an .mlpackage, which is a folder")
    saved = SavedProgram(package)
    return PackageDescription(
        functions={name: _function(saved.description(name)) for name in saved.functions},
        default=saved.default_function,
        named=bool(saved.model.description.functions),
        metadata=saved.metadata,
        bytes=sum(f.stat().st_size for f in package.rglob("*") if f.is_file()),
    )


def _function(description: Any) -> FunctionDescription:
    return FunctionDescription(
        inputs={f.name: _feature(f) for f in description.input},
        outputs={f.name: _feature(f) for f in description.output},
        states={f.name: _feature(f) for f in description.state},
    )


def _feature(feature: Any) -> Feature:
    kind = feature.type
    array = kind.stateType.arrayType if kind.HasField("stateType") else kind.multiArrayType
    dtype = array.ArrayDataType.Name(array.dataType).lower()
    ranges = [(r.lowerBound, r.upperBound) for r in array.shapeRange.sizeRanges]
    shape = [low if low == high else (low, high) for low, high in ranges] or list(array.shape)
    return Feature(name=feature.name, dtype=dtype, shape=tuple(shape))

"""Every name of ``coreai-core`` that its makers do not promise to keep, in one place.

The beta's public face (``coreai.authoring``) has the operations; state, constants from a buffer
and packed codes are private. Nothing is imported until it is asked for. Knows no model.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE, VERSION = "coreai-core", "1.0.0b3"
DYNAMIC = -1  # the size of an axis that is known only at run time
_OUT = "{}Out"  # the name under which a graph hands a state back
_ELEMENTS = {"float16": "F16Type", "float32": "F32Type"}

Value = Any  # of coreai.authoring, which has no types that mypy could follow


@dataclass(frozen=True)
class Tensor:
    """What goes into or stays in a graph: sizes, of which some ``DYNAMIC``, and a NumPy type."""

    shape: tuple[int, ...]
    dtype: type[np.generic]


def authoring() -> Any:
    """The public module ``coreai.authoring``, after a look at its version.

    Raises:
        ImportError: one line, where the extra is not installed or another version is.
    """
    mend = f"pip install 'openelm-mlx[coreai]' ({PACKAGE} {VERSION}; Linux x86-64 or macOS)"
    try:
        found = version(PACKAGE)
    except PackageNotFoundError as error:
        raise ImportError(f"Core AI needs {PACKAGE}, which is not installed: {mend}") from error
    if found != VERSION:
        raise ImportError(
            f"{PACKAGE} {found} is installed, and this export was checked with {VERSION} only, "
            f"since its state is not in the public face: {mend}"
        )
    import coreai.authoring  # has to come before any other module of the package

    return coreai.authoring


class Program:
    """A program under construction: make graphs inside ``with program:``, then ``save`` it."""

    def __init__(self) -> None:
        self._face = authoring()
        self._module = self._face.Module.create()
        self._buffers: list[np.ndarray] = []  # constants point into them until the file is written

    def __enter__(self) -> "Program":
        self._module.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._module.__exit__(*error)  # without an error the rewrites run

    def graph(
        self,
        name: str,
        inputs: Mapping[str, Tensor],
        states: Mapping[str, Tensor],
        body: Callable[..., tuple[dict[str, Value], dict[str, Value]]],
    ) -> None:
        """Add a function.

        Args:
            name: by which apps load it.
            inputs: in the order in which apps bind them.
            states: buffers of the app that the function changes.
            body: takes one value for each input and state, in order; returns the outputs and the
                states' new values, by name.

        Raises:
            ValueError: if an output has no name, which crashes the runtime, or a state is missing.
        """
        from coreai._compiler.ir import ArrayAttr, DictAttr, StringAttr
        from coreai.authoring.graph_builder import GraphOp

        spec = self._face.TensorSpec
        tensors = {**inputs, **states}
        types = [spec(list(t.shape), t.dtype)._to_mlir() for t in tensors.values()]
        op = GraphOp(name, types, [], input_names=list(tensors))
        with op.block:
            outputs, kept = body(*map(self._face.Value._from_mlir, op.arguments))
            _check_results(name, outputs, kept, states)
            results = OrderedDict((key, value._to_mlir()) for key, value in outputs.items())
            for key in states:
                results[_OUT.format(key)] = kept[key]._to_mlir()
            op.set_outputs_spec_from_dict(results)
        # The second attribute makes the rewrites turn the argument into state and drop the output.
        attributes = []
        for key in tensors:
            entries = {"coreai.name": StringAttr.get(key)}
            if key in states:
                entries["MutableBuffers.buffer_mutation"] = StringAttr.get(_OUT.format(key))
            attributes.append(DictAttr.get(entries))
        op.arg_attrs = ArrayAttr.get(attributes)

    def constant(self, array: np.ndarray, name: str) -> Value:
        """A float16 or float32 array, not copied; ``name`` is its own in the file."""
        from coreai._compiler import ir

        element = getattr(ir, _ELEMENTS[array.dtype.name]).get()
        return self._resource(array, name, array.shape, element)

    def codes(self, packed: np.ndarray, shape: Sequence[int], bits: int, name: str) -> Value:
        """Unsigned integers of 4 or 8 bits from their bytes, the first code in the low bits.

        ``coreai.authoring.constant(..., uint4)`` would write other values than it is given.

        Args:
            packed: uint8, rows of ``shape``'s last axis one after another.
            shape: of the codes.
            bits: of a code.
            name: the constant's own in the file.
        """
        from coreai._compiler import ir

        if packed.dtype != np.uint8 or packed.size * 8 != int(np.prod(shape)) * bits:
            raise ValueError(
                f"{name}: {packed.size} bytes of {packed.dtype} do not hold {tuple(shape)} codes "
                f"of {bits} bits"
            )
        return self._resource(packed, name, shape, ir.IntegerType.get_unsigned(bits))

    def zero_codes(self, shape: Sequence[int], bits: int) -> Value:
        """Codes that are all 0, which take no room in the file."""
        from coreai._compiler import ir

        element = ir.IntegerType.get_unsigned(bits)
        kind = ir.RankedTensorType.get(list(shape), element)
        zero = ir.DenseElementsAttr.get_splat(kind, ir.IntegerAttr.get(element, 0))
        return self._emit(zero)

    def _resource(self, array: np.ndarray, name: str, shape: Sequence[int], element: Any) -> Value:
        from coreai._compiler import ir

        buffer: Any = np.ascontiguousarray(array)
        self._buffers.append(buffer)
        kind = ir.RankedTensorType.get(list(shape), element)
        return self._emit(ir.DenseResourceElementsAttr.get_from_buffer(buffer, name, kind))

    def _emit(self, attribute: Any) -> Value:
        from coreai._compiler.dialects import coreai as dialect

        return self._face.Value._from_mlir(dialect.ConstantOp(value=attribute).result)

    def save(self, path: Path, about: Mapping[str, str]) -> None:
        """Write the asset, a folder named ``*.aimodel``.

        Args:
            path: of the folder.
            about: ``author``, ``license``, ``description``, and more entries of any name.

        Raises:
            OSError: if it cannot be written.
        """
        from coreai.runtime import AIModelAssetMetadata

        metadata = AIModelAssetMetadata()
        metadata.author, metadata.license = about.get("author", ""), about.get("license", "")
        metadata.model_description = about.get("description", "")
        for key in sorted(set(about) - {"author", "license", "description"}):
            metadata.set_custom(key, about[key])
        try:
            self._face.AIProgram(self._module).save_asset(path, metadata=metadata)
        except RuntimeError as error:
            cause = error.__cause__ or error
            raise OSError(f"{path} cannot be written ({cause}); is the disk full?") from error


def _check_results(
    graph: str,
    outputs: Mapping[str, Value],
    kept: Mapping[str, Value],
    states: Mapping[str, Tensor],
) -> None:
    if not outputs or not all(outputs):
        raise ValueError(
            f"graph {graph!r}: every output needs a name, or Apple's runtime aborts; "
            f"got {list(outputs)}"
        )
    if set(kept) != set(states):
        raise ValueError(f"graph {graph!r}: states {sorted(states)}, new values {sorted(kept)}")

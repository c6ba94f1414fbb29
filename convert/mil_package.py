"""A saved `.mlpackage`: its manifest, program, feature descriptions and constants.

Knows the format alone; what the operations mean is in `mil_ops`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.mil_blob import BlobFile
from convert.mil_tools import coremltools
from convert.mil_types import NUMPY, Array, TensorType, unpack

_MODEL_PREFIX = "@model_path/"
Message = Any  # a protobuf message: its classes are made at run time


class SavedProgram:
    """The program and the weights of a package on disk.

    Args:
        path: the `.mlpackage` folder.

    Raises:
        FileNotFoundError: if the folder, its manifest, its program or its weights are not there.
        ValueError: if they cannot be read, or hold another kind of model than an ML program.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model_file = _model_file(path)
        self.model = _parse(self.model_file)
        if self.model.WhichOneof("Type") != "mlProgram":
            kind = self.model.WhichOneof("Type")
            raise ValueError(f"{path}: holds a {kind}, expected an ML program (mlprogram)")
        if not self.functions:
            raise ValueError(f"{path}: the program holds no function; export it again")
        self._blobs: dict[str, BlobFile] = {}

    @property
    def functions(self) -> Mapping[str, Message]:
        """Function name -> `MILSpec.Function`."""
        return self.model.mlProgram.functions

    @property
    def default_function(self) -> str:
        """The function that runs where none is named."""
        named = self.model.description.defaultFunctionName
        return named or ("main" if "main" in self.functions else next(iter(self.functions)))

    @property
    def metadata(self) -> dict[str, str]:
        """The user-defined metadata."""
        return dict(self.model.description.metadata.userDefined)

    def description(self, function: str) -> Message:
        """Feature descriptions of a function: `input`, `output` and `state` lists.

        Raises:
            ValueError: if the package describes no such function.
        """
        described = self.model.description.functions
        if not described:
            return self.model.description
        for item in described:
            if item.name == function:
                return item
        raise ValueError(f"{self.path}: function {function} has no feature descriptions")

    def block(self, function: str) -> Message:
        """The operations of a function, of the specialization for its own opset.

        Raises:
            ValueError: if it has none.
        """
        message = self.functions[function]
        blocks = message.block_specializations
        if message.opset not in blocks:
            raise ValueError(f"{self.path}: function {function} has no block for {message.opset}")
        return blocks[message.opset]

    def blob(self, file_name: str) -> BlobFile:
        """The weight file that a constant names.

        Raises:
            ValueError: if the name leads out of the package.
        """
        if file_name not in self._blobs:
            inside = file_name.removeprefix(_MODEL_PREFIX)
            if inside == file_name or ".." in Path(inside).parts or Path(inside).is_absolute():
                raise ValueError(
                    f"{self.path}: weights in {file_name}, expected a file under {_MODEL_PREFIX}"
                )
            self._blobs[file_name] = BlobFile(self.model_file.parent / inside)
        return self._blobs[file_name]


def _model_file(path: Path) -> Path:
    manifest = path / "Manifest.json"
    if not manifest.is_file():
        raise FileNotFoundError(f"{path}: no Manifest.json; expected a .mlpackage folder")
    try:
        items = json.loads(manifest.read_text(encoding="utf-8"))
        inside = items["itemInfoEntries"][items["rootModelIdentifier"]]["path"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{manifest}: not a package's manifest ({error!r})") from error
    found = path / "Data" / str(inside)
    if not found.resolve().is_relative_to(path.resolve()):
        raise ValueError(f"{manifest}: the model is at {inside}, outside the package")
    if not found.is_file():
        raise FileNotFoundError(f"{found}: the package's program is missing; export it again")
    return found


def _parse(path: Path) -> Message:
    from google.protobuf.message import DecodeError

    model = coremltools("proto.Model_pb2").Model()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise ValueError(f"{path}: not a Core ML model ({error}); export it again") from error
    return model


def tensor_type(message: Message) -> TensorType:
    """The type that a `MILSpec.ValueType` declares; a state has that of the tensor it wraps.

    Raises:
        ValueError: if it is no tensor (a list, tuple or dictionary).
    """
    if message.WhichOneof("type") == "stateType":
        message = message.stateType.wrappedType
    if message.WhichOneof("type") != "tensorType":
        raise ValueError(f"a value of type {message.WhichOneof('type')}, expected a tensor")
    tensor = message.tensorType
    shape = [
        int(size.constant.size) if size.WhichOneof("dimension") == "constant" else None
        for size in tensor.dimensions
    ]
    return TensorType(coremltools("proto.MIL_pb2").DataType.Name(tensor.dataType), tuple(shape))


def is_state(message: Message) -> bool:
    """Whether a `MILSpec.ValueType` declares a state."""
    return message.WhichOneof("type") == "stateType"


def immediate(value: Message) -> Array | str:
    """A constant that stands in the program itself: an array, or one string.

    Raises:
        ValueError: if its numbers do not fill its declared shape, or it is of an unknown kind.
    """
    tensor = value.immediateValue.tensor
    kind = tensor.WhichOneof("value")
    declared = tensor_type(value.type)
    if kind == "strings":
        return ",".join(tensor.strings.values)
    if declared.dtype not in NUMPY:
        raise ValueError(f"a constant of type {declared.dtype}")
    if kind == "bytes":
        return unpack(tensor.bytes.values, declared)
    numbers = getattr(tensor, kind).values if kind else []
    array = np.array(numbers, dtype=NUMPY[declared.dtype])
    shape = declared.static_shape()
    if array.size != int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"{array.size} numbers for a constant {declared}")
    return array.reshape(shape)


def argument_values(argument: Message) -> Iterator[tuple[str | None, Message | None]]:
    """What an operation's parameter is bound to: (name, None) or (None, constant value)."""
    for binding in argument.arguments:
        if binding.WhichOneof("binding") == "name":
            yield binding.name, None
        else:
            yield None, binding.value

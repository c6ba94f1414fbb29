"""Write a PyTorch archive without PyTorch: a protocol 2 pickle and one record a storage.

Layout and alignment are those of ``torch.save`` (PyTorch 2.13, ``torch/serialization.py`` and
``caffe2/serialize/inline_container.cc``); dates are fixed, so the same tree gives the same bytes.
"""

import math
import re
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from convert.pt_dtypes import BY_MLX, BY_NAME, UNTYPED_STORAGE, ElementType
from convert.pt_tensor import PtTensor

_ALIGNMENT = 64  # bytes, of each record's data within the file
_CHUNK_BYTES = 16 * 2**20
_ZIP64_BYTES = 2**31 - 1  # from here on zipfile needs a larger header
_ZIP64_EXTRA = 20
_PADDING_HEADER = struct.Struct("<HH")  # PyTorch's extra field "FB": id, length
_PADDING_ID = 0x4246
_MAX_DEPTH = 100
_ATOMIC_NAME = re.compile(r"\.(.+)\.[^.]+\.tmp(\.[^.]*)?")  # atomic_file's temporary names

Tensor = mx.array | PtTensor | np.ndarray[Any, Any]


def write(path: str | Path, tree: object) -> None:
    """Write a tree that ``torch.load(path, weights_only=True)`` reads, bit for bit.

    Tensors are written one after another; a ``PtTensor`` is loaded for that and dropped again. One
    array found at several places is stored once and shares its storage in PyTorch, too. Not atomic:
    wrap it in ``atomic_file``.

    Args:
        path: the file, replaced if it is there; its folder must exist.
        tree: dict, OrderedDict, Counter, list, tuple, set, ``None``, booleans, numbers, str, bytes,
            ``mx.Dtype``, and tensors: ``mx.array``, NumPy array or ``PtTensor``. NumPy scalars
            become Python's; a defaultdict becomes a dict.

    Raises:
        ValueError: if the tree holds anything else, or an array of a type PyTorch or MLX lacks;
            the message says where. Nothing is written then.
    """
    path = Path(path)
    pickler = _Pickler()
    data = pickler.dump(tree)
    with path.open("wb") as file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        records = _Records(file, archive, _archive_name(path))
        records.add("data.pkl", data)
        records.add("byteorder", b"little")
        for key, tensor in enumerate(pickler.tensors):
            records.add(f"data/{key}", _bytes_of(tensor))
        records.add("version", b"3\n")


def _archive_name(path: Path) -> str:
    """The folder inside the zip: the file's stem, as in torch.save, also for a temporary file."""
    temporary = _ATOMIC_NAME.fullmatch(path.name)
    stem = Path(temporary[1] if temporary else path.name).stem
    return stem if stem.isascii() and stem.isprintable() and "\\" not in stem else "archive"


class _Records:
    """Appends records whose data begin at multiples of 64 bytes."""

    def __init__(self, file: BinaryIO, archive: zipfile.ZipFile, folder: str) -> None:
        self._file = file
        self._archive = archive
        self._folder = folder

    def add(self, name: str, data: bytes | memoryview) -> None:
        size = len(data)
        entry = zipfile.ZipInfo(f"{self._folder}/{name}", date_time=(1980, 1, 1, 0, 0, 0))
        entry.create_system = 3  # the same on every system
        entry.external_attr = 0o644 << 16
        zip64 = size >= _ZIP64_BYTES
        header = 30 + len(entry.filename) + _PADDING_HEADER.size + (_ZIP64_EXTRA if zip64 else 0)
        padding = -(self._file.tell() + header) % _ALIGNMENT
        entry.extra = _PADDING_HEADER.pack(_PADDING_ID, padding) + b"Z" * padding
        with self._archive.open(entry, "w", force_zip64=zip64) as record:
            for at in range(0, size, _CHUNK_BYTES):
                record.write(data[at : at + _CHUNK_BYTES])


def _bytes_of(tensor: Tensor) -> bytes | memoryview:
    """The row-major little-endian bytes, without a copy where the array is laid out so already."""
    if isinstance(tensor, PtTensor):
        tensor = tensor.load()
    if tensor.size == 0:
        return b""
    if not isinstance(tensor, np.ndarray):
        row_major = mx.contiguous(tensor, stream=mx.cpu)
        bits = mx.view(row_major, BY_MLX[tensor.dtype].raw, stream=mx.cpu)
        tensor = np.array(bits, copy=False)  # the same memory
    plain = np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<"))
    return plain.reshape(-1).view(np.uint8).data


def _element_of(tensor: Tensor, place: str) -> ElementType:
    if not isinstance(tensor, np.ndarray):
        return BY_MLX[tensor.dtype]
    element = BY_NAME.get(tensor.dtype.name)
    if element is None:
        raise ValueError(
            f"cannot write the NumPy array of {tensor.dtype} at {place}: expected one of "
            f"{', '.join(BY_NAME)}; convert it first"
        )
    return element


class _Pickler:
    """Emits opcodes by hand: ``pickle`` would have to import torch to name its functions."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []  # in the order of their storage keys
        self._keys: dict[int, int] = {}
        self._out = bytearray()

    def dump(self, tree: object) -> bytes:
        self._out += b"\x80\x02"
        self._save(tree, "the top level", 0)
        self._out += b"."
        return bytes(self._out)

    def _save(self, value: Any, place: str, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise ValueError(f"cannot write more than {_MAX_DEPTH} containers inside each other")
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, dict):
            self._dict(value, place, depth)
        elif isinstance(value, (list, tuple, set)):
            self._sequence(value, place, depth)
        elif isinstance(value, (mx.array, PtTensor, np.ndarray)):
            self._tensor(value, place)
        else:
            self._scalar(value, place)

    def _scalar(self, value: Any, place: str) -> None:
        for kind, emit in _SCALARS.items():
            if isinstance(value, kind):
                emit(self, value)
                return
        raise ValueError(
            f"cannot write the {type(value).__name__} at {place}: expected tensors, dictionaries, "
            "lists, tuples, numbers, strings, bytes or None"
        )

    def _dict(self, items: dict[Any, Any], place: str, depth: int) -> None:
        if isinstance(items, OrderedDict):
            self._global("collections", "OrderedDict")
            self._out += b")R"
        elif isinstance(items, Counter):
            self._global("collections", "Counter")
            self._out += b"}"
        else:
            self._out += b"}"
        self._out += b"("
        for key, value in items.items():
            self._save(key, f"a key of {place}", depth + 1)
            self._save(value, str(key) if depth == 0 else f"{place}.{key}", depth + 1)
        self._out += b"u\x85R" if isinstance(items, Counter) else b"u"

    def _sequence(self, items: Any, place: str, depth: int) -> None:
        if isinstance(items, set):
            self._global("__builtin__", "set")
            items = sorted(items, key=repr)  # the same bytes in every process
            closing = b"e\x85R"
        else:
            closing = b"t" if isinstance(items, tuple) else b"e"
        self._out += b"(" if closing == b"t" else b"]("
        for index, item in enumerate(items):
            self._save(item, f"{place}[{index}]", depth + 1)
        self._out += closing

    def _tensor(self, tensor: Tensor, place: str) -> None:
        """``_rebuild_tensor_v2(storage, 0, shape, strides, False, OrderedDict())``, or v3."""
        element = _element_of(tensor, place)
        key = self._keys.setdefault(id(tensor), len(self.tensors))
        if key == len(self.tensors):
            self.tensors.append(tensor)  # keeps the id alive
        untyped = element.storage == UNTYPED_STORAGE
        shape = tuple(int(size) for size in tensor.shape)
        self._global("torch._utils", "_rebuild_tensor_v3" if untyped else "_rebuild_tensor_v2")
        self._out += b"((" + _text("storage")
        self._global("torch.storage" if untyped else "torch", element.storage)
        self._out += _text(str(key)) + _text("cpu")
        self._int(math.prod(shape) * (element.itemsize if untyped else 1))
        self._out += b"tQ"
        for value in (0, shape, _row_major_strides(shape), False):
            self._save(value, place, 0)
        self._global("collections", "OrderedDict")
        self._out += b")R"
        if untyped:
            self._global("torch", element.name)
        self._out += b"tR"

    def _int(self, value: int) -> None:
        if -(2**31) <= value < 2**31:
            self._out += b"J" + struct.pack("<i", value)
            return
        encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        if len(encoded) > 255:
            raise ValueError("cannot write an integer of more than 254 bytes")
        self._out += b"\x8a" + bytes([len(encoded)]) + encoded

    def _bytes(self, value: bytes | bytearray) -> None:
        if isinstance(value, bytearray):
            self._global("__builtin__", "bytearray")
        self._global("_codecs", "encode")
        self._out += _text(bytes(value).decode("latin-1")) + _text("latin1") + b"\x86R"
        if isinstance(value, bytearray):
            self._out += b"\x85R"

    def _complex(self, value: complex) -> None:
        self._global("__builtin__", "complex")
        self._out += struct.pack(">cdcd", b"G", value.real, b"G", value.imag) + b"\x86R"

    def _global(self, module: str, name: str) -> None:
        self._out += f"c{module}\n{name}\n".encode("ascii")

    def _emit(self, data: bytes) -> None:
        self._out += data


_SCALARS: dict[type | tuple[type, ...], Callable[[_Pickler, Any], None]] = {
    type(None): lambda p, _: p._emit(b"N"),
    bool: lambda p, value: p._emit(b"\x88" if value else b"\x89"),
    int: _Pickler._int,
    float: lambda p, value: p._emit(b"G" + struct.pack(">d", value)),
    str: lambda p, value: p._emit(_text(value)),
    (bytes, bytearray): _Pickler._bytes,
    complex: _Pickler._complex,
    mx.Dtype: lambda p, value: p._global("torch", BY_MLX[value].name),
}


def _text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements, as PyTorch's contiguous tensors have them (empty axes count as 1)."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= max(size, 1)
    return tuple(strides)

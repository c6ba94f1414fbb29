"""The weight file of a Core ML package, `weights/weight.bin`, read without coremltools.

A 64-byte file header (count, version), then for each tensor a 64-byte header, aligned to 64
(sentinel, element type, bytes, place of the data, bits of padding), and its aligned data.
Source: MILBlob/Blob/StorageFormat.hpp in apple/coremltools.
"""

import struct
from pathlib import Path

import numpy as np

from convert.mil_types import Array, TensorType, unpack

_ALIGNMENT = 64
_HEADER = struct.Struct("<IIQQQ")
_SENTINEL = 0xDEADBEEF
_VERSION = 2
# Element types as this file numbers them.
_CODES = {
    "FLOAT16": 1,
    "FLOAT32": 2,
    "UINT8": 3,
    "INT8": 4,
    "INT16": 6,
    "UINT16": 7,
    "INT4": 8,
    "UINT1": 9,
    "UINT2": 10,
    "UINT4": 11,
    "UINT3": 12,
    "UINT6": 13,
    "INT32": 14,
    "UINT32": 15,
}
_NAMES = {code: name for name, code in _CODES.items()}


class BlobFile:
    """A weight file, mapped into memory: pages are read when a tensor is.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is too short for its header or of another version.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: the package's weights are missing; export it again")
        self.path = path
        self.size = path.stat().st_size
        if self.size < _ALIGNMENT:
            raise ValueError(f"{path}: {self.size} bytes, too short for a weight file; {_AGAIN}")
        self._bytes: Array = np.memmap(path, np.uint8, mode="r")
        count, version = struct.unpack("<II", self._bytes[:8].tobytes())
        if version != _VERSION:
            raise ValueError(f"{path}: weight file of version {version}, expected {_VERSION}")
        self.count = count

    def read(self, offset: int, tensor: TensorType) -> Array:
        """The tensor whose header is at ``offset``, checked against its declared type.

        Returns:
            An array of the declared shape; a read-only view of the file where nothing is packed.

        Raises:
            ValueError: if header or data do not fit the file or the type.
        """
        start, size = self.check(offset, tensor)
        return unpack(self._bytes[start : start + size], tensor)

    def check(self, offset: int, tensor: TensorType) -> tuple[int, int]:
        """Check a tensor's header against its declared type, without reading the data.

        Returns:
            Where the data begin and how many bytes they are.

        Raises:
            ValueError: if header or data do not fit the file or the type.
        """
        where = f"{self.path}: the tensor at byte {offset}"
        if offset % _ALIGNMENT or offset < _ALIGNMENT:
            raise ValueError(f"{where} is not at a multiple of {_ALIGNMENT}; {_AGAIN}")
        if offset + _ALIGNMENT > self.size:
            raise ValueError(f"{where} is past the end of the file ({self.size} bytes); {_AGAIN}")
        header = self._bytes[offset : offset + _HEADER.size].tobytes()
        sentinel, code, size, start, padding = _HEADER.unpack(header)
        if sentinel != _SENTINEL:
            raise ValueError(f"{where} has no header (the marker is {sentinel:#x}); {_AGAIN}")
        if code != _CODES.get(tensor.dtype):
            found = _NAMES.get(code, f"of type {code}")
            raise ValueError(f"{where} is {found.lower()}, the program declares {tensor}")
        self._check_data(where, tensor, size, start, padding)
        return start, size

    def _check_data(
        self, where: str, tensor: TensorType, size: int, start: int, padding: int
    ) -> None:
        bits = int(np.prod(tensor.static_shape(), dtype=np.int64)) * tensor.bits
        if size != (bits + 7) // 8 or (tensor.bits < 8 and padding != -bits % 8):
            raise ValueError(
                f"{where} has {size} bytes ({padding} bits of padding), the program declares "
                f"{tensor}: {bits} bits"
            )
        if start % _ALIGNMENT:
            raise ValueError(f"{where} has data at {start}, not a multiple of {_ALIGNMENT}")
        if start + size > self.size:
            raise ValueError(
                f"{where} ends at {start + size}, past the end of the file ({self.size} bytes): "
                "the file is cut short; export or copy it again"
            )


_AGAIN = "the file is damaged, export or copy it again"

"""Element types and shapes of a MIL program, as its specification spells them."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

FLOATS = ("FLOAT16", "FLOAT32", "FLOAT64")

# What holds a value here: numbers narrower than a byte are held in one.
NUMPY: dict[str, npt.DTypeLike] = {
    "BOOL": np.bool_,
    "FLOAT16": np.float16,
    "FLOAT32": np.float32,
    "FLOAT64": np.float64,
    "INT4": np.int8,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT1": np.uint8,
    "UINT2": np.uint8,
    "UINT3": np.uint8,
    "UINT4": np.uint8,
    "UINT6": np.uint8,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
}
PACKED_BITS = {"INT4": 4, "UINT1": 1, "UINT2": 2, "UINT3": 3, "UINT4": 4, "UINT6": 6}


@dataclass(frozen=True)
class TensorType:
    """Declared type of a value: element type and shape, None where a dimension may vary."""

    dtype: str
    shape: tuple[int | None, ...]

    @property
    def bits(self) -> int:
        """Bits of one element as a package stores it."""
        return PACKED_BITS.get(self.dtype, 8 * np.dtype(NUMPY[self.dtype]).itemsize)

    def static_shape(self) -> tuple[int, ...]:
        """The shape of a value that must be wholly known, as a constant's.

        Raises:
            ValueError: if a dimension may vary.
        """
        if any(size is None for size in self.shape):
            raise ValueError(f"a constant of shape {self} has no fixed size")
        return tuple(size for size in self.shape if size is not None)

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a value of ``shape`` has this rank and these fixed dimensions."""
        return len(shape) == len(self.shape) and all(
            want in (None, got) for want, got in zip(self.shape, shape, strict=True)
        )

    def __str__(self) -> str:
        sizes = ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.dtype.lower()} [{sizes}]"


def unpack(data: bytes | Array, tensor: TensorType) -> Array:
    """Stored bytes as an array of ``tensor``'s shape, in the type that `NUMPY` names.

    Numbers narrower than a byte follow one another from the lowest bit up, without gaps.

    Args:
        data: the bytes, or a uint8 array of them; a byte array is not copied where it need not be.
        tensor: type and fixed shape.

    Raises:
        ValueError: if the bytes are too few or too many for the shape.
    """
    shape = tensor.static_shape()
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    expected = (count * tensor.bits + 7) // 8
    if raw.size != expected:
        raise ValueError(f"{raw.size} bytes hold no {tensor}, which takes {expected}")
    if tensor.dtype not in PACKED_BITS:
        return raw.view(NUMPY[tensor.dtype]).reshape(shape)
    values = _bit_fields(raw, tensor.bits)[:count]
    if tensor.dtype == "INT4":
        values ^= 8  # the sign bit, then back: 8..15 become -8..-1
        values -= 8
        values = values.view(np.int8)
    return values.reshape(shape)


def _bit_fields(raw: Array, bits: int) -> Array:
    """All numbers of ``bits`` bits in a byte array, the unused last bits too."""
    width = math.lcm(bits, 8) // 8  # bytes after which the pattern repeats
    groups = np.pad(raw, (0, -raw.size % width)).reshape(-1, width)
    values = np.empty((len(groups), width * 8 // bits), np.uint8)
    for place in range(values.shape[1]):
        byte, shift = divmod(place * bits, 8)
        field = groups[:, byte] >> shift
        if shift + bits > 8:
            field |= groups[:, byte + 1] << (8 - shift)
        np.bitwise_and(field, 2**bits - 1, out=values[:, place])
    return values.reshape(-1)

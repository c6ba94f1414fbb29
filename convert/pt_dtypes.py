"""PyTorch's element types, their storage classes and their MLX counterparts.

Source: pytorch ``torch/storage.py`` (``_dtype_to_storage_type_map``, ``_new_dtypes``), 2.13.
"""

from dataclasses import dataclass

import mlx.core as mx

UNTYPED_STORAGE = "UntypedStorage"


@dataclass(frozen=True)
class ElementType:
    """One element type as PyTorch stores it and MLX holds it."""

    name: str  # torch.<name>
    storage: str  # torch.<storage>; unsigned types have none of their own
    mlx: mx.Dtype
    raw: mx.Dtype  # the unsigned integer of the same width that carries the bits
    swap_bytes: int  # bytes that change places between byte orders; 4 for either half of complex64

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.raw.size


_TYPES = (
    ElementType("float32", "FloatStorage", mx.float32, mx.uint32, 4),
    ElementType("float64", "DoubleStorage", mx.float64, mx.uint64, 8),
    ElementType("float16", "HalfStorage", mx.float16, mx.uint16, 2),
    ElementType("bfloat16", "BFloat16Storage", mx.bfloat16, mx.uint16, 2),
    ElementType("int8", "CharStorage", mx.int8, mx.uint8, 1),
    ElementType("int16", "ShortStorage", mx.int16, mx.uint16, 2),
    ElementType("int32", "IntStorage", mx.int32, mx.uint32, 4),
    ElementType("int64", "LongStorage", mx.int64, mx.uint64, 8),
    ElementType("uint8", "ByteStorage", mx.uint8, mx.uint8, 1),
    ElementType("bool", "BoolStorage", mx.bool_, mx.uint8, 1),
    ElementType("complex64", "ComplexFloatStorage", mx.complex64, mx.uint64, 4),
    ElementType("uint16", UNTYPED_STORAGE, mx.uint16, mx.uint16, 2),
    ElementType("uint32", UNTYPED_STORAGE, mx.uint32, mx.uint32, 4),
    ElementType("uint64", UNTYPED_STORAGE, mx.uint64, mx.uint64, 8),
)

BY_NAME = {item.name: item for item in _TYPES}
BY_MLX = {item.mlx: item for item in _TYPES}
BY_STORAGE = {item.storage: item for item in _TYPES if item.storage != UNTYPED_STORAGE}

# Named in the refusal; a tensor of such a type has no bit-exact place in MLX.
UNSUPPORTED_STORAGES = {
    "ComplexDoubleStorage": "complex128",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
}
UNSUPPORTED_NAMES = frozenset(UNSUPPORTED_STORAGES.values()) | {
    "complex32",
    "float4_e2m1fn_x2",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
}


def no_mlx_type(name: str) -> ValueError:
    """The refusal of an element type that MLX lacks."""
    target = "complex64" if name.startswith("complex") else "bfloat16"
    cast = (
        f"tensor.dequantize().to(torch.{target})"
        if name.startswith("q")
        else (f"tensor.to(torch.{target})")
    )
    return ValueError(
        f"holds a tensor of torch.{name}, which MLX has no type for; "
        f"convert it in PyTorch first, for example {cast}, and save the file again"
    )

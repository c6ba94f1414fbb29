"""A tensor inside a PyTorch archive: where its bits lie, and how they become an ``mx.array``.

Shapes and strides count elements, as in PyTorch. Everything runs on MLX's CPU stream, the only one
that knows float64, and moves bits through unsigned integers, so that no value changes.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import numpy as np

from convert.pt_archive import PtArchive
from convert.pt_dtypes import ElementType

_MAX_DIMENSIONS = 64
MAX_MLX_SIZE = 2**31 - 1  # MLX counts an axis in int32
_MAX_EXPANDED_BYTES = 64 * 2**20  # a stride of 0 can make terabytes of four bytes


@dataclass(frozen=True)
class StorageRef:
    """One flat buffer of the archive, the record ``data/<key>``."""

    key: str
    nbytes: int
    element: ElementType | None  # None: untyped, the tensor says what the bytes are


@dataclass(frozen=True)
class TensorSpec:
    """A strided view of a storage, checked to lie inside it."""

    storage: StorageRef
    element: ElementType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conjugate: bool = False  # PyTorch's lazy conj() and the negation it leaves in .imag
    negative: bool = False

    def __post_init__(self) -> None:
        numbers = (self.offset, *self.shape, *self.strides)
        if any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
            raise ValueError(
                "holds a tensor with a bad offset, shape or stride: damaged or hostile"
            )
        if len(self.shape) != len(self.strides) or len(self.shape) > _MAX_DIMENSIONS:
            raise ValueError(
                f"holds a tensor of {len(self.shape)} axes and {len(self.strides)} strides, "
                f"expected as many, {_MAX_DIMENSIONS} at most: damaged or hostile"
            )
        self._check_bounds()

    def _check_bounds(self) -> None:
        if (self.offset + self.span) * self.element.itemsize > self.storage.nbytes:
            raise ValueError(
                f"holds a tensor that reaches outside its storage of {self.storage.nbytes} bytes: "
                "damaged or hostile"
            )
        if self.nbytes > max(self.storage.nbytes, _MAX_EXPANDED_BYTES):
            raise ValueError(
                f"expands {self.storage.nbytes} bytes to a tensor of {self.nbytes}; "
                "save tensor.clone() of the unexpanded tensor in PyTorch"
            )
        if max((*self.shape, 0 if self.is_contiguous else self.span), default=0) > MAX_MLX_SIZE:
            raise ValueError(
                "holds a tensor with an axis of 2**31 elements or more, past MLX's limit"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor when it is laid out by itself."""
        return math.prod(self.shape) * self.element.itemsize

    @property
    def span(self) -> int:
        """Elements from the first to the last one used, both included."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        axes = [(n, s) for n, s in zip(self.shape, self.strides, strict=True) if n != 1]
        if 0 in self.shape or not axes:
            return True
        return axes[-1][1] == 1 and all(a[1] == b[0] * b[1] for a, b in pairwise(axes))


class PtTensor:
    """A tensor that stays in the file until ``load`` is called."""

    __slots__ = ("_archive", "_spec")

    def __init__(self, archive: PtArchive, spec: TensorSpec) -> None:
        self._archive = archive
        self._spec = spec
        archive.check_storage(spec.storage.key, spec.storage.nbytes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes, () for a scalar tensor."""
        return self._spec.shape

    @property
    def dtype(self) -> mx.Dtype:
        """The MLX type that ``load`` returns; nothing is converted."""
        return self._spec.element.mlx

    @property
    def nbytes(self) -> int:
        """Bytes of the loaded array."""
        return self._spec.nbytes

    @property
    def storage(self) -> StorageRef:
        """The buffer the tensor is a view of; tied tensors name the same ``key``."""
        return self._spec.storage

    def __repr__(self) -> str:
        return f"PtTensor(shape={self.shape}, dtype={self.dtype})"

    def load(self) -> mx.array:
        """Read the tensor; only the bytes it spans, in one piece of memory of its own.

        Returns:
            A row-contiguous array of ``shape`` and ``dtype``. A float64 one can be used on the CPU
            stream only: cast it with ``astype(mx.float32, stream=mx.cpu)`` for the GPU.

        Raises:
            ValueError: if the file was closed, cut short or damaged since it was opened.
        """
        spec = self._spec
        if spec.is_contiguous:
            return self._finish(self._read(spec.shape, spec.offset))
        flat = self._read((spec.span,), spec.offset)
        view = mx.as_strided(flat, spec.shape, spec.strides, 0, stream=mx.cpu)
        return self._finish(mx.contiguous(view, stream=mx.cpu))

    @property
    def storage_size(self) -> int:
        """Elements of the whole storage."""
        return self.storage.nbytes // self._spec.element.itemsize

    def load_storage(self) -> mx.array:
        """Read the whole storage, ``MAX_MLX_SIZE`` elements at most, flat, for ``view``."""
        return self._read((self.storage_size,), 0)

    def view(self, storage: mx.array) -> mx.array:
        """The tensor as a view of ``load_storage``'s array: tied tensors share their memory."""
        spec = self._spec
        if 0 in spec.shape:
            return mx.zeros(spec.shape, dtype=self.dtype, stream=mx.cpu)
        return self._finish(
            mx.as_strided(storage, spec.shape, spec.strides, spec.offset, stream=mx.cpu)
        )

    def _read(self, shape: tuple[int, ...], offset: int) -> mx.array:
        """Fill a new array in place, so that no second copy exists even for a moment."""
        element = self._spec.element
        bits = mx.zeros(shape, dtype=element.raw, stream=mx.cpu)
        mx.eval(bits)
        if bits.size:
            target = np.array(bits, copy=False).reshape(-1).view(np.uint8)  # the same memory
            self._archive.fill(
                f"data/{self.storage.key}",
                target.data,
                start=offset * element.itemsize,
                swap_bytes=element.swap_bytes,
            )
        return mx.view(bits, element.mlx, stream=mx.cpu)

    def _finish(self, values: mx.array) -> mx.array:
        if self._spec.conjugate:
            values = mx.conjugate(values, stream=mx.cpu)
        if self._spec.negative:
            values = mx.negative(values, stream=mx.cpu)
        mx.eval(values)
        return values

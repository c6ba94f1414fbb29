"""The forms in which a Core ML package holds a weight matrix: float16, codes or a palette.

A `StoredWeight` writes itself into a MIL program and knows what will be read back, to the bit, as
coremltools defines the operations. What Core ML's own arithmetic makes of them is not known here.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.coreml_codes import Codes, chunks
from convert.coreml_palette import Palettes
from convert.mil_tools import coremltools

Var = Any  # a coremltools MIL variable; coremltools has no types to import


@dataclass(frozen=True, kw_only=True)
class StoredWeight(ABC):
    """A matrix (out, in) in the form in which the package holds it.

    Attributes:
        note: what is not as asked, in words for the user; empty where all is.
    """

    note: str = ""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out, in)."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes in the package's weight file, without alignment."""

    @abstractmethod
    def emit(self, name: str) -> Var:
        """Add the matrix to the open MIL builder context; its value is float16 (out, in).

        Use the one result for all that reads the matrix: a second call stores it again.
        """

    @abstractmethod
    def rows(self, part: slice) -> np.ndarray:
        """Rows as float16: the bits that the package's operations give."""

    @abstractmethod
    def scaled(self, rows: slice, exponent: int) -> "StoredWeight | None":
        """The same matrix with some rows multiplied by 2^-exponent.

        Returns:
            None where that is not exact: where a stored number or a weight read back would lose
            bits or overflow, or where the rows share a palette with others.
        """

    def decompressed(self) -> np.ndarray:
        """The whole matrix as float32: the bits that the package's operations give."""
        result = np.empty(self.shape, np.float32)
        for part in chunks(*self.shape):
            result[part] = self.rows(part)
        return result

    def _if_exact(self, other: "StoredWeight", rows: slice, exponent: int) -> bool:
        """Whether what is read of ``other``'s rows is exactly ours times 2^-exponent."""
        start, stop, _ = rows.indices(self.shape[0])
        parts = (
            slice(start + part.start, start + part.stop)
            for part in chunks(stop - start, self.shape[1])
        )
        return all(
            np.array_equal(
                np.ldexp(self.rows(part).astype(np.float32), -exponent), other.rows(part)
            )
            for part in parts
        )


def _times_power(values: np.ndarray, rows: slice, exponent: int) -> np.ndarray | None:
    """Float16 values with the rows times 2^-exponent; None where bits are lost."""
    exact = np.ldexp(values[rows].astype(np.float32), -exponent)
    result = values.copy()
    with np.errstate(over="ignore"):
        result[rows] = exact
    return result if np.array_equal(result[rows], exact) else None


@dataclass(frozen=True, kw_only=True)
class Dense(StoredWeight):
    """Plain float16: ``values`` (out, in)."""

    values: np.ndarray

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, columns = self.values.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        """Bytes, packed."""
        return self.values.nbytes

    def emit(self, name: str) -> Var:
        """See `StoredWeight.emit`."""
        builder = coremltools("converters.mil").Builder
        return builder.const(val=self.values, name=name)

    def rows(self, part: slice) -> np.ndarray:
        """See `StoredWeight.rows`."""
        return self.values[part]

    def scaled(self, rows: slice, exponent: int) -> "Dense | None":
        """See `StoredWeight.scaled`."""
        values = _times_power(self.values, rows, exponent)
        return None if values is None else replace(self, values=values)


@dataclass(frozen=True, kw_only=True)
class Affine(StoredWeight):
    """Integer codes with a scale, and perhaps an offset, for each block of the input axis."""

    stored: Codes

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, columns = self.stored.codes.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        """Bytes, packed."""
        stored = self.stored
        offset = 0 if stored.offset is None else _packed_bytes(stored.offset, stored.bits)
        return _packed_bytes(stored.codes, stored.bits) + stored.scale.nbytes + offset

    def emit(self, name: str) -> Var:
        """See `StoredWeight.emit`."""
        builder = coremltools("converters.mil").Builder
        stored = self.stored
        integer = _integer_type(f"int{stored.bits}")
        inputs = {"data": stored.codes.astype(integer), "scale": stored.scale}
        if stored.offset is not None:
            kept = stored.offset.dtype == np.float16
            inputs["offset"] = stored.offset if kept else stored.offset.astype(integer)
        return builder.constexpr_blockwise_shift_scale(**inputs, name=name)

    def rows(self, part: slice) -> np.ndarray:
        """See `StoredWeight.rows`."""
        # Sums and products in float32, each rounded to float16 once: float16 arithmetic.
        scale = self.stored.scale[part][..., None].astype(np.float32)
        codes = self.stored.codes[part]
        values = codes.reshape(*scale.shape[:2], -1).astype(np.float32)
        if self.stored.offset is not None:
            values -= self.stored.offset[part][..., None].astype(np.float32)
            values = values.astype(np.float16).astype(np.float32)
        return (values * scale).astype(np.float16).reshape(codes.shape)

    def scaled(self, rows: slice, exponent: int) -> "Affine | None":
        """See `StoredWeight.scaled`."""
        scale = _times_power(self.stored.scale, rows, exponent)
        if scale is None:
            return None
        result = replace(self, stored=replace(self.stored, scale=scale))
        return result if self._if_exact(result, rows, exponent) else None


@dataclass(frozen=True, kw_only=True)
class Palette(StoredWeight):
    """Indices into a palette for each block of rows, or of rows and columns."""

    stored: Palettes

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, columns = self.stored.indices.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        """Bytes, packed."""
        return _packed_bytes(self.stored.indices, self.stored.bits) + self.stored.values.nbytes

    def emit(self, name: str) -> Var:
        """See `StoredWeight.emit`."""
        builder = coremltools("converters.mil").Builder
        indices = self.stored.indices.astype(_integer_type(f"uint{self.stored.bits}"))
        lut = self.stored.values[..., None]  # (row groups, column groups, 2^bits, 1)
        return builder.constexpr_lut_to_dense(indices=indices, lut=lut, name=name)

    def rows(self, part: slice) -> np.ndarray:
        """See `StoredWeight.rows`."""
        indices, values = self.stored.indices[part], self.stored.values
        group = np.arange(*part.indices(self.shape[0])) // self._height
        block = np.arange(values.shape[1])
        within = indices.reshape(len(group), len(block), -1)
        found: np.ndarray = values[group[:, None, None], block[:, None], within]
        return found.reshape(indices.shape)

    @property
    def _height(self) -> int:
        return self.shape[0] // self.stored.values.shape[0]

    def scaled(self, rows: slice, exponent: int) -> "Palette | None":
        """See `StoredWeight.scaled`."""
        start, stop, _ = rows.indices(self.shape[0])
        if start % self._height or stop % self._height:
            return None
        groups = slice(start // self._height, stop // self._height)
        values = _times_power(self.stored.values, groups, exponent)
        return None if values is None else replace(self, stored=replace(self.stored, values=values))


def _packed_bytes(values: np.ndarray, bits: int) -> int:
    """Bytes of float16 numbers, or of integers packed in ``bits``."""
    return values.nbytes if values.dtype == np.float16 else (values.size * bits + 7) // 8


def _integer_type(name: str) -> np.dtype:
    """NumPy's dtype for a type of MIL: those under 8 bits carry their true type as metadata."""
    types = coremltools("converters.mil.mil").types
    return np.dtype(types.type_mapping.string_to_nptype(name))

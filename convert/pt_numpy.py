"""NumPy scalars and arrays inside a pickle, built from checked parts only.

NumPy's own ``__setstate__`` trusts its pickle; here types, shapes and lengths are checked first,
and object arrays, which hold further pickles, are refused.
"""

import math
import re
from collections.abc import Callable

import numpy as np

_CODES = re.compile(r"b1|[iu][1248]|f[248]|c(8|16)|[SU][0-9]{1,6}")
_MAX_DIMENSIONS = 32


class NumpyDtype:
    """A ``numpy.dtype`` being built: its code comes first, its byte order later."""

    __slots__ = ("code", "order")

    def __init__(self, code: object, *_: object) -> None:
        """Take the arguments of ``numpy.dtype``: a code such as ``f8``, align, copy."""
        if not isinstance(code, str) or not _CODES.fullmatch(code):
            raise ValueError(
                f"refuses NumPy data of type {str(code)[:40]!r}: "
                "only numbers, booleans and strings are read"
            )
        self.code = code
        self.order = "="

    def set_state(self, state: object) -> None:
        """Take the byte order from ``(version, order, subdtype, names, fields, ...)``."""
        if not isinstance(state, tuple) or len(state) < 5 or state[1] not in ("<", ">", "=", "|"):
            raise TypeError("a bad NumPy type")
        if any(part is not None for part in state[2:5]):
            raise ValueError("refuses NumPy data with fields: only plain numbers are read")
        self.order = state[1]

    def numpy(self) -> "np.dtype[np.generic]":
        """The finished type."""
        order = "=" if self.order == "|" else self.order
        return np.dtype(self.code).newbyteorder(order)  # type: ignore[arg-type]  # checked above


def set_array_state(
    array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]", state: object
) -> None:
    """Fill an empty array from ``(version, shape, dtype, is_fortran, bytes)``, in place."""
    if not isinstance(state, tuple) or len(state) != 5:
        raise TypeError("a bad NumPy array")
    _, shape, dtype, is_fortran, data = state
    made = _array(data, dtype, shape)
    assert isinstance(data, (bytes, bytearray))  # _array checked it
    checked = (1, made.shape, made.dtype, bool(is_fortran), bytes(data))
    array.__setstate__(checked)  # type: ignore[arg-type]  # the stub wants numpy.bool, NumPy bool


def _array(
    data: object, dtype: object, shape: object, order: str = "C"
) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    """A view of ``data``, whose length has to be exactly that of the array."""
    if not isinstance(data, (bytes, bytearray)) or not isinstance(dtype, NumpyDtype):
        raise TypeError("a NumPy array of no bytes")
    if not isinstance(shape, tuple) or len(shape) > _MAX_DIMENSIONS or order not in ("C", "F"):
        raise TypeError("a NumPy array of no shape")
    if any(type(size) is not int or size < 0 for size in shape):
        raise TypeError("a NumPy array of a bad shape")
    kind = dtype.numpy()
    if math.prod(shape) * kind.itemsize != len(data):
        raise TypeError("a NumPy array whose bytes do not fill its shape")
    return np.ndarray(shape, kind, data, order="F" if order == "F" else "C")


def _scalar(dtype: object, data: object) -> object:
    return _array(data, dtype, ())[()]


def _from_buffer(data: object, dtype: object, shape: object, order: str) -> object:
    return _array(data, dtype, shape, order).copy(order="A")


def _reconstruct(*_: object) -> object:
    """The empty array that a BUILD opcode fills; its class is always ``numpy.ndarray``."""
    return np.ndarray((0,), np.dtype("b"))


NUMPY_GLOBALS: dict[str, Callable[..., object]] = {
    "numpy.dtype": NumpyDtype,
    **{
        f"numpy.{core}.{name}": function
        for core in ("core", "_core")
        for name, function in (
            ("multiarray.scalar", _scalar),
            ("multiarray._reconstruct", _reconstruct),
            ("numeric._frombuffer", _from_buffer),
        )
    },
}

"""Weight files: read as coremltools' own reader reads them; torn and mislabelled ones refused."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.mil_blob import BlobFile
from convert.mil_tools import coremltools
from convert.mil_types import TensorType, unpack

pytestmark = pytest.mark.slow  # importing coremltools takes seconds

# Element type -> what coremltools' writer and reader call it.
STORED = {
    "FLOAT16": "fp16",
    "FLOAT32": "float",
    "INT4": "int4",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "UINT1": "uint1",
    "UINT2": "uint2",
    "UINT3": "uint3",
    "UINT4": "uint4",
    "UINT6": "uint6",
    "UINT8": "uint8",
    "UINT16": "uint16",
    "UINT32": "uint32",
}
SHAPE = (3, 7)  # 21 numbers: none of the packed types fills its last byte


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """One tensor of each element type in one file, and where their headers are."""
    path = tmp_path_factory.mktemp("blob") / "weight.bin"
    writer = coremltools("libmilstoragepython")._BlobStorageWriter(str(path))
    rng = np.random.default_rng(1)
    offsets = {}
    for dtype, name in STORED.items():
        offsets[dtype] = getattr(writer, f"write_{name}_data")(_numbers(rng, dtype, name))
    del writer
    return path, offsets


def _numbers(rng: np.random.Generator, dtype: str, name: str) -> np.ndarray:
    if dtype == "FLOAT32":
        return rng.standard_normal(21).astype(np.float32)
    if dtype == "FLOAT16":
        return rng.standard_normal(21).astype(np.float16).view(np.uint16)
    bits = int(dtype.lstrip("UINT"))
    low = 0 if dtype.startswith("U") else -(2 ** (bits - 1))
    values = rng.integers(low, low + 2**bits, 21)
    if bits in (1, 2, 3, 4, 6):
        types = coremltools("converters.mil.mil").types
        return values.astype(types.nptype_from_builtin(types.string_to_builtin(name)))
    return values.astype(name)


@pytest.mark.parametrize("dtype", STORED)
def test_every_element_type_reads_as_coremltools_reads_it(
    dtype: str, stored: tuple[Path, dict[str, int]]
) -> None:
    path, offsets = stored
    reader = coremltools("libmilstoragepython")._BlobStorageReader(str(path))
    expected = np.array(getattr(reader, f"read_{STORED[dtype]}_data")(offsets[dtype]))
    if dtype == "FLOAT16":
        expected = expected.astype(np.uint16).view(np.float16)
    found = BlobFile(path).read(offsets[dtype], TensorType(dtype, SHAPE))
    assert found.shape == SHAPE
    np.testing.assert_array_equal(found.ravel(), expected.astype(found.dtype))


def _patched(stored: tuple[Path, dict[str, int]], to: Path, change: Callable[[Any], None]) -> Path:
    data = bytearray(stored[0].read_bytes())
    change(data)
    to.write_bytes(data)
    return to


def _header(offset: int, layout: str, place: int, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(layout, data, offset + place, value)


INT8 = TensorType("INT8", SHAPE)


@pytest.mark.parametrize(
    ("layout", "place", "value", "message"),
    [
        ("<I", 0, 7, r"has no header \(the marker is 0x7\)"),
        ("<I", 4, 3, r"is uint8, the program declares int8 \[3, 7\]"),
        ("<I", 4, 99, "is of type 99, the program declares int8"),
        ("<Q", 8, 20, r"has 20 bytes .* the program declares int8 \[3, 7\]: 168 bits"),
        ("<Q", 16, 65, "has data at 65, not a multiple of 64"),
        ("<Q", 16, 1 << 40, "ends at 1099511627797, past the end of the file .* cut short"),
    ],
)
def test_a_damaged_header_is_refused(
    layout: str,
    place: int,
    value: int,
    message: str,
    stored: tuple[Path, dict[str, int]],
    tmp_path: Path,
) -> None:
    offset = stored[1]["INT8"]
    path = _patched(stored, tmp_path / "weight.bin", _header(offset, layout, place, value))
    with pytest.raises(ValueError, match=message):
        BlobFile(path).read(offset, INT8)


def test_wrong_padding_of_packed_numbers_is_refused(
    stored: tuple[Path, dict[str, int]], tmp_path: Path
) -> None:
    offset = stored[1]["UINT4"]
    path = _patched(stored, tmp_path / "weight.bin", _header(offset, "<Q", 24, 0))
    with pytest.raises(ValueError, match=r"11 bytes \(0 bits of padding\)"):
        BlobFile(path).read(offset, TensorType("UINT4", SHAPE))


def test_a_file_cut_short_is_refused(stored: tuple[Path, dict[str, int]], tmp_path: Path) -> None:
    last = max(stored[1].values())
    torn = tmp_path / "weight.bin"
    torn.write_bytes(stored[0].read_bytes()[: last + 70])
    with pytest.raises(ValueError, match="past the end of the file"):
        BlobFile(torn).read(last, TensorType("UINT32", SHAPE))
    torn.write_bytes(stored[0].read_bytes()[: last + 10])
    with pytest.raises(ValueError, match="past the end of the file"):
        BlobFile(torn).read(last, TensorType("UINT32", SHAPE))
    torn.write_bytes(b"\4\0\0\0")
    with pytest.raises(ValueError, match="4 bytes, too short for a weight file"):
        BlobFile(torn)


def test_an_offset_that_is_no_header_is_refused(stored: tuple[Path, dict[str, int]]) -> None:
    with pytest.raises(ValueError, match="is not at a multiple of 64"):
        BlobFile(stored[0]).read(stored[1]["INT8"] + 8, INT8)


def test_another_version_and_a_missing_file_are_refused(
    stored: tuple[Path, dict[str, int]], tmp_path: Path
) -> None:
    path = _patched(stored, tmp_path / "weight.bin", _header(0, "<I", 4, 1))
    with pytest.raises(ValueError, match="weight file of version 1, expected 2"):
        BlobFile(path)
    with pytest.raises(FileNotFoundError, match="weights are missing"):
        BlobFile(tmp_path / "none.bin")


def test_bytes_that_do_not_fill_a_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 bytes hold no uint4 \[7\], which takes 4"):
        unpack(b"abc", TensorType("UINT4", (7,)))
    with pytest.raises(ValueError, match=r"float32 \[\?\] has no fixed size"):
        unpack(b"abc", TensorType("FLOAT32", (None,)))

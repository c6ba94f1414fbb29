"""The zip container of a PyTorch file: finds its records and reads their bytes, checked.

It knows zip, byte order and what other files look like; it knows no tensors and no pickles.
PyTorch stores records uncompressed (``caffe2/serialize/inline_container.cc``), so a record's bytes
are read straight from the file. They are not memory-mapped: mapped pages would count as memory.
"""

import struct
import threading
import zipfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

_CHUNK_BYTES = 16 * 2**20
_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, ..., length of name, length of extra field
_ENCRYPTED = 0x1
_MAX_ITEMSIZE = 16  # PyTorch declares whole elements; an odd storage may hold a part of one more
_LEGACY_MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # LONG1 of torch's magic number
_RESAVE = "re-save it in PyTorch 1.6 or later with torch.save(torch.load(f), f)"
_COPY_AGAIN = "copy or download it again"


class PtArchive:
    """An open PyTorch archive; records are named without the archive's folder."""

    def __init__(self, path: Path) -> None:
        """Open and check a file.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it is not a whole archive written by ``torch.save`` of PyTorch >= 1.6.
        """
        self.path = path
        _refuse_other_formats(path)
        self._lock = threading.Lock()
        self._file = path.open("rb")
        try:
            self._length = path.stat().st_size
            self._records = self._index()
            self._swap = False
            self._swap = self._is_big_endian()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; tensors not yet loaded can no longer be."""
        self._file.close()

    def read(self, name: str, limit: int) -> bytes:
        """All bytes of a small record.

        Raises:
            ValueError: if it is missing, larger than ``limit`` bytes, or damaged.
        """
        size = self._record(name).file_size
        if size > limit:
            raise self._error(f"{name} takes {size} bytes, more than the {limit} that are read")
        data = bytearray(size)
        if size:
            self.fill(name, memoryview(data))
        return bytes(data)

    def check_storage(self, key: str, nbytes: int) -> None:
        """Refuse a storage whose declared size is not what its record holds."""
        size = self._record(f"data/{key}").file_size
        if not nbytes <= size < nbytes + _MAX_ITEMSIZE:
            raise self._error(
                f"storage {key!r} declares {nbytes} bytes but its record holds {size}: "
                f"damaged or hostile; {_COPY_AGAIN}"
            )

    def fill(self, name: str, target: memoryview, *, start: int = 0, swap_bytes: int = 1) -> None:
        """Read bytes ``start ...`` of a record into ``target``, in native byte order.

        A record read whole is checked against its CRC-32, unless that is 0, which is what
        ``torch.serialization.set_crc32_options(False)`` leaves.

        Args:
            name: the record.
            target: writable, of bytes; filled to its end.
            start: first byte wanted.
            swap_bytes: width of the numbers, swapped if the archive is big-endian.

        Raises:
            ValueError: if the file is closed, cut short or damaged.
        """
        if self._file.closed:
            raise self._error("is closed; load its tensors inside the `with PtFile(...)` block")
        record = self._record(name)
        crc = 0
        with self._lock:  # tensors may be loaded from several threads
            self._file.seek(self._data_offset(record) + start)
            for at in range(0, len(target), _CHUNK_BYTES):
                with target[at : at + _CHUNK_BYTES] as part:
                    if self._file.readinto(part) != len(part):
                        raise self._error(f"ends inside {name}: truncated; {_COPY_AGAIN}")
                    crc = zlib.crc32(part, crc)
        if len(target) == record.file_size and record.CRC not in (0, crc):
            raise self._error(f"{name} does not match its checksum: damaged; {_COPY_AGAIN}")
        if self._swap and swap_bytes > 1:
            np.frombuffer(target, dtype=f"u{swap_bytes}").byteswap(inplace=True)

    def _index(self) -> dict[str, zipfile.ZipInfo]:
        """Records by name, all in one folder that holds data.pkl."""
        try:
            with zipfile.ZipFile(self._file) as archive:
                entries = archive.infolist()
        except (
            zipfile.BadZipFile,
            struct.error,
            ValueError,
            NotImplementedError,
            OSError,
        ) as error:
            raise self._error(
                f"is a truncated or damaged PyTorch archive ({_one_line(error)}); {_COPY_AGAIN}"
            ) from error
        roots = [e.filename[: -len("data.pkl")] for e in entries if _is_pickle(e.filename)]
        names = {e.filename for e in entries}
        if any(name.endswith("/constants.pkl") or "/code/" in name for name in names):
            raise self._error(
                "is a TorchScript program, not a checkpoint; save its weights in PyTorch with "
                "torch.save(torch.jit.load(f).state_dict(), g)"
            )
        if len(roots) != 1 or len(names) != len(entries):
            raise self._error(
                "is a zip file but not a PyTorch checkpoint: expected exactly one folder with "
                "data.pkl in it, as torch.save writes"
            )
        if any(e.compress_type != zipfile.ZIP_STORED or e.flag_bits & _ENCRYPTED for e in entries):
            raise self._error(
                "holds compressed or encrypted records, which torch.save never writes: unpack it "
                "and pack it again with `zip -0 -r`"
            )
        if any(
            e.compress_size != e.file_size or not 0 <= e.header_offset < self._length
            for e in entries
        ) or (sum(e.file_size for e in entries) > self._length):  # records may not overlap
            raise self._error("declares more bytes than it has: damaged or hostile")
        start = len(roots[0])
        return {e.filename[start:]: e for e in entries if e.filename.startswith(roots[0])}

    def _record(self, name: str) -> zipfile.ZipInfo:
        record = self._records.get(name)
        if record is None:
            raise self._error(f"lacks the record {name!r}: damaged; {_COPY_AGAIN}")
        return record

    def _data_offset(self, record: zipfile.ZipInfo) -> int:
        """Where the bytes begin: after a local header whose extra field pads to 64 bytes."""
        self._file.seek(record.header_offset)
        header = self._file.read(_LOCAL_HEADER.size)
        if len(header) == _LOCAL_HEADER.size and header.startswith(b"PK\x03\x04"):
            _, name_length, extra_length = _LOCAL_HEADER.unpack(header)
            return record.header_offset + _LOCAL_HEADER.size + int(name_length) + int(extra_length)
        raise self._error(f"{record.filename!r} has no zip header: damaged; {_COPY_AGAIN}")

    def _is_big_endian(self) -> bool:
        if "byteorder" not in self._records:
            return False  # PyTorch before 2.1 wrote none, and ran on little-endian machines
        order = self.read("byteorder", limit=16).strip()
        if order not in (b"little", b"big"):
            raise self._error(f"has byte order {order!r}, expected b'little' or b'big'")
        return order == b"big"

    def _error(self, message: str) -> ValueError:
        return ValueError(f"{self.path}: {message}")


def _is_pickle(name: str) -> bool:
    return name.endswith("/data.pkl") and name.count("/") == 1


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _refuse_other_formats(path: Path) -> None:
    """Say what a file is that is no zip archive, and how to get one."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path}: no such file; give the path of a PyTorch .pt or .bin file"
        )
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; give the path of a PyTorch .pt or .bin file in it")
    if not path.is_file():
        raise ValueError(f"{path}: is not a regular file; give the path of a PyTorch .pt file")
    with path.open("rb") as file:
        head = file.read(512)
    if not head.startswith(b"PK\x03\x04"):
        raise ValueError(f"{path}: {_what_it_is(head)}")


def _what_it_is(head: bytes) -> str:
    if not head:
        return f"is empty; {_COPY_AGAIN}"
    if _LEGACY_MAGIC in head[:16]:
        return f"is in PyTorch's format of before 1.6; {_RESAVE}"
    if head[257:262] == b"ustar":
        return f"is a tar file, PyTorch's format of before 0.2 if it is a checkpoint; {_RESAVE}"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself; run `git lfs pull` in its repository"
    if head[8:10] == b'{"':
        return "is a safetensors file, not a PyTorch one; `openelm convert huggingface` reads it"
    if head[0] == 0x80:
        return "is a plain pickle, not written by torch.save; save it again with torch.save"
    return "is not a PyTorch file: expected a zip archive written by torch.save of PyTorch >= 1.6"

"""Files opened for reading their uncompressed bytes: as they are, gzip or zstandard."""

import gzip
import io
import zlib
from pathlib import Path
from typing import IO, Any, cast

SUFFIXES = (".gz", ".zst")
_CHUNK = 1 << 20


class DamagedFileError(Exception):
    """The rest of a file cannot be read."""


# What reading a damaged file raises, compressed or not.
BROKEN = (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError, DamagedFileError)


def open_bytes(path: Path, offset: int = 0) -> IO[bytes]:
    """Open a file by its name.

    Args:
        path: with .gz or .zst at the end where it is compressed.
        offset: uncompressed bytes to pass over; free in a plain file, read in others.

    Raises:
        ImportError: naming the extra, if zstandard is needed and not installed.
        OSError: if the file cannot be opened.
        Exception: one of ``BROKEN``, if it is damaged; reading raises these too.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        plain = path.open("rb")
        plain.seek(offset)
        return plain
    raw: Any = gzip.GzipFile(path, "rb") if suffix == ".gz" else _ZstandardFile(path)
    file = cast("IO[bytes]", io.BufferedReader(raw, _CHUNK))
    while offset and (skipped := len(file.read(min(offset, _CHUNK)))):
        offset -= skipped
    return file


class _ZstandardFile(io.RawIOBase):
    """Frames of zstandard one after another; unlike the package's own reader, tells a cut one."""

    def __init__(self, path: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ImportError(
                f'reading {path} needs zstandard: pip install "openelm-mlx[data]"',
                name="zstandard",
            ) from error
        self._error = zstandard.ZstdError
        self._new = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        self._frame: Any = None
        self._file = path.open("rb")
        self._compressed = b""
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` as far as there is something at hand; 0 at the end."""
        while not len(self._plain):
            self._compressed = self._compressed or self._file.read(_CHUNK >> 4)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the compressed file ends early")
                return 0
            self._decompress()
        count = min(len(buffer), len(self._plain))
        buffer[:count], self._plain = self._plain[:count], self._plain[count:]
        return count

    def _decompress(self) -> None:
        self._frame = self._frame or self._new()
        try:
            self._plain = memoryview(self._frame.decompress(self._compressed))
        except self._error as error:
            raise DamagedFileError(str(error)) from error
        self._compressed = self._frame.unused_data
        if self._frame.eof:
            self._frame = None

    def close(self) -> None:
        """Close the file underneath too."""
        if not self.closed:
            self._file.close()
        super().close()

"""PyTorch archives put together by hand: they judge the reader without torch or our writer."""

import pickle
import struct
import zipfile
from pathlib import Path

import openelm_mlx  # noqa: F401 - loads OpenBLAS before mlx

from convert import pt_file  # isort: skip

REBUILD_V2 = b"ctorch._utils\n_rebuild_tensor_v2\n"
HOOKS = b"ccollections\nOrderedDict\n)R"


def push(value: object) -> bytes:
    """Opcodes that push a plain value."""
    return pickle.dumps(value, protocol=2)[2:-1]


def storage_opcodes(kind: str, key: str, size: int) -> bytes:
    """Opcodes that push the storage ``data/<key>``."""
    module, _, name = kind.rpartition(".")
    return (
        b"("
        + push("storage")
        + f"c{module or 'torch'}\n{name}\n".encode()
        + push(key)
        + push("cpu")
        + push(size)
        + b"tQ"
    )


def tensor_opcodes(
    kind: str,
    size: int,
    shape: object,
    strides: object,
    *,
    offset: object = 0,
    key: str = "0",
    tail: bytes = b"",
    function: bytes = REBUILD_V2,
) -> bytes:
    """Opcodes that push a tensor; ``tail`` follows the hooks (a dtype, metadata)."""
    arguments = push(offset) + push(shape) + push(strides) + b"\x89" + HOOKS + tail
    return function + b"(" + storage_opcodes(kind, key, size) + arguments + b"tR"


def whole(opcodes: bytes) -> bytes:
    """A protocol 2 pickle of some opcodes."""
    return b"\x80\x02" + opcodes + b"."


def save(
    path: Path,
    data_pkl: bytes,
    storages: dict[str, bytes] | None = None,
    *,
    byteorder: bytes = b"little",
    compression: int = zipfile.ZIP_STORED,
    extra: dict[str, bytes] | None = None,
) -> Path:
    """Write an archive around a pickle."""
    records = {"data.pkl": data_pkl, "byteorder": byteorder, "version": b"3\n", **(extra or {})}
    records |= {f"data/{key}": data for key, data in (storages or {}).items()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(f"hand/{name}", data)
    return path


def clear_checksums(path: Path) -> None:
    """Set every CRC-32 of the central directory to 0, as torch does when told not to compute it."""
    data = bytearray(path.read_bytes())
    at = data.find(b"PK\x01\x02")
    while at >= 0:
        data[at + 16 : at + 20] = struct.pack("<I", 0)
        at = data.find(b"PK\x01\x02", at + 4)
    path.write_bytes(data)


def refusal(path: Path) -> str:
    """The message a file is refused with, after the file's name."""
    tree, message = outcome(path)
    assert message is not None, f"{path} was read as {tree}"
    return message


def outcome(path: Path) -> tuple[object, str | None]:
    """What a file gives: its tree, or else the well-formed message of its refusal."""
    try:
        return pt_file.read(path), None
    except ValueError as error:
        message = str(error)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    assert message.count(str(path)) == 1
    assert len(message) < len(str(path)) + 500
    return None, message.removeprefix(f"{path}: ")

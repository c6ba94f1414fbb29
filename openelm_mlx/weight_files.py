"""Tensors of a model folder: find, check and read them; write them in shards as they come.

Knows file layouts (safetensors, sharded, ``.npz``, PyTorch ``.bin``), not what the tensors mean.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

SHARD_BYTES = 5 << 30  # as mlx_lm and Hugging Face write
_INDEX = "model.safetensors.index.json"
_LAYOUTS = (  # in order of preference; an index names its files, a pattern finds them
    *(_INDEX, "model.safetensors", "model*.safetensors"),
    *("weights.safetensors.index.json", "weights.safetensors", "weights*.safetensors"),
    *("pytorch_model.bin.index.json", "pytorch_model.bin", "pytorch_model*.bin", "weights.npz"),
)
_TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_NOT_IN_MLX = ("F64", "F8_", "F4", "F6_")  # MLX refuses the first and reads the others as integers


class StoredTensor(Protocol):
    """A tensor of an open file: an ``mx.array`` (lazy), or what becomes one by ``load()``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""

    @property
    def dtype(self) -> mx.Dtype:
        """The type in the file."""


def find_weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's tensors, one layout only, in order.

    Raises:
        FileNotFoundError: if there are none, or an index names a shard that is missing; the
            message lists what was looked for.
        ValueError: if an index is damaged.
    """
    for pattern in _LAYOUTS:
        if pattern.endswith(".index.json"):
            files = _indexed_files(folder / pattern)
        else:
            files = sorted(folder.glob(pattern))
        if files:
            return files
    raise FileNotFoundError(f"{folder} holds no weights: looked for {', '.join(_LAYOUTS)}")


def _indexed_files(index: Path) -> list[Path]:
    """The shards that an index names, none where there is no index."""
    if not index.is_file():
        return []
    entries = read_json(index).get("weight_map")
    names = list(entries.values()) if isinstance(entries, dict) else []
    if not names or not all(isinstance(n, str) and n == Path(n).name for n in names):
        raise ValueError(
            f"{index} is damaged: weight_map must give each tensor the name of a file beside it; "
            "download the folder again"
        )
    files = [index.parent / name for name in sorted(set(names))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{index.parent}: {index.name} names {len(missing)} of {len(files)} files that are "
            f"missing, first {missing[0]}; download the folder again"
        )
    return files


def read_weights(folder: Path) -> dict[str, mx.array]:
    """All tensors of a model folder, lazily where the format allows.

    Args:
        folder: with any of the layouts of :func:`find_weight_files`.

    Returns:
        name -> array in the file's dtype.

    Raises:
        FileNotFoundError: if there are none.
        ValueError: if a file is truncated or damaged.
    """
    with open_weights(folder) as tensors:
        return {name: load_tensor(tensor) for name, tensor in tensors.items()}


@contextmanager
def open_weights(folder: Path) -> Iterator[dict[str, StoredTensor]]:
    """The tensors of a folder without their values, which :func:`load_tensor` reads.

    Take them out of the dictionary as they are used, and a folder larger than memory passes
    through; arguments and errors as :func:`read_weights`.
    """
    with ExitStack() as files:
        tensors: dict[str, StoredTensor] = {}
        for file in find_weight_files(folder):
            tensors.update(files.enter_context(open_tensor_file(file)))
        yield tensors


def load_tensor(tensor: StoredTensor) -> mx.array:
    """The array of an entry of :func:`open_weights`; lazy unless the file is PyTorch's."""
    return tensor if isinstance(tensor, mx.array) else tensor.load()  # type: ignore[attr-defined]


def read_tensor_file(file: Path) -> dict[str, mx.array]:
    """All tensors of one file; see :func:`read_weights`."""
    with open_tensor_file(file) as tensors:
        return {name: load_tensor(tensor) for name, tensor in tensors.items()}


@contextmanager
def open_tensor_file(file: Path) -> Iterator[dict[str, StoredTensor]]:
    """The tensors of one ``.safetensors``, ``.npz`` or PyTorch ``.bin`` / ``.pt`` file."""
    if file.suffix in _TORCH_SUFFIXES:
        from convert.pt_file import PtFile

        with PtFile(file) as archive:
            yield dict(archive.state_dict())
        return
    yield _map_file(file)  # not kept here: every tensor would stay in memory after its use


def _map_file(file: Path) -> dict[str, StoredTensor]:
    """MLX's lazy arrays of a file."""
    if file.suffix == ".safetensors":
        _refuse_foreign_types(file, check_safetensors(file))
    try:
        loaded: Any = mx.load(str(file))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {one_line(error)}; is it complete?") from error
    return dict(loaded)


def _refuse_foreign_types(file: Path, header: dict[str, Any]) -> None:
    for name, entry in header.items():
        dtype = "" if name == "__metadata__" else str(entry.get("dtype"))
        if dtype.startswith(_NOT_IN_MLX):
            raise ValueError(
                f"{file}: {name} is stored as {dtype}, which MLX cannot read; convert the "
                "checkpoint to float32 or bfloat16 first"
            )


def check_safetensors(file: Path) -> dict[str, Any]:
    """Read the header of a safetensors file and hold it against the file's size.

    Returns:
        The header: tensor name -> dtype, shape and offsets, and ``__metadata__``.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no safetensors file, truncated or padded.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(
                f"{file} is no complete safetensors file: its header claims {length} bytes and the "
                f"file has {size}; download or convert it again"
            )
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            ends = [int(v["data_offsets"][1]) for k, v in header.items() if k != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{file} is no safetensors file: its header is damaged; download it again"
            ) from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ValueError(
            f"{file} is truncated or damaged: {size} bytes where its header says {expected}; "
            "download or convert it again"
        )
    return header


class ShardWriter:
    """Writes tensors to ``model.safetensors``, or to numbered shards when they fill.

    Args:
        folder: an existing folder, usually from ``atomic_folder``.
        shard_bytes: the size at which the next shard begins.
        form: the ``format`` in the files' metadata; transformers insists on "pt".
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES, form: str = "mlx") -> None:
        self.folder, self.shard_bytes, self.form = folder, shard_bytes, form
        self._pending: dict[str, mx.array] = {}
        self._shards: list[list[str]] = []
        self._bytes = self.total_bytes = 0

    def add(self, name: str, array: mx.array) -> None:
        """Take one tensor; writes and forgets the shard before it if it is full."""
        if self._pending and self._bytes + array.nbytes > self.shard_bytes:
            self._flush()
        self._pending[name] = array
        self._bytes += array.nbytes
        self.total_bytes += array.nbytes

    def close(self) -> None:
        """Write the last shard, give all their final names and write the index."""
        self._flush()
        count = len(self._shards)
        weight_map = {}
        for i, names in enumerate(self._shards):
            final = "model.safetensors" if count == 1 else shard_name(i, count)
            os.rename(self._part(i), self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            write_json(self.folder / _INDEX, index)

    def _flush(self) -> None:
        if self._pending or not self._shards:
            write_tensor_file(self._part(len(self._shards)), self._pending, form=self.form)
            self._shards.append(list(self._pending))
            self._pending, self._bytes = {}, 0
            mx.clear_cache()  # the shard's buffers would otherwise stay with MLX's allocator

    def _part(self, index: int) -> Path:
        return self.folder / f"part-{index:05d}.safetensors"


def shard_name(index: int, count: int) -> str:
    """``model-00001-of-00002.safetensors``: Hugging Face's name for shard ``index`` from 0."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_weights(folder: Path, tensors: Iterable[tuple[str, mx.array]]) -> int:
    """Write tensors through a :class:`ShardWriter`; return their bytes."""
    writer = ShardWriter(folder)
    for name, array in tensors:
        writer.add(name, array)
    writer.close()
    return writer.total_bytes


def write_tensor_file(file: Path, tensors: Mapping[str, mx.array], form: str = "mlx") -> None:
    """Write one ``.safetensors`` file.

    Raises:
        OSError: if the disk is full or the file cannot be made.
    """
    try:
        mx.save_safetensors(str(file), dict(tensors), metadata={"format": form})
    except RuntimeError as error:
        raise OSError(f"{file} cannot be written ({one_line(error)}); is the disk full?") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it does not hold a JSON object; with line and column.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} must hold a JSON object, not a {type(value).__name__}")
    return value


def write_json(file: Path, value: object) -> None:
    """Write JSON, indented, keys in the given order, ending in a newline."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def one_line(error: BaseException) -> str:
    """An exception's message folded to one line."""
    return " ".join(str(error).split()) or type(error).__name__

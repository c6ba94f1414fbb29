"""Read and write PyTorch checkpoints (``.pt``, ``.bin``) without PyTorch, every value bit for bit.

``read`` loads a whole file, ``PtFile`` one tensor at a time, ``write`` makes a file that
``torch.load(path, weights_only=True)`` reads. Reading executes nothing: names outside the list in
``pt_globals`` are refused. The work is done by ``pt_archive`` (zip), ``pt_unpickler`` (pickle),
``pt_globals`` and ``pt_numpy`` (what names mean), ``pt_tensor`` (layout) and ``pt_writer``.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import mlx.core as mx

from convert.pt_archive import PtArchive
from convert.pt_globals import MEANING, finish_leaf
from convert.pt_tensor import MAX_MLX_SIZE, PtTensor, TensorSpec
from convert.pt_unpickler import unpickle
from convert.pt_writer import write

__all__ = ["PtFile", "PtTensor", "read", "write"]

_MAX_PICKLE_BYTES = 256 * 2**20
_MAX_DEPTH = 100  # containers inside containers
_STATE_DICT_KEYS = ("model_state_dict", "state_dict", "model")  # CoreNet's, Lightning's, others'


def read(path: str | Path) -> Any:
    """Read a whole file.

    Tensors that share a storage (tied weights) share their memory. float64 stays float64, which
    MLX computes with on the CPU stream only; cast it with ``astype(mx.float32, stream=mx.cpu)``.

    Args:
        path: a file of ``torch.save``, PyTorch >= 1.6, at either byte order.

    Returns:
        The object tree: dictionaries, lists, tuples, scalars, strings and ``None`` as they were
        saved; tensors and parameters as ``mx.array``; ``torch.Size`` as tuple, ``torch.device`` as
        str, ``torch.dtype`` as ``mx.Dtype``; NumPy scalars and arrays as NumPy's.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, no PyTorch checkpoint, or holds anything but plain tensors
            and containers. Nothing in it is executed.
    """
    with PtFile(path) as file:
        return _load_tensors(file.tree)


class PtFile:
    """An open checkpoint whose tensors stay on disk until they are asked for.

    ``tree`` is the object tree of ``read`` with a ``PtTensor`` in place of each tensor. A file
    larger than memory is converted by loading, writing and dropping one tensor after another.
    """

    tree: Any

    def __init__(self, path: str | Path) -> None:
        """Open a file and read all but its tensors.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: as ``read`` does.
        """
        self.path = Path(path)
        self._archive = PtArchive(self.path)
        try:
            self.tree = _map_leaves(self._unpickle(), self._open_leaf)
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
        self._archive.close()

    def state_dict(self) -> dict[str, PtTensor]:
        """The model's weights: name -> tensor, in the file's order.

        They are the whole file, or what a training checkpoint keeps under ``model_state_dict``,
        ``state_dict`` or ``model``.

        Raises:
            ValueError: if there is no mapping of names to tensors at these places.
        """
        tree = self.tree
        if not isinstance(tree, dict):
            raise ValueError(
                f"{self.path}: holds a {type(tree).__name__}, expected a state dict or a "
                "dictionary with one; save model.state_dict() in PyTorch"
            )
        for weights in (tree, *(tree.get(key) for key in _STATE_DICT_KEYS)):
            if isinstance(weights, dict) and _is_state_dict(weights):
                return dict(weights)
        listed = ", ".join(repr(key)[:60] for key in list(tree)[:20]) or "none"
        raise ValueError(
            f"{self.path}: no state dict found: expected names with tensors, alone or under "
            f"{', '.join(_STATE_DICT_KEYS)}; the top-level keys are {listed}"
        )

    def _unpickle(self) -> Any:
        data = self._archive.read("data.pkl", limit=_MAX_PICKLE_BYTES)
        try:
            return _map_leaves(unpickle(data, MEANING), finish_leaf)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error

    def _open_leaf(self, value: object) -> object:
        return PtTensor(self._archive, value) if isinstance(value, TensorSpec) else value


def _is_state_dict(value: dict[Any, Any]) -> bool:
    return len(value) > 0 and all(
        isinstance(name, str) and isinstance(tensor, PtTensor) for name, tensor in value.items()
    )


def _load_tensors(tree: Any) -> Any:
    """Replace each ``PtTensor`` by its array; views that overlap share one array in memory."""
    views: dict[tuple[str, mx.Dtype], list[PtTensor]] = defaultdict(list)
    _map_leaves(tree, lambda value: _note(value, views))
    storages: dict[tuple[str, mx.Dtype], mx.array] = {}

    def load(value: object) -> object:
        if not isinstance(value, PtTensor):
            return value
        place = (value.storage.key, value.dtype)
        apart = sum(view.nbytes for view in views[place]) <= value.storage.nbytes
        if apart or value.storage_size > MAX_MLX_SIZE:
            return value.load()
        if place not in storages:
            storages[place] = value.load_storage()
        return value.view(storages[place])

    return _map_leaves(tree, load)


def _note(value: object, views: dict[tuple[str, mx.Dtype], list[PtTensor]]) -> object:
    if isinstance(value, PtTensor):
        views[value.storage.key, value.dtype].append(value)
    return value


def _map_leaves(tree: Any, leaf: Callable[[object], object]) -> Any:
    """Replace all that is no container by ``leaf(it)``; objects found twice stay one object."""
    done: dict[int, tuple[Any, Any]] = {}  # id -> object, kept alive, and its replacement

    def visit(value: Any, depth: int) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if id(value) in done:
            return done[id(value)][1]
        if depth > _MAX_DEPTH:
            raise ValueError(f"nests containers more than {_MAX_DEPTH} deep: damaged or hostile")
        if not isinstance(value, tuple):  # a tuple that holds itself ends at the depth limit
            done[id(value)] = (value, value)
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = visit(item, depth + 1)
        elif isinstance(value, (list, deque)):
            for index, item in enumerate(value):
                value[index] = visit(item, depth + 1)
        elif isinstance(value, tuple):
            done[id(value)] = (value, tuple(visit(item, depth + 1) for item in value))
        elif not isinstance(value, (set, frozenset)):
            done[id(value)] = (value, leaf(value))
        return done[id(value)][1]

    return visit(tree, 0)

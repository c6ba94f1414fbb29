"""The allow-list: every name a PyTorch pickle may use, and what is built for it.

Nothing named in a file is imported or looked up; a name that is not in these tables is refused.
Sources: pytorch ``torch/_utils.py``, ``torch/_tensor.py``, ``torch/_weights_only_unpickler.py``
(torch 2.13) and what ``pickle`` writes for Python's and NumPy's own types.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from convert.pt_containers import FACTORIES, PYTHON_GLOBALS
from convert.pt_dtypes import (
    BY_MLX,
    BY_NAME,
    BY_STORAGE,
    UNSUPPORTED_NAMES,
    UNSUPPORTED_STORAGES,
    UNTYPED_STORAGE,
    ElementType,
    no_mlx_type,
)
from convert.pt_numpy import NUMPY_GLOBALS, NumpyDtype, set_array_state
from convert.pt_tensor import StorageRef, TensorSpec
from convert.pt_unpickler import Global, Meaning

_PYTHON_2_NAMES = {"__builtin__.xrange": "builtins.range"}  # what protocols 0 to 2 write
_DTYPE_ALIASES = {"half": "float16", "float": "float32", "double": "float64", "cfloat": "complex64"}
_UNTYPED = Global("torch.storage.UntypedStorage")
_TENSOR_CLASSES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")


def find_global(module: str, name: str) -> object:
    """What a name in a pickle stands for.

    Returns:
        An ``mx.Dtype`` for a torch dtype (its name, a string, where MLX has no such type), an
        ``ElementType`` for a storage class, else a ``Global``.

    Raises:
        ValueError: if the name is not on the allow-list, or is a storage MLX has no type for.
    """
    if module == "torch":
        constant = _torch_constant(name)
        if constant is not None:
            return constant
    full = f"{module}.{name}"
    full = _PYTHON_2_NAMES.get(full, full.replace("__builtin__.", "builtins.", 1))
    if full not in _GLOBALS:
        raise ValueError(
            f"refuses to load {full[:200]!r}: only plain tensors and containers are read; if you "
            "trust the file, save its weights alone in PyTorch: "
            "d = torch.load(f, weights_only=False); "
            "torch.save(d['model_state_dict'], g), with the key that holds them"
        )
    return _GLOBALS[full]


def _torch_constant(name: str) -> object:
    dtype = _DTYPE_ALIASES.get(name, name)
    if dtype in BY_NAME:
        return BY_NAME[dtype].mlx
    if dtype in UNSUPPORTED_NAMES:
        return f"torch.{dtype}"
    if name in UNSUPPORTED_STORAGES:
        raise no_mlx_type(UNSUPPORTED_STORAGES[name])
    return BY_STORAGE.get(name)


def find_persistent(key: object) -> StorageRef:
    """A storage, from the id ``("storage", class, key, device, number of elements)``."""
    if type(key) is not tuple or len(key) != 5 or key[0] != "storage":
        raise TypeError("a persistent id that is no storage")
    _, kind, name, _, size = key
    if type(name) is not str or type(size) is not int or size < 0:
        raise TypeError("a storage with a bad key or size")
    if kind is _UNTYPED:
        return StorageRef(name, size, None)
    if type(kind) is not ElementType:
        raise TypeError("a storage of no known class")
    return StorageRef(name, size * kind.itemsize, kind)


def set_state(target: object, state: object) -> None:
    """Apply the state of a BUILD opcode; attributes, such as ``_metadata``, are left out."""
    if isinstance(target, NumpyDtype):
        target.set_state(state)
    elif type(target) is np.ndarray:
        set_array_state(target, state)
    elif not isinstance(target, (OrderedDict, defaultdict, Counter, deque)):
        raise ValueError(
            f"refuses to set the state of a {type(target).__name__}: "
            "only plain tensors and containers are read"
        )


MEANING = Meaning(find_global=find_global, find_persistent=find_persistent, set_state=set_state)


def finish_leaf(value: object) -> object:
    """Turn what only makes sense inside a pickle into a value, or refuse it.

    Raises:
        ValueError: if a bare class, function or storage stands where a value is expected.
    """
    if isinstance(value, NumpyDtype):
        return value.numpy()
    if isinstance(value, Global):
        raise ValueError(
            f"refuses to load {value.name!r} as a value: only plain tensors and containers are read"
        )
    if isinstance(value, (StorageRef, ElementType)):
        raise ValueError("holds a bare storage; save the tensor over it instead")
    return value


def _rebuild_tensor(
    storage: object, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *rest: object
) -> TensorSpec:
    """torch._utils._rebuild_tensor, and _v2, whose rest is requires_grad, hooks, metadata."""
    if type(storage) is not StorageRef or storage.element is None:
        raise TypeError("a tensor without a typed storage")
    return _spec(storage, storage.element, (offset, shape, strides), rest[2:])


def _rebuild_tensor_v3(
    storage: object,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
    hooks: object,
    dtype: object,
    *metadata: object,
) -> TensorSpec:
    """torch._utils._rebuild_tensor_v3: an untyped storage and a dtype."""
    if isinstance(dtype, str):
        raise no_mlx_type(dtype.removeprefix("torch."))
    if type(storage) is not StorageRef or type(dtype) is not mx.Dtype:
        raise TypeError("a tensor without a storage or dtype")
    return _spec(storage, BY_MLX[dtype], (offset, shape, strides), metadata)


def _spec(
    storage: StorageRef,
    element: ElementType,
    layout: tuple[int, tuple[int, ...], tuple[int, ...]],
    metadata: tuple[object, ...],
) -> TensorSpec:
    offset, shape, strides = layout
    flags = metadata[0] if metadata else {}
    if type(shape) is not tuple or type(strides) is not tuple:
        raise TypeError("a shape that is no tuple")
    if not isinstance(flags, dict) or not flags.keys() <= {"conj", "neg"}:
        raise TypeError("tensor metadata other than conj and neg")
    return TensorSpec(
        storage,
        element,
        offset,
        shape,
        strides,
        conjugate=bool(flags.get("conj", False)),
        negative=bool(flags.get("neg", False)),
    )


def _rebuild_parameter(data: object, *_: object) -> TensorSpec:
    """torch._utils._rebuild_parameter: requires_grad, hooks and attributes are left out."""
    if type(data) is not TensorSpec:
        raise TypeError("a parameter of what is no tensor")
    return data


def _rebuild_from_type(function: object, kind: object, arguments: object, _: object) -> object:
    """torch._tensor._rebuild_from_type_v2: a tensor with Python attributes, or a subclass."""
    if type(kind) is not Global or kind.name not in _TENSOR_CLASSES:
        raise TypeError("a tensor of no known class")
    if type(function) is not Global or function.name not in _TENSOR_FUNCTIONS:
        raise TypeError("a tensor made by no known function")
    if type(arguments) is not tuple:
        raise TypeError("arguments that are no tuple")
    return _TENSOR_FUNCTIONS[function.name](*arguments)


def _device(kind: str, index: int | None = None) -> str:
    return str(kind)[:64] if index is None else f"{str(kind)[:64]}:{index:d}"


def _layout(name: str) -> str:
    return str(name)[:64]


def _size(*sizes: object) -> tuple[object, ...]:
    return tuple(sizes[0]) if sizes and isinstance(sizes[0], (tuple, list)) else ()


_TENSOR_FUNCTIONS: dict[str, Callable[..., object]] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
}
_FUNCTIONS: dict[str, Callable[..., object]] = {
    **_TENSOR_FUNCTIONS,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    **PYTHON_GLOBALS,
    **NUMPY_GLOBALS,
}
_GLOBALS: dict[str, Global] = {
    **{name: Global(name) for name in (*FACTORIES, *_TENSOR_CLASSES, "numpy.ndarray")},
    **{name: Global(name, build) for name, build in _FUNCTIONS.items()},
    _UNTYPED.name: _UNTYPED,
    f"torch.{UNTYPED_STORAGE}": _UNTYPED,
}

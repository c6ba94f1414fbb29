"""A pickle interpreter that calls nothing of Python's: it builds plain containers.

``pickletools`` decodes the opcodes and this module runs them. It knows nothing of PyTorch: its
caller decides what a name stands for, and only the caller's ``Global`` objects are ever called.
Whatever else a pickle can do (instances of classes, attributes, extension codes) is refused.
"""

import pickletools
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

_MAX_OPCODES = 20_000_000
_MAX_KEY_DEPTH = 2  # hashing a key must be neither deep nor long
_MAX_KEY_ITEMS = 16
_KEYS = (type(None), bool, int, float, complex, str, bytes, np.generic)
_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset, deque)

_LITERALS = frozenset(
    "INT LONG LONG1 LONG4 BININT BININT1 BININT2 FLOAT BINFLOAT UNICODE BINUNICODE "  # noqa: SIM905 - a table of words reads better
    "SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8".split()
)
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_EMPTY: dict[str, type] = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set}
_TUPLE_LENGTH = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = frozenset({"PROTO", "FRAME"})


@dataclass(frozen=True, eq=False)
class Global:
    """What an allowed name stands for in a pickle."""

    name: str  # module and name
    build: Callable[..., object] | None = None  # checks its arguments itself; None: never called


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """The caller's side of a pickle. Each function raises ValueError for what it does not allow."""

    find_global: Callable[[str, str], object]  # module, name -> constant or Global
    find_persistent: Callable[[object], object]  # persistent id -> object
    set_state: Callable[[object, object], None]  # object, state of a BUILD opcode


def unpickle(data: bytes, meaning: Meaning) -> object:
    """Run a pickle.

    Args:
        data: the pickle, protocol 0 to 5.
        meaning: what names, persistent ids and states stand for.

    Returns:
        Containers, scalars and what ``meaning`` returned.

    Raises:
        ValueError: in one line, if the pickle is damaged, too large, or does what is not allowed.
    """
    machine = _Machine(data, meaning)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pickletools, on stray backslashes in damaged names
            return machine.run()
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__} {error}".split())[:200]
        raise ValueError(f"its data.pkl is damaged: {reason}") from error


def is_plain_key(value: object, depth: int = 0) -> bool:
    """Whether a value may be a dictionary key or a set's element: a scalar or a small tuple."""
    if isinstance(value, _KEYS):
        return True
    if type(value) is not tuple or depth >= _MAX_KEY_DEPTH or len(value) > _MAX_KEY_ITEMS:
        return False
    return all(is_plain_key(item, depth + 1) for item in value)


def _opcodes(data: bytes) -> Iterator[tuple[str, Any]]:
    """Name and argument of each opcode up to STOP."""
    opcodes = pickletools.genops(data)
    while True:
        try:
            opcode, argument, _ = next(opcodes)
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"its data.pkl is damaged: {reason}") from error
        if opcode.name == "STOP":
            return
        yield opcode.name, argument


class _Machine:
    """The stack, its marks, and the memo. Stacks hold ``Any``: each opcode checks what it pops."""

    def __init__(self, data: bytes, meaning: Meaning) -> None:
        self.data = data
        self.meaning = meaning
        self.stack: list[Any] = []
        self.marked: list[list[Any]] = []  # stacks below the open marks
        self.memo: dict[int, Any] = {}
        self.budget = 4 * len(data) + 2**20  # items that calls may copy: stops memoized bombs

    def run(self) -> object:
        """Interpret every opcode and return what STOP leaves."""
        for count, (name, argument) in enumerate(_opcodes(self.data)):
            if count >= _MAX_OPCODES:
                raise ValueError(f"its data.pkl takes more than {_MAX_OPCODES} steps to read")
            self.step(name, argument)
        if self.marked or len(self.stack) != 1:
            raise ValueError("its data.pkl is damaged: it does not end with one object")
        return self.stack[0]

    def step(self, name: str, argument: Any) -> None:
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name in _TUPLE_LENGTH:
            self.stack.append(self.pop_tuple(_TUPLE_LENGTH[name]))
        elif name in _OPERATIONS:
            _OPERATIONS[name](self, argument)
        elif name not in _IGNORED:
            raise ValueError(
                f"refuses the pickle opcode {name}: only plain tensors and containers are read"
            )

    def push(self, value: Any) -> None:
        self.stack.append(value)  # a method: `stack` is another list after pop_mark

    def pop_tuple(self, length: int) -> tuple[Any, ...]:
        if len(self.stack) < length:
            raise IndexError("pop from an empty stack")
        items = tuple(self.stack[-length:])
        del self.stack[-length:]
        return items

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marked.pop()
        return items

    def mark(self, _: Any) -> None:
        self.marked.append(self.stack)
        self.stack = []

    def put(self, argument: Any) -> None:
        self.memo[int(argument)] = self.stack[-1]

    def charge(self, arguments: tuple[Any, ...]) -> None:
        """Count what a call may copy; a pickle that copies one memoized object for ever stops."""
        self.budget -= sum(len(item) for item in arguments if isinstance(item, _SIZED))
        if self.budget < 0:
            raise ValueError("its data.pkl unfolds to far more than its size: damaged or hostile")

    def find_global(self, argument: Any) -> None:
        module, _, name = str(argument).partition(" ")
        self.stack.append(self.meaning.find_global(module, name))

    def find_stack_global(self, _: Any) -> None:
        module, name = self.pop_tuple(2)
        if type(module) is not str or type(name) is not str:
            raise TypeError("names must be strings")
        self.stack.append(self.meaning.find_global(module, name))

    def reduce(self, _: Any) -> None:
        target, arguments = self.pop_tuple(2)
        if type(arguments) is not tuple:
            raise TypeError("arguments must be a tuple")
        if type(target) is not Global or target.build is None:
            shown = target.name if type(target) is Global else type(target).__name__
            raise ValueError(
                f"refuses to call {shown!r}: only plain tensors and containers are read"
            )
        self.charge(arguments)
        self.stack.append(target.build(*arguments))

    def build(self, _: Any) -> None:
        target, state = self.pop_tuple(2)
        self.charge(state if type(state) is tuple else ())
        self.meaning.set_state(target, state)
        self.stack.append(target)

    def append(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], (list, deque)):
            raise TypeError("append to what is no list")
        self.stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise TypeError("items for what is no dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key)] = value

    def add_items(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not set:
            raise TypeError("elements for what is no set")
        self.stack[-1].update(_key(item) for item in items)

    def new_dict(self, _: Any) -> None:
        items = self.pop_mark()
        self.stack.append({})
        self.set_items(items)


def _key(value: Any) -> Any:
    if not is_plain_key(value):
        raise ValueError(
            f"uses a {type(value).__name__} as a dictionary key or set element; "
            "expected strings, numbers or small tuples of them"
        )
    return value


_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": _Machine.mark,
    "POP": lambda m, _: m.stack.pop() and None,
    "POP_MARK": lambda m, _: m.pop_mark().clear(),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "PUT": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": lambda m, _: m.put(len(m.memo)),
    "GET": lambda m, index: m.push(m.memo[index]),
    "BINGET": lambda m, index: m.push(m.memo[index]),
    "LONG_BINGET": lambda m, index: m.push(m.memo[index]),
    "TUPLE": lambda m, _: m.push(tuple(m.pop_mark())),
    "LIST": lambda m, _: m.push(m.pop_mark()),
    "DICT": _Machine.new_dict,
    "FROZENSET": lambda m, _: m.push(frozenset(map(_key, m.pop_mark()))),
    "APPEND": lambda m, _: m.append([m.stack.pop()]),
    "APPENDS": lambda m, _: m.append(m.pop_mark()),
    "SETITEM": lambda m, _: m.set_items(list(m.pop_tuple(2))),
    "SETITEMS": lambda m, _: m.set_items(m.pop_mark()),
    "ADDITEMS": lambda m, _: m.add_items(m.pop_mark()),
    "GLOBAL": _Machine.find_global,
    "STACK_GLOBAL": _Machine.find_stack_global,
    "REDUCE": _Machine.reduce,
    "NEWOBJ": _Machine.reduce,
    "BUILD": _Machine.build,
    "BINPERSID": lambda m, _: m.push(m.meaning.find_persistent(m.stack.pop())),
}

"""Python's own containers inside a pickle, built from checked parts and never of a bare length."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable

from convert.pt_unpickler import Global, is_plain_key


def _encode(text: str, encoding: str) -> bytes:
    """_codecs.encode, which is how protocols 0 to 2 write bytes."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise TypeError("an encoding other than latin1")
    return text.encode("latin-1")


def _bytes(*nothing: object) -> bytes:
    if nothing:
        raise TypeError("bytes of something")
    return b""


def _bytearray(*content: object) -> bytearray:
    """From bytes, or the (str, "latin-1") of protocols 0 to 2; never of a length."""
    if not content:
        return bytearray()
    if len(content) == 2 and isinstance(content[0], str):
        return bytearray(_encode(content[0], str(content[1])))
    if len(content) == 1 and isinstance(content[0], bytes):
        return bytearray(content[0])
    raise TypeError("a bytearray of no bytes")


def _complex(real: float, imaginary: float) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError("a complex number of no two floats")
    return complex(real, imaginary)


def _range(start: int, stop: int, step: int) -> range:
    return range(start, stop, step)


def _elements(items: object) -> list[object]:
    if type(items) is not list or not all(map(is_plain_key, items)):
        raise TypeError("elements other than strings, numbers and small tuples")
    return items


def _ordered_dict(*nothing: object) -> OrderedDict[object, object]:
    if nothing:
        raise TypeError("an OrderedDict made with arguments")
    return OrderedDict()


def _defaultdict(factory: object = None) -> defaultdict[object, object]:
    if factory is None:
        return defaultdict(None)
    if type(factory) is not Global or factory.name not in FACTORIES:
        raise TypeError("a defaultdict of no plain container or number")
    return defaultdict(FACTORIES[factory.name])


def _counter(*items: object) -> Counter[object]:
    counter: Counter[object] = Counter()
    if items:
        if type(items[0]) is not dict:
            raise TypeError("a Counter of no dictionary")
        dict.update(counter, items[0])
    return counter


def _deque(items: object = (), limit: int | None = None) -> deque[object]:
    if not isinstance(items, (tuple, list)):
        raise TypeError("a deque of no list")
    return deque(items, limit)


FACTORIES: dict[str, Callable[[], object]] = {
    "builtins.list": list,
    "builtins.dict": dict,
    "builtins.set": set,
    "builtins.int": int,
    "builtins.float": float,
    "collections.OrderedDict": OrderedDict,
}
PYTHON_GLOBALS: dict[str, Callable[..., object]] = {
    "_codecs.encode": _encode,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "builtins.range": _range,
    "builtins.set": lambda items: set(_elements(items)),
    "builtins.frozenset": lambda items: frozenset(_elements(items)),
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _defaultdict,
    "collections.Counter": _counter,
    "collections.deque": _deque,
}

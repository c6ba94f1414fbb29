"""From a value in a YAML file, or a word on the command line, to what a dataclass field holds.

Knows Python's annotations and YAML 1.1's habits: it reads ``1e-4`` as text and ``off`` as false.
"""

import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

Annotation = Any  # a type, Literal, union or sequence, as typing.get_type_hints gives it

_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_SEQUENCES = (list, tuple, Sequence)


def convert(value: object, annotation: Annotation) -> Any:
    """A value as a field wants it.

    Args:
        value: as YAML gives it; text that spells a number will do for one.
        annotation: of the field: bool, int, float, str, Path, None, Literal, a union of these, or a
            sequence of one of them.

    Returns:
        The value; sequences as tuples.

    Raises:
        ValueError: "must be ..., got ...", to stand after the key.
        TypeError: for an annotation of another kind, which is a mistake in the program.
    """
    if _form(annotation) in (Union, types.UnionType):
        return _union(value, annotation)
    if _form(annotation) is Literal:
        return _literal(value, annotation)
    if _form(annotation) in _SEQUENCES:
        return _sequence(value, annotation)
    if annotation not in _SCALARS:
        raise TypeError(f"no recipe can hold a field of type {annotation}")
    return _SCALARS[annotation](value)


def from_text(text: str, annotation: Annotation) -> Any:
    """A word of the command line as a field wants it; for a sequence, one of its items.

    Raises:
        ValueError: see :func:`convert`.
    """
    if admits(annotation, type(None)) and text.lower() in ("none", "null"):
        return None
    if admits(annotation, bool) and text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    return convert(text, item_of(annotation) or annotation)


def describe(annotation: Annotation) -> str:
    """What an annotation admits, in words."""
    if _form(annotation) in (Union, types.UnionType):
        return " or ".join(describe(member) for member in get_args(annotation))
    if _form(annotation) is Literal:
        values = [str(value) for value in get_args(annotation)]
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    if _form(annotation) in _SEQUENCES:
        return f"a list, each {describe(get_args(annotation)[0])}"
    return _WORDS.get(annotation, str(annotation))


def admits(annotation: Annotation, kind: type) -> bool:
    """Whether an annotation is ``kind``, or a union with it."""
    return annotation is kind or kind in members_of(annotation)


def members_of(annotation: Annotation) -> tuple[Annotation, ...]:
    """The members of a union; an annotation of another kind is its own only one."""
    union = _form(annotation) in (Union, types.UnionType)
    return get_args(annotation) if union else (annotation,)


def item_of(annotation: Annotation) -> Annotation | None:
    """What the items of a sequence are; None where there can be no sequence."""
    for member in members_of(annotation):
        if _form(member) in _SEQUENCES:
            return get_args(member)[0]
    return None


def _form(annotation: Annotation) -> Any:
    return get_origin(annotation)


def _union(value: object, annotation: Annotation) -> Any:
    members = get_args(annotation)
    # Exact kinds first, or 1 would be taken for a float in `float | int`.
    exact = [m for m in members if isinstance(m, type) and type(value) is m]
    for member in [*exact, *(m for m in members if m not in exact)]:
        try:
            return convert(value, member)
        except ValueError:
            continue
    raise ValueError(_wrong(value, annotation))


def _literal(value: object, annotation: Annotation) -> Any:
    for admitted in get_args(annotation):
        if value == admitted and type(value) is type(admitted):
            return admitted
        if not isinstance(admitted, str) and value == str(admitted):
            return admitted
    raise ValueError(_wrong(value, annotation))


def _sequence(value: object, annotation: Annotation) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{_wrong(value, annotation)}; write [{value}] for a list of one")
    return tuple(convert(item, get_args(annotation)[0]) for item in value)


def _bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(_wrong(value, bool))


def _int(value: object) -> int:
    number = _number(value, int)
    if number != int(number):
        raise ValueError(_wrong(value, int))
    return int(number)


def _float(value: object) -> float:
    return float(_number(value, float))


def _number(value: object, kind: type) -> int | float:
    """The number that ``value`` is or spells, finite."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        number: int | float = value
    elif isinstance(value, str):
        try:
            number = int(value) if value.strip().lstrip("+-").isdigit() else float(value)
        except ValueError:
            raise ValueError(_wrong(value, kind)) from None
    else:
        raise ValueError(_wrong(value, kind))
    if not abs(number) < float("inf"):  # NaN is not less either
        raise ValueError(_wrong(value, kind))
    return number


def _str(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(_wrong(value, str))


def _path(value: object) -> Path:
    return Path(_str(value)).expanduser()


def _none(value: object) -> None:
    if value is not None:
        raise ValueError(_wrong(value, type(None)))


def _wrong(value: object, annotation: Annotation) -> str:
    hint = ""
    admits_text = any(m in (str, Path) or _form(m) is Literal for m in members_of(annotation))
    if admits_text and isinstance(value, bool | int | float):
        hint = "; put text that YAML reads as something else into quotes"
    shown = "nothing" if value is None else repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return f"must be {describe(annotation)}, got {shown}{hint}"


_SCALARS: dict[Annotation, Any] = {
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    Path: _path,
    type(None): _none,
    None: _none,
}
_WORDS: dict[Annotation, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    type(None): "none",
    None: "none",
}

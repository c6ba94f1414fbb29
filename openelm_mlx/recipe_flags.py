"""Settings dataclasses as keys, and keys as flags of ``argparse``.

A key is a field's name; its help is the field's own comment. Two dataclasses may share a key: its
one value goes to both, and the first one's default counts.
"""

import argparse
import linecache
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from openelm_mlx.recipe_values import (
    Annotation,
    admits,
    convert,
    describe,
    from_text,
    item_of,
    members_of,
)

_METAVARS = {int: "N", float: "X"}
_FIELD = re.compile(r"    (\w+): [^#]*(?:#\s*(.*))?$")


class _Unset:
    """What ``--flag none`` leaves in the namespace, where None means that nothing was given."""

    def __repr__(self) -> str:
        return "none"


UNSET = _Unset()


@dataclass(frozen=True, kw_only=True)
class Key:
    """One setting.

    Attributes:
        name: of the field, and of the key in a recipe.
        annotation: what it may hold.
        default: ``dataclasses.MISSING`` where it must be given.
        help: one line.
        words: what ``true`` and ``false`` stand for in a field of text, and what the bare flag
            means; from the field's metadata.
    """

    name: str
    annotation: Annotation
    default: Any
    help: str = ""
    words: Mapping[bool, str] = field(default_factory=dict)

    @property
    def flag(self) -> str:
        """``learning_rate`` -> ``--learning-rate``."""
        return "--" + self.name.replace("_", "-")

    def read(self, value: object) -> Any:
        """A value of a recipe as the field wants it.

        Raises:
            ValueError: "must be ..., got ...".
        """
        if isinstance(value, bool) and self.words:
            value = self.words[value]
        return convert(value, self.annotation)

    def read_text(self, text: str) -> Any:
        """A word of the command line as the field, or an item of it, wants it.

        Raises:
            argparse.ArgumentTypeError: "must be ..., got ...".
        """
        try:
            if self.words and text.lower() in ("true", "false"):
                return self.words[text.lower() == "true"]
            value = from_text(text, self.annotation)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return UNSET if value is None else value


def keys_of(*classes: type) -> dict[str, Key]:
    """The keys of some settings dataclasses, in order.

    Raises:
        TypeError: if two of them have a key with different types: a mistake in the program.
    """
    keys: dict[str, Key] = {}
    for cls in classes:
        hints, comments = get_type_hints(cls), _comments(cls)
        for item in fields(cls):
            if not item.init:
                continue
            key = Key(
                name=item.name,
                annotation=hints[item.name],
                default=_default(item),
                help=item.metadata.get("help", comments.get(item.name, "")),
                words=item.metadata.get("words", {}),
            )
            known = keys.setdefault(item.name, key)
            if known.annotation != key.annotation:
                raise TypeError(f"{cls.__name__}.{item.name} has another type in another class")
    return keys


def add_flags(
    parser: argparse.ArgumentParser,
    *classes: type,
    without: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add a flag for every key, in one group a dataclass.

    Flags that are not given leave None, so that a recipe's value can count. Booleans come as
    ``--x`` and ``--no-x``, lists as words after the flag; ``none`` is a value where it may be one.

    Args:
        parser: of a command.
        classes: settings dataclasses.
        without: keys that the command sets itself.
        defaults: values for the help where a recipe counts by default.
    """
    keys, seen = keys_of(*classes), set(without)
    for cls in classes:
        group = parser.add_argument_group(
            (cls.__doc__ or cls.__name__).partition("\n")[0].rstrip(".")
        )
        for item in fields(cls):
            if item.init and item.name not in seen:
                seen.add(item.name)
                key = keys[item.name]
                if defaults and item.name in defaults:
                    key = replace(key, default=defaults[item.name])
                group.add_argument(key.flag, **_options(key))


def words(*, true: str, false: str) -> dict[str, Any]:
    """Metadata of a text field that also takes ``true``, ``false`` and the bare flag."""
    return {"words": {True: true, False: false}}


def _options(key: Key) -> dict[str, Any]:
    """The arguments of ``add_argument`` for a key."""
    help_text = f"{key.help.replace('%', '%%')}{_shown_default(key)}".strip() or None
    if set(members_of(key.annotation)) <= {bool, type(None)}:
        return {"action": argparse.BooleanOptionalAction, "default": None, "help": help_text}
    options: dict[str, Any] = {
        "type": _named(key.read_text, describe(key.annotation)),
        "metavar": _metavar(key.annotation),
        "default": None,
        "help": help_text,
    }
    if item_of(key.annotation) is not None:
        options["nargs"] = "+"
    elif key.words or admits(key.annotation, bool):
        options |= {"nargs": "?", "const": key.words.get(True, True)}
    return options


def _named(reader: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return reader(text)

    read.__name__ = name  # argparse shows it
    return read


def _metavar(annotation: Annotation) -> str:
    shown = item_of(annotation) or annotation
    members = [m for m in members_of(shown) if m not in (type(None), bool)]
    literals = [str(v) for m in members if get_origin(m) is Literal for v in get_args(m)]
    if literals:
        return "{" + ",".join(literals) + "}"
    return _METAVARS.get(members[0], "TEXT") if members else "TEXT"


def _shown_default(key: Key) -> str:
    if key.default is MISSING or key.default is None or key.default == ():
        return ""
    value = key.default
    shown = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return f" (default {shown.lower() if isinstance(value, bool) else shown})".replace("%", "%%")


def _default(item: Any) -> Any:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _comments(cls: type) -> dict[str, str]:
    """Field -> the comment behind it, or on the lines above it."""
    module = sys.modules[cls.__module__]
    lines = linecache.getlines(getattr(module, "__file__", None) or "")
    start = next((i for i, line in enumerate(lines) if _begins(line, cls)), len(lines))
    found: dict[str, str] = {}
    above: list[str] = []
    for line in lines[start + 1 :]:
        if line.strip() and not line.startswith(" "):
            break
        match = _FIELD.match(line.rstrip())
        if match:
            found[match[1]] = match[2] or " ".join(above)
        above = [*above, line.strip("# \n")] if line.startswith("    #") else []
    return found


def _begins(line: str, cls: type) -> bool:
    return re.match(rf"class {cls.__name__}\b", line) is not None

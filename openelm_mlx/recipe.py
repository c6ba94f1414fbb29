"""Settings of a run: a YAML recipe and flags -> dataclasses. Flag, then recipe, then default.

A recipe is flat, each key a field of one of the run's dataclasses; a key that none has is an error.
Types are in ``recipe_values``, flags in ``recipe_flags``.
"""

import argparse
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from openelm_mlx.recipe_flags import UNSET, Key, keys_of
from openelm_mlx.recipe_flags import add_flags as add_flags
from openelm_mlx.recipe_flags import words as words

_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a recipe file holds.

    Attributes:
        source: where it was found, for messages.
        values: key -> value, as YAML gives it.
        lines: key -> its line, counted from 1.
    """

    source: str
    values: Mapping[str, Any]
    lines: Mapping[str, int]

    def where(self, key: str) -> str:
        """``finetune_lora.yaml line 3``."""
        return f"{self.source} line {self.lines[key]}" if key in self.lines else self.source


def recipe_names() -> list[str]:
    """The recipes that come with the package."""
    folder = files("openelm_mlx") / "recipes"
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


def load_recipe(name: str | Path) -> Recipe:
    """Read a recipe.

    Args:
        name: of a file, or of a recipe that comes with the package, such as ``finetune_lora``.

    Raises:
        FileNotFoundError: if there is none; the message lists those of the package.
        ValueError: if it is no YAML mapping, or names a key twice.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return _parse(path.read_text(encoding="utf-8-sig"), source=str(path))
    stem = str(name).removesuffix(".yaml")
    if stem in recipe_names():
        text = (files("openelm_mlx") / "recipes" / f"{stem}.yaml").read_text(encoding="utf-8")
        return _parse(text, source=f"{stem}.yaml")
    near = get_close_matches(stem, recipe_names(), n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise FileNotFoundError(
        f"no recipe {name}{hint}: there is no such file, and the package has "
        + ", ".join(recipe_names())
    )


def resolve(
    namespace: argparse.Namespace,
    recipe: Recipe | None,
    *classes: type,
    fixed: Mapping[str, Any] | None = None,
    unused: Mapping[str, str] | None = None,
) -> tuple[Any, ...]:
    """Settings dataclasses from flags, recipe and defaults, in that order.

    Args:
        namespace: what ``argparse`` made of the flags of :func:`add_flags`.
        recipe: from :func:`load_recipe`; None for none.
        classes: settings dataclasses.
        fixed: values of keys that the command sets itself; no recipe may hold them.
        unused: key -> why it has no effect in this run; setting it is an error.

    Returns:
        One instance a class, in order.

    Raises:
        ValueError: one line with all that is wrong: unknown keys with the nearest that exist,
            values of the wrong type with their line, and what the dataclasses themselves refuse.
    """
    fixed, unused = fixed or {}, unused or {}
    keys = {name: key for name, key in keys_of(*classes).items() if name not in fixed}
    problems, values, broken = _from_recipe(recipe, keys, unused)
    from_flags = _from_flags(namespace, {*keys, *unused})
    problems += [
        f"--{name.replace('_', '-')} has no effect: {unused[name]}"
        for name in from_flags
        if name in unused
    ]
    values |= {name: value for name, value in from_flags.items() if name in keys}
    broken -= set(from_flags)
    missing = {n for n, key in keys.items() if key.default is MISSING and n not in values} - broken
    problems += [f"{name} must be given" for name in sorted(missing)]
    defaults = {name: key.default for name, key in keys.items()}
    complete = {**defaults, **values, **fixed}

    instances = []
    for cls in classes:
        names = {item.name for item in fields(cls) if item.init}
        if names & (broken | missing):
            continue
        try:
            instances.append(cls(**{name: complete[name] for name in names}))
        except ValueError as error:
            problems.append(str(error) + _origin(str(error), recipe, names - set(from_flags)))
    if problems:
        raise ValueError("; ".join(problems))
    return tuple(instances)


def chosen(namespace: argparse.Namespace, recipe: Recipe | None, key: str, *classes: type) -> Any:
    """The value that one key will get, for a command that needs it before it can resolve all.

    A recipe's value of the wrong type gives the default; :func:`resolve` reports it.
    """
    known = keys_of(*classes)[key]
    if key in (flags := _from_flags(namespace, {key})):
        return flags[key]
    if recipe is not None and key in recipe.values:
        try:
            return known.read(recipe.values[key])
        except ValueError:
            return known.default
    return known.default


def pick_one(namespace: argparse.Namespace, recipe: Recipe | None, *names: str) -> str | None:
    """Which of some keys that exclude each other counts: a flag's before the recipe's.

    Returns:
        Its name; None if none was given.

    Raises:
        ValueError: if two were given in the same place.
    """
    by_flag = [n for n in names if getattr(namespace, n, None) not in (None, UNSET)]
    by_recipe = [n for n in names if recipe and recipe.values.get(n) is not None]
    found, where = (by_flag, "flags") if by_flag else (by_recipe, recipe.source if recipe else "")
    if len(found) > 1:
        raise ValueError(f"{where}: {' and '.join(found)} exclude each other; give one")
    return found[0] if found else None


def settings_of(*instances: Any) -> dict[str, Any]:
    """The settings of some dataclasses in one mapping, ready for JSON or YAML."""
    return {k: _plain(v) for instance in instances for k, v in asdict(instance).items()}


def render_settings(settings: Mapping[str, Any]) -> str:
    """Settings as lines of a recipe, which can be saved and used again."""
    width = max((len(key) for key in settings), default=0)
    return "".join(f"{key + ':':{width + 1}} {_yaml(value)}\n" for key, value in settings.items())


def _parse(text: str, *, source: str) -> Recipe:
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return Recipe(source=source, values={}, lines={})
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{source}: a recipe is a list of `key: value` lines")
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, line = str(loader.construct_object(key_node)), key_node.start_mark.line + 1
            if key in lines:
                raise ValueError(f"{source}: {key} stands on line {lines[key]} and {line}")
            values[key] = loader.construct_object(value_node, deep=True)
            lines[key] = line
    except yaml.YAMLError as error:
        raise ValueError(f"{source} is not YAML: {' '.join(str(error).split())}") from error
    return Recipe(source=source, values=values, lines=lines)


def _from_recipe(
    recipe: Recipe | None, keys: Mapping[str, Key], unused: Mapping[str, str]
) -> tuple[list[str], dict[str, Any], set[str]]:
    """Problems, values, and the keys whose values could not be read."""
    problems: list[str] = []
    values: dict[str, Any] = {}
    broken: set[str] = set()
    if recipe is None:
        return problems, values, broken
    for name, value in recipe.values.items():
        if name in unused:
            problems.append(f"{recipe.where(name)}: {name} has no effect: {unused[name]}")
        elif name not in keys:
            problems.append(f"{recipe.where(name)}: {_unknown(name, value, keys)}")
        else:
            try:
                values[name] = keys[name].read(value)
            except ValueError as error:
                broken.add(name)
                problems.append(f"{recipe.where(name)}: {name} {error}")
    return problems, values, broken


def _unknown(name: str, value: object, keys: Mapping[str, Key]) -> str:
    if isinstance(value, Mapping):
        return f"unknown key {name!r}: recipes are flat, write what is below it without {name!r}"
    near = get_close_matches(name.replace("-", "_"), keys, n=1, cutoff=0.5)
    return f"unknown key {name!r}" + (f" (did you mean {near[0]}?)" if near else "")


def _from_flags(namespace: argparse.Namespace, names: set[str]) -> dict[str, Any]:
    given = {n: v for n, v in vars(namespace).items() if n in names and v is not None}
    return {
        name: None if value is UNSET else tuple(value) if isinstance(value, list) else value
        for name, value in given.items()
    }


def _origin(message: str, recipe: Recipe | None, names: set[str]) -> str:
    """Which lines of the recipe a dataclass's complaint is about."""
    if recipe is None:
        return ""
    said = [n for n in recipe.values if n in names and re.search(rf"\b{n}\b", message)]
    return f" ({', '.join(recipe.where(name) for name in said)})" if said else ""


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _yaml(value: Any) -> str:
    import yaml

    return (
        yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()
    )

"""What describes a CoreNet checkpoint: its training YAML, a JSON mapping, a preset, or its shapes.

Reads configs, not weights. Sources: apple/corenet@1aa3acd ``general_gpt.py`` (``GPTConfig``,
``gpt_configs``) and ``projects/openelm/*_configs/*.yaml``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from mlx.utils import tree_flatten

from convert.corenet_lora import AdapterRule, read_rules
from convert.names import CORENET_ROWS, HUB_ROWS, TABLES
from openelm_mlx.config import ModelArgs
from openelm_mlx.mismatch import Shapes
from openelm_mlx.model import Model
from openelm_mlx.weight_files import one_line, read_json

PRESETS = ("270M", "450M", "1.1B", "3B")
_OPTIONS = (
    "give --preset 270M, 450M, 1.1B or 3B, or --config with CoreNet's training YAML, its "
    "general_gpt mapping as JSON, or Hugging Face's config.json"
)
_NORM = "transformer.norm.weight"
_GENERAL_GPT = ("model", "language_modeling", "general_gpt")
_OTHER_MODELS: dict[
    str, dict[str, Any]
] = {  # in CoreNet's table of names beside the published sizes
    "gpt-test": {
        "num_transformer_layers": 1,
        "model_dim": 128,
        "head_dim": 64,
        "num_gqa_groups": 1,
        "ffn_multipliers": (0.25, 0.75),
        "qkv_multipliers": (0.25, 0.5),
    },
    "gpt-1_3B": {
        "num_transformer_layers": 24,
        "model_dim": 2048,
        "head_dim": 64,
        "num_gqa_groups": 4,
        "ffn_multipliers": 3.0,
        "qkv_multipliers": 1.0,
    },
}


@dataclass(frozen=True, kw_only=True)
class CorenetConfig:
    """The architecture of a checkpoint and what else its config says."""

    args: ModelArgs
    source: str  # where it came from, for messages
    vocab_size: int | None = None  # rows that the config names; None where it names none
    padding_index: int | None = None
    rules: tuple[AdapterRule, ...] = ()  # which modules have adapters, with alpha and rsLoRA


def resolve(config: str | Path | None, preset: str | None, shapes: Shapes) -> CorenetConfig:
    """Find the architecture of a checkpoint.

    Args:
        config: a file, see :func:`read_config`.
        preset: one of the published sizes.
        shapes: of the file's tensors under Hugging Face's names; decide where neither is given.

    Raises:
        ValueError: if both are given, or neither and no published size has these shapes.
    """
    if config is not None and preset is not None:
        raise ValueError("--config and --preset both name an architecture; give one of them")
    if config is not None:
        return read_config(config)
    if preset is not None:
        return CorenetConfig(args=ModelArgs.preset(preset), source=f"preset {preset}")
    return _infer(shapes)


def read_config(path: str | Path) -> CorenetConfig:
    """Read CoreNet's YAML (nested or with dotted keys), its mapping as JSON, or HF's config.json.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it cannot be parsed or describes no OpenELM model; with the file's name.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is no file; {_OPTIONS}")
    values = read_json(path) if path.suffix == ".json" else _read_yaml(path)
    try:
        return _from_mapping(nest(values), str(path))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def nest(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Dotted keys made nested: ``{"a.b": 1, "a": {"c": 2}}`` -> ``{"a": {"b": 1, "c": 2}}``."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        *parents, last = str(key).split(".")
        place = out
        for parent in parents:
            inner = place.get(parent)
            place[parent] = place = inner if isinstance(inner, dict) else {}
        if isinstance(value, Mapping):
            inner = place.get(last)
            place[last] = {**(inner if isinstance(inner, dict) else {}), **nest(value)}
        elif not isinstance(place.get(last), dict):
            place[last] = value
    return out


def parameter_shapes(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an architecture's parameters; its arrays stay unevaluated."""
    parameters: Any = tree_flatten(Model(args).parameters())
    return {name: tuple(array.shape) for name, array in parameters}


def table_rows(shapes: Shapes) -> int:
    """Vocabulary rows of a checkpoint.

    Raises:
        ValueError: if it has no embedding table.
    """
    shape = shapes.get(TABLES[0], ())
    if len(shape) != 2:
        raise ValueError(
            "the file holds no token_embeddings.weight of two axes; is it an OpenELM checkpoint?"
        )
    return shape[0]


def folder_rows(rows: int, asked: int | None, said: int | None) -> int:
    """How many of a file's vocabulary rows go into the model folder.

    Args:
        rows: of the file.
        asked: ``--vocab-size``; always wins.
        said: by the config; None where it says nothing.

    Returns:
        ``rows`` where the config says so or is silent, but 32000 where the file has CoreNet's
        32128 and the config does not insist; else what the config says, which will not fit.

    Raises:
        ValueError: if more rows are asked for than there are.
    """
    if asked is not None:
        if not 1 <= asked <= rows:
            raise ValueError(
                f"--vocab-size {asked} is not between 1 and the {rows} rows of the file"
            )
        return asked
    if said is None:
        return HUB_ROWS if rows == CORENET_ROWS else rows
    return said


def _read_yaml(path: Path) -> Mapping[Any, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {one_line(error)}") from error
    if not isinstance(values, Mapping):
        raise ValueError(f"{path} must hold a mapping, not a {type(values).__name__}")
    return values


def _from_mapping(values: Mapping[str, Any], source: str) -> CorenetConfig:
    """Find the mapping that describes the model, inside whichever file it is in."""
    model = values.get("model")
    rules: tuple[AdapterRule, ...] = ()
    if isinstance(model, Mapping):
        settings = _dig(values, _GENERAL_GPT)
        rules = read_rules(model.get("lora"))
    else:
        settings = next(
            (values[k] for k in ("general_gpt", "config") if isinstance(values.get(k), Mapping)),
            values,
        )
    padding = settings.get("padding_index", values.get("padding_index"))
    return CorenetConfig(
        args=_architecture(settings),
        source=source,
        vocab_size=settings.get("vocab_size"),
        padding_index=padding if isinstance(padding, int) else None,
        rules=rules,
    )


def _dig(values: Mapping[str, Any], keys: Sequence[str]) -> Mapping[str, Any]:
    found: Any = values
    for i, key in enumerate(keys):
        found = found.get(key) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            raise ValueError(f"no mapping at {'.'.join(keys[: i + 1])}; expected {'.'.join(keys)}")
    return found


def _architecture(settings: Mapping[str, Any]) -> ModelArgs:
    """From a ``general_gpt`` mapping, with a name or with explicit fields, or a config.json."""
    given = {k: v for k, v in settings.items() if v is not None and k != "padding_index"}
    explicit = {"num_transformer_layers", "model_dim"} <= set(given)
    if "model_type" in given or explicit:
        return ModelArgs.from_dict(given)
    name = given.pop("model_name", None)
    if name is None:
        raise ValueError(
            f"describes no model: neither model_name nor model_dim and num_transformer_layers "
            f"is in it; {_OPTIONS}"
        )
    context = given.pop("max_context_length", 2048)
    vocab_size = given.pop("vocab_size", HUB_ROWS)
    if given:
        raise ValueError(
            f"{', '.join(sorted(given))} cannot be set beside model_name {name!r}, which names a "
            "whole architecture; remove them, or give every field and no model_name"
        )
    args = (
        ModelArgs.from_scaling(**_OTHER_MODELS[name])
        if name in _OTHER_MODELS
        else ModelArgs.preset(str(name))
    )
    return replace(args, vocab_size=vocab_size, max_context_length=context)


def _infer(shapes: Shapes) -> CorenetConfig:
    """The published size whose tensors have exactly these names and shapes."""
    rows = table_rows(shapes)
    found = {name: tuple(shape) for name, shape in shapes.items()}
    for name in PRESETS:
        args = ModelArgs.preset(name, vocab_size=rows)
        if found.get(_NORM) == (args.model_dim,) and found == parameter_shapes(args):
            return CorenetConfig(args=args, source=f"the file's shapes, which are OpenELM-{name}'s")
    raise ValueError(
        f"the file's {len(found)} tensors are those of none of the four published sizes, so its "
        f"architecture has to be given: {_OPTIONS}"
    )

"""PEFT's ``adapter_config.json``: which modules it adapts and by how much, and what we cannot hold.

Knows settings and names of modules, no tensors. Source: huggingface/peft v0.21.2,
``tuners/lora/config.py`` (keys), ``tuners/tuners_utils.py`` ``check_target_module_exists`` (which
modules), ``utils/other.py`` ``get_pattern_key`` (per-module rank and alpha).
"""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openelm_mlx.adapter_args import AdapterArgs, scale_of

logger = logging.getLogger(__name__)

_MERGE = "merge with PEFT's merge_and_unload, then `openelm convert huggingface` the whole model"
# Settings under which a module does more than W + scale B A, or other weights than A and B moved.
_UNSUPPORTED = (
    *("modules_to_save", "target_parameters", "trainable_token_indices", "layer_replication"),
    *("lora_bias", "megatron_config", "use_qalora", "use_bdlora", "alora_invocation_tokens"),
    *("arrow_config", "kasa_config", "monteclora_config"),
)
# What they choose is over when training ends, or is in the tensors.
_HARMLESS = (
    *("auto_mapping", "inference_mode", "peft_type", "peft_version", "revision", "task_type"),
    *("bias", "fan_in_fan_out", "init_lora_weights", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config"),
    "ensure_weight_tying",
)
_KEEP_THE_BASE = ("gaussian", "eva", "orthogonal")  # the other named initialisations change W
_REGULAR = ("target_modules", "exclude_modules")  # a text is one regular expression
_NUMBER = (int | float, "a number")
_TYPES: dict[str, tuple[Any, str]] = {
    "base_model_name_or_path": (str, "a text"),
    "r": (int, "an integer"),
    "lora_alpha": _NUMBER,
    "lora_dropout": _NUMBER,
    "use_rslora": (bool, "true or false"),
    "use_dora": (bool, "true or false"),
    "rank_pattern": (Mapping, "an object"),
    "alpha_pattern": (Mapping, "an object"),
    "target_modules": (str | list, "a list of names or a regular expression"),
    "exclude_modules": (str | list, "a list of names or a regular expression"),
    "layers_to_transform": (int | list, "an integer or a list of them"),
    "layers_pattern": (str | list, "a name or a list of them"),
}


@dataclass(frozen=True, kw_only=True)
class PeftSettings:
    """What a PEFT config says of its adapters; module names are the model's, without prefix."""

    rank: int = 8
    alpha: float = 8.0
    dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: str | Sequence[str] | None = None  # a text is one regular expression
    exclude_modules: str | Sequence[str] = ()
    layers_to_transform: Sequence[int] = ()  # empty: all
    layers_pattern: Sequence[str] = ()
    base_model: str | None = None

    def rank_of(self, module: str) -> int:
        """The rank that PEFT gives a module."""
        return self.rank_pattern.get(_pattern(self.rank_pattern, module), self.rank)

    def scale_of(self, module: str) -> float:
        """The factor before B A in a module."""
        alpha = self.alpha_pattern.get(_pattern(self.alpha_pattern, module), self.alpha)
        return scale_of(alpha, self.rank_of(module), use_rslora=self.use_rslora)

    def selects(self, module: str) -> bool:
        """Whether PEFT adapts a module; true where the config leaves it to the model's class."""
        if _named(self.exclude_modules, module):
            return False
        if self.target_modules is None or self.target_modules == "all-linear":
            return True
        if isinstance(self.target_modules, str) or module in self.target_modules:
            return _named(self.target_modules, module)
        return _named(self.target_modules, module) and self._in_layers(module)

    def _in_layers(self, module: str) -> bool:
        if not self.layers_to_transform:
            return True
        patterns = self.layers_pattern or ("[^.]*",)
        found = [re.match(rf"(?:.*?\.)?{pattern}\.(\d+)\.", module) for pattern in patterns]
        return any(match and int(match[1]) in self.layers_to_transform for match in found)


def read_settings(config: Mapping[str, Any], file: Path) -> PeftSettings:
    """The settings of an ``adapter_config.json``.

    Args:
        config: the JSON object.
        file: for messages.

    Raises:
        ValueError: if it is not LoRA's, a key has another type than it should, or it asks for what
            a folder of ours cannot hold, all of it named at once.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(
            f"{file}: peft_type is {kind!r}; only LORA (with rsLoRA and DoRA) can be converted"
        )
    _refuse_unsupported(config, file)
    values = {key: _checked(config, key, file) for key in _TYPES if config.get(key) is not None}
    _check_values(values, file)
    layers, patterns = values.get("layers_to_transform", []), values.get("layers_pattern", [])
    exclude = values.get("exclude_modules", ())
    return PeftSettings(
        rank=values.get("r", PeftSettings.rank),
        alpha=float(values.get("lora_alpha", PeftSettings.alpha)),
        dropout=float(values.get("lora_dropout", 0.0)),
        use_rslora=values.get("use_rslora", False),
        use_dora=values.get("use_dora", False),
        rank_pattern=values.get("rank_pattern", {}),
        alpha_pattern=values.get("alpha_pattern", {}),
        target_modules=values.get("target_modules"),
        exclude_modules=exclude,
        layers_to_transform=[layers] if isinstance(layers, int) else layers,
        layers_pattern=[patterns] if isinstance(patterns, str) and patterns else list(patterns),
        base_model=values.get("base_model_name_or_path"),
    )


def config_for_peft(
    args: AdapterArgs,
    *,
    ranks: Mapping[str, int],
    targets: Sequence[str],
    base_model: str,
) -> dict[str, Any]:
    """An ``adapter_config.json`` for PEFT.

    Args:
        args: of our folder.
        ranks: module -> rank of its tensors.
        targets: ``target_modules`` that select just these modules.
        base_model: a Hub id or a name.
    """
    rank = max(ranks.values())
    smaller = {module: own for module, own in ranks.items() if own != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "revision": None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha_of(args.scale, rank, use_rslora=args.use_rslora),
        "lora_dropout": args.dropout,
        "target_modules": list(targets),
        "rank_pattern": smaller,
        "alpha_pattern": {
            module: alpha_of(args.scale, own, use_rslora=args.use_rslora)
            for module, own in smaller.items()
        },
        "use_rslora": args.use_rslora,
        "use_dora": args.kind == "dora",
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "layers_pattern": None,
        "modules_to_save": None,
    }


def alpha_of(scale: float, rank: int, *, use_rslora: bool) -> float:
    """The alpha that gives this scale at this rank, whole where one does.

    Exact where any float64 is: no alpha / 3 is 0.1, and then the 17th digit differs.
    """
    alpha = scale * (math.sqrt(rank) if use_rslora else rank)
    near = (round(alpha), alpha, math.nextafter(alpha, 0.0), math.nextafter(alpha, math.inf))
    exact = (a for a in near if a > 0 and scale_of(a, rank, use_rslora=use_rslora) == scale)
    return next(exact, alpha)


def _refuse_unsupported(config: Mapping[str, Any], file: Path) -> None:
    found = [f"{key} = {config[key]!r}" for key in _UNSUPPORTED if config.get(key)]
    if config.get("bias", "none") != "none":
        found.append(f"bias = {config['bias']!r}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in _KEEP_THE_BASE:
        found.append(f"init_lora_weights = {start!r}, which also changes the base's weights")
    if found:
        raise ValueError(f"{file}: an adapter folder cannot hold {', '.join(found)}; {_MERGE}")
    if config.get("fan_in_fan_out"):
        logger.warning("%s: fan_in_fan_out is ignored, as PEFT does for linear layers", file)
    known = {*_TYPES, *_UNSUPPORTED, *_HARMLESS}
    strange = [key for key, value in config.items() if key not in known and value]
    if strange:
        logger.warning(
            "%s: %s unknown here and ignored; check the logits if they change what the adapters do",
            *(file, ", ".join(strange) + (" are" if len(strange) > 1 else " is")),
        )


def _checked(config: Mapping[str, Any], key: str, file: Path) -> Any:
    kind, name = _TYPES[key]
    value = config[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{file}: {key} must be {name}, got {value!r}")
    return value


def _check_values(values: Mapping[str, Any], file: Path) -> None:
    """Refuse what PEFT would refuse too: ranks, alphas and regular expressions that are none."""
    ranks = [values.get("r", 1), *values.get("rank_pattern", {}).values()]
    alphas = [values.get("lora_alpha", 1), *values.get("alpha_pattern", {}).values()]
    patterns = [*values.get("rank_pattern", {}), *values.get("alpha_pattern", {})]
    patterns += [v for v in map(values.get, _REGULAR) if isinstance(v, str)]
    try:
        wrong = [r for r in ranks if not _is_positive(r, int)]
        wrong += [a for a in alphas if not _is_positive(a, int | float)]
        if wrong:
            raise ValueError(f"ranks and alphas must be positive numbers, got {wrong[0]!r}")
        for pattern in patterns:
            re.compile(pattern)
    except (ValueError, re.error) as error:
        raise ValueError(f"{file}: {error}") from error


def _is_positive(value: object, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and value > 0


def _pattern(patterns: Mapping[str, Any], module: str) -> str:
    """The first key that matches the end of a module's name, else the name itself."""
    found = (key for key in patterns if re.match(rf"(.*\.)?({key})$", module))
    return next(found, module)


def _named(names: str | Sequence[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)

"""Adapter folders: ``adapters.safetensors`` beside ``adapter_config.json``, as mlx_lm has them.

Knows names, keys and their history, not the model. Tensors are called
``transformer.layers.0.attn.qkv_proj.lora_a`` (in, r), ``….lora_b`` (r, out), for DoRA ``….m``
(out,), and ``transformer.token_embeddings.lora_a`` (V, r), ``….lora_b`` (r, D). The config's
own entry ``openelm_mlx`` holds what mlx_lm has no key for.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from openelm_mlx.adapter_args import (
    LAYER_MODULES,
    MODEL_MODULES,
    AdapterArgs,
    mlx_lm_key,
    scale_of,
    short_name,
)
from openelm_mlx.adapter_layers import LEAVES
from openelm_mlx.atomic import atomic_file, atomic_folder
from openelm_mlx.weight_files import read_json, read_tensor_file, write_json

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = "adapters.safetensors"
WEIGHTS_FILES = (WEIGHTS, "adapters.npz")
PEFT_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_OBJECT, _INTEGER, _NUMBER = (Mapping, "an object"), (int, "an integer"), (int | float, "a number")
_TYPES = {
    "num_layers": _INTEGER,
    "lora_layers": _INTEGER,
    "lora_parameters": _OBJECT,
    "openelm_mlx": _OBJECT,
}
_PARAMETER_TYPES = {
    **{"rank": _INTEGER, "scale": _NUMBER, "alpha": _NUMBER, "dropout": _NUMBER},
    "keys": (list, "a list of names"),
}


@dataclass(frozen=True, kw_only=True)
class AdapterFolder:
    """An adapter folder as read: ``args`` is None where it holds whole weights ("full")."""

    args: AdapterArgs | None
    tensors: dict[str, mx.array]


def read_adapter_folder(folder: str | Path, *, scale: float | None = None) -> AdapterFolder:
    """Settings and tensors of a folder that we, mlx_lm or its forerunners wrote.

    Without a config, or with an old one, rank, kind, layers and modules are inferred from the
    tensors, and that is said; ``scale`` cannot be.

    Args:
        folder: holds ``adapters.safetensors`` (or ``adapters.npz``).
        scale: used in place of the config's.

    Raises:
        FileNotFoundError: if the folder or its tensors are missing.
        ValueError: if it is a PEFT folder, damaged, or its scale is unknown.
    """
    folder = Path(folder)
    _check_is_adapter_folder(folder)
    tensors = dict(sorted(read_tensor_file(weights_file(folder)).items()))
    _check_floating(tensors, folder)
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    _check_types(config, folder / CONFIG)
    if config.get("fine_tune_type") == "full":
        return AdapterFolder(args=None, tensors=tensors)
    inferred = _infer(tensors, source=str(folder))
    if not config:
        logger.warning(
            "%s has no %s; from the tensors: %s, rank %d, modules %s",
            *(folder, CONFIG, inferred["kind"], inferred["rank"]),
            ", ".join(inferred["names"]),
        )
    return AdapterFolder(args=_args(config, inferred, scale, folder), tensors=tensors)


def write_adapter_folder(
    folder: str | Path,
    tensors: Mapping[str, mx.array],
    args: AdapterArgs,
    *,
    overwrite: bool = False,
) -> None:
    """Make an adapter folder, whole or not at all.

    Args:
        folder: to be made; one that is there is replaced as a whole, only with ``overwrite``.
        tensors: named as the module docstring says; stored in their own types.
        args: what they were made with; ``args.scale`` is the factor before the product.
        overwrite: replace an adapter folder that is there.

    Raises:
        FileExistsError: if the folder is there and may not be replaced.
    """
    with atomic_folder(folder, overwrite=overwrite) as temporary:
        write_adapter_files(temporary, tensors, args)


def write_adapter_files(folder: Path, tensors: Mapping[str, mx.array], args: AdapterArgs) -> None:
    """Write the two files into a folder that is there, each replacing its forerunner at once."""
    with atomic_file(folder / WEIGHTS) as file:
        mx.save_safetensors(str(file), dict(tensors), metadata={"format": "mlx"})
    with atomic_file(folder / CONFIG) as file:
        write_json(file, config_of(args))


def config_of(args: AdapterArgs) -> dict[str, Any]:
    """``adapter_config.json``: mlx_lm's keys, and ours under ``openelm_mlx``."""
    return {
        "fine_tune_type": args.kind,
        "num_layers": args.num_layers,
        "lora_parameters": {
            "rank": args.rank,
            "scale": args.scale,
            "dropout": args.dropout,
            "keys": [mlx_lm_key(target) for target in args.target_modules],
        },
        "openelm_mlx": {
            "use_rslora": args.use_rslora,
            "adapt_tied_head": args.adapt_tied_head,
        },
    }


def _check_is_adapter_folder(folder: Path) -> None:
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give the folder that holds {WEIGHTS}")
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist; give a folder that holds {WEIGHTS}")
    peft = next((name for name in PEFT_FILES if (folder / name).is_file()), None)
    if peft:
        raise ValueError(
            f"{folder} is a PEFT adapter ({peft}); convert it first with "
            f"`openelm convert peft {folder} --model MODEL --output DIR`"
        )


def weights_file(folder: Path) -> Path:
    """The file of an adapter folder that holds its tensors.

    Raises:
        FileNotFoundError: if there is none.
    """
    for name in WEIGHTS_FILES:
        if (folder / name).is_file():
            return folder / name
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:5]) or "nothing"
    raise FileNotFoundError(f"{folder} holds no {WEIGHTS}; it holds {found}")


def _check_floating(tensors: Mapping[str, mx.array], folder: Path) -> None:
    wrong = [n for n, array in tensors.items() if not mx.issubdtype(array.dtype, mx.floating)]
    if wrong:
        raise ValueError(
            f"{folder}: {len(wrong)} tensors are not floating-point, first {wrong[0]} with "
            f"{tensors[wrong[0]].dtype}"
        )


def _check_types(config: Mapping[str, Any], file: Path) -> None:
    """Refuse a value of another JSON type than its key has; null counts as absent."""
    _check_keys(config, _TYPES, file, "")
    _check_keys(config.get("lora_parameters") or {}, _PARAMETER_TYPES, file, "lora_parameters.")


def _check_keys(
    values: Mapping[str, Any], types: Mapping[str, tuple[Any, str]], file: Path, prefix: str
) -> None:
    for key, (kind, name) in types.items():
        value = values.get(key)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{file}: {prefix}{key} must be {name}, got {value!r}")


def _infer(tensors: Mapping[str, mx.array], *, source: str) -> dict[str, Any]:
    """Rank, kind and modules as the tensors' names and shapes tell them."""
    paths = list(dict.fromkeys(name.rpartition(".")[0] for name in tensors))
    ranks = [array.shape[-1] for name, array in tensors.items() if name.endswith(".lora_a")]
    strangers = [name for name in tensors if name.rpartition(".")[2] not in LEAVES]
    if strangers or not ranks:
        raise ValueError(
            f"{source}: these are no adapter tensors: expected names that end in "
            f"{', '.join(LEAVES)}, found {', '.join(strangers[:3]) or 'no lora_a'}"
        )
    return {
        "rank": max(set(ranks), key=ranks.count),
        "kind": "dora" if any(name.endswith(".m") for name in tensors) else "lora",
        "embedding_magnitude": _embedding_magnitude(tensors),
        "paths": paths,
        "names": list(dict.fromkeys(short_name(path) for path in paths)),
    }


def _embedding_magnitude(tensors: Mapping[str, mx.array]) -> str:
    """Which of the two meanings the embedding's ``m`` has: one number a token, or a feature."""
    path = MODEL_MODULES["token_embeddings"]
    m, a = tensors.get(f"{path}.m"), tensors.get(f"{path}.lora_a")
    if m is None:
        return "none"
    return "token" if a is not None and m.shape[:1] == a.shape[:1] else "feature"


def _args(
    config: Mapping[str, Any], inferred: Mapping[str, Any], scale: float | None, folder: Path
) -> AdapterArgs:
    parameters = config.get("lora_parameters") or {}
    own = config.get("openelm_mlx") or {}
    num_layers = config.get("num_layers") or config.get("lora_layers")
    if num_layers is None:  # whole paths name the very layers that the file has
        targets, num_layers = inferred["paths"], -1
    else:  # without keys, mlx_lm's own default has changed over time: the tensors tell it
        targets = [_short_key(key) for key in parameters.get("keys") or inferred["names"]]
    if scale is None:
        scale = _scale(config, parameters, inferred["rank"], folder)
    try:
        return AdapterArgs(
            rank=parameters.get("rank", inferred["rank"]),
            scale=scale,
            dropout=parameters.get("dropout", 0.0),
            kind=config.get("fine_tune_type") or inferred["kind"],
            target_modules=targets,
            num_layers=num_layers if num_layers > 0 else -1,  # mlx_lm: 0 and below are all
            use_rslora=own.get("use_rslora", False),
            embedding_magnitude=inferred["embedding_magnitude"],
            adapt_tied_head=own.get("adapt_tied_head", True),
        )
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error


def _short_key(key: str) -> str:
    return short_name(key) if key in (LAYER_MODULES | MODEL_MODULES).values() else key


def _scale(
    config: Mapping[str, Any], parameters: Mapping[str, Any], rank: int, folder: Path
) -> float:
    """The config's ``scale``, or an error that says why it is not clear."""
    scale, alpha = parameters.get("scale"), parameters.get("alpha")
    if scale is None:
        hint = (
            f", but alpha {alpha:g}, which is scale {scale_of(alpha, rank):g} at rank {rank}"
            if alpha is not None
            else ", and the tensors do not tell it"
        )
        raise ValueError(
            f"{folder / CONFIG}: no lora_parameters.scale{hint}; write the scale there "
            "(alpha / rank in PEFT's terms), or pass scale= to load_adapters"
        )
    if alpha is not None and "lora_layers" in config:
        raise ValueError(
            f"{folder / CONFIG} has both scale {scale:g} and alpha {alpha:g}: old mlx_lm used "
            f"scale * alpha / rank = {scale * alpha / rank:g}, later ones scale alone; keep the "
            "right number as lora_parameters.scale and remove alpha, or pass scale="
        )
    if alpha is not None:
        logger.warning("%s: alpha is ignored, as in mlx_lm; scale is used", folder / CONFIG)
    return float(scale)

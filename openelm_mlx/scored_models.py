"""Whatever holds a model on disk -> something that scores tokens, with its tokenizer and size.

A model folder or Hub repository (quantised or not), an adapter folder, a Core ML package, or a
Core AI bundle.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx

from openelm_mlx.adapter_files import CONFIG as ADAPTER_CONFIG
from openelm_mlx.adapter_files import WEIGHTS_FILES, weights_file
from openelm_mlx.checkpoint import load, load_args
from openelm_mlx.cpu_weights import float32_fits
from openelm_mlx.evaluation_record import folder_bytes, sha256_of
from openelm_mlx.hub import local_or_download
from openelm_mlx.model import Model, num_parameters
from openelm_mlx.run_flags import RECIPE_FILE
from openelm_mlx.token_scoring import ModelScorer, TokenScorer
from openelm_mlx.tokenizer import Tokenizer, load_tokenizer
from openelm_mlx.tokenizer_files import has_tokenizer
from openelm_mlx.weight_files import find_weight_files, read_json

logger = logging.getLogger(__name__)

_SHARE = 0.8  # of the machine's memory that weights may take without a word

Kind = Literal["model", "adapters", "coreml", "coreai"]


@dataclass(frozen=True, kw_only=True)
class ScoredModel:
    """A model that is ready to score.

    Attributes:
        name: as it was asked for.
        kind: what it is on disk.
        scorer: scores and continues token ids.
        tokenizer: of the text.
        mlx: the MLX model, where there is one.
        bytes: of the weights on disk; of adapters with their base's.
        hash: SHA-256 over them.
        float32: whether it computes in float32 whatever its weights are.
    """

    name: str
    kind: Kind
    scorer: TokenScorer
    tokenizer: Tokenizer
    mlx: Model | None
    bytes: int
    hash: str
    float32: bool


def open_model(
    name: str,
    *,
    adapter_path: str | None = None,
    tokenizer: str | None = None,
    float32: bool = False,
    default_base: str | None = None,
    default_tokenizer: Tokenizer | None = None,
) -> ScoredModel:
    """Load a model of any kind.

    Args:
        name: folder, package, bundle or Hub id.
        adapter_path: adapters to put on a model folder.
        tokenizer: in place of the model's own.
        float32: compute in float32.
        default_base: of an adapter folder that names none.
        default_tokenizer: of a package or bundle that brings none.

    Raises:
        FileNotFoundError: if something is missing.
        ValueError: if it is damaged, or has no tokenizer.
    """
    kind = kind_of(name)
    if adapter_path is not None and kind != "model":
        raise ValueError(f"{name} takes no --adapter-path: it is no model folder")
    if kind in ("coreml", "coreai"):
        return _open_exported(name, kind, tokenizer, default_tokenizer, float32=float32)
    if kind == "adapters":
        adapter_path, base = name, _base_of(Path(name), default_base)
    else:
        base = name
    model, found = load(base, adapter_path, tokenizer, need_tokenizer=True)
    if found is None:
        raise ValueError(f"{base} has no tokenizer; give --tokenizer")
    return of_model(
        model, found, name=name, kind=kind, files=_files(base, adapter_path), float32=float32
    )


def of_model(
    model: Model,
    tokenizer: Tokenizer,
    *,
    name: str,
    kind: Kind,
    files: list[Path],
    float32: bool,
) -> ScoredModel:
    """An MLX model that is loaded already, whose weights came from ``files``."""
    if float32:
        is_now = model.transformer.norm.weight.dtype == mx.float32
        if not is_now and not float32_fits(model, _SHARE):
            logger.warning(
                "%s takes %.1f GB in float32, which hardly fit into this machine's memory; "
                "--no-float32 computes with the weights as they are",
                *(name, 4 * num_parameters(model) / 1e9),
            )
        model.set_dtype(mx.float32)
    model.eval()
    return ScoredModel(
        name=name,
        kind=kind,
        scorer=ModelScorer(model),
        tokenizer=tokenizer,
        mlx=model,
        bytes=sum(file.stat().st_size for file in files),
        hash=sha256_of(files),
        float32=float32,
    )


def kind_of(name: str) -> Kind:
    """What a name stands for."""
    path = Path(name).expanduser()
    if path.suffix == ".mlpackage":
        return "coreml"
    if path.is_dir() and any(path.glob("*.aimodel")):
        return "coreai"
    adapters = any((path / file).is_file() for file in (ADAPTER_CONFIG, *WEIGHTS_FILES))
    return "adapters" if adapters and not (path / "config.json").is_file() else "model"


def context_of(name: str, *, default_base: str | None = None) -> int:
    """Tokens that a model's context holds, its weights unread.

    Args:
        name: as for :func:`open_model`.
        default_base: of an adapter folder that names none.
    """
    kind, path = kind_of(name), Path(name).expanduser()
    if kind == "coreml":
        from openelm_mlx.package_scoring import package_context

        return package_context(path)
    if kind == "coreai":
        from openelm_mlx.bundle_scoring import bundle_context

        return bundle_context(path)
    base = _base_of(path, default_base) if kind == "adapters" else name
    return load_args(local_or_download(base)).max_context_length


def _files(base: str, adapter_path: str | None) -> list[Path]:
    files = find_weight_files(local_or_download(base))
    return files if adapter_path is None else [*files, weights_file(Path(adapter_path))]


def _base_of(folder: Path, default: str | None) -> str:
    """The model that adapters belong to: as mlx_lm or a run of ours recorded it, or the default."""
    config = folder / ADAPTER_CONFIG
    named = read_json(config).get("model") if config.is_file() else None
    if not isinstance(named, str) and (folder / RECIPE_FILE).is_file():
        from openelm_mlx.recipe import load_recipe

        named = load_recipe(folder / RECIPE_FILE).values.get("model")
    base = named if isinstance(named, str) else default
    if base is None:
        raise ValueError(
            f"{folder} does not say which model its adapters belong to; give --model M "
            f"--adapter-path {folder}, or name the model before it"
        )
    return base


def _open_exported(
    name: str,
    kind: Kind,
    tokenizer: str | None,
    default_tokenizer: Tokenizer | None,
    *,
    float32: bool,
) -> ScoredModel:
    path = Path(name).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(f"{name} does not exist; give a package that was exported")
    scorer = _exported_scorer(path, kind, float32=float32)
    beside = path.with_name(f"{path.stem}-bundle")  # where `convert coreml` puts the tokenizer
    own = next(filter(has_tokenizer, (path / "tokenizer", path, beside)), None)
    found = default_tokenizer
    if tokenizer is not None:
        found = load_tokenizer(tokenizer)
    elif own is not None:
        found = Tokenizer.from_path(own)
    if found is None:
        raise ValueError(f"{name} brings no tokenizer; give --tokenizer, or a model before it")
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return ScoredModel(
        name=name,
        kind=kind,
        scorer=scorer,
        tokenizer=found,
        mlx=None,
        bytes=folder_bytes(path),
        hash=sha256_of(files),
        float32=float32,
    )


def _exported_scorer(path: Path, kind: Kind, *, float32: bool) -> TokenScorer:
    if kind == "coreml":
        from openelm_mlx.package_scoring import package_scorer

        return package_scorer(path, float32=float32)
    from openelm_mlx.bundle_scoring import bundle_scorer

    return bundle_scorer(path)

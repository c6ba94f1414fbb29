"""Model folders on disk: the one format that every stage reads and writes.

A folder holds Hugging Face's ``config.json`` and tensor names, a tokenizer, and ``openelm.json``
with its provenance; it runs as it is in mlx_lm and in Apple's own code (DESIGN section 4).
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from openelm_mlx.atomic import atomic_folder
from openelm_mlx.compatibility import where_it_runs
from openelm_mlx.config import ModelArgs
from openelm_mlx.fitting import (
    build_model,
    is_float,
    quantization_of,
    settle_tying,
    with_huggingface_names,
)
from openelm_mlx.hub import local_or_download
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tokenizer_search import load_tokenizer
from openelm_mlx.weight_files import (
    StoredTensor,
    read_json,
    read_weights,
    write_json,
    write_weights,
)

logger = logging.getLogger(__name__)


def load(
    path_or_repo: str | Path,
    adapter_path: str | Path | None = None,
    tokenizer: str | Path | None = None,
    *,
    revision: str | None = None,
    lazy: bool = False,
    need_tokenizer: bool = False,
) -> tuple[Model, Tokenizer | None]:
    """Load a model and its tokenizer, ready to run.

    Args:
        path_or_repo: a model folder (ours, mlx_lm's, Hugging Face's, CoreNet's MLX folders,
            quantised or not) or a Hub repository.
        adapter_path: a folder with ``adapters.safetensors``, applied to the model.
        tokenizer: file, folder or Hub id to use in place of the folder's own.
        revision: branch, tag or commit of a Hub repository.
        lazy: leave the weights unread until first used.
        need_tokenizer: whether a missing tokenizer is an error, in place of a warning.

    Returns:
        The model in eval mode with the dtypes of the file, and the tokenizer; None, with a
        warning, where there is none.

    Raises:
        FileNotFoundError: if the folder, its config or its weights are missing.
        ValueError: if a file is damaged, or tensors and config do not fit together.
    """
    folder = local_or_download(path_or_repo, revision=revision)
    model = load_model(folder, lazy=lazy)
    if adapter_path is not None:
        from openelm_mlx.lora import load_adapters

        load_adapters(model, adapter_path)
        model.eval()
    found = load_tokenizer(
        tokenizer,
        model_path=folder,
        repo=None if Path(path_or_repo).expanduser().is_dir() else str(path_or_repo),
        vocab_size=model.args.vocab_size,
        required=need_tokenizer,
    )
    return model, found


def load_model(folder: str | Path, *, lazy: bool = False) -> Model:
    """Build the model of a folder and fill it; see :func:`load`."""
    folder = Path(folder)
    args = load_args(folder)
    weights = with_huggingface_names(read_weights(folder))
    args = settle_tying(args, read_json(folder / "config.json"), weights)
    return build_model(args, weights, source=str(folder), lazy=lazy)


def load_args(folder: str | Path) -> ModelArgs:
    """The architecture of a folder, from ``config.json``.

    Raises:
        FileNotFoundError: if the folder or its config is missing.
        ValueError: if the config describes no OpenELM model.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; give a model folder")
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder} holds no config.json; give a model folder, or convert a checkpoint first "
            "with `openelm convert`"
        )
    config = read_json(folder / "config.json")
    try:
        if "model_name" in config and "model_dim" not in config:
            return _corenet_mlx_args(config)
        return ModelArgs.from_dict(config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error


def save_model(
    model: Model,
    folder: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    instruct: bool = False,
    provenance: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model as a complete folder, or nothing at all.

    Args:
        model: plain or quantised, without adapters.
        folder: to be made; an existing one is replaced only with ``overwrite``.
        tokenizer: saved beside the weights, so that the folder is self-contained.
        instruct: whether the chat template goes with it (DESIGN section 4).
        provenance: source, hash, licence: kept in ``openelm.json``.
        overwrite: replace a model folder that is there.

    Raises:
        FileExistsError: if the folder is there and may not be replaced.
    """
    tensors: Any = tree_flatten(model.parameters())
    with atomic_folder(folder, overwrite=overwrite) as temporary:
        write_weights(temporary, tensors)
        write_companions(
            temporary,
            with_dtype(model.args, dict(tensors)),
            tokenizer=tokenizer,
            instruct=instruct,
            provenance=provenance,
        )


def write_companions(
    folder: Path,
    args: ModelArgs,
    *,
    tokenizer: Tokenizer | None,
    instruct: bool,
    provenance: Mapping[str, Any] | None,
) -> None:
    """Write all of a model folder but its weights; says where the folder will not run.

    Args:
        folder: existing, usually from ``atomic_folder``.
        args: written as ``config.json``.
        tokenizer: None leaves a folder without one, which is said.
        instruct: write the chat template too.
        provenance: more entries for ``openelm.json``.
    """
    write_json(folder / "config.json", args.to_dict())
    generation = {"bos_token_id": args.bos_token_id, "eos_token_id": args.eos_token_id}
    write_json(folder / "generation_config.json", generation)
    from importlib.metadata import version  # 0.06 s that most commands need not wait for

    versions = {name: version(name) for name in ("openelm-mlx", "mlx")}
    write_json(folder / "openelm.json", {**(provenance or {}), "versions": versions})
    if tokenizer is None:
        logger.warning("the folder has no tokenizer; commands on it will need --tokenizer")
    else:
        from openelm_mlx.chat_template import APPLE_INSTRUCT_TEMPLATE

        template = (tokenizer.chat_template or APPLE_INSTRUCT_TEMPLATE) if instruct else None
        tokenizer.save(folder, chat_template=template)
    reason = where_it_runs(args, quantization_of(args))["mlx_lm"]
    if reason:
        logger.warning("the folder runs here but not in stock mlx_lm: %s", reason)


def with_dtype(args: ModelArgs, weights: Mapping[str, StoredTensor]) -> ModelArgs:
    """``args`` whose ``torch_dtype`` says what most of the weights' elements are stored in."""
    sizes: dict[str, int] = {}
    for tensor in weights.values():
        if is_float(tensor.dtype):
            name = str(tensor.dtype).removeprefix("mlx.core.")
            sizes[name] = sizes.get(name, 0) + math.prod(tensor.shape)
    extra = {k: v for k, v in args.extra.items() if k != "dtype"}
    return replace(args, extra={**extra, "torch_dtype": max(sizes, key=lambda k: sizes[k])})


def _corenet_mlx_args(config: Mapping[str, Any]) -> ModelArgs:
    """The config of a folder that CoreNet's ``mlx_examples/open_elm`` wrote."""
    args = ModelArgs.preset(config["model_name"], vocab_size=config.get("vocab_size", 32128))
    context = config.get("max_context_length", args.max_context_length)
    extra = {"quantization": config["quantization"]} if config.get("quantization") else {}
    return replace(args, max_context_length=context, extra=extra)

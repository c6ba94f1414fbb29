"""Adapters on a model: which modules get them, which parameters train, adapter folders.

The layers are in ``adapter_layers``, the settings in ``adapter_args``, the files in
``adapter_files``; this module joins them with the model. Knows nothing of text or training.
"""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from openelm_mlx.adapter_args import LAYER_MODULES, MODEL_MODULES, matches, short_name
from openelm_mlx.adapter_args import AdapterArgs as AdapterArgs
from openelm_mlx.adapter_embeddings import DoRAEmbedding, LoRAEmbedding
from openelm_mlx.adapter_files import read_adapter_folder, write_adapter_folder
from openelm_mlx.adapter_layers import (
    LEAVES,
    Adapter,
    DoRALinear,
    LoRALinear,
    dense_shape,
    is_embedding,
)
from openelm_mlx.mismatch import check_tensors
from openelm_mlx.model import Model

logger = logging.getLogger(__name__)


def add_adapters(model: Model, args: AdapterArgs, *, seed: int = 0) -> None:
    """Wrap the target modules and freeze everything but the adapters.

    A new adapter changes nothing: ``lora_b`` starts at 0 and ``lora_a`` uniform within in^-0.5; for
    an embedding ``lora_a`` at 0 and ``lora_b`` normal, as in CoreNet and PEFT. All float32.

    Args:
        model: plain or quantised, without adapters.
        args: the settings.
        seed: draws the same adapters again, whatever else was drawn before.

    Raises:
        ValueError: if a target or ``num_layers`` does not fit the model, or it has adapters.
    """
    targets = _targets(model, args)
    keys = mx.random.split(mx.random.key(seed), len(targets))
    model.freeze()
    for (path, base), key in zip(targets.items(), keys, strict=True):
        set_module(model, path, _adapter(base, args, key))
    model.train(model.training)  # new modules start in training mode
    if args.kind == "dora" and args.adapts_embedding and args.embedding_magnitude == "none":
        logger.info("token_embeddings gets plain LoRA under DoRA, as in CoreNet")


def load_adapters(
    model: Model, folder: str | Path, *, scale: float | None = None
) -> AdapterArgs | None:
    """Put a folder's adapters on a model; only they will train.

    Reads what we, mlx_lm and its forerunners wrote, and mlx_lm's "full" folders of whole weights,
    which replace the model's.

    Args:
        model: the base the adapters were made for, without adapters.
        folder: holds ``adapters.safetensors`` and ``adapter_config.json``.
        scale: used in place of the config's.

    Returns:
        The settings read; None where the folder holds whole weights.

    Raises:
        FileNotFoundError: if the folder or its tensors are missing.
        ValueError: if the tensors do not fit the model (all named, with both shapes), the scale is
            unknown, or the folder is PEFT's. The model is as it was.
    """
    read = read_adapter_folder(folder, scale=scale)
    found = {name: array.shape for name, array in read.tensors.items()}
    if read.args is None:
        shapes = {name: array.shape for name, array in _flat(model.parameters())}
        check_tensors({n: shapes[n] for n in found if n in shapes}, found, source=str(folder))
        model.load_weights(list(read.tensors.items()), strict=False)
        return None
    args = replace(read.args, num_layers=min(read.args.num_layers, len(model.layers)))
    check_tensors(adapter_shapes(model, args), found, source=str(folder))
    add_adapters(model, args)
    model.load_weights(list(read.tensors.items()), strict=False)
    if args.adapt_tied_head and args.adapts_embedding and "lm_head" not in model:
        logger.warning(
            "%s: as in mlx_lm, the embedding's adapter also reaches the tied output head; "
            "CoreNet and PEFT leave the head alone",
            folder,
        )
    return args


def save_adapters(
    model: Model, folder: str | Path, args: AdapterArgs, *, overwrite: bool = False
) -> None:
    """Write a model's adapters as a folder that :func:`load_adapters` and mlx_lm read.

    Args:
        model: with the adapters that ``args`` describe.
        folder: to be made; one that is there is replaced as a whole, only with ``overwrite``.
        args: the settings they were made with.
        overwrite: replace an adapter folder that is there.

    Raises:
        FileExistsError: if the folder is there and may not be replaced.
        ValueError: if the model's adapters are not those of ``args``.
    """
    tensors = adapter_state(model)
    check_tensors(
        adapter_shapes(model, args),
        {name: array.shape for name, array in tensors.items()},
        source="the model's adapters",
    )
    warn_where_mlx_lm_differs(model, args)
    write_adapter_folder(folder, tensors, args, overwrite=overwrite)


def warn_where_mlx_lm_differs(model: Model, args: AdapterArgs) -> None:
    """Say if stock mlx_lm would read these adapters but compute something else."""
    if not args.adapts_embedding:
        return
    if args.kind == "dora" and args.embedding_magnitude != "token":
        reason = "it learns a length for every row of the embedding"
    elif "lm_head" not in model and not args.adapt_tied_head:
        reason = "it applies the embedding's adapter to the tied output head as well"
    else:
        return
    logger.warning(
        "these adapters give other logits in stock mlx_lm: %s; fuse them into the model, or leave "
        "token_embeddings out of the target modules",
        reason,
    )


def adapter_state(model: Model) -> dict[str, mx.array]:
    """The adapters' tensors by name, in the model's order; empty without adapters."""
    leaves = _flat(model.parameters())
    return {name: array for name, array in leaves if name.rpartition(".")[2] in LEAVES}


def adapter_shapes(model: Model, args: AdapterArgs) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that ``args`` stand for on this model.

    Args:
        model: with or without adapters; plain or quantised.
        args: the settings.

    Raises:
        ValueError: if a target or ``num_layers`` does not fit the model.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path, base in _targets(model, args, adapted=True).items():
        rows, columns = dense_shape(base)
        inputs, outputs = (rows, columns) if is_embedding(base) else (columns, rows)
        shapes[f"{path}.lora_a"] = (inputs, args.rank)
        shapes[f"{path}.lora_b"] = (args.rank, outputs)
        if args.kind == "dora" and not is_embedding(base):
            shapes[f"{path}.m"] = (outputs,)
        elif is_embedding(base) and args.embedding_magnitude != "none":
            shapes[f"{path}.m"] = (inputs if args.embedding_magnitude == "token" else outputs,)
    return shapes


def trainable_count(model: nn.Module) -> int:
    """Number of elements that training will move."""
    return sum(array.size for _, array in _flat(model.trainable_parameters()))


def adapted_modules(model: Model) -> dict[str, Adapter]:
    """The adapters of a model by path, from the embedding to the head."""
    modules = ((path, get_module(model, path)) for path in module_paths(model))
    return {path: module for path, module in modules if isinstance(module, Adapter)}


def module_paths(model: Model) -> list[str]:
    """Paths of all modules that can be adapted, from the embedding to the head."""
    paths = [MODEL_MODULES["token_embeddings"]]
    for i in range(len(model.layers)):
        paths += [f"transformer.layers.{i}.{name}" for name in LAYER_MODULES.values()]
    return paths + ([MODEL_MODULES["lm_head"]] if "lm_head" in model else [])


def get_module(model: nn.Module, path: str) -> nn.Module:
    """The module at a dotted path."""
    module: Any = model
    for part in path.split("."):
        module = module[int(part)] if part.isdigit() else module[part]
    return module


def set_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a dotted path."""
    parent, _, name = path.rpartition(".")
    setattr(get_module(model, parent) if parent else model, name, module)


def _targets(model: Model, args: AdapterArgs, *, adapted: bool = False) -> dict[str, nn.Module]:
    """Path -> base layer of what ``args`` select; all that does not fit is refused."""
    layers = len(model.layers)
    if args.num_layers > layers:
        raise ValueError(f"num_layers is {args.num_layers}, but the model has {layers}; -1 is all")
    if not adapted and adapted_modules(model):
        raise ValueError("the model has adapters already; fuse them, or load the base again")
    first = 0 if args.num_layers == -1 else layers - args.num_layers
    paths = module_paths(model)
    chosen = [
        path
        for path in paths
        if path in args.target_modules
        or (_layer_of(path, first) >= first and any(matches(t, path) for t in args.target_modules))
    ]
    for target in args.target_modules:
        if not any(matches(target, path) for path in paths):
            names = ", ".join(dict.fromkeys(short_name(path) for path in paths))
            raise ValueError(
                f"the model has no module {target!r}; in each of its {layers} layers and beside "
                f"them it has {names}"
            )
    modules = {path: get_module(model, path) for path in chosen}
    return {p: m.base if isinstance(m, Adapter) else m for p, m in modules.items()}


def _layer_of(path: str, outside: int) -> int:
    parts = path.split(".")
    return int(parts[2]) if parts[1:2] == ["layers"] else outside


def _adapter(base: nn.Module, args: AdapterArgs, key: mx.array) -> Adapter:
    rows, columns = dense_shape(base)
    if is_embedding(base):
        a, b = mx.zeros((rows, args.rank)), mx.random.normal((args.rank, columns), key=key)
        scale, head = args.scale, args.adapt_tied_head
        if args.embedding_magnitude == "none":
            return LoRAEmbedding(base, lora_a=a, lora_b=b, scale=scale, adapt_head=head)
        by_token = args.embedding_magnitude == "token"
        return DoRAEmbedding(
            base, lora_a=a, lora_b=b, scale=scale, by_token=by_token, adapt_head=head
        )
    bound = columns**-0.5
    layer = DoRALinear if args.kind == "dora" else LoRALinear
    return layer(
        base,
        lora_a=mx.random.uniform(-bound, bound, (columns, args.rank), key=key),
        lora_b=mx.zeros((args.rank, rows)),
        scale=args.scale,
        dropout=args.dropout,
    )


def _flat(tree: Any) -> list[tuple[str, mx.array]]:
    pairs: Any = tree_flatten(tree)
    return pairs

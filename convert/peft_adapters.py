"""PEFT's tensors and settings joined into one adapter folder's, and taken apart again.

PEFT has a rank and a scale for each module, a folder of ours one of each. PEFT's DoRA gives the
embedding a magnitude, CoreNet's does not: written for PEFT it is the length of the adapted columns,
which changes nothing, and known again on the way back.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from convert.adapter_merge import target_names, to_rank
from convert.peft_config import PeftSettings
from convert.peft_tensors import EMBEDDING, Leaves
from openelm_mlx.adapter_args import AdapterArgs, short_name
from openelm_mlx.adapter_embeddings import LoRAEmbedding
from openelm_mlx.adapter_files import CONFIG
from openelm_mlx.adapter_layers import Adapter, norms_of
from openelm_mlx.lora import adapted_modules, get_module, module_paths
from openelm_mlx.model import Model

logger = logging.getLogger(__name__)


def check_against_config(
    modules: Mapping[str, Leaves], settings: PeftSettings, base: Model, folder: Path
) -> None:
    """In PEFT the config decides: tensors that say otherwise are an error, missing ones are said.

    Args:
        modules: path -> leaf -> array in our layout.
        settings: the config's.
        base: the model.
        folder: for messages.

    Raises:
        ValueError: if rank, kind or choice of modules differ.
    """
    for module, leaves in modules.items():
        rank, stated = leaves["lora_a"].shape[1], settings.rank_of(module)
        if rank != stated:
            raise ValueError(
                f"{folder}: {module} has rank {rank} in the tensors and {stated} by r and "
                f"rank_pattern of {CONFIG}"
            )
        if ("m" in leaves) != settings.use_dora:
            raise ValueError(
                f"{folder}: use_dora is {str(settings.use_dora).lower()}, but {module} has "
                f"{'a' if 'm' in leaves else 'no'} lora_magnitude_vector"
            )
    unselected = [module for module in modules if not settings.selects(module)]
    if unselected:
        raise ValueError(
            f"{folder}: {len(unselected)} modules have tensors that PEFT would not use, first "
            f"{unselected[0]}: target_modules and the layers of {CONFIG} leave them out"
        )
    if isinstance(settings.target_modules, list):
        _say_what_is_missing(modules, settings, module_paths(base), folder)


def _say_what_is_missing(
    modules: Mapping[str, Leaves], settings: PeftSettings, paths: list[str], folder: Path
) -> None:
    targets = settings.target_modules or ()
    idle = [t for t in targets if not any(f".{path}".endswith(f".{t}") for path in paths)]
    if idle:
        logger.warning(
            "%s: the model has no %s, which target_modules names; it has %s",
            *(folder, ", ".join(idle), ", ".join(dict.fromkeys(map(short_name, paths)))),
        )
    bare = [path for path in paths if settings.selects(path) and path not in modules]
    if bare:
        logger.warning(
            "%s has no tensors for %d modules that target_modules selects, first %s; they stay as "
            "in the base",
            *(folder, len(bare), bare[0]),
        )


def unite(
    modules: Mapping[str, Leaves], settings: PeftSettings, base: Model, folder: Path
) -> tuple[dict[str, mx.array], AdapterArgs]:
    """An adapter folder's tensors and settings; the arguments are those of the check above.

    Smaller ranks are filled with zeros and ``lora_b`` takes the difference in scale.

    Raises:
        ValueError: if a setting is out of our range.
    """
    scales = {module: settings.scale_of(module) for module in modules}
    rank = max(leaves["lora_a"].shape[1] for leaves in modules.values())
    scale = Counter(scales.values()).most_common(1)[0][0]
    others = [m for m in modules if scales[m] != scale or modules[m]["lora_a"].shape[1] != rank]
    if others:
        logger.info(
            "%d modules have another rank or scale, first %s: filled up with zeros to rank %d, the "
            "difference in scale is in lora_b",
            *(len(others), others[0], rank),
        )
    magnitude = _magnitude(modules, base, settings.scale_of(EMBEDDING))
    tensors: dict[str, mx.array] = {}
    for module, leaves in modules.items():
        factors = to_rank(
            leaves["lora_a"], leaves["lora_b"], rank=rank, factor=scales[module] / scale
        )
        tensors |= {f"{module}.lora_a": factors[0], f"{module}.lora_b": factors[1]}
        if "m" in leaves and not (module == EMBEDDING and magnitude == "none"):
            tensors[f"{module}.m"] = leaves["m"]
    try:
        return tensors, AdapterArgs(
            rank=rank,
            scale=scale,
            dropout=settings.dropout,
            kind="dora" if settings.use_dora else "lora",
            target_modules=target_names(list(modules), module_paths(base)),
            use_rslora=settings.use_rslora,
            embedding_magnitude=magnitude,
        )
    except ValueError as error:
        raise ValueError(f"{folder / CONFIG}: {error}") from error


def refuse_what_peft_cannot(args: AdapterArgs, base: Model, folder: Path) -> None:
    """Refuse adapters that would do something else in PEFT.

    Raises:
        ValueError: if they learn a length for every token, or reach a tied head.
    """
    instead = "fuse it into the model with `openelm fuse`, or train without token_embeddings"
    if args.embedding_magnitude == "token":
        raise ValueError(
            f"{folder}: mlx_lm's DoRA of token_embeddings learns a length a token, PEFT's a length "
            f"a feature; {instead}"
        )
    if args.adapts_embedding and args.adapt_tied_head and "lm_head" not in base:
        raise ValueError(
            f"{folder}: as in mlx_lm, the embedding's adapter also reaches the tied output head, "
            f"which it does not in PEFT; {instead}"
        )


def leaves_for_peft(model: Model, args: AdapterArgs) -> dict[str, Leaves]:
    """Path -> leaf -> array, with the magnitude that PEFT expects of a DoRA embedding.

    Args:
        model: with adapters.
        args: the settings they were made with.
    """
    modules = {path: _used_ranks(adapter) for path, adapter in adapted_modules(model).items()}
    embedding = modules.get(EMBEDDING, {})
    if embedding and args.kind == "dora" and "m" not in embedding:
        table = get_module(model, EMBEDDING).base
        embedding["m"] = _column_lengths(table, embedding, args.scale)
    return modules


def _used_ranks(adapter: Adapter) -> Leaves:
    """The adapter's tensors, without the zeros that filled a smaller rank up."""
    used = mx.any(adapter.lora_a != 0, axis=0) | mx.any(adapter.lora_b != 0, axis=1)
    ranks = [rank for rank, kept in enumerate(used.tolist(), 1) if kept]  # type: ignore[arg-type]
    rank = max(ranks, default=len(used))
    leaves = {"lora_a": adapter.lora_a[:, :rank], "lora_b": adapter.lora_b[:rank]}
    return {**leaves, "m": adapter.m} if "m" in adapter else leaves


def _magnitude(
    modules: Mapping[str, Leaves], base: Model, scale: float
) -> Literal["none", "feature"]:
    """PEFT's lengths of the embedding's columns; none where they are just what they would be."""
    leaves = modules.get(EMBEDDING, {})
    if "m" not in leaves:
        return "none"
    lengths = _column_lengths(get_module(base, EMBEDDING), leaves, scale)
    idle = len(modules) > 1 and mx.array_equal(leaves["m"], lengths).item()
    return "none" if idle else "feature"


def _column_lengths(table: nn.Module, leaves: Leaves, scale: float) -> mx.array:
    """(D,) float32: the lengths that leave an adapted embedding as it is."""
    lora_a, lora_b = (mx.contiguous(leaves[name]) for name in ("lora_a", "lora_b"))
    adapter = LoRAEmbedding(table, lora_a=lora_a, lora_b=lora_b, scale=scale)
    return norms_of(adapter.fused_weight(), axis=0)

"""Adapters of several ranks and scales as a folder of ours holds them: one rank, one scale.

Shared by the converters that read CoreNet's and PEFT's adapters; knows neither's names.
"""

from collections import Counter
from collections.abc import Sequence

import mlx.core as mx

from openelm_mlx.adapter_args import LAYER_MODULES, short_name


def to_rank(
    lora_a: mx.array, lora_b: mx.array, *, rank: int, factor: float
) -> tuple[mx.array, mx.array]:
    """Fill two factors up with zeros, and multiply what they add by ``factor``.

    Args:
        lora_a: (in, r) with r <= ``rank``.
        lora_b: (r, out).
        rank: of the folder.
        factor: the module's scale / the folder's scale.

    Returns:
        (in, rank) and (rank, out). The second is float32 where rounding the product to its own
        type would change it.
    """
    missing = rank - lora_a.shape[1]
    if missing:
        lora_a = mx.pad(lora_a, [(0, 0), (0, missing)])
        lora_b = mx.pad(lora_b, [(0, missing), (0, 0)])
    if factor != 1.0:
        exact = lora_b.astype(mx.float32) * factor
        rounded = exact.astype(lora_b.dtype)
        same = mx.array_equal(rounded.astype(mx.float32), exact).item()
        lora_b = rounded if same else exact
    return mx.contiguous(lora_a), mx.contiguous(lora_b)


def target_names(modules: Sequence[str], in_model: Sequence[str]) -> list[str]:
    """``target_modules`` that select the given modules and no others.

    Args:
        modules: paths of the adapted modules.
        in_model: paths of all modules that could be.

    Returns:
        Short names where all layers have that module adapted, else whole paths.
    """
    adapted, present = (Counter(map(short_name, paths)) for paths in (modules, in_model))
    return list(
        dict.fromkeys(
            short if short not in LAYER_MODULES or adapted[short] == present[short] else module
            for module in modules
            for short in [short_name(module)]
        )
    )

"""Which layer is quantised how: the settings a user may ask for, and what each layer takes.

Knows modules and widths, not files.
"""

from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

MODES = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}  # group, bits
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (128, 64, 32)
UNTOUCHED = 16  # --embedding-bits that leaves the table and the head as they are
_TABLES = ("transformer.token_embeddings", "lm_head")

LayerSettings = dict[str, Any]  # group_size, bits, mode, as ``to_quantized`` takes them


@dataclass(frozen=True, kw_only=True)
class QuantizeArgs:
    """How to quantise; the defaults of Python and the command line.

    Attributes:
        bits: a weight's; None takes the mode's (affine 4).
        group_size: weights that share a scale; None takes the mode's (affine 64).
        mode: "affine", "mxfp4", "mxfp8" or "nvfp4"; all but the first fix bits and group.
        embedding_bits: for the embedding and the head, affine; 16 leaves them; None as the rest.

    Raises:
        ValueError: if a mode does not exist or has no such bits or group.
    """

    bits: int | None = None
    group_size: int | None = None
    mode: str = "affine"
    embedding_bits: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode {self.mode!r} is not one of {', '.join(MODES)}")
        group, bits = MODES[self.mode]
        fixed = self.mode != "affine"
        for name, value, default, choices in (
            ("bits", self.bits, bits, (bits,) if fixed else AFFINE_BITS),
            ("group_size", self.group_size, group, (group,) if fixed else AFFINE_GROUPS),
        ):
            object.__setattr__(self, name, default if value is None else value)
            if getattr(self, name) not in choices:
                allowed = ", ".join(map(str, choices))
                raise ValueError(f"{name} {value} does not exist in mode {self.mode}: {allowed}")
        if self.embedding_bits not in (None, *AFFINE_BITS, UNTOUCHED):
            raise ValueError(
                f"embedding_bits {self.embedding_bits} is not one of "
                f"{', '.join(map(str, AFFINE_BITS))}, or {UNTOUCHED} to leave the table as it is"
            )

    @property
    def settings(self) -> LayerSettings:
        """What a layer gets that nothing is special about."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


def plan_layers(model: nn.Module, asked: QuantizeArgs) -> dict[str, LayerSettings | None]:
    """Settings for every layer that can be quantised; None where it stays as it is."""
    modules: Any = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    plan: dict[str, LayerSettings | None] = {}
    for path, module in modules:
        if not hasattr(module, "to_quantized"):
            continue
        wanted: LayerSettings | None = asked.settings
        if path in _TABLES and asked.embedding_bits is not None:
            wanted = _table_settings(asked)
        plan[path] = wanted and _fit(wanted, module.weight.shape[-1])
    return plan


def _table_settings(asked: QuantizeArgs) -> LayerSettings | None:
    if asked.embedding_bits == UNTOUCHED:
        return None
    group = asked.group_size if asked.mode == "affine" else MODES["affine"][0]
    return {"group_size": group, "bits": asked.embedding_bits, "mode": "affine"}


def _fit(wanted: LayerSettings, width: int) -> LayerSettings | None:
    """The settings with the largest group, of the asked size or less, that divides the width."""
    groups = AFFINE_GROUPS if wanted["mode"] == "affine" else (wanted["group_size"],)
    for group in groups:
        if group <= wanted["group_size"] and width % group == 0:
            return {**wanted, "group_size": group}
    return None

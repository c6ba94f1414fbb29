"""Bases and adapters to fuse, for tests."""

from pathlib import Path
from typing import Any

import numpy as np
from folder_makers import logits, small_folder, small_model
from golden_lora import LINEAR, randomise

from convert.quantize import quantize
from openelm_mlx.checkpoint import load
from openelm_mlx.lora import AdapterArgs, adapter_state, add_adapters, save_adapters
from openelm_mlx.model import Model

ARGS = AdapterArgs(rank=4, scale=2.0, target_modules=LINEAR)
WIDE: dict[str, Any] = {"ffn_multipliers": (1.0, 2.0)}


def adapters(folder: Path, base: Model, args: AdapterArgs = ARGS, *, size: float = 1.0) -> Path:
    """Random adapters for a model, whose change is ``size`` times as large."""
    add_adapters(base, args)
    randomise(base)
    for name, array in adapter_state(base).items():
        if name.endswith("lora_b") and size != 1:
            base.load_weights([(name, array * size)], strict=False)
    save_adapters(base, folder, args)
    return folder


def adapted_logits(base: Path, adapter_path: Path) -> np.ndarray:
    return logits(load(base, adapter_path=adapter_path)[0])


def quantised(tmp_path: Path, **settings: Any) -> Path:
    """A base in 4 bit, groups of 32."""
    small_folder(tmp_path / "plain", None, small_model(**WIDE))
    quantize(tmp_path / "plain", tmp_path / "base", bits=4, group_size=32, **settings)
    return tmp_path / "base"

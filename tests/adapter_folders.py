"""Adapter folders for tests, made and spoilt."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from golden_lora import UNTIED, randomise
from model_makers import random_model, random_tokens

from openelm_mlx.lora import (
    AdapterArgs,
    add_adapters,
    save_adapters,
)
from openelm_mlx.model import Model

TOKENS = random_tokens(2, 9, 61)
B_NAME = "transformer.layers.0.attn.qkv_proj.lora_b"


def adapted(args: AdapterArgs) -> Model:
    """A random untied model with adapters that matter."""
    model = random_model(UNTIED)
    add_adapters(model, args)
    randomise(model)
    return model


def saved(folder: Path, args: AdapterArgs | None = None) -> Path:
    """A folder of random adapters for ``random_model(UNTIED)``."""
    args = args or AdapterArgs(rank=2, scale=2.0)
    save_adapters(adapted(args), folder, args)
    return folder


def edit(folder: Path, **changes: Any) -> None:
    """Set keys of the config; None removes one."""
    file = folder / "adapter_config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def rewrite(folder: Path, tensors: dict[str, mx.array]) -> None:
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)


def tensors_of(folder: Path) -> dict[str, mx.array]:
    loaded: Any = mx.load(str(folder / "adapters.safetensors"))
    return dict(loaded)

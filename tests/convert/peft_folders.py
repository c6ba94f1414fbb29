"""PEFT adapter folders for tests, and in NumPy the model that PEFT makes of them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import golden_set  # imports openelm_mlx, so that OpenBLAS comes before mlx.core
import mlx.core as mx
import numpy as np
from golden_lora import UNTIED
from model_makers import random_model

from convert.pt_file import write
from openelm_mlx.checkpoint import save_model
from openelm_mlx.model import Model

PREFIX = "base_model.model."
TABLE = "transformer.token_embeddings"
LINEAR = [
    f"transformer.layers.{i}.{name}"
    for i in range(2)
    for name in ("attn.qkv_proj", "attn.out_proj", "ffn.proj_1", "ffn.proj_2")
]
TIED = {**UNTIED, "share_input_output_layers": True}


def base_model(*, tied: bool = True) -> Model:
    return random_model(TIED if tied else UNTIED, seed=5)


def base_folder(path: Path, *, tied: bool = True) -> Path:
    save_model(base_model(tied=tied), path)
    return path


def peft_config(**changes: Any) -> dict[str, Any]:
    """As PEFT 0.21 writes it, for LoRA of all linear layers with rank 4 and scale 2.5."""
    return {
        **{"alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "apple/OpenELM"},
        **{"bias": "none", "exclude_modules": None, "fan_in_fan_out": False},
        **{"inference_mode": True, "init_lora_weights": True, "layer_replication": None},
        **{"layers_pattern": None, "layers_to_transform": None, "loftq_config": {}},
        **{"lora_alpha": 10, "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None},
        **{"megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA"},
        **{"peft_version": "0.21.2", "qalora_group_size": 16, "r": 4, "rank_pattern": {}},
        **{"revision": None, "target_parameters": None, "task_type": "CAUSAL_LM"},
        **{"target_modules": ["qkv_proj", "out_proj", "proj_1", "proj_2"]},
        **{"trainable_token_indices": None, "use_dora": False, "use_rslora": False},
        **changes,
    }


def peft_tensors(
    model: Model,
    ranks: Mapping[str, int],
    *,
    dora: bool = False,
    dtype: mx.Dtype = mx.float32,
    seed: int = 7,
) -> dict[str, mx.array]:
    """Random adapters of the given modules, in PEFT's names and layout."""
    generator = np.random.default_rng(seed)
    weights = golden_set.numpy_weights(model)
    found: dict[str, np.ndarray] = {}
    for module, rank in ranks.items():
        rows, columns = weights[f"{module}.weight"].shape
        a, b, outputs, end = "lora_A.weight", "lora_B.weight", rows, f"{PREFIX}{module}."
        if module == TABLE:
            a, b, outputs = "lora_embedding_A", "lora_embedding_B", columns
        found[end + a] = generator.normal(size=(rank, rows + columns - outputs)) * 0.3
        found[end + b] = generator.normal(size=(outputs, rank)) * 0.3
        if dora:
            found[end + "lora_magnitude_vector"] = generator.uniform(0.5, 2.0, outputs)
    return {n: mx.array(array.astype(np.float32)).astype(dtype) for n, array in found.items()}


def peft_folder(
    path: Path, tensors: Mapping[str, mx.array], *, form: str = "safetensors", **changes: Any
) -> Path:
    """The two files; ``form`` bin gives what ``torch.save`` does."""
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text(json.dumps(peft_config(**changes)))
    if form == "bin":
        write(path / "adapter_model.bin", dict(tensors))
    else:
        mx.save_safetensors(str(path / "adapter_model.safetensors"), dict(tensors))
    return path


def merged(model: Model, tensors: Mapping[str, mx.array], scales: Mapping[str, float]) -> Model:
    """The untied model whose weights PEFT's merge would give: W + s B A, for DoRA at length m."""
    weights = golden_set.numpy_weights(model)
    weights.setdefault("lm_head.weight", weights[f"{TABLE}.weight"])
    arrays = {n: np.array(t.astype(mx.float32)).astype(np.float64) for n, t in tensors.items()}
    for module, scale in scales.items():
        start = f"{PREFIX}{module}.lora_"
        if module == TABLE:
            delta = (arrays[f"{start}embedding_B"] @ arrays[f"{start}embedding_A"]).T
        else:
            delta = arrays[f"{start}B.weight"] @ arrays[f"{start}A.weight"]
        total = weights[f"{module}.weight"] + scale * delta
        m = arrays.get(f"{start}magnitude_vector")
        if m is not None:
            axis = 0 if module == TABLE else 1
            lengths = np.linalg.norm(total, axis=axis, keepdims=True)
            total = total * np.expand_dims(m, axis) / lengths
        weights[f"{module}.weight"] = total.astype(np.float32)
    out = Model(replace(model.args, share_input_output_layers=False))
    out.load_weights([(name, mx.array(array)) for name, array in weights.items()], strict=True)
    return out


def tensors_in(folder: Path, name: str = "adapter_model.safetensors") -> dict[str, mx.array]:
    loaded: Any = mx.load(str(folder / name))
    return dict(loaded)


def config_in(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return config

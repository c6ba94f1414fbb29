"""Model folders for tests: a small model that a tiny tokenizer fits, saved in many ways."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import golden_set  # imports openelm_mlx, so that OpenBLAS comes before mlx.core
import mlx.core as mx
import numpy as np
import tiny_tokenizer as tiny
from model_makers import random_model

from openelm_mlx.checkpoint import save_model
from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import Tokenizer

IDS = [1, 17, 260, 3, 300, 45, 45, 299]


def small_config(**changes: Any) -> dict[str, Any]:
    """Heads [2, 4], kv heads [1, 2], feed-forward [32, 64]; every width divides by 32."""
    args = ModelArgs.from_scaling(
        **{
            **{"num_transformer_layers": 2, "model_dim": 64, "head_dim": 16},
            **{"qkv_multipliers": (0.5, 1.0), "ffn_multipliers": (0.5, 1.0)},
            **{"num_gqa_groups": 2, "ffn_dim_divisor": 32, "vocab_size": tiny.VOCAB_SIZE},
            **changes,
        }
    )
    return args.to_dict()


def small_model(dtype: mx.Dtype = mx.float32, **changes: Any) -> Model:
    """A random model of :func:`small_config`, in eval mode."""
    config = small_config(**changes)
    model = random_model({k: v for k, v in config.items() if k not in ("architectures",)})
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def small_folder(
    path: Path, tokenizer: Tokenizer | None, model: Model | None = None, **settings: Any
) -> Path:
    """``model`` saved as a folder of ours."""
    save_model(model or small_model(), path, tokenizer=tokenizer, **settings)
    return path


def foreign_folder(path: Path, config: Mapping[str, Any], weights: Mapping[str, mx.array]) -> Path:
    """What others write: a config and one safetensors file, no tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(path / "model.safetensors"), dict(weights))
    return path


def weights_of(model: Model) -> dict[str, mx.array]:
    """The parameters by name."""
    return dict(golden_set.flat(model))


def logits(model: Model, ids: list[int] = IDS) -> np.ndarray:
    """(L, V) float32."""
    return np.array(model(mx.array([ids]))[0].astype(mx.float32))


def bits(array: mx.array) -> bytes:
    """The array's memory, so that NaN and -0 count too."""
    kinds = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32}
    return np.array(mx.view(array, kinds[array.itemsize])).tobytes()


def assert_same_weights(found: Mapping[str, mx.array], expected: Mapping[str, mx.array]) -> None:
    """Equal names, shapes, types and bits."""
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        assert bits(found[name]) == bits(array), name


def files(folder: Path) -> list[str]:
    """Names of all files, hidden ones too."""
    return sorted(p.name for p in folder.iterdir())

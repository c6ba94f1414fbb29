"""Models for tests: Apple's tiny ones, and random ones of any shape."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import golden_set  # imports openelm_mlx, so that OpenBLAS comes before mlx.core
import mlx.core as mx
import numpy as np

from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Model


@lru_cache(maxsize=8)
def apple_model(name: str) -> tuple[Model, dict[str, Any]]:
    """One of Apple's tiny models in eval mode, and its config; not to be changed."""
    folder = golden_set.find(f"hf/{name}")
    assert folder is not None
    config = golden_set.read_json(folder / "config.json")
    model = Model(ModelArgs.from_dict(config))
    weights: Any = mx.load(str(folder / "model.safetensors"))
    model.load_weights(list(model.sanitize(weights).items()), strict=True)
    model.eval()
    return model, config


@lru_cache(maxsize=8)
def apple_io(name: str) -> dict[str, np.ndarray]:
    """Inputs and outputs of one of Apple's tiny models."""
    path = golden_set.find(f"io/{name}.safetensors")
    assert path is not None
    return golden_set.read_numpy(path)


def random_model(config: Mapping[str, Any], seed: int = 0) -> Model:
    """``model_of`` the keys of a ``config.json``."""
    return model_of(ModelArgs(**config), seed)


def model_of(args: ModelArgs, seed: int = 0) -> Model:
    """A float32 model in eval mode, norm weights far from 1 so that a lost one shows."""
    mx.random.seed(seed)
    model = Model(args)
    norms = {
        name: mx.random.uniform(0.4, 1.6, weight.shape)
        for name, weight in golden_set.flat(model)
        if weight.ndim == 1
    }
    model.load_weights(list(norms.items()), strict=False)
    model.eval()
    mx.eval(model.parameters())
    return model


def random_tokens(batch: int, length: int, vocab_size: int, seed: int = 0) -> mx.array:
    """(batch, length) int32."""
    ids = np.random.default_rng(seed).integers(0, vocab_size, (batch, length))
    return mx.array(ids.astype(np.int32))

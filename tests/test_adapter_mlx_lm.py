"""Adapter folders in stock mlx_lm and its own here: equal logits both ways."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from adapter_folders import TOKENS
from golden_lora import LINEAR, UNTIED, largest, logits, randomise
from mlx.utils import tree_flatten
from model_makers import random_model

from openelm_mlx.checkpoint import load, save_model
from openelm_mlx.lora import AdapterArgs, adapter_state, add_adapters, load_adapters, save_adapters
from openelm_mlx.model import Model

pytestmark = pytest.mark.slow  # importing mlx_lm takes 2 s

ATOL = 1e-4
TIED = {**UNTIED, "share_input_output_layers": True, "model_dim": 64, "head_dim": 32}


def base(tmp_path: Path, *, tied: bool = True, bits: int | None = None) -> Path:
    """A model folder that both sides read."""
    config: dict[str, Any] = {**TIED, "share_input_output_layers": tied, "ffn_dim_divisor": 32}
    if bits:
        quantization = {"group_size": 32, "bits": bits}
        model = random_model({**config, "extra": {"quantization": quantization}})
        nn.quantize(model, **quantization)
    else:
        model = random_model(config)
    save_model(model, tmp_path / "base")
    return tmp_path / "base"


def stock_model(folder: Path) -> Any:
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    return model


def stock_logits(folder: Path, adapters: Path) -> np.ndarray:
    from mlx_lm.tuner.utils import load_adapters

    model = load_adapters(stock_model(folder), str(adapters))
    model.eval()
    return np.array(model(TOKENS))


def ours(folder: Path, adapters: Path) -> Model:
    return load(folder, adapter_path=adapters)[0]


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize(
    "args",
    [
        AdapterArgs(rank=2, scale=2.0, target_modules=LINEAR),
        AdapterArgs(rank=2, scale=2.0, target_modules=LINEAR, kind="dora"),
        AdapterArgs(rank=2, scale=2.0, target_modules=["qkv_proj", "proj_2"], num_layers=1),
        AdapterArgs(rank=2, scale=2.0, target_modules=["transformer.layers.0.attn.out_proj"]),
        AdapterArgs(rank=2, scale=2.0, adapt_tied_head=True),
    ],
    ids=["lora", "dora", "last-layer", "one-path", "embedding-and-head"],
)
def test_mlx_lm_computes_the_same_from_our_folder(
    tmp_path: Path, args: AdapterArgs, bits: int | None
) -> None:
    folder = base(tmp_path, bits=bits)
    model, _ = load(folder)
    before = logits(model, TOKENS)
    add_adapters(model, args)
    randomise(model)
    save_adapters(model, tmp_path / "a", args)
    after = logits(model, TOKENS)
    assert largest(after, before) > 0.1
    assert largest(stock_logits(folder, tmp_path / "a"), after) < ATOL


def test_mlx_lm_computes_the_same_from_our_embedding_adapter_of_an_untied_model(
    tmp_path: Path,
) -> None:
    folder = base(tmp_path, tied=False)
    model, _ = load(folder)
    args = AdapterArgs(rank=2, scale=2.0, target_modules=["token_embeddings", "lm_head"])
    add_adapters(model, args)
    randomise(model)
    save_adapters(model, tmp_path / "a", args)
    assert largest(stock_logits(folder, tmp_path / "a"), logits(model, TOKENS)) < ATOL


def test_mlx_lm_adapts_a_tied_head_where_we_warned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning tells the truth; when this fails, mlx_lm has changed and it may go."""
    folder = base(tmp_path)
    model, _ = load(folder)
    args = AdapterArgs(rank=2, scale=2.0)
    add_adapters(model, args)
    randomise(model)
    save_adapters(model, tmp_path / "a", args)
    assert "other logits in stock mlx_lm" in caplog.text
    assert largest(stock_logits(folder, tmp_path / "a"), logits(model, TOKENS)) > 0.1


def stock_folder(
    folder: Path, target: Path, *, kind: str, keys: list[str] | None, num_layers: int
) -> np.ndarray:
    """Write adapters as ``mlx_lm.lora`` does; return mlx_lm's logits with them."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model = stock_model(folder)
    parameters: dict[str, Any] = {"rank": 3, "scale": 1.5, "dropout": 0.0}
    if keys is not None:
        parameters["keys"] = keys
    model.freeze()
    linear_to_lora_layers(model, num_layers, parameters, use_dora=kind == "dora")
    randomise(model)
    trained: Any = tree_flatten(model.trainable_parameters())
    target.mkdir()
    mx.save_safetensors(str(target / "adapters.safetensors"), dict(trained))
    config = {"fine_tune_type": kind, "num_layers": num_layers, "lora_parameters": parameters}
    (target / "adapter_config.json").write_text(json.dumps({**config, "seed": 0, "model": "x"}))
    model.eval()
    return np.array(model(TOKENS))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize(
    ("keys", "num_layers"),
    [
        (None, 16),
        (None, 1),
        (["attn.qkv_proj"], -3),
        (["ffn.proj_1", "transformer.token_embeddings"], 1),
        (["transformer.token_embeddings"], 0),
    ],
)
def test_we_compute_the_same_from_mlx_lms_folder(
    tmp_path: Path, keys: list[str] | None, num_layers: int, kind: str, tied: bool
) -> None:
    folder = base(tmp_path, tied=tied)
    expected = stock_folder(folder, tmp_path / "a", kind=kind, keys=keys, num_layers=num_layers)
    model = ours(folder, tmp_path / "a")
    assert largest(logits(model, TOKENS), expected) < ATOL
    save_adapters(model, tmp_path / "again", reload_args(folder, tmp_path / "a"))
    assert largest(logits(ours(folder, tmp_path / "again"), TOKENS), expected) < ATOL
    assert largest(stock_logits(folder, tmp_path / "again"), expected) < ATOL


def reload_args(folder: Path, adapters: Path) -> AdapterArgs:
    args = load_adapters(load(folder)[0], adapters)
    assert args is not None
    return args


def test_mlx_lms_adapter_of_a_tied_embedding_is_said_to_reach_the_head(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = base(tmp_path)
    keys = ["transformer.token_embeddings"]
    stock_folder(folder, tmp_path / "a", kind="lora", keys=keys, num_layers=-1)
    caplog.clear()
    ours(folder, tmp_path / "a")
    assert "as in mlx_lm, the embedding's adapter also reaches the tied output head" in caplog.text


def test_mlx_lms_whole_weights_replace_the_models(tmp_path: Path) -> None:
    folder = base(tmp_path)
    stock = stock_model(folder)
    weights = {
        f"transformer.layers.1.{name}.weight": mx.random.normal(shape)
        for name, shape in {"ffn.proj_2": (64, 64), "ffn_norm": (64,)}.items()
    }
    stock.load_weights(list(weights.items()), strict=False)
    (tmp_path / "a").mkdir()
    mx.save_safetensors(str(tmp_path / "a/adapters.safetensors"), weights)
    (tmp_path / "a/adapter_config.json").write_text('{"fine_tune_type": "full", "num_layers": 1}')
    model = ours(folder, tmp_path / "a")
    assert not adapter_state(model)
    assert largest(logits(model, TOKENS), np.array(stock(TOKENS))) < ATOL
    weights["transformer.layers.1.ffn_norm.bias"] = mx.zeros((64,))
    weights["transformer.layers.1.ffn.proj_2.weight"] = mx.zeros((64, 65))
    mx.save_safetensors(str(tmp_path / "a/adapters.safetensors"), weights)
    with pytest.raises(ValueError, match=r"unexpected: .*ffn_norm.bias.*\[64, 65\], expected \[64"):
        ours(folder, tmp_path / "a")


def test_mlx_lm_refuses_our_folder_with_peft_magnitudes_of_the_embedding(tmp_path: Path) -> None:
    """Loudly, by shape: it never computes something else in silence."""
    folder = base(tmp_path)
    model, _ = load(folder)
    args = AdapterArgs(rank=2, scale=2.0, kind="dora", embedding_magnitude="feature")
    add_adapters(model, args)
    save_adapters(model, tmp_path / "a", args)
    with pytest.raises(ValueError, match=r"token_embeddings\.m: adapter shape"):
        stock_logits(folder, tmp_path / "a")

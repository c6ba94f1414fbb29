"""Tensors under other names and quantised ones become the model that their config says."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from folder_makers import (
    foreign_folder,
    logits,
    small_config,
    small_model,
    weights_of,
)

from convert.names import to_corenet
from openelm_mlx import config as config_module
from openelm_mlx.checkpoint import load_model
from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Model

TABLE = "transformer.token_embeddings.weight"
UNTIED: dict[str, Any] = {"share_input_output_layers": False}


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (each caller checks the message)
        load_model(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# CoreNet's names and folders


def test_corenets_names_are_read(tmp_path: Path) -> None:
    model = small_model(**UNTIED)
    weights = {to_corenet(name): w for name, w in weights_of(model).items()}
    assert "layers.0.attn.qkv_proj.weight" in weights
    folder = foreign_folder(tmp_path, small_config(**UNTIED), weights)
    np.testing.assert_array_equal(logits(load_model(folder)), logits(model))


@pytest.mark.parametrize("quantization", [None, {"group_size": 32, "bits": 4}])
def test_corenet_mlx_folders_are_read(
    quantization: dict[str, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(config_module._PRESETS, "270m", (2, 64, 16))
    args = ModelArgs.preset("OpenELM-270M", vocab_size=320)
    model = Model(args)
    if quantization:
        nn.quantize(model, **quantization)
    weights = {to_corenet(name): w for name, w in weights_of(model).items()}
    mx.save_safetensors(str(tmp_path / "weights.safetensors"), weights)
    config = {"model_name": "OpenELM-270M", "vocab_size": 320, "max_context_length": 512}
    config |= {"quantization": quantization} if quantization else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_model(tmp_path)
    assert loaded.args.max_context_length == 512
    np.testing.assert_array_equal(logits(loaded), logits(model))


# Quantised folders


def quantised(model: Model, **settings: Any) -> Model:
    nn.quantize(model, **settings)
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {"group_size": 64, "bits": 4},
        {"group_size": 32, "bits": 4},
        {"group_size": 32, "bits": 8},
        {"group_size": 32, "bits": 3},
        {"mode": "mxfp4", "group_size": 32, "bits": 4},
        {"mode": "nvfp4", "group_size": 16, "bits": 4},
    ],
)
@pytest.mark.parametrize("changes", [{}, UNTIED])
def test_quantised_folders_give_the_logits_of_mlx(
    settings: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    changes = {**changes, "ffn_multipliers": (1.0, 2.0)}
    model = small_model(**changes)
    fits = settings["group_size"]  # layer 0's out_proj is 32 wide: not quantised in groups of 64
    nn.quantize(
        model,
        **settings,
        class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[1] % fits == 0,
    )
    config = {**small_config(**changes), "quantization": settings}
    loaded = load_model(foreign_folder(tmp_path, config, weights_of(model)))
    assert isinstance(loaded.transformer.token_embeddings, nn.QuantizedEmbedding)
    np.testing.assert_array_equal(logits(loaded), logits(model))


def test_settings_of_single_layers_are_read(tmp_path: Path) -> None:
    model = small_model()
    table, plain = "transformer.token_embeddings", "transformer.layers.0.ffn.proj_2"
    default = {"group_size": 32, "bits": 4}
    entry = {**default, table: {"group_size": 64, "bits": 8}, plain: False}

    def settings(path: str, module: nn.Module) -> bool | dict[str, int]:
        choice = entry.get(path, default)
        return choice if hasattr(module, "to_quantized") else False

    nn.quantize(model, class_predicate=settings)
    config = {**small_config(), "quantization": entry}
    loaded = load_model(foreign_folder(tmp_path, config, weights_of(model)))
    assert loaded.transformer.token_embeddings.bits == 8
    assert type(loaded.layers[0].ffn.proj_2) is nn.Linear
    np.testing.assert_array_equal(logits(loaded), logits(model))


def test_packed_weights_without_settings_are_named(tmp_path: Path) -> None:
    model = quantised(small_model(), group_size=32, bits=4)
    message = refusal(foreign_folder(tmp_path, small_config(), weights_of(model)))
    assert f"{len(weights_of(model)) - len(weights_of(small_model()))} unexpected: " in message
    assert ".scales" in message


def test_settings_that_fit_no_layer_are_refused(tmp_path: Path) -> None:
    model = quantised(small_model(), group_size=32, bits=4)
    for entry in ({"group_size": 32, "bits": 8}, {"group_size": 7, "bits": 4}, {"bits": "x"}):
        config = {**small_config(), "quantization": entry}
        message = refusal(foreign_folder(tmp_path, config, weights_of(model)))
        assert "of another shape" in message or "quantization entry of config.json" in message

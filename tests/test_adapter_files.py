"""Adapter folders: written whole, read back exactly, and by the side of mlx_lm."""

import json
import logging
from pathlib import Path

import golden_lora
import mlx.core as mx
import numpy as np
import pytest
from adapter_folders import B_NAME, TOKENS, adapted, saved, tensors_of
from golden_lora import LINEAR, UNTIED, VARIANTS, fill, largest, logits, randomise
from model_makers import random_model

from openelm_mlx.adapter_files import write_adapter_files, write_adapter_folder
from openelm_mlx.lora import (
    AdapterArgs,
    adapter_state,
    add_adapters,
    load_adapters,
    save_adapters,
    trainable_count,
)

SETTINGS = [
    AdapterArgs(rank=2, scale=2.0),
    AdapterArgs(
        rank=3, scale=0.5, dropout=0.1, num_layers=1, target_modules=["out_proj", "proj_1"]
    ),
    AdapterArgs(rank=2, scale=2.0, use_rslora=True, target_modules=[*LINEAR, "lm_head"]),
    AdapterArgs(rank=2, scale=2.0, kind="dora"),
    AdapterArgs(rank=2, scale=2.0, kind="dora", embedding_magnitude="feature"),
    AdapterArgs(rank=2, scale=2.0, kind="dora", embedding_magnitude="token"),
    AdapterArgs(rank=2, scale=2.0, target_modules=["transformer.layers.0.ffn.proj_2"]),
    AdapterArgs(rank=2, scale=2.0, adapt_tied_head=True),
]


@pytest.mark.parametrize("args", SETTINGS, ids=range(len(SETTINGS)))
def test_saved_adapters_load_exactly(tmp_path: Path, args: AdapterArgs) -> None:
    model = adapted(args)
    save_adapters(model, tmp_path / "a", args)
    again = random_model(UNTIED)
    assert load_adapters(again, tmp_path / "a") == args
    np.testing.assert_array_equal(logits(again, TOKENS), logits(model, TOKENS))
    assert trainable_count(again) == trainable_count(model)
    before, after = adapter_state(model), adapter_state(again)
    assert list(before) == list(after)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_bfloat16_adapters_stay_bfloat16(tmp_path: Path) -> None:
    args = AdapterArgs(rank=2, scale=2.0, kind="dora")
    model = adapted(args)
    fill(model, {k: v.astype(mx.bfloat16) for k, v in adapter_state(model).items()})
    save_adapters(model, tmp_path / "a", args)
    again = random_model(UNTIED)
    load_adapters(again, tmp_path / "a")
    assert {array.dtype for array in adapter_state(again).values()} == {mx.bfloat16}
    np.testing.assert_array_equal(logits(again, TOKENS), logits(model, TOKENS))


def test_the_config_has_mlx_lms_keys(tmp_path: Path) -> None:
    saved(tmp_path / "a", AdapterArgs(rank=2, scale=2.0, dropout=0.1, kind="dora", num_layers=1))
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    keys = ["attn.qkv_proj", "attn.out_proj", "ffn.proj_1", "ffn.proj_2"]
    assert config["fine_tune_type"] == "dora"
    assert config["num_layers"] == 1
    assert config["lora_parameters"] == {
        "rank": 2,
        "scale": 2.0,
        "dropout": 0.1,
        "keys": [*keys, "transformer.token_embeddings"],
    }
    names = set(tensors_of(tmp_path / "a"))
    assert "transformer.layers.1.attn.qkv_proj.m" in names
    assert "transformer.token_embeddings.lora_a" in names


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_folder_of_apples_tensors_gives_apples_logits(tmp_path: Path, variant: str) -> None:
    """The way that the converters go: tensors and settings, without a model."""
    write_adapter_folder(tmp_path / "a", golden_lora.adapter_tensors(variant), VARIANTS[variant])
    model = golden_lora.base_model()
    assert load_adapters(model, tmp_path / "a") == VARIANTS[variant]
    expected = golden_lora.io(f"{variant}.logits")
    assert largest(logits(model, golden_lora.input_ids()), expected) < 1e-4


def test_an_existing_folder_is_replaced_only_when_asked(tmp_path: Path) -> None:
    args = AdapterArgs(rank=2, scale=2.0)
    saved(tmp_path / "a", args)
    model = random_model(UNTIED)
    add_adapters(model, args)
    with pytest.raises(FileExistsError, match="--overwrite"):
        save_adapters(model, tmp_path / "a", args)
    save_adapters(model, tmp_path / "a", args, overwrite=True)
    assert not tensors_of(tmp_path / "a")[B_NAME].any().item()


def test_files_are_replaced_inside_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    args = AdapterArgs(rank=2, scale=2.0)
    for seed in (1, 2):
        model = adapted(args)
        randomise(model, seed)
        write_adapter_files(tmp_path, adapter_state(model), args)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "adapter_config.json",
        "adapters.safetensors",
        "metrics.jsonl",
    ]
    assert np.array_equal(tensors_of(tmp_path)[B_NAME], adapter_state(model)[B_NAME])


def test_settings_of_other_adapters_are_not_saved(tmp_path: Path) -> None:
    model = adapted(AdapterArgs(rank=2))
    with pytest.raises(ValueError, match=r"qkv_proj.lora_a is \[32, 2\], expected \[32, 3\]"):
        save_adapters(model, tmp_path / "a", AdapterArgs(rank=3))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("tied", "args", "warned"),
    [
        (True, AdapterArgs(), "applies the embedding's adapter to the tied output head"),
        (True, AdapterArgs(adapt_tied_head=True), None),
        (True, AdapterArgs(target_modules=LINEAR), None),
        (True, AdapterArgs(kind="dora", target_modules=LINEAR), None),
        (False, AdapterArgs(), None),
        (False, AdapterArgs(kind="dora"), "learns a length for every row of the embedding"),
        (False, AdapterArgs(kind="dora", embedding_magnitude="token"), None),
    ],
)
def test_saving_says_where_mlx_lm_would_compute_something_else(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    tied: bool,
    args: AdapterArgs,
    warned: str | None,
) -> None:
    model = random_model({**UNTIED, "share_input_output_layers": tied})
    add_adapters(model, args)
    with caplog.at_level(logging.WARNING):
        save_adapters(model, tmp_path / "a", args)
    assert (warned in caplog.text) if warned else not caplog.text

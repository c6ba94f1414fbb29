"""Adapter folders that do not fit, are damaged or old: refused in one line, or read right."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapter_folders import B_NAME, TOKENS, adapted, edit, rewrite, saved, tensors_of
from golden_lora import UNTIED, logits
from model_makers import random_model

from openelm_mlx.lora import (
    AdapterArgs,
    adapted_modules,
    add_adapters,
    load_adapters,
    save_adapters,
)


def refused(folder: Path, message: str) -> str:
    """Loading fails with one line that matches; the model is as it was."""
    model = random_model(UNTIED)
    before = logits(model, TOKENS)
    with pytest.raises(ValueError, match=message) as caught:
        load_adapters(model, folder)
    assert "\n" not in str(caught.value)
    assert not adapted_modules(model)
    np.testing.assert_array_equal(logits(model, TOKENS), before)
    return str(caught.value)


def test_all_tensors_that_do_not_fit_are_named_at_once(tmp_path: Path) -> None:
    """Guards mlx-lm#1725: unknown and wrong-shaped tensors were taken."""
    folder = saved(tmp_path / "a")
    tensors = tensors_of(folder)
    tensors["transformer.layers.0.attn.qkv_porj.lora_a"] = tensors.pop(
        "transformer.layers.0.attn.qkv_proj.lora_a"
    )
    del tensors["transformer.layers.1.ffn.proj_2.lora_b"]
    tensors["transformer.layers.1.ffn.proj_1.lora_b"] = mx.zeros((3, 64))
    rewrite(folder, tensors)
    message = refused(folder, "tensors do not fit")
    assert "2 missing: transformer.layers.0.attn.qkv_proj.lora_a (nearest in the file" in message
    assert "transformer.layers.1.ffn.proj_2.lora_b" in message
    assert "1 unexpected: transformer.layers.0.attn.qkv_porj.lora_a" in message
    assert "transformer.layers.1.ffn.proj_1.lora_b is [3, 64], expected [2, 64]" in message


def test_another_rank_than_the_configs_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a")
    edit(folder, lora_parameters={"rank": 4, "scale": 2.0, "dropout": 0.0})
    refused(folder, r"embeddings.lora_a is \[61, 2\], expected \[61, 4\].* and 15 more")


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    args = AdapterArgs(rank=2, scale=2.0)
    model = random_model({**UNTIED, "vocab_size": 64, "num_query_heads": [4, 4]})
    add_adapters(model, args)
    save_adapters(model, tmp_path / "a", args)
    refused(tmp_path / "a", r"embeddings.lora_a is \[64, 2\], expected \[61, 2\]")


def test_dora_without_its_magnitudes_is_refused(tmp_path: Path) -> None:
    """Guards unsloth-zoo#954: DoRA that silently is plain LoRA."""
    folder = saved(tmp_path / "a", AdapterArgs(rank=2, scale=2.0, kind="dora"))
    rewrite(folder, {k: v for k, v in tensors_of(folder).items() if not k.endswith(".m")})
    refused(folder, r"8 missing: transformer.layers.0.attn.qkv_proj.m")


def test_magnitudes_in_a_lora_folder_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", AdapterArgs(rank=2, scale=2.0, kind="dora"))
    edit(folder, fine_tune_type="lora")
    refused(folder, "8 unexpected: transformer.layers.0.attn")


def test_tensors_that_are_no_adapters_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a")
    rewrite(folder, {"transformer.norm.weight": mx.ones((32,))})
    refused(folder, "no adapter tensors: expected names that end in lora_a, lora_b, m, found trans")


def test_integer_tensors_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a")
    tensors = tensors_of(folder)
    rewrite(folder, {**tensors, B_NAME: tensors[B_NAME].astype(mx.int32)})
    refused(folder, f"1 tensors are not floating-point, first {B_NAME} with .*int32")


def test_modules_of_another_architecture_are_refused_with_those_that_exist(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a")
    parameters = {"rank": 2, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    edit(folder, lora_parameters=parameters)
    refused(folder, "adapter_config.json: OpenELM has no module 'self_attn.q_proj'.* it has qkv_p")


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin"])
def test_a_peft_folder_is_answered_with_the_command_that_converts_it(
    tmp_path: Path, file: str
) -> None:
    (tmp_path / file).touch()
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 16}')
    refused(tmp_path, f"PEFT adapter .{file}.; convert it first with `openelm convert peft ")


def test_a_path_without_adapters_is_said(tmp_path: Path) -> None:
    model = random_model(UNTIED)
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; give a folder"):
        load_adapters(model, tmp_path / "nowhere")
    (tmp_path / "notes.txt").touch()
    with pytest.raises(FileNotFoundError, match=r"holds no adapters.safetensors; it holds notes"):
        load_adapters(model, tmp_path)
    refused(saved(tmp_path / "a") / "adapters.safetensors", "is a file; give the folder that holds")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path / "a") / "adapters.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    refused(tmp_path / "a", "truncated")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fine_tune_type": "rslora"}, "kind must be lora or dora, got 'rslora'"),
        ({"num_layers": "all"}, "adapter_config.json: num_layers must be an integer, got 'all'"),
        ({"lora_parameters": [1]}, "lora_parameters must be an object"),
        (
            {"lora_parameters": {"rank": 2, "scale": "2"}},
            "lora_parameters.scale must be a number, got '2'",
        ),
    ],
)
def test_a_damaged_config_is_refused_by_key(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = saved(tmp_path / "a")
    edit(folder, **changes)
    refused(folder, message)


# Scales and old folders


def test_alpha_in_place_of_scale_is_answered_with_the_scale(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a")
    edit(folder, lora_parameters={"rank": 2, "alpha": 16.0, "dropout": 0.0})
    refused(folder, "no lora_parameters.scale, but alpha 16, which is scale 8 at rank 2; write")
    assert load_adapters(random_model(UNTIED), folder, scale=2.0).scale == 2.0


def test_old_folders_with_scale_and_alpha_are_ambiguous(tmp_path: Path) -> None:
    """mlx_lm multiplied both until September 2024."""
    folder = saved(tmp_path / "a")
    parameters = {"rank": 2, "alpha": 16.0, "scale": 10.0, "dropout": 0.0}
    edit(folder, lora_layers=2, num_layers=None, lora_parameters=parameters)
    refused(folder, r"scale 10 and alpha 16: old mlx_lm used scale \* alpha / rank = 80, later")


def test_a_left_over_alpha_is_ignored_as_in_mlx_lm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path / "a")
    edit(folder, lora_parameters={"rank": 2, "alpha": 16.0, "scale": 3.0, "dropout": 0.0})
    assert load_adapters(random_model(UNTIED), folder).scale == 3.0
    assert "alpha is ignored, as in mlx_lm" in caplog.text


def test_without_a_config_all_but_the_scale_is_inferred(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards mlx-examples#1317 and #226."""
    args = AdapterArgs(rank=3, scale=2.0, kind="dora", num_layers=1)
    folder = saved(tmp_path / "a", args)
    (folder / "adapter_config.json").unlink()
    refused(folder, "no lora_parameters.scale, and the tensors do not tell it; write the scale")
    model = random_model(UNTIED)
    found = load_adapters(model, folder, scale=2.0)
    assert (found.rank, found.kind, found.scale) == (3, "dora", 2.0)
    assert "dora, rank 3, modules " in caplog.text
    np.testing.assert_array_equal(logits(model, TOKENS), logits(adapted(args), TOKENS))


@pytest.mark.parametrize("changes", [{"lora_layers": 1}, {"lora_layers": 16}, {}])
def test_a_config_of_older_mlx_lm_is_read(tmp_path: Path, changes: dict[str, int]) -> None:
    """No ``num_layers``, no ``fine_tune_type``, no ``keys``, more layers than the model has."""
    num_layers = 1 if changes.get("lora_layers") == 1 else -1
    args = AdapterArgs(rank=2, scale=2.0, num_layers=num_layers, target_modules=["qkv_proj"])
    folder = saved(tmp_path / "a", args)
    old = {"lora_parameters": {"rank": 2, "scale": 2.0, "dropout": 0.0}, **changes}
    (folder / "adapter_config.json").write_text(json.dumps(old))
    model = random_model(UNTIED)
    load_adapters(model, folder)
    np.testing.assert_array_equal(logits(model, TOKENS), logits(adapted(args), TOKENS))


def test_an_npz_file_is_read(tmp_path: Path) -> None:
    args = AdapterArgs(rank=2, scale=2.0)
    folder = saved(tmp_path / "a", args)
    mx.savez(str(folder / "adapters.npz"), **tensors_of(folder))
    (folder / "adapters.safetensors").unlink()
    model = random_model(UNTIED)
    load_adapters(model, folder)
    np.testing.assert_array_equal(logits(model, TOKENS), logits(adapted(args), TOKENS))

"""PEFT folders both ways: PEFT's sums in NumPy, bit-equal round trips, Apple's golden adapters."""

import json
import math
from pathlib import Path
from typing import Any

import golden_lora
import mlx.core as mx
import numpy as np
import pytest
from folder_makers import assert_same_weights
from golden_lora import largest, logits, randomise
from model_makers import random_tokens
from peft_folders import (
    LINEAR,
    TABLE,
    base_folder,
    base_model,
    config_in,
    merged,
    peft_folder,
    peft_tensors,
    tensors_in,
)

from convert.peft import from_peft, to_peft
from openelm_mlx.adapter_files import read_adapter_folder
from openelm_mlx.checkpoint import load_model, save_model
from openelm_mlx.cli import main
from openelm_mlx.lora import AdapterArgs, add_adapters, load_adapters, save_adapters
from openelm_mlx.model import Model

TOKENS = random_tokens(2, 9, 61)
QKV = "transformer.layers.1.attn.qkv_proj"
FOUR = ["qkv_proj", "out_proj", "proj_1", "proj_2"]
ALL = dict.fromkeys(LINEAR, 4)
WITH_TABLE = {**ALL, TABLE: 4}
UNEVEN = {**ALL, QKV: 6, "transformer.layers.0.ffn.proj_1": 2, "transformer.layers.1.ffn.proj_1": 2}
UNEVEN_CONFIG = {
    "rank_pattern": {"layers.1.attn.qkv_proj": 6, "proj_1": 2},
    "alpha_pattern": {"layers.1.attn.qkv_proj": 7},
}
# name -> ranks, dora, config, what PEFT multiplies B A by in each module (default alpha / r)
CASES: dict[str, tuple[dict[str, int], bool, dict[str, Any], dict[str, float]]] = {
    "lora": (ALL, False, {}, {}),
    "rslora": (ALL, False, {"use_rslora": True}, dict.fromkeys(ALL, 5.0)),
    "dora": (ALL, True, {"use_dora": True}, {}),
    "embedding": (WITH_TABLE, False, {"target_modules": [*FOUR, "token_embeddings"]}, {}),
    "dora embedding": (
        *(WITH_TABLE, True),
        {"use_dora": True, "target_modules": [*FOUR, "token_embeddings"]},
        {},
    ),
    "embedding alone": (
        *({TABLE: 4}, True),
        {"use_dora": True, "target_modules": ["token_embeddings"]},
        {},
    ),
    "one layer": ({QKV: 4}, False, {"target_modules": ["qkv_proj"], "layers_to_transform": 1}, {}),
    "expression": ({QKV: 4}, False, {"target_modules": r".*\.1\.attn\.qkv_proj"}, {}),
    "uneven": (
        *(UNEVEN, False, UNEVEN_CONFIG),
        {QKV: 7 / 6, **{m: 5.0 for m in LINEAR if "proj_1" in m}},
    ),
    "uneven rslora and dora": (
        *(UNEVEN, True, {**UNEVEN_CONFIG, "use_rslora": True, "use_dora": True}),
        {
            **dict.fromkeys(ALL, 5.0),
            **{QKV: 7 / math.sqrt(6)},
            **{m: 10 / math.sqrt(2) for m in LINEAR if "proj_1" in m},
        },
    ),
}


def adapted(base: Path, folder: Path) -> Model:
    model = load_model(base)
    load_adapters(model, folder)
    model.eval()
    return model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base_model()`` as a folder, not to be changed."""
    return base_folder(tmp_path_factory.mktemp("peft") / "base")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base_model(tied=False)`` as a folder, not to be changed."""
    return base_folder(tmp_path_factory.mktemp("peft") / "untied", tied=False)


@pytest.mark.parametrize(
    ("case", "tied"), [*((case, True) for case in CASES), ("dora embedding", False)]
)
def test_logits_are_those_of_pefts_merge(
    case: str, tied: bool, base: Path, untied: Path, tmp_path: Path
) -> None:
    ranks, dora, config, special = CASES[case]
    base = base if tied else untied
    tensors = peft_tensors(base_model(tied=tied), ranks, dora=dora)
    folder = peft_folder(tmp_path / "peft", tensors, **config)
    from_peft(folder, base, tmp_path / "ours")
    scales = {module: special.get(module, 10 / rank) for module, rank in ranks.items()}
    expected = merged(base_model(tied=tied), tensors, scales)
    found = logits(adapted(base, tmp_path / "ours"), TOKENS)
    assert largest(found, logits(expected, TOKENS)) < 1e-4
    assert largest(found, logits(base_model(tied=tied), TOKENS)) > 0.1


def test_an_adapter_of_the_head_is_read(untied: Path, tmp_path: Path) -> None:
    model = base_model(tied=False)
    tensors = peft_tensors(model, {"lm_head": 4})
    folder = peft_folder(tmp_path / "peft", tensors, target_modules=["lm_head"])
    from_peft(folder, untied, tmp_path / "ours")
    expected = merged(model, tensors, {"lm_head": 2.5})
    found = logits(adapted(untied, tmp_path / "ours"), TOKENS)
    assert largest(found, logits(expected, TOKENS)) < 1e-4


def test_a_bin_file_gives_the_same_folder(base: Path, tmp_path: Path) -> None:
    tensors = peft_tensors(base_model(), ALL, dtype=mx.bfloat16)
    for form in ("bin", "safetensors"):
        from_peft(peft_folder(tmp_path / f"in-{form}", tensors, form=form), base, tmp_path / form)
    one, other = (tensors_in(tmp_path / n, "adapters.safetensors") for n in ("bin", "safetensors"))
    assert_same_weights(one, other)
    assert {array.dtype for array in one.values()} == {mx.bfloat16}


@pytest.mark.parametrize("case", [case for case in CASES if "uneven" not in case])
def test_peft_to_ours_to_peft_keeps_every_bit(case: str, base: Path, tmp_path: Path) -> None:
    ranks, dora, config, _ = CASES[case]
    tensors = peft_tensors(base_model(), ranks, dora=dora, dtype=mx.bfloat16)
    from_peft(peft_folder(tmp_path / "peft", tensors, **config), base, tmp_path / "ours")
    to_peft(tmp_path / "ours", base, tmp_path / "again")
    assert_same_weights(tensors_in(tmp_path / "again"), tensors)
    before, after = config_in(tmp_path / "peft"), config_in(tmp_path / "again")
    for key in ("r", "lora_alpha", "lora_dropout", "use_dora", "use_rslora", "rank_pattern"):
        assert after[key] == before[key], key


def test_ranks_of_one_scale_come_back_as_they_were(base: Path, tmp_path: Path) -> None:
    tensors = peft_tensors(base_model(), UNEVEN)
    ranks = {"rank_pattern": UNEVEN_CONFIG["rank_pattern"]}
    alphas = {"alpha_pattern": {"qkv_proj": 10.0, "layers.1.attn.qkv_proj": 15, "proj_1": 5}}
    alphas["alpha_pattern"] = dict(reversed(alphas["alpha_pattern"].items()))  # the first key wins
    folder = peft_folder(tmp_path / "peft", tensors, **ranks, **alphas)
    from_peft(folder, base, tmp_path / "ours")
    to_peft(tmp_path / "ours", base, tmp_path / "again")
    assert_same_weights(tensors_in(tmp_path / "again"), tensors)
    config = config_in(tmp_path / "again")
    assert (config["r"], config["lora_alpha"]) == (6, 15)
    assert config["rank_pattern"] == {m: r for m, r in UNEVEN.items() if r != 6}
    assert set(config["alpha_pattern"].values()) == {10, 5}


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_another_scale_is_not_rounded_to_16_bit(
    base: Path, dtype: mx.Dtype, tmp_path: Path
) -> None:
    tensors = peft_tensors(base_model(), UNEVEN, dtype=dtype)
    from_peft(peft_folder(tmp_path / "peft", tensors, **UNEVEN_CONFIG), base, tmp_path / "ours")
    ours = tensors_in(tmp_path / "ours", "adapters.safetensors")
    theirs = tensors[f"base_model.model.{QKV}.lora_B.weight"].astype(mx.float32)
    found = ours[f"{QKV}.lora_b"].astype(mx.float32).T * 2.5
    np.testing.assert_allclose(np.array(found), np.array(theirs) * 7 / 6, rtol=1e-6)
    assert ours["transformer.layers.0.ffn.proj_1.lora_b"].dtype == dtype  # twice is exact


@pytest.mark.parametrize(
    "args",
    [
        AdapterArgs(rank=3, scale=0.1, target_modules=FOUR, dropout=0.1),
        AdapterArgs(rank=8, scale=20.0),
        AdapterArgs(rank=2, scale=1.7, num_layers=1),
        AdapterArgs(rank=3, scale=10 / math.sqrt(3), use_rslora=True, target_modules=["proj_2"]),
        AdapterArgs(rank=2, scale=2.0, kind="dora"),
        AdapterArgs(rank=2, scale=2.0, kind="dora", embedding_magnitude="feature"),
    ],
)
def test_ours_to_peft_to_ours_keeps_every_bit(
    base: Path, args: AdapterArgs, tmp_path: Path
) -> None:
    model = base_model()
    add_adapters(model, args)
    randomise(model)
    save_adapters(model, tmp_path / "ours", args)
    to_peft(tmp_path / "ours", base, tmp_path / "peft")
    from_peft(tmp_path / "peft", base, tmp_path / "again")
    before, after = (read_adapter_folder(tmp_path / name) for name in ("ours", "again"))
    assert_same_weights(after.tensors, before.tensors)
    assert after.args is not None
    assert before.args is not None
    for name in ("rank", "dropout", "kind", "use_rslora", "embedding_magnitude"):
        assert getattr(after.args, name) == getattr(before.args, name), name
    assert after.args.scale == pytest.approx(before.args.scale, rel=3e-16)  # no alpha gives 0.1
    found = logits(adapted(base, tmp_path / "again"), TOKENS)
    np.testing.assert_array_equal(found, logits(adapted(base, tmp_path / "ours"), TOKENS))


@pytest.mark.parametrize("variant", golden_lora.VARIANTS)
def test_apples_adapters_keep_apples_logits_in_peft(variant: str, tmp_path: Path) -> None:
    expected = golden_lora.io(f"{variant}.logits")
    args = golden_lora.VARIANTS[variant]
    model = golden_lora.adapted_model(variant)
    save_adapters(model, tmp_path / "ours", args)
    base = golden_lora.base_model()
    save_model(base, tmp_path / "base")
    to_peft(tmp_path / "ours", tmp_path / "base", tmp_path / "peft")
    config = config_in(tmp_path / "peft")
    assert (config["r"], config["lora_alpha"]) == (4, 10)
    assert config["use_rslora"] == ("rslora" in variant)
    ids = golden_lora.input_ids()
    tensors = tensors_in(tmp_path / "peft")
    modules = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in tensors}
    untied = merged(base, tensors, dict.fromkeys(modules, args.scale))
    assert largest(logits(untied, ids), expected) < 1e-4


def test_mlx_lms_adapters_become_pefts(base: Path, tmp_path: Path) -> None:
    model = base_model()
    args = AdapterArgs(rank=2, scale=20.0, target_modules=FOUR)
    add_adapters(model, args)
    randomise(model)
    save_adapters(model, tmp_path / "ours", args)
    config = config_in(tmp_path / "ours")
    del config["openelm_mlx"]  # mlx_lm writes no such entry
    (tmp_path / "ours/adapter_config.json").write_text(json.dumps(config))
    to_peft(tmp_path / "ours", base, tmp_path / "peft")
    found = config_in(tmp_path / "peft")
    assert (found["r"], found["lora_alpha"], found["target_modules"]) == (2, 40, FOUR)
    assert found["base_model_name_or_path"] == "base"
    assert tensors_in(tmp_path / "peft")[f"base_model.model.{QKV}.lora_A.weight"].shape == (2, 32)


def test_the_commands_convert_and_report(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = peft_folder(tmp_path / "peft", peft_tensors(base_model(), ALL))
    ours, again = str(tmp_path / "ours"), str(tmp_path / "again")
    arguments = ["convert", "peft", str(folder), "--model", str(base), "--output", ours]
    assert main(arguments) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == ours
    assert out[1].startswith("LoRA, rank 4, scale 2.5 (alpha 10), 8 modules: qkv_proj, out_proj")
    assert out[2] == "base model by the PEFT config: apple/OpenELM"
    assert main(arguments) == 1
    assert "is not empty; add --overwrite" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    back = ["convert", "to-peft", ours, "--model", str(base), "--output", again]
    assert main(back) == 0
    assert main([*back, "--overwrite"]) == 0
    assert sorted(p.name for p in Path(again).iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]

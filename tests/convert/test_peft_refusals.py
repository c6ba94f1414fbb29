"""PEFT folders that cannot be converted are refused in one line that names what is wrong."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from adapter_folders import saved
from peft_folders import LINEAR, base_folder, base_model, peft_folder, peft_tensors

from convert.peft import from_peft, to_peft
from openelm_mlx.lora import AdapterArgs, add_adapters, save_adapters

QKV = "transformer.layers.1.attn.qkv_proj"
FOUR = ["qkv_proj", "out_proj", "proj_1", "proj_2"]
ALL = dict.fromkeys(LINEAR, 4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base_model()`` as a folder, not to be changed."""
    return base_folder(tmp_path_factory.mktemp("peft") / "base")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``base_model(tied=False)`` as a folder, not to be changed."""
    return base_folder(tmp_path_factory.mktemp("peft") / "untied", tied=False)


def refusal(*arguments: Any, to: bool = False) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        (to_peft if to else from_peft)(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA"),
        ({"modules_to_save": ["lm_head"]}, "cannot hold modules_to_save = ['lm_head']; merge"),
        ({"bias": "all"}, "cannot hold bias = 'all'"),
        ({"init_lora_weights": "pissa"}, "'pissa', which also changes the base's weights"),
        ({"lora_bias": True, "use_qalora": True}, "lora_bias = True, use_qalora = True"),
        ({"r": 8}, "has rank 4 in the tensors and 8 by r"),
        ({"r": "8"}, "r must be an integer, got '8'"),
        ({"use_rslora": 1}, "use_rslora must be true or false, got 1"),
        ({"rank_pattern": {"qkv_proj": 0}}, "must be positive numbers, got 0"),
        ({"target_modules": "(qkv"}, "unterminated subpattern"),
        ({"use_dora": True}, "use_dora is true, but transformer.layers.0.attn.qkv_proj has no"),
        ({"target_modules": ["qkv_proj"]}, "6 modules have tensors that PEFT would not use"),
        ({"layers_to_transform": [0]}, "first transformer.layers.1.attn.qkv_proj"),
        ({"exclude_modules": ["proj_2"]}, "first transformer.layers.0.ffn.proj_2"),
        ({"lora_dropout": 1.0}, "dropout must lie in [0, 1)"),
    ],
)
def test_settings_that_do_not_fit_are_named(
    base: Path, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = peft_folder(tmp_path / "peft", peft_tensors(base_model(), ALL), **changes)
    message = refusal(folder, base, tmp_path / "out")
    assert words in message
    assert "adapter_config.json" in message or "use_dora" in message
    assert not (tmp_path / "out").exists()


def test_another_base_is_refused_with_both_shapes(base: Path, tmp_path: Path) -> None:
    tensors = peft_tensors(base_model(), ALL)
    name = f"base_model.model.{QKV}.lora_A.weight"
    folder = peft_folder(tmp_path / "peft", {**tensors, name: mx.zeros((4, 48))})
    message = refusal(folder, base, tmp_path / "out")
    assert f"1 of another shape: {name} is [4, 48], expected [4, 32]" in message


def test_unknown_modules_are_named_with_those_that_exist(base: Path, tmp_path: Path) -> None:
    tensors = {
        name.replace("qkv_proj", "q_proj"): array
        for name, array in peft_tensors(base_model(), ALL).items()
    }
    message = refusal(peft_folder(tmp_path / "peft", tensors), base, tmp_path / "out")
    assert "adapts 2 modules that the model does not have" in message
    assert "first transformer.layers.0.attn.q_proj; in its 2 layers" in message
    assert "token_embeddings, qkv_proj, out_proj, proj_1, proj_2 (queries" in message


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda t: {k: v for k, v in t.items() if "lora_B" not in k}, "8 missing: base_model.mod"),
        (lambda t: {**t, "base_model.model.x.lora_C.weight": mx.zeros(1)}, "x.lora_C.weight is no"),
        (lambda t: {k: v.astype(mx.int32) for k, v in t.items()}, "not floating-point"),
        (lambda _: {}, "holds no adapter"),
    ],
)
def test_damaged_tensors_are_named(base: Path, spoil: Any, words: str, tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "peft", spoil(peft_tensors(base_model(), ALL)))
    assert words in refusal(folder, base, tmp_path / "out")


def test_each_kind_of_folder_is_known_by_the_other_route(untied: Path, tmp_path: Path) -> None:
    ours = saved(tmp_path / "ours")
    assert "is an adapter folder for MLX already" in refusal(ours, untied, tmp_path / "out")
    theirs = peft_folder(tmp_path / "peft", peft_tensors(base_model(), ALL))
    assert "is a PEFT adapter already" in refusal(theirs, untied, tmp_path / "out", to=True)


def test_missing_files_are_named(base: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "is not a folder" in refusal(tmp_path / "none", base, out)
    folder = peft_folder(tmp_path / "run/checkpoint-5", peft_tensors(base_model(), ALL))
    assert "give one of its folders checkpoint-5" in refusal(folder.parent, base, out)
    (folder / "adapter_model.safetensors").rename(folder / "other.safetensors")
    message = refusal(folder, base, out)
    assert "holds no adapter_model.safetensors or adapter_model.bin; it holds" in message
    (folder / "other.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").unlink()
    assert "holds no adapter_config.json; it holds adapter_model" in refusal(folder, base, out)


def test_what_peft_cannot_do_is_refused(base: Path, tmp_path: Path) -> None:
    model = base_model()
    tied = AdapterArgs(rank=2, scale=2.0, adapt_tied_head=True)
    by_token = AdapterArgs(rank=2, scale=2.0, kind="dora", embedding_magnitude="token")
    for name, args, words in [
        ("tied", tied, "also reaches the tied output head"),
        ("token", by_token, "learns a length a token, PEFT's a length a feature"),
    ]:
        model = base_model()
        add_adapters(model, args)
        save_adapters(model, tmp_path / name, args)
        message = refusal(tmp_path / name, base, tmp_path / "out", to=True)
        assert words in message
        assert "openelm fuse" in message
    (tmp_path / "full").mkdir()
    (tmp_path / "full/adapter_config.json").write_text('{"fine_tune_type": "full"}')
    mx.save_safetensors(
        str(tmp_path / "full/adapters.safetensors"),
        {"transformer.norm.weight": mx.ones(32)},
    )
    message = refusal(tmp_path / "full", base, tmp_path / "out", to=True)
    assert 'holds whole weights ("full"), no adapters' in message


def test_what_is_ignored_is_said(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = {m: 4 for m in LINEAR if m != QKV}
    folder = peft_folder(
        tmp_path / "peft",
        peft_tensors(base_model(), ranks),
        target_modules=[*FOUR, "q_proj"],
        fan_in_fan_out=True,
        use_new_thing=3,
    )
    from_peft(folder, base, tmp_path / "out")
    assert "the model has no q_proj, which target_modules names" in caplog.text
    assert f"no tensors for 1 modules that target_modules selects, first {QKV}" in caplog.text
    assert "fan_in_fan_out is ignored" in caplog.text
    assert "use_new_thing is unknown here and ignored" in caplog.text


def test_base_tables_beside_the_adapters_must_be_the_models(untied: Path, tmp_path: Path) -> None:
    """PEFT stores a targeted or resized table with its adapters."""
    model = base_model(tied=False)
    tensors = peft_tensors(model, {"lm_head": 4})
    name = "base_model.model.lm_head.base_layer.weight"
    same = {**tensors, name: model.lm_head.weight}
    folder = peft_folder(tmp_path / "same", same, target_modules=["lm_head"])
    assert from_peft(folder, untied, tmp_path / "ours").modules == ["lm_head"]
    other = {**tensors, name: mx.zeros((63, 32))}
    folder = peft_folder(tmp_path / "other", other, target_modules=["lm_head"])
    message = refusal(folder, untied, tmp_path / "out")
    assert f"{name} [63, 32] is another weight than the model's [61, 32]" in message

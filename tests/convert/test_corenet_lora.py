"""CoreNet's LoRA and DoRA files: a base folder and adapters that give Apple's logits."""

import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import golden_lora
import golden_set
import mlx.core as mx
import numpy as np
import pytest
import yaml
from corenet_files import corenet_state, write_config, write_state
from folder_makers import assert_same_weights

from convert.corenet import from_corenet, to_corenet
from convert.pt_file import read, write
from openelm_mlx import cli
from openelm_mlx.adapter_files import read_adapter_folder
from openelm_mlx.checkpoint import load
from openelm_mlx.lora import load_adapters
from openelm_mlx.weight_files import read_json, read_weights

_WRAPPED = re.compile(r"(.*)\.weight")
QKV = "layers.1.attn.qkv_proj"


def settings(variant: str) -> dict[str, Any]:
    """alpha and rsLoRA as the golden set was made with."""
    return {"lora_alpha": 10, "rslora": variant.startswith("rslora")}


def whole_state(variant: str) -> OrderedDict[str, mx.array]:
    """What CoreNet saves: adapted base weights under ``base_layer``, and the adapters."""
    adapters = golden_lora.read_pt(f"{variant}.adapter_only.pt")
    adapted = {name.partition(".lora_")[0] for name in adapters}
    state: OrderedDict[str, mx.array] = OrderedDict()
    for name, array in golden_lora.read_pt("base.pt").items():
        module = name.removesuffix(".weight")
        state[f"{module}.base_layer.weight" if module in adapted else name] = array
    return OrderedDict(state | adapters)


def lora_config(path: Path) -> Path:
    """The golden base's ``general_gpt`` as JSON."""
    path.write_text(json.dumps(golden_set.read_json(golden_lora.find("lora.json"))["config"]))
    return path


def assert_apples_logits(model: Any, variant: str) -> None:
    ids, expected = golden_lora.input_ids(), golden_lora.io(f"{variant}.logits")
    got = np.array(model(ids))
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=0)  # seen: 2.4e-5
    base = golden_lora.io("base.logits")
    assert np.abs(expected - base).max() > 1  # the adapters matter


def refusal(*args: Any, **settings: Any) -> str:
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        from_corenet(*args, **settings)
    assert "\n" not in str(caught.value)
    assert not Path(args[1]).exists()
    return str(caught.value)


# Apple's numbers


@pytest.mark.parametrize("variant", golden_lora.VARIANTS)
def test_a_whole_file_becomes_a_base_and_adapters_with_apples_logits(
    variant: str, tmp_path: Path
) -> None:
    file = write_state(tmp_path / "m.pt", whole_state(variant))
    config = lora_config(tmp_path / "c.json")
    folder = from_corenet(file, tmp_path / "out", config=config, **settings(variant))
    model, _ = load(folder, adapter_path=folder / "adapters")
    assert_apples_logits(model, variant)
    base, _ = load(folder)
    expected = golden_lora.io("base.logits")
    np.testing.assert_allclose(np.array(base(golden_lora.input_ids())), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("variant", golden_lora.VARIANTS)
def test_apples_own_whole_files_are_those_the_tests_make(variant: str) -> None:
    path = golden_set.find(f"lora/{variant}.pt")
    if path is None:
        pytest.skip(f"golden lora/{variant}.pt is not at hand")
    assert_same_weights(whole_state(variant), read(path))


@pytest.mark.parametrize("variant", golden_lora.VARIANTS)
def test_a_file_of_adapters_alone_fits_its_base(variant: str, tmp_path: Path) -> None:
    config = lora_config(tmp_path / "c.json")
    base = from_corenet(golden_lora.find("base.pt"), tmp_path / "base", config=config)
    file = golden_lora.find(f"{variant}.adapter_only.pt")
    adapters = from_corenet(file, tmp_path / "adapters", base=base, **settings(variant))
    model, _ = load(base, adapter_path=adapters)
    assert_apples_logits(model, variant)
    expected = golden_lora.VARIANTS[variant]
    found = read_adapter_folder(adapters).args
    assert found is not None
    assert (found.rank, found.scale, found.kind) == (4, expected.scale, expected.kind)
    assert found.use_rslora == expected.use_rslora


def test_the_base_keeps_its_bits_and_plain_names(tmp_path: Path) -> None:
    file = write_state(tmp_path / "m.pt", whole_state("lora_recipe_with_embedding"))
    config = lora_config(tmp_path / "c.json")
    folder = from_corenet(file, tmp_path / "out", config=config, lora_alpha=10)
    expected = golden_lora.read_pt("base.pt")
    assert_same_weights(
        read_weights(folder), {f"transformer.{name}": array for name, array in expected.items()}
    )


# Where alpha comes from


def lora_yaml(path: Path, entries: list[dict[str, Any]], *, flat: bool = False) -> Path:
    """A PEFT recipe as CoreNet has them."""
    config = golden_set.read_json(golden_lora.find("lora.json"))["config"]
    lora = {"use_lora": True, "config": entries}
    values: dict[str, Any] = {"model": {"language_modeling": {"general_gpt": config}, "lora": lora}}
    if flat:
        values = {f"model.language_modeling.general_gpt.{k}": v for k, v in config.items()}
        values |= {"model.lora.use_lora": True, "model.lora.config": entries}
    path.write_text(yaml.safe_dump(values))
    return path


def entry(regex: str, **params: Any) -> dict[str, Any]:
    values = {"adapter_name": "lora", "r": 4, "lora_alpha": 10, "lora_dropout": 0.1, **params}
    return {"regex": regex, "module_type": "linear", "params": values}


RECIPE = [".*token_embedding.*", ".*out_proj.*", ".*qkv_proj.*", r".*proj_\d.*"]


@pytest.mark.parametrize("flat", [False, True])
def test_the_yaml_says_alpha_and_dropout(flat: bool, tmp_path: Path) -> None:
    file = write_state(tmp_path / "m.pt", whole_state("lora_recipe_with_embedding"))
    config = lora_yaml(tmp_path / "c.yaml", [entry(regex) for regex in RECIPE], flat=flat)
    folder = from_corenet(file, tmp_path / "out", config=config)
    model, _ = load(folder, adapter_path=folder / "adapters")
    assert_apples_logits(model, "lora_recipe_with_embedding")
    assert read_json(folder / "adapters/adapter_config.json")["lora_parameters"]["dropout"] == 0.1


def test_the_yaml_says_rslora(tmp_path: Path) -> None:
    file = golden_lora.find("rslora_linear.adapter_only.pt")
    config = lora_yaml(tmp_path / "c.yaml", [entry(r, use_rslora=True) for r in RECIPE])
    base = from_corenet(golden_lora.find("base.pt"), tmp_path / "base", config=config)
    adapters = from_corenet(file, tmp_path / "adapters", base=base, config=config)
    model, _ = load(base, adapter_path=adapters)
    assert_apples_logits(model, "rslora_linear")


def test_the_flag_wins_over_the_yaml(tmp_path: Path) -> None:
    file = write_state(tmp_path / "m.pt", whole_state("lora_linear"))
    config = lora_yaml(tmp_path / "c.yaml", [entry(r, lora_alpha=99) for r in RECIPE])
    folder = from_corenet(file, tmp_path / "out", config=config, lora_alpha=10)
    model, _ = load(folder, adapter_path=folder / "adapters")
    assert_apples_logits(model, "lora_linear")


def test_an_unknown_alpha_is_asked_for(tmp_path: Path) -> None:
    file = write_state(tmp_path / "m.pt", whole_state("lora_linear"))
    message = refusal(file, tmp_path / "out", config=lora_config(tmp_path / "c.json"))
    assert "LoRA alpha of layers.0.attn.qkv_proj" in message
    assert "--lora-alpha" in message
    only_some = lora_yaml(tmp_path / "c.yaml", [entry(".*qkv_proj.*")])
    assert "alpha of layers.0.attn.out_proj" in refusal(file, tmp_path / "out", config=only_some)


def deltas(folder: Path) -> dict[str, np.ndarray]:
    """What an adapter folder adds to each weight, in float64."""
    read_folder = read_adapter_folder(folder)
    assert read_folder.args is not None
    a = {n.removesuffix(".lora_a"): t for n, t in read_folder.tensors.items() if "lora_a" in n}
    scale = read_folder.args.scale
    return {
        module: scale
        * (np.array(lora_a, np.float64) @ np.array(read_folder.tensors[f"{module}.lora_b"])).T
        for module, lora_a in a.items()
    }


def test_modules_of_other_rank_and_alpha_add_what_corenet_adds(tmp_path: Path) -> None:
    state = whole_state("lora_linear")
    generator = np.random.default_rng(0)
    wide = {"A": (6, 64), "B": (96, 6)}
    for part, shape in wide.items():
        array = generator.normal(size=shape).astype(np.float32)
        state[f"{QKV}.lora_{part}.lora.weight"] = mx.array(array)
    rules = [entry(".*qkv_proj.*", lora_alpha=3, use_rslora=True), entry(".*(out_proj|proj_).*")]
    config = lora_yaml(tmp_path / "c.yaml", rules)
    file = write_state(tmp_path / "m.pt", state)
    folder = from_corenet(file, tmp_path / "out", config=config)
    found = deltas(folder / "adapters")
    for module, delta in found.items():
        name = module.removeprefix("transformer.")
        a = np.array(state[f"{name}.lora_A.lora.weight"], np.float64)
        b = np.array(state[f"{name}.lora_B.lora.weight"], np.float64)
        rank = a.shape[0]
        scaling = 3 / np.sqrt(rank) if "qkv_proj" in name else 10 / rank
        np.testing.assert_allclose(delta, scaling * (b @ a), rtol=1e-5, atol=1e-6)
    load(folder, adapter_path=folder / "adapters")


def test_adapters_in_a_few_layers_are_named_one_by_one(tmp_path: Path) -> None:
    state = golden_lora.read_pt("lora_linear.adapter_only.pt")
    state = {name: array for name, array in state.items() if name.startswith("layers.1.attn")}
    base = from_corenet(
        golden_lora.find("base.pt"), tmp_path / "base", config=lora_config(tmp_path / "c.json")
    )
    write(tmp_path / "m.pt", state)
    from_corenet(tmp_path / "m.pt", tmp_path / "out", base=base, lora_alpha=10)
    model, _ = load(base)
    args = load_adapters(model, tmp_path / "out")
    assert args is not None
    assert set(args.target_modules) == {
        "transformer.layers.1.attn.qkv_proj",
        "transformer.layers.1.attn.out_proj",
    }
    assert not hasattr(model.layers[0].attn.qkv_proj, "lora_a")


# The embedding's rows


def embedding_adapters(rows: int) -> dict[str, mx.array]:
    mx.random.seed(0)
    return {
        "token_embeddings.lora_embedding_A.lora": mx.random.normal((4, rows)),
        "token_embeddings.lora_embedding_B.lora": mx.random.normal((64, 4)),
    }


def lora_state() -> dict[str, mx.array]:
    """A model of 40 rows whose embedding has an adapter."""
    state = corenet_state()
    state["token_embeddings.base_layer.weight"] = state.pop("token_embeddings.weight")
    return dict(state) | embedding_adapters(40)


def test_the_embeddings_adapter_loses_the_rows_the_base_loses(tmp_path: Path) -> None:
    state = lora_state()
    folder = from_corenet(
        write_state(tmp_path / "m.pt", state),
        tmp_path / "out",
        config=write_config(tmp_path / "c.json"),
        vocab_size=32,
        lora_alpha=4,
    )
    tensors = read_adapter_folder(folder / "adapters").tensors
    expected = state["token_embeddings.lora_embedding_A.lora"].T[:32]
    assert_same_weights({"": tensors["transformer.token_embeddings.lora_a"]}, {"": expected})
    load(folder, adapter_path=folder / "adapters")


@pytest.mark.parametrize("asked", [None, 32])
def test_adapters_alone_may_have_the_rows_that_the_base_keeps_apart(
    asked: int | None, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "c.json")
    base = from_corenet(
        write_state(tmp_path / "b.pt"), tmp_path / "base", config=config, vocab_size=32
    )
    file = write_state(tmp_path / "m.pt", embedding_adapters(40))
    from_corenet(file, tmp_path / "out", base=base, lora_alpha=4, vocab_size=asked)
    tensors = read_adapter_folder(tmp_path / "out").tensors
    assert tensors["transformer.token_embeddings.lora_a"].shape == (32, 4)
    message = refusal(file, tmp_path / "no", base=base, lora_alpha=4, vocab_size=30)
    assert "--vocab-size 30 is not the 32 rows of" in message


def test_adapters_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json")
    base = from_corenet(write_state(tmp_path / "b.pt"), tmp_path / "base", config=config)
    file = write_state(tmp_path / "m.pt", embedding_adapters(44))
    message = refusal(file, tmp_path / "out", base=base, lora_alpha=4)
    assert "token_embeddings.lora_a is [44, 4], expected [40, 4]" in message


# What does not fit


def test_adapters_alone_ask_for_their_base(tmp_path: Path) -> None:
    file = write_state(tmp_path / "m.pt", embedding_adapters(40))
    message = refusal(file, tmp_path / "out", lora_alpha=4)
    assert "2 LoRA tensors and no model" in message
    assert "--base" in message


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("plain", {"lora_alpha": 4}, "holds a plain model, without LoRA tensors: --lora-alpha"),
        ("plain", {"rslora": True, "base": "x"}, "--base, --rslora would do nothing"),
        ("whole", {"base": "x"}, "holds a whole model: --base would do nothing"),
        ("alone", {"dtype": "float16", "base": "x"}, "holds adapters alone: --dtype would do"),
        ("alone", {"preset": "3B", "instruct": True}, "--preset, --instruct would do nothing"),
    ],
)
def test_flags_that_would_do_nothing_are_refused(
    kind: str, flags: dict[str, Any], message: str, tmp_path: Path
) -> None:
    states = {"plain": corenet_state(), "whole": lora_state(), "alone": embedding_adapters(40)}
    file = write_state(tmp_path / "m.pt", states[kind])
    assert message in refusal(file, tmp_path / "out", **flags)


def changed(**changes: mx.array | None) -> dict[str, mx.array]:
    """Apple's DoRA adapters with tensors of layer 1's qkv_proj replaced, or removed by None."""
    state = golden_lora.read_pt("dora_linear.adapter_only.pt")
    for part, array in changes.items():
        ending = "" if part == "magnitude_vector" else ".weight"
        name = f"{QKV}.lora_{part}.lora{ending}"
        state.pop(name)
        if array is not None:
            state[name] = array
    return state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"A": mx.zeros((4, 65))}, "qkv_proj.lora_a is [65, 4], expected [64, 4]"),
        ({"A": mx.zeros((3, 64))}, "qkv_proj.lora_b is [4, 96], expected [3, 96]"),
        ({"B": None}, "1 missing: transformer.layers.1.attn.qkv_proj.lora_b"),
        ({"A": None}, "1 missing: transformer.layers.1.attn.qkv_proj.lora_a"),
        ({"magnitude_vector": mx.zeros(95)}, "qkv_proj.m is [95], expected [96]"),
        ({"magnitude_vector": None}, "1 of 12 linear modules have no DoRA magnitude"),
    ],
)
def test_adapters_that_do_not_fit_are_named(
    state: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = lora_config(tmp_path / "c.json")
    base = from_corenet(golden_lora.find("base.pt"), tmp_path / "base", config=config)
    write(tmp_path / "m.pt", changed(**state))
    assert message in refusal(tmp_path / "m.pt", tmp_path / "out", base=base, lora_alpha=10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.1.attn.qkv_proj.lora_A.second.weight", "2 adapters (lora, second)"),
        ("layers.1.attn.qkv_proj.lora_C.lora.weight", "is no LoRA or DoRA tensor"),
        ("layers.7.attn.qkv_proj.lora_A.lora.weight", "1 unexpected: transformer.layers.7"),
        ("layers.1.attn.q_norm.lora_A.lora.weight", "1 unexpected: transformer.layers.1.attn.q_no"),
    ],
)
def test_tensors_that_are_no_adapters_of_the_model_are_named(
    name: str, message: str, tmp_path: Path
) -> None:
    config = lora_config(tmp_path / "c.json")
    base = from_corenet(golden_lora.find("base.pt"), tmp_path / "base", config=config)
    state = golden_lora.read_pt("lora_linear.adapter_only.pt")
    write(tmp_path / "m.pt", {**state, name: mx.zeros((4, 64))})
    assert message in refusal(tmp_path / "m.pt", tmp_path / "out", base=base, lora_alpha=10)


@pytest.mark.parametrize(
    "rule",
    [{"regex": "("}, {"params": None}, {"params": {"r": 4}}, {"params": {"lora_alpha": "much"}}],
)
def test_a_damaged_rule_is_named(rule: dict[str, Any], tmp_path: Path) -> None:
    file = write_state(tmp_path / "m.pt", whole_state("lora_linear"))
    config = lora_yaml(tmp_path / "c.yaml", [{**entry(".*"), **rule}])
    message = refusal(file, tmp_path / "out", config=config)
    assert "c.yaml: model.lora.config: " in message


def test_adapters_are_not_lost_in_silence_on_the_way_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_state(tmp_path / "m.pt", whole_state("lora_linear"))
    folder = from_corenet(
        file, tmp_path / "out", config=lora_config(tmp_path / "c.json"), lora_alpha=10
    )
    back = read(to_corenet(folder, tmp_path / "back.pt"))
    assert_same_weights(back, golden_lora.read_pt("base.pt"))
    assert "its adapters are not written" in caplog.text


def test_the_command_names_both_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_state(tmp_path / "m.pt", whole_state("dora_linear"))
    config = lora_config(tmp_path / "c.json")
    argv = ["convert", "corenet", str(file), "--output", str(tmp_path / "out")]
    assert cli.main([*argv, "--config", str(config), "--lora-alpha", "10"]) == 0
    out = tmp_path / "out"
    assert capsys.readouterr().out == f"{out}\n{out / 'adapters'}\n"

"""Hugging Face folders to ours and back: bit for bit, complete, and whole or not at all."""

import json
from pathlib import Path
from typing import Any

import golden_set
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from folder_makers import (
    assert_same_weights,
    files,
    foreign_folder,
    logits,
    small_config,
    small_folder,
    small_model,
    weights_of,
)
from layout_makers import LAYOUTS, Layout, Weights, corenet_mlx
from model_makers import apple_io, random_model
from slow_params import slow
from tiny_tokenizer import TinyTokenizer

from convert.huggingface import from_hub, to_hub_folder
from convert.names import to_corenet
from openelm_mlx.checkpoint import load_model
from openelm_mlx.config import ModelArgs
from openelm_mlx.weight_files import check_safetensors, read_json, read_weights

UNTIED: dict[str, Any] = {"share_input_output_layers": False}
TABLE = "transformer.token_embeddings.weight"


def apples(folder: Path) -> dict[str, Any]:
    """config.json without ``auto_map``, which names where code lies."""
    return {k: v for k, v in read_json(folder / "config.json").items() if k != "auto_map"}


# Apple's folders


def test_there_and_back_gives_apples_tensors_and_config(golden_model: str, tmp_path: Path) -> None:
    apple = golden_set.find(f"hf/{golden_model}")
    assert apple is not None
    ours = from_hub(apple, tmp_path / "ours")
    back = to_hub_folder(ours, tmp_path / "back")
    assert_same_weights(read_weights(back), read_weights(apple))
    assert apples(back) == apples(apple)
    assert check_safetensors(back / "model.safetensors")["__metadata__"] == {"format": "pt"}
    assert read_json(back / "config.json")["auto_map"] == {
        "AutoConfig": "apple/OpenELM-270M--configuration_openelm.OpenELMConfig",
        "AutoModelForCausalLM": "apple/OpenELM-270M--modeling_openelm.OpenELMForCausalLM",
    }


def test_our_folder_gives_apples_logits_and_holds_nothing_twice(
    golden_model: str, tmp_path: Path
) -> None:
    apple, io = golden_set.find(f"hf/{golden_model}"), apple_io(golden_model)
    assert apple is not None
    ours = from_hub(apple, tmp_path / "ours")
    got = np.array(load_model(ours)(mx.array(io["input_ids"].astype(np.int32))))
    np.testing.assert_allclose(got, io["logits"], atol=1e-4, rtol=0)
    assert "transformer.classifier.weight" not in read_weights(ours)


def test_code_is_found_from_a_folder_made_of_apples_repository(tmp_path: Path) -> None:
    cache = tmp_path / "models--apple--OpenELM-450M" / "snapshots" / ("a" * 40)
    config = {**small_config(), "auto_map": {"AutoConfig": "configuration_openelm.OpenELMConfig"}}
    foreign_folder(cache, config, weights_of(small_model()))
    ours = from_hub(cache, tmp_path / "ours")
    stated = {"AutoConfig": "apple/OpenELM-450M--configuration_openelm.OpenELMConfig"}
    assert read_json(ours / "config.json")["auto_map"] == stated
    back = to_hub_folder(ours, tmp_path / "back")
    assert read_json(back / "config.json")["auto_map"] == stated
    provenance = read_json(ours / "openelm.json")
    assert (provenance["source"], provenance["revision"]) == ("apple/OpenELM-450M", "a" * 40)


# Layouts


def corenet_names(folder: Path, weights: Weights) -> None:
    corenet_mlx(folder, {to_corenet(name): array for name, array in weights.items()})


@pytest.mark.parametrize("dtype", [mx.bfloat16, *slow(mx.float32, mx.float16)])
@pytest.mark.parametrize("write", [*LAYOUTS, corenet_names])
def test_every_layout_keeps_every_bit(write: Layout, dtype: mx.Dtype, tmp_path: Path) -> None:
    weights = weights_of(small_model(dtype, **UNTIED))
    source = tmp_path / "in"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(small_config(**UNTIED)))
    write(source, weights)
    ours = from_hub(source, tmp_path / "out")
    assert_same_weights(read_weights(ours), weights)
    name = str(dtype).removeprefix("mlx.core.")
    assert read_json(ours / "config.json")["torch_dtype"] == name


def test_odd_bfloat16_values_pass_bit_for_bit(tmp_path: Path) -> None:
    weights = weights_of(small_model(mx.bfloat16))
    every = mx.view(mx.arange(1 << 16, dtype=mx.uint32).astype(mx.uint16), mx.bfloat16)
    weights[TABLE] = every[: 320 * 64].reshape(320, 64)
    weights["transformer.layers.1.ffn.proj_1.weight"] = every[-128 * 64 :].reshape(128, 64)
    ours = from_hub(foreign_folder(tmp_path / "in", small_config(), weights), tmp_path / "out")
    back = to_hub_folder(ours, tmp_path / "back")
    assert_same_weights(read_weights(back), weights)


def test_large_models_are_sharded_both_ways(tmp_path: Path) -> None:
    weights = weights_of(small_model(**UNTIED))
    source = foreign_folder(tmp_path / "in", small_config(**UNTIED), weights)
    ours = from_hub(source, tmp_path / "ours", shard_bytes=50_000)
    back = to_hub_folder(ours, tmp_path / "back", shard_bytes=50_000)
    for folder, form in ((ours, "mlx"), (back, "pt")):
        shards = sorted(folder.glob("model-*.safetensors"))
        assert len(shards) > 3
        index = read_json(folder / "model.safetensors.index.json")
        assert set(index["weight_map"].values()) == {f.name for f in shards}
        assert all(check_safetensors(f)["__metadata__"] == {"format": form} for f in shards)
    assert_same_weights(read_weights(ours), weights)


@pytest.mark.slow
def test_conversion_holds_one_shard_in_memory_not_the_model(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"num_transformer_layers": 40, "ffn_multipliers": (8.0, 8.0)}
    model = small_model(**changes)
    total = sum(w.nbytes for w in weights_of(model).values())
    assert total > 15 << 20
    source = foreign_folder(tmp_path / "in", small_config(**changes), weights_of(model))
    del model
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    from_hub(source, tmp_path / "out", shard_bytes=1 << 20)
    assert mx.get_peak_memory() - before < 4 << 20


# Heads


@pytest.mark.parametrize("changes", [{}, UNTIED])
def test_equal_copies_of_the_head_are_dropped_and_others_refused(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    weights = weights_of(small_model(**changes))
    original = weights["lm_head.weight" if changes else TABLE]
    copy = "transformer.classifier.weight"
    config = small_config(**changes)
    equal = foreign_folder(tmp_path / "equal", config, {**weights, copy: original})
    assert_same_weights(read_weights(from_hub(equal, tmp_path / "out")), weights)
    wrong = foreign_folder(tmp_path / "wrong", config, {**weights, copy: original * 2})
    with pytest.raises(ValueError, match=f"{copy} differs from"):
        from_hub(wrong, tmp_path / "none")
    assert files(tmp_path) == ["equal", "out", "wrong"]


def test_apples_code_gets_an_untied_head_under_both_names(tmp_path: Path) -> None:
    model = small_model(**UNTIED)
    back = to_hub_folder(small_folder(tmp_path / "in", None, model), tmp_path / "back")
    written = read_weights(back)
    head = weights_of(model)["lm_head.weight"]
    expected = {"lm_head.weight": head, "transformer.classifier.weight": head}
    assert_same_weights({n: written[n] for n in expected}, expected)
    config = read_json(back / "config.json")
    assert config["tie_word_embeddings"] is False
    assert config["share_input_output_layers"] is False
    np.testing.assert_array_equal(logits(load_model(back)), logits(model))


# Types


def test_a_type_is_changed_only_when_asked(tmp_path: Path) -> None:
    model = small_model()
    source = foreign_folder(tmp_path / "in", small_config(), weights_of(model))
    ours = from_hub(source, tmp_path / "out", dtype="bfloat16")
    assert_same_weights(
        read_weights(ours), {n: w.astype(mx.bfloat16) for n, w in weights_of(model).items()}
    )
    assert read_json(ours / "config.json")["torch_dtype"] == "bfloat16"


def test_values_that_overflow_float16_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = weights_of(small_model(mx.bfloat16))
    weights["transformer.norm.weight"][:3] = 1e6
    source = foreign_folder(tmp_path / "in", small_config(), weights)
    from_hub(source, tmp_path / "out", dtype="float16")
    assert "3 of " in caplog.text
    assert "overflow float16" in caplog.text
    assert "transformer.norm.weight (3)" in caplog.text


def test_an_unknown_type_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype 'int4' is not one of float32, float16, bfloat16"):
        from_hub(tmp_path / "none", tmp_path / "out", dtype="int4")


# Quantised folders


def quantised_folder(path: Path, **settings: Any) -> Path:
    model = small_model()
    nn.quantize(model, **settings)
    entry = {**settings, "mode": settings.get("mode", "affine")}
    config = {**small_config(), "quantization": entry, "quantization_config": entry}
    return foreign_folder(path, config, weights_of(model))


@pytest.mark.parametrize(
    "settings",
    [{"group_size": 32, "bits": 4}, {"mode": "mxfp8", "group_size": 32, "bits": 8}],
)
def test_a_quantised_folder_is_copied_as_it_is(settings: dict[str, Any], tmp_path: Path) -> None:
    source = quantised_folder(tmp_path / "in", **settings)
    ours = from_hub(source, tmp_path / "out")
    assert_same_weights(read_weights(ours), read_weights(source))
    before, after = (read_json(f / "config.json") for f in (source, ours))
    assert after["quantization"] == before["quantization"]
    np.testing.assert_array_equal(logits(load_model(ours)), logits(load_model(source)))
    with pytest.raises(ValueError, match="is quantised and keeps its types; leave out --dtype"):
        from_hub(source, tmp_path / "cast", dtype="float32")


@pytest.mark.parametrize(
    "settings",
    [{"group_size": 32, "bits": 4}, {"mode": "nvfp4", "group_size": 16, "bits": 4}],
)
def test_apples_code_gets_quantised_weights_only_unpacked(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    source = quantised_folder(tmp_path / "in", **settings)
    with pytest.raises(ValueError, match=r"is quantised by MLX, .* add --dequantize"):
        to_hub_folder(source, tmp_path / "out")
    back = to_hub_folder(source, tmp_path / "out", dequantize=True)
    config = read_json(back / "config.json")
    assert not {"quantization", "quantization_config"} & set(config)
    shapes = {n: w.shape for n, w in weights_of(small_model()).items()}
    assert {n: w.shape for n, w in read_weights(back).items()} == shapes
    # Unpacked weights are exact; only the order of sums differs.
    np.testing.assert_allclose(
        logits(load_model(back)), logits(load_model(source)), atol=2e-4, rtol=0
    )


def test_there_is_nothing_to_dequantize_in_a_plain_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not quantised; leave out --dequantize"):
        to_hub_folder(small_folder(tmp_path / "in", None), tmp_path / "out", dequantize=True)


# What Apple's code cannot run


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_query_heads": [4, 2], "num_kv_heads": [2, 1]}, "recomputes the heads"),
        ({"rms_norm_eps": 1e-5}, "RMSNorm uses 1e-6"),
    ],
)
def test_a_model_that_apples_code_would_build_otherwise_is_refused(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = {**small_config(), **changes}
    config.pop("architectures")
    folder = small_folder(tmp_path / "in", None, random_model(config))
    with pytest.raises(ValueError, match=f"cannot become a folder for Apple's code: .*{reason}"):
        to_hub_folder(folder, tmp_path / "out")
    assert files(tmp_path) == ["in"]


@pytest.mark.parametrize("multipliers", [(0.5, 1.0), (1.0, 0.5), 1.0])
def test_missing_multipliers_are_found_from_the_heads(
    multipliers: float | tuple[float, float], tmp_path: Path
) -> None:
    model = small_model(qkv_multipliers=multipliers)
    config = small_config(qkv_multipliers=multipliers)
    heads = config["num_query_heads"]
    del config["qkv_multipliers"]  # as mlx_lm's own converter may leave it
    back = to_hub_folder(
        foreign_folder(tmp_path / "in", config, weights_of(model)), tmp_path / "out"
    )
    written = read_json(back / "config.json")
    del written["num_query_heads"], written["num_kv_heads"]  # Apple's code recomputes them
    assert list(ModelArgs.from_dict(written).num_query_heads) == heads


# Judges of their own


@pytest.mark.slow
def test_mlx_lm_loads_what_we_write(tmp_path: Path, tiny_tokenizer: TinyTokenizer) -> None:
    mlx_lm = pytest.importorskip("mlx_lm")
    model = small_model(**UNTIED)
    config = {**small_config(**UNTIED), "auto_map": {"AutoConfig": "configuration_openelm.X"}}
    source = foreign_folder(tmp_path / "in", config, weights_of(model))
    ours = from_hub(source, tmp_path / "out", tokenizer=tiny_tokenizer.path, instruct=True)
    stock, tokenizer = mlx_lm.load(str(ours))
    np.testing.assert_allclose(logits(stock), logits(model), atol=1e-5, rtol=0)
    assert tokenizer.encode("The wolf") == tiny_tokenizer.tokenizer.encode("The wolf")
    assert tokenizer.chat_template


@pytest.mark.slow
def test_pytorch_reads_the_folder_for_apples_code(golden_model: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors")
    apple = golden_set.find(f"hf/{golden_model}")
    assert apple is not None
    back = to_hub_folder(from_hub(apple, tmp_path / "ours"), tmp_path / "back")
    with (
        safetensors.safe_open(back / "model.safetensors", framework="pt") as ours,
        safetensors.safe_open(apple / "model.safetensors", framework="pt") as theirs,
    ):
        assert ours.metadata() == theirs.metadata()
        assert set(ours.keys()) == set(theirs.keys())
        for name in theirs.keys():  # noqa: SIM118  (no mapping)
            assert ours.get_tensor(name).equal(theirs.get_tensor(name)), name

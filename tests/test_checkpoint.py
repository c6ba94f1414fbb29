"""Model folders: ours, Hugging Face's, CoreNet-MLX's and quantised ones, read and written."""

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
from model_makers import apple_io
from tiny_tokenizer import TinyTokenizer

from openelm_mlx.chat_template import APPLE_INSTRUCT_TEMPLATE
from openelm_mlx.checkpoint import load, load_args, load_model, save_model
from openelm_mlx.config import ModelArgs
from openelm_mlx.fitting import build_model
from openelm_mlx.weight_files import read_json, read_weights

TABLE = "transformer.token_embeddings.weight"
UNTIED: dict[str, Any] = {"share_input_output_layers": False}


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (each caller checks the message)
        load_model(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Hugging Face's folders


def test_apples_folders_give_apples_logits(golden_model: str) -> None:
    folder, io = golden_set.find(f"hf/{golden_model}"), apple_io(golden_model)
    assert folder is not None
    model = load_model(folder)
    got = np.array(model(mx.array(io["input_ids"].astype(np.int32))))
    np.testing.assert_allclose(got, io["logits"], atol=1e-4, rtol=0)  # seen: 3.4e-5


@pytest.mark.parametrize("head", ["lm_head.weight", "transformer.classifier.weight"])
def test_an_untied_head_is_found_under_either_name(head: str, tmp_path: Path) -> None:
    model = small_model(**UNTIED)
    weights = weights_of(model)
    weights[head] = weights.pop("lm_head.weight")
    folder = foreign_folder(tmp_path, small_config(**UNTIED), weights)
    np.testing.assert_array_equal(logits(load_model(folder)), logits(model))


def test_two_heads_that_differ_are_refused(tmp_path: Path) -> None:
    weights = weights_of(small_model(**UNTIED))
    weights["transformer.classifier.weight"] = weights["lm_head.weight"] + 1
    folder = foreign_folder(tmp_path, small_config(**UNTIED), weights)
    assert "transformer.classifier.weight differs from lm_head.weight" in refusal(folder)


@pytest.mark.parametrize("head", ["lm_head.weight", "transformer.classifier.weight"])
def test_a_copy_of_the_tied_table_is_accepted_only_if_equal(head: str, tmp_path: Path) -> None:
    model = small_model()
    weights = weights_of(model)
    equal = foreign_folder(tmp_path / "a", small_config(), {**weights, head: weights[TABLE]})
    np.testing.assert_array_equal(logits(load_model(equal)), logits(model))
    other = foreign_folder(tmp_path / "b", small_config(), {**weights, head: weights[TABLE] * 2})
    assert f"{head} differs from {TABLE}" in refusal(other)


def test_a_config_silent_about_tying_is_settled_by_the_tensors(tmp_path: Path) -> None:
    for name, changes in (("tied", {}), ("untied", UNTIED)):
        model = small_model(**changes)
        config = small_config(**changes)
        del config["share_input_output_layers"]
        folder = foreign_folder(tmp_path / name, config, weights_of(model))
        loaded = load_model(folder)
        assert loaded.args.share_input_output_layers == (name == "tied")
        np.testing.assert_array_equal(logits(loaded), logits(model))


def test_an_untied_config_without_a_head_names_it(tmp_path: Path) -> None:
    folder = foreign_folder(tmp_path, small_config(**UNTIED), weights_of(small_model()))
    assert "1 missing: lm_head.weight" in refusal(folder)


def test_a_renamed_tensor_makes_a_short_message_with_the_nearest_name(tmp_path: Path) -> None:
    weights = weights_of(small_model())
    weights["transformer.layers.0.attn.qkv.weight"] = weights.pop(
        "transformer.layers.0.attn.qkv_proj.weight"
    )
    message = refusal(foreign_folder(tmp_path, small_config(), weights))
    assert "1 missing: transformer.layers.0.attn.qkv_proj.weight (nearest in the file" in message
    assert len(message) < 400 + len(str(tmp_path))


def test_missing_extra_and_mis_shaped_tensors_come_in_one_message(tmp_path: Path) -> None:
    weights = weights_of(small_model())
    del weights["transformer.layers.1.ffn.proj_2.weight"]
    weights["rotary.inv_freq"] = mx.zeros(3)
    weights[TABLE] = weights[TABLE][:-2]
    message = refusal(foreign_folder(tmp_path, small_config(), weights))
    assert str(tmp_path) in message
    for part in (
        "1 missing: transformer.layers.1.ffn.proj_2.weight",
        "1 unexpected: rotary.inv_freq",
        f"1 of another shape: {TABLE} is [318, 64], expected [320, 64]",
    ):
        assert part in message


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    weights = {name: w.astype(mx.int8) for name, w in weights_of(small_model()).items()}
    message = refusal(foreign_folder(tmp_path, small_config(), weights))
    assert "hold another kind of number than expected" in message
    assert "int8" in message


# Configs


def test_a_missing_folder_or_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none is not a folder; give a model folder"):
        load_args(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json; .*openelm convert"):
        load_args(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere/at/all does not exist; give a folder"):
        load("nowhere/at/all")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ('{"model_type": "llama"}', "model_type is 'llama', expected 'openelm'"),
        ('{"model_name": "OpenELM-7B"}', "no preset 'OpenELM-7B'"),
        ('{"model_type": "openelm", "model_dim": "wide"}', "model_dim must be a positive integer"),
    ],
)
def test_a_wrong_config_is_refused_with_its_file(
    content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_args(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_revision_of_a_local_folder_is_an_error(tiny_model_dir: Path) -> None:
    with pytest.raises(ValueError, match="is a folder here and has no revision 'v2'"):
        load(tiny_model_dir, revision="v2")


# Saving


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("changes", [{}, UNTIED])
def test_save_then_load_is_the_identity(
    dtype: mx.Dtype, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = small_model(dtype, **changes)
    save_model(model, tmp_path / "out")
    assert_same_weights(weights_of(load_model(tmp_path / "out")), weights_of(model))
    config = read_json(tmp_path / "out" / "config.json")
    assert config["torch_dtype"] == str(dtype).removeprefix("mlx.core.")
    assert config.get("tie_word_embeddings") == (False if changes else None)
    assert ModelArgs.from_dict(config).to_dict() == config


def test_a_saved_quantised_model_is_the_same(tmp_path: Path) -> None:
    entry = {"group_size": 32, "bits": 4}
    config = {**small_config(), "quantization": entry}
    model = small_model()
    nn.quantize(model, **entry)
    source = load_model(foreign_folder(tmp_path / "in", config, weights_of(model)))
    save_model(source, tmp_path / "out")
    assert read_json(tmp_path / "out" / "config.json")["quantization"] == entry
    assert_same_weights(read_weights(tmp_path / "out"), weights_of(model))


def test_a_saved_folder_is_complete(tmp_path: Path, tiny_tokenizer: TinyTokenizer) -> None:
    folder = small_folder(
        tmp_path / "out", tiny_tokenizer.tokenizer, provenance={"source": "here", "licence": "MIT"}
    )
    assert files(folder) == [
        *("config.json", "generation_config.json", "model.safetensors", "openelm.json"),
        *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    ]
    provenance = read_json(folder / "openelm.json")
    assert (provenance["source"], provenance["licence"]) == ("here", "MIT")
    assert set(provenance["versions"]) == {"openelm-mlx", "mlx"}
    expected = {"bos_token_id": 1, "eos_token_id": 2}
    assert read_json(folder / "generation_config.json") == expected
    model, tokenizer = load(folder)
    assert tokenizer is not None
    assert tokenizer.encode("The king") == tiny_tokenizer.tokenizer.encode("The king")
    assert not model.training


def test_only_an_instruct_folder_gets_the_chat_template(
    tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    for instruct in (False, True):
        folder = small_folder(tmp_path / str(instruct), tiny_tokenizer.tokenizer, instruct=instruct)
        settings = read_json(folder / "tokenizer_config.json")
        assert settings.get("chat_template") == (APPLE_INSTRUCT_TEMPLATE if instruct else None)


def test_a_folder_without_a_tokenizer_loads_with_a_warning(
    tmp_path: Path, tiny_tokenizer: TinyTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    folder = small_folder(tmp_path / "out", None)
    assert "the folder has no tokenizer" in caplog.text
    caplog.clear()
    assert load(folder)[1] is None
    assert "--tokenizer" in caplog.text
    with pytest.raises(FileNotFoundError, match="--tokenizer"):
        load(folder, need_tokenizer=True)
    given = load(folder, tokenizer=tiny_tokenizer.path)[1]
    assert given is not None
    assert given.encode("a") == tiny_tokenizer.tokenizer.encode("a")


def test_a_model_that_mlx_lm_would_get_wrong_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(small_model(activation_fn_name="gelu"), tmp_path / "gelu")
    assert "runs here but not in stock mlx_lm: it computes swish" in caplog.text
    caplog.clear()
    save_model(small_model(), tmp_path / "swish")
    assert "mlx_lm" not in caplog.text


def test_nothing_is_left_behind_when_saving_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("openelm_mlx.checkpoint.write_json", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_model(small_model(), tmp_path / "out")
    assert files(tmp_path) == []


def test_a_folder_is_replaced_only_when_asked(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "out", None)
    with pytest.raises(FileExistsError, match="--overwrite"):
        small_folder(folder, None)
    other = small_model(mx.float16)
    small_folder(folder, None, other, overwrite=True)
    assert_same_weights(read_weights(folder), weights_of(other))
    assert files(tmp_path) == ["out"]


def test_loading_lazily_reads_no_weights(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "out", None)
    lazy = load_model(folder, lazy=True)
    (folder / "model.safetensors").write_bytes(b"")  # the open file loses its contents
    with pytest.raises(RuntimeError):
        mx.eval(lazy.transformer.norm.weight)  # one, as MLX would raise the others' errors later


def test_messages_name_where_the_tensors_came_from() -> None:
    with pytest.raises(
        ValueError, match=r"^there: tensors do not fit the config \(18 expected, 0 found"
    ):
        build_model(ModelArgs.from_dict(small_config()), {}, source="there")

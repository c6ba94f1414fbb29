"""Quantised folders: judged by MLX's own quantiser, by stock mlx_lm and by plain NumPy."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

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
from slow_params import slow
from tiny_tokenizer import TinyTokenizer

from convert.quantize import quantize
from convert.quantize_plan import QuantizeArgs
from openelm_mlx.checkpoint import load_model
from openelm_mlx.cli import main
from openelm_mlx.model import Model
from openelm_mlx.weight_files import read_json, read_weights

TABLE = "transformer.token_embeddings"
NARROW = "transformer.layers.0.attn.out_proj"  # 32 wide, where all else is 64 and more
WIDE: dict[str, Any] = {"ffn_multipliers": (1.0, 2.0)}


def reference_model(model: Model, **settings: Any) -> Model:
    """MLX's own quantiser on the layers whose width the group divides."""
    group = settings["group_size"]
    nn.quantize(
        model,
        **settings,
        class_predicate=lambda _, m: hasattr(m, "to_quantized") and m.weight.shape[1] % group == 0,
    )
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {"bits": 4, "group_size": 32, "mode": "affine"},
        {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        *slow(*({"bits": n, "group_size": 32, "mode": "affine"} for n in (2, 3, 5, 6, 8))),
        *slow({"bits": 8, "group_size": 32, "mode": "mxfp8"}),
        *slow({"bits": 4, "group_size": 16, "mode": "nvfp4"}),
    ],
)
def test_codes_are_those_of_mlx(settings: dict[str, Any], tmp_path: Path) -> None:
    source = small_folder(tmp_path / "in", None, small_model())
    report = quantize(source, tmp_path / "out", **settings)
    expected = reference_model(small_model(), **settings)
    assert_same_weights(read_weights(tmp_path / "out"), weights_of(expected))
    assert read_json(tmp_path / "out" / "config.json")["quantization"] == settings
    np.testing.assert_array_equal(logits(load_model(tmp_path / "out")), logits(expected))
    assert report.left == []


def test_python_and_the_command_line_have_the_same_defaults(tmp_path: Path) -> None:
    source = small_folder(tmp_path / "in", None, small_model(**WIDE))
    quantize(source, tmp_path / "python")
    assert main(["convert", "quantize", str(source), "--output", str(tmp_path / "cli")]) == 0
    python, cli = (read_json(tmp_path / n / "config.json") for n in ("python", "cli"))
    assert python == cli
    assert {k: python["quantization"][k] for k in ("bits", "group_size", "mode")} == {
        **{"bits": 4, "group_size": 64, "mode": "affine"}
    }
    assert_same_weights(read_weights(tmp_path / "cli"), read_weights(tmp_path / "python"))


@pytest.mark.parametrize(
    ("mode", "group", "bits"), [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]
)
def test_microscaled_modes_take_their_own_group_and_bits(mode: str, group: int, bits: int) -> None:
    # Guards mlx-lm#935: Python's default group of 64 went into mxfp4.
    assert QuantizeArgs(mode=mode).settings == {"mode": mode, "group_size": group, "bits": bits}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "int4"}, "mode 'int4' is not one of affine, mxfp4, mxfp8, nvfp4"),
        ({"bits": 7}, "bits 7 does not exist in mode affine: 2, 3, 4, 5, 6, 8"),
        ({"group_size": 16}, "group_size 16 does not exist in mode affine: 128, 64, 32"),
        ({"mode": "mxfp4", "bits": 8}, "bits 8 does not exist in mode mxfp4: 4"),
        ({"mode": "mxfp4", "group_size": 64}, "group_size 64 does not exist in mode mxfp4: 32"),
        ({"embedding_bits": 7}, "embedding_bits 7 is not one of 2, 3, 4, 5, 6, 8, or 16"),
    ],
)
def test_settings_that_do_not_exist_are_refused_at_once(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(tmp_path / "nowhere", tmp_path / "out", **settings)


# Widths that the group does not divide


def test_a_narrow_layer_takes_a_smaller_group_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small_model(**WIDE)
    source = small_folder(tmp_path / "in", None, model)
    assert main(["convert", "quantize", str(source), "--output", str(tmp_path / "out")]) == 0
    assert (
        f"1 in smaller groups, which divide their width: {NARROW} (32)" in capsys.readouterr().out
    )
    entry = read_json(tmp_path / "out" / "config.json")["quantization"]
    assert entry[NARROW] == {"group_size": 32, "bits": 4, "mode": "affine"}
    loaded = load_model(tmp_path / "out")
    assert loaded.layers[0].attn.out_proj.group_size == 32
    assert loaded.layers[0].attn.qkv_proj.group_size == 64


def test_a_layer_that_fits_no_group_stays_and_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"model_dim": 96, "head_dim": 12, "ffn_dim_divisor": 16, "ffn_multipliers": (0.5, 1)}
    model = small_model(**changes)  # out_proj 48 and 96 wide, proj_2 48 and 96
    source = small_folder(tmp_path / "in", None, model)
    report = quantize(source, tmp_path / "out", group_size=64)
    left = ["transformer.layers.0.attn.out_proj", "transformer.layers.0.ffn.proj_2"]
    assert report.left == left
    assert set(report.smaller_groups.values()) == {32}
    entry = read_json(tmp_path / "out" / "config.json")["quantization"]
    assert {path: entry[path] for path in left} == dict.fromkeys(left, False)
    loaded = load_model(tmp_path / "out")
    assert type(loaded.layers[0].attn.out_proj) is nn.Linear
    original = weights_of(model)
    written = read_weights(tmp_path / "out")
    names = [f"{path}.weight" for path in left]
    assert_same_weights({n: written[n] for n in names}, {n: original[n] for n in names})
    main(["convert", "quantize", str(source), "--output", str(tmp_path / "cli")])
    assert f"2 not quantised: {', '.join(left)}\n" in capsys.readouterr().out


# The embedding and the head


@pytest.mark.parametrize("changes", [{}, {"share_input_output_layers": False}])
@pytest.mark.parametrize("embedding_bits", [8, *slow(None, 16)])
def test_the_tables_take_more_bits_on_request(
    embedding_bits: int | None, changes: dict[str, Any], tmp_path: Path
) -> None:
    source = small_folder(tmp_path / "in", None, small_model(**changes))
    quantize(source, tmp_path / "out", bits=3, group_size=32, embedding_bits=embedding_bits)
    loaded = load_model(tmp_path / "out")
    tables = [loaded.transformer.token_embeddings]
    tables += [loaded.lm_head] if changes else []
    bits = [getattr(table, "bits", 16) for table in tables]
    assert bits == [embedding_bits or 3] * len(tables)
    assert loaded.layers[0].ffn.proj_1.bits == 3
    expected = small_model(**changes)
    nn.quantize(
        expected,
        class_predicate=lambda path, m: (
            hasattr(m, "to_quantized")
            and (path not in (TABLE, "lm_head") or embedding_bits != 16)
            and {
                "group_size": 32,
                "bits": (embedding_bits or 3) if path in (TABLE, "lm_head") else 3,
            }
        ),
    )
    np.testing.assert_array_equal(logits(loaded), logits(expected))


def test_an_affine_table_goes_with_microscaled_layers(tmp_path: Path) -> None:
    source = small_folder(tmp_path / "in", None)
    quantize(source, tmp_path / "out", mode="mxfp4", embedding_bits=8)
    table = load_model(tmp_path / "out").transformer.token_embeddings
    assert (table.mode, table.bits, table.group_size) == ("affine", 8, 64)


# The folder


@pytest.mark.slow
def test_the_folder_is_complete_and_remembers_where_it_came_from(
    tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    source = small_folder(
        tmp_path / "in", tiny_tokenizer.tokenizer, instruct=True, provenance={"licence": "mit"}
    )
    (source / "LICENSE").write_text("free")
    theirs = {"bos_token_id": 1, "eos_token_id": 2, "repetition_penalty": 1.2}
    (source / "generation_config.json").write_text(json.dumps(theirs))
    report = quantize(source, tmp_path / "out", group_size=32)
    out = report.folder
    assert files(out) == files(source)
    for name in ("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "LICENSE"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert read_json(out / "generation_config.json") == theirs
    provenance = read_json(out / "openelm.json")
    weights = (source / "model.safetensors").read_bytes()
    assert provenance["sha256"] == hashlib.sha256(weights).hexdigest()
    assert (provenance["source"], provenance["licence"]) == ("in", "mit")
    assert provenance["quality"]["perplexity_after"] == report.quality.perplexity_after


def test_a_quantised_folder_is_refused(tmp_path: Path) -> None:
    source = small_folder(tmp_path / "in", None)
    quantize(source, tmp_path / "once", group_size=32)
    with pytest.raises(ValueError, match="once is quantised already; give the folder it was made"):
        quantize(tmp_path / "once", tmp_path / "twice")
    assert files(tmp_path) == ["in", "once"]


def test_small_models_at_four_bits_are_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = small_folder(tmp_path / "in", None)
    quantize(source, tmp_path / "four", group_size=32)
    assert re.search(r"4 bits cost a model of 0\.\d+ M parameters much quality", caplog.text)
    caplog.clear()
    quantize(source, tmp_path / "eight", bits=8, group_size=32)
    assert "much quality" not in caplog.text


def test_nothing_is_left_behind_and_nothing_replaced_unasked(tmp_path: Path) -> None:
    weights = weights_of(small_model())
    del weights["transformer.norm.weight"]
    broken = foreign_folder(tmp_path / "broken", small_config(), weights)
    with pytest.raises(ValueError, match=r"1 missing: transformer\.norm\.weight"):
        quantize(broken, tmp_path / "out")
    whole = small_folder(tmp_path / "whole", None)
    with pytest.raises(FileExistsError, match="--overwrite"):
        quantize(whole, whole)
    assert files(tmp_path) == ["broken", "whole"]
    quantize(whole, whole, overwrite=True, group_size=32)
    assert "quantization" in read_json(whole / "config.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bits": 3, "embedding_bits": 8},
        {"embedding_bits": 16},
        {"mode": "mxfp4"},
        {"mode": "nvfp4", "embedding_bits": 6},
        {"changes": {"model_dim": 96, "head_dim": 12, "ffn_dim_divisor": 16}},
        {"changes": {"share_input_output_layers": False}, "embedding_bits": 8},
    ],
)
def test_stock_mlx_lm_computes_the_same(
    settings: dict[str, Any], tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    mlx_lm = pytest.importorskip("mlx_lm")
    utils = pytest.importorskip("mlx_lm.utils")
    model = small_model(**settings.pop("changes", {}))
    source = small_folder(tmp_path / "in", tiny_tokenizer.tokenizer, model)
    report = quantize(source, tmp_path / "out", **settings)
    stock, _ = mlx_lm.load(str(tmp_path / "out"))
    ours = load_model(tmp_path / "out")
    np.testing.assert_allclose(logits(stock), logits(ours), atol=1e-5, rtol=0)
    assert utils.compute_bits_per_weight(stock) == pytest.approx(report.bits_per_weight)

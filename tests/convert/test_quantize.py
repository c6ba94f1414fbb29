"""Quantised folders: judged by MLX's own quantiser, by stock mlx_lm and by plain NumPy."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import reference
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
from golden_set import numpy_weights
from tiny_tokenizer import TinyTokenizer

from convert.quantize import quantize
from convert.quantize_check import BUILT_IN_TEXT, MAX_TOKENS, make_sample, measure, read_documents
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
        *({"bits": bits, "group_size": 32, "mode": "affine"} for bits in (2, 3, 4, 5, 6, 8)),
        {"bits": 4, "group_size": 32, "mode": "mxfp4"},
        {"bits": 8, "group_size": 32, "mode": "mxfp8"},
        {"bits": 4, "group_size": 16, "mode": "nvfp4"},
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
@pytest.mark.parametrize("embedding_bits", [None, 8, 16])
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


# What is measured


def numpy_scores(folder: Path, ids: list[int]) -> np.ndarray:
    """(L, V) float64 logits by the independent NumPy model, of unpacked weights."""
    model = load_model(folder)
    weights = numpy_weights(model)
    for path, module in dict(model.named_modules()).items():
        if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
            plain = mx.dequantize(
                module.weight,
                module.scales.astype(mx.float32),
                module.biases.astype(mx.float32),
                group_size=module.group_size,
                bits=module.bits,
            )
            weights[f"{path}.weight"] = np.array(plain)
    config = read_json(folder / "config.json")
    return reference.forward(config, weights, np.array([ids[:-1]]))[0]


def numpy_perplexity(scores: np.ndarray, targets: list[int]) -> float:
    highest = scores.max(axis=1, keepdims=True)
    logsumexp = highest[:, 0] + np.log(np.exp(scores - highest).sum(axis=1))
    return math.exp((logsumexp - scores[np.arange(len(targets)), targets]).mean())


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"share_input_output_layers": False}])
def test_logit_error_and_perplexity_agree_with_numpy(
    dtype: mx.Dtype, changes: dict[str, Any], tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    tokenizer = tiny_tokenizer.tokenizer
    source = small_folder(tmp_path / "in", tokenizer, small_model(dtype, **changes))
    text = "The old king went to the forest. The wolf saw him."
    (tmp_path / "text.txt").write_text(text)
    report = quantize(source, tmp_path / "out", data=tmp_path / "text.txt", group_size=32, bits=4)
    ids = tokenizer.encode(text)
    before, after = (numpy_scores(tmp_path / name, ids) for name in ("in", "out"))
    quality = report.quality
    assert quality.text == "text.txt"
    assert quality.tokens == len(ids) - 1
    assert quality.perplexity_before == pytest.approx(numpy_perplexity(before, ids[1:]), rel=1e-4)
    assert quality.perplexity_after == pytest.approx(numpy_perplexity(after, ids[1:]), rel=1e-4)
    error = np.abs(before - after)
    assert quality.mean_logit_error == pytest.approx(error.mean(), rel=1e-3)
    assert quality.max_logit_error == pytest.approx(error.max(), rel=1e-3)
    same = (before.argmax(axis=1) == after.argmax(axis=1)).mean()
    assert quality.same_first_choice == pytest.approx(same)


def test_more_bits_lose_less(tmp_path: Path, tiny_tokenizer: TinyTokenizer) -> None:
    source = small_folder(tmp_path / "in", tiny_tokenizer.tokenizer)
    text = tmp_path / "text.txt"
    text.write_text("The old king went to the forest. The wolf saw him.")
    errors = [
        quantize(
            source, tmp_path / f"{bits}", bits=bits, group_size=32, data=text
        ).quality.mean_logit_error
        for bits in (2, 3, 4, 6, 8)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 10 * errors[-1] > 0


def test_bits_per_weight_count_scales_and_plain_layers(tmp_path: Path) -> None:
    model = small_model(mx.bfloat16)
    source = small_folder(tmp_path / "in", None, model)
    report = quantize(source, tmp_path / "out", group_size=32)
    matrices = sum(w.size for w in weights_of(model).values() if w.ndim == 2)
    norms = sum(w.size for w in weights_of(model).values() if w.ndim == 1)
    bits = matrices * (4 + 2 * 16 / 32) + norms * 16
    assert report.bits_per_weight == pytest.approx(bits / (matrices + norms))
    assert report.bytes_before == 2 * (matrices + norms)
    assert report.bytes_after * 8 == bits


def test_long_text_is_scored_in_windows_of_the_context(tiny_tokenizer: TinyTokenizer) -> None:
    tokenizer = tiny_tokenizer.tokenizer
    short, whole = (small_model(max_context_length=n) for n in (50, 2048))
    sample = make_sample(None, tokenizer, 320)
    ids = tokenizer.encode(BUILT_IN_TEXT)
    assert sample.documents == [ids]
    found = measure(short, sample)
    assert found.tokens == len(ids) - 1
    total = 0.0
    for start in range(0, len(ids) - 1, 50):
        piece = ids[start : start + 51]
        scores = logits(whole, piece[:-1]).astype(np.float64)
        total += math.log(numpy_perplexity(scores, piece[1:])) * (len(piece) - 1)
    assert found.nll == pytest.approx(total / (len(ids) - 1), rel=1e-5)
    assert found.logits.shape == (50, 320)


def test_a_large_file_is_cut_after_a_fixed_number_of_tokens(
    tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    lines = [json.dumps({"text": f"The king {i} went to the forest"}) for i in range(4000)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n\n")
    sample = make_sample(tmp_path / "data.jsonl", tiny_tokenizer.tokenizer, 320)
    assert sum(len(ids) - 1 for ids in sample.documents) == MAX_TOKENS
    assert all(ids[0] == 1 for ids in sample.documents)


def test_without_a_tokenizer_random_tokens_show_the_logit_error_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = small_folder(tmp_path / "in", None)
    assert main(["convert", "quantize", str(source), "--output", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "logits on random tokens: mean error 0." in out
    assert "perplexity: not measured, since the folder has no tokenizer" in out
    (tmp_path / "text.txt").write_text("a")
    with pytest.raises(ValueError, match="--data needs a tokenizer, and the folder has none"):
        quantize(source, tmp_path / "none", data=tmp_path / "text.txt")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", '{"text": "a"}\n{"text"\n', "x.jsonl, line 2: not valid JSON"),
        ("x.jsonl", '{"text": 3}\n', 'x.jsonl, line 1: expected an object with a string under "te'),
        ("x.jsonl", "[1]\n", "x.jsonl, line 1: expected an object"),
        ("x.txt", "", "x.txt holds no text to measure by"),
    ],
)
def test_damaged_text_is_refused_by_line(
    name: str, content: str, message: str, tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        make_sample(tmp_path / name, tiny_tokenizer.tokenizer, 320)


def test_a_missing_text_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.txt does not exist"):
        list(read_documents(tmp_path / "none.txt"))


# The folder


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
    assert "4 bits cost a model of 0 M parameters much quality" in caplog.text
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

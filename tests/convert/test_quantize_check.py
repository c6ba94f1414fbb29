"""What quantising costs, as reported: judged by the model in plain NumPy."""

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
    logits,
    small_folder,
    small_model,
    weights_of,
)
from golden_set import numpy_weights
from tiny_tokenizer import TinyTokenizer

from convert.quantize import quantize
from convert.quantize_check import BUILT_IN_TEXT, MAX_TOKENS, make_sample, measure, read_documents
from openelm_mlx.checkpoint import load_model
from openelm_mlx.cli import main
from openelm_mlx.weight_files import read_json

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

"""`openelm fuse`: folders that do what base and adapters do, and a report of what it cost."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from adapter_folders import edit, tensors_of
from folder_makers import IDS, assert_same_weights, files, logits, small_folder, small_model
from fuse_folders import ARGS, adapted_logits, adapters, quantised
from golden_lora import LINEAR, largest
from tiny_tokenizer import TinyTokenizer

from openelm_mlx.checkpoint import load, load_model
from openelm_mlx.cli import main
from openelm_mlx.fuse import fuse
from openelm_mlx.lora import AdapterArgs
from openelm_mlx.weight_files import read_json, read_weights


def deltas(folder: Path) -> dict[str, np.ndarray]:
    """What an adapter folder of :data:`ARGS` adds to each weight, in float64."""
    tensors = {name: np.array(array, np.float64) for name, array in tensors_of(folder).items()}
    return {
        name.removesuffix(".lora_a"): ARGS.scale * (a @ tensors[name[:-1] + "b"]).T
        for name, a in tensors.items()
        if name.endswith(".lora_a")
    }


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_the_folder_needs_no_adapters(
    kind: Any, tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    base = small_folder(tmp_path / "base", tiny_tokenizer.tokenizer)
    args = AdapterArgs(rank=4, scale=2.0, kind=kind, target_modules=LINEAR)
    path = adapters(tmp_path / "adapters", small_model(), args)
    report = fuse(base, path, tmp_path / "out")
    found, tokenizer = load(tmp_path / "out")
    assert tokenizer is not None
    assert tokenizer.encode("the wolf") == tiny_tokenizer.tokenizer.encode("the wolf")
    assert files(tmp_path / "out") == files(base)
    assert largest(logits(found), adapted_logits(base, path)) < 1e-4
    assert largest(logits(found), logits(small_model())) > 0.1
    assert report.cost.text == "the built-in text"
    assert report.cost.mean_lost < 1e-5
    assert report.cost.logit_error < 1e-5 < 0.01 < (report.cost.logit_change or 0)
    assert report.no_longer == {}


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_what_16_bits_lose_of_a_small_change_is_measured_and_said(
    dtype: mx.Dtype, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards mlx-examples#832: a fused model that behaves like its base."""
    base = small_folder(tmp_path / "base", None, small_model(dtype))
    path = adapters(tmp_path / "adapters", small_model(dtype), size=1e-4)
    report = fuse(base, path, tmp_path / "out")
    before, after = read_weights(base), read_weights(tmp_path / "out")
    for module, delta in deltas(path).items():
        old, new = (
            np.array(w[f"{module}.weight"].astype(mx.float32), np.float64) for w in (before, after)
        )
        expected = np.linalg.norm(new - (old + delta)) / np.linalg.norm(delta)
        assert report.cost.lost[module] == pytest.approx(expected, rel=1e-3)
    assert report.cost.mean_lost > 0.5
    assert report.cost.worst in deltas(path)
    name = str(dtype).removeprefix("mlx.core.")
    assert f"rounding to {name} left an error of" in caplog.text
    assert "--adapter-path" in caplog.text
    assert {array.dtype for array in after.values()} == {dtype}


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_a_quantised_base_stays_so_and_the_cost_is_said(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = quantised(tmp_path, mode=mode)
    path = adapters(tmp_path / "adapters", load_model(base))
    report = fuse(base, path, tmp_path / "out")
    found = load_model(tmp_path / "out")
    settings = {"group_size": 32, "bits": 4, "mode": mode}
    weights = read_weights(base)
    for module, delta in deltas(path).items():
        old = unpacked(weights, module, settings)
        exact = mx.array((old + delta).astype(np.float32))
        codes = {
            f"{module}.{part}": array
            for part, array in zip(
                ("weight", "scales", "biases"), mx.quantize(exact, **settings), strict=False
            )
        }
        new = unpacked(codes, module, settings)
        expected = np.linalg.norm(new - (old + delta)) / np.linalg.norm(delta)
        assert report.cost.lost[module] == pytest.approx(expected, rel=1e-2)
    assert report.quantized
    assert f"{report.cost.mean_lost * 100:.3g}% of the adapters' change" in caplog.text
    assert "--dequantize stores the whole model in floating point" in caplog.text
    assert read_json(tmp_path / "out/config.json") == read_json(base / "config.json")
    error = np.linalg.norm(logits(found) - adapted_logits(base, path))
    relative = error / np.linalg.norm(adapted_logits(base, path))
    assert 0.005 < relative < 2
    assert 0.3 * relative < report.cost.logit_error < 3 * relative  # on other tokens


def unpacked(weights: dict[str, mx.array], module: str, settings: dict[str, Any]) -> np.ndarray:
    parts = [weights.get(f"{module}.{part}") for part in ("weight", "scales", "biases")]
    return np.array(mx.dequantize(*parts, **settings, dtype=mx.float32), np.float64)


def test_dequantize_keeps_the_change_and_cleans_the_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards mlx-lm#659: the config kept `quantization_config`, and the folder did not load."""
    base = quantised(tmp_path)
    path = adapters(tmp_path / "adapters", load_model(base))
    caplog.clear()
    report = fuse(base, path, tmp_path / "out", dequantize=True)
    config = read_json(tmp_path / "out/config.json")
    assert "quantization" in read_json(base / "config.json")
    assert not [key for key in config if "quantization" in key]
    found = load_model(tmp_path / "out")
    assert largest(logits(found), adapted_logits(base, path)) < 1e-3
    assert report.cost.mean_lost < 1e-5
    assert report.cost.logit_error < 1e-4
    assert not report.quantized
    assert "--dequantize" not in caplog.text
    assert not [name for name in read_weights(tmp_path / "out") if name.endswith("scales")]


def test_dequantize_is_an_error_where_nothing_is_quantised(tmp_path: Path) -> None:
    base = small_folder(tmp_path / "base", None)
    path = adapters(tmp_path / "adapters", small_model())
    with pytest.raises(ValueError, match="base is not quantised; leave --dequantize out"):
        fuse(base, path, tmp_path / "out", dequantize=True)


@pytest.mark.parametrize("packed", [False, True])
def test_an_embedding_adapter_unties_the_head_and_says_where_that_does_not_run(
    packed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = quantised(tmp_path) if packed else small_folder(tmp_path / "base", None)
    args = AdapterArgs(rank=4, scale=2.0)
    path = adapters(tmp_path / "adapters", load_model(base), args)
    command = ["fuse", "--model", str(base), "--adapter-path", str(path)]
    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "the head is untied: the adapter of the embedding does not reach it" in out
    assert "does not run in mlx-swift-lm: " in out
    assert "it builds an untied head with the wrong size" in out
    config = read_json(tmp_path / "out/config.json")
    assert config["share_input_output_layers"] is False
    assert config["tie_word_embeddings"] is False
    assert_same_weights(head(tmp_path / "out"), head(base))
    found, expected = logits(load_model(tmp_path / "out")), adapted_logits(base, path)
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < (0.5 if packed else 1e-5)  # 4 bit, twice


def head(folder: Path) -> dict[str, mx.array]:
    """The output head's tensors, by part."""
    weights = read_weights(folder)
    own = any(name.startswith("lm_head.") for name in weights)
    start = "lm_head." if own else "transformer.token_embeddings."
    return {n.removeprefix(start): array for n, array in weights.items() if n.startswith(start)}


def test_mlx_lms_embedding_adapter_leaves_the_head_tied(tmp_path: Path) -> None:
    base = small_folder(tmp_path / "base", None)
    path = adapters(tmp_path / "adapters", small_model(), AdapterArgs(rank=4, scale=2.0))
    edit(path, openelm_mlx=None)  # as mlx_lm writes it; there the adapter reaches the head
    report = fuse(base, path, tmp_path / "out")
    assert not report.head_untied
    assert read_json(tmp_path / "out/config.json")["share_input_output_layers"] is True
    found = logits(load_model(tmp_path / "out"))
    assert largest(found, adapted_logits(base, path)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("form", ["plain", "embedding", "quantised", "dequantised"])
def test_stock_mlx_lm_runs_the_fused_folder(form: str, tmp_path: Path) -> None:
    from mlx_lm.utils import load_model as stock

    base = quantised(tmp_path) if "quantised" in form else small_folder(tmp_path / "base", None)
    args = AdapterArgs(rank=4, scale=2.0) if form != "plain" else ARGS
    path = adapters(tmp_path / "adapters", load_model(base), args)
    fuse(base, path, tmp_path / "out", dequantize=form == "dequantised")
    model, _ = stock(tmp_path / "out", strict=True)
    expected = logits(load_model(tmp_path / "out"))
    assert largest(np.array(model(mx.array([IDS])))[0], expected) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_mlx_lms_adapters_are_fused_to_mlx_lms_logits(kind: str, tmp_path: Path) -> None:
    import test_adapter_mlx_lm as stock

    base = stock.base(tmp_path)
    keys = ["attn.qkv_proj", "ffn.proj_1", "transformer.token_embeddings"]
    expected = stock.stock_folder(base, tmp_path / "a", kind=kind, keys=keys, num_layers=-1)
    report = fuse(base, tmp_path / "a", tmp_path / "out")
    assert not report.head_untied
    found = np.array(stock.stock_model(tmp_path / "out")(stock.TOKENS))
    assert largest(found, expected) < 1e-4

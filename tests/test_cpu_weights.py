"""What a Linux CPU gets in place of a folder's own weights: the same numbers, quicker to read."""

import io
import logging
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from command_line import run_here
from folder_makers import assert_same_weights, logits, small_folder, small_model, weights_of
from tiny_tokenizer import TinyTokenizer

from openelm_mlx import blas, cpu_weights
from openelm_mlx.adapter_args import AdapterArgs
from openelm_mlx.checkpoint import save_model
from openelm_mlx.lora import add_adapters

MANY = 1000  # tokens


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Linux CPU with OpenBLAS, whatever this machine has."""
    monkeypatch.setattr(cpu_weights, "helps_here", lambda: True)


def inputs_first(array: mx.array) -> bool:
    """Whether the memory of a matrix is that of its transpose; Fortran order in NumPy's words."""
    return np.array(array, copy=False).flags.f_contiguous


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("tied", [True, False])
def test_arranged_weights_are_the_same_matrices(tied: bool) -> None:
    plain = small_model(share_input_output_layers=tied)
    arranged = small_model(share_input_output_layers=tied)
    cpu_weights.prepare_for_generation(arranged, tokens=MANY)
    assert_same_weights(weights_of(arranged), weights_of(plain))
    assert np.abs(logits(arranged) - logits(plain)).max() < 1e-6
    matrices = [a for a in weights_of(arranged).values() if a.ndim == 2]
    assert matrices
    assert all(inputs_first(a) for a in matrices)
    assert not any(inputs_first(a) for a in weights_of(plain).values() if a.ndim == 2)


@pytest.mark.usefixtures("here")
def test_a_folder_of_arranged_weights_is_the_folder_of_the_plain_ones(tmp_path: Path) -> None:
    model = small_model()
    save_model(model, tmp_path / "plain")
    cpu_weights.put_inputs_first(model)
    save_model(model, tmp_path / "arranged")
    plain, arranged = (tmp_path / n / "model.safetensors" for n in ("plain", "arranged"))
    assert plain.read_bytes() == arranged.read_bytes()


@pytest.mark.usefixtures("here")
def test_16_bit_weights_are_computed_in_float32(caplog: pytest.LogCaptureFixture) -> None:
    half, exact = small_model(mx.bfloat16), small_model(mx.bfloat16)
    exact.set_dtype(mx.float32)
    with caplog.at_level(logging.INFO, logger="openelm_mlx"):
        cpu_weights.prepare_for_generation(half, tokens=10)
    assert_same_weights(weights_of(half), weights_of(exact))
    assert "computed in float32" in caplog.text
    assert not cpu_weights.cast_to_float32(half)  # nothing is left to do


@pytest.mark.usefixtures("here")
def test_quantised_layers_keep_their_codes() -> None:
    model, kept = small_model(mx.bfloat16), small_model(mx.bfloat16)
    for m in (model, kept):
        nn.quantize(m, group_size=32, bits=4)
    cpu_weights.prepare_for_generation(model, tokens=MANY)
    before, after = weights_of(kept), weights_of(model)
    codes = [name for name, array in before.items() if array.dtype == mx.uint32]
    assert codes
    assert all(mx.array_equal(before[n], after[n]) for n in codes)
    assert {a.dtype for n, a in after.items() if n not in codes} == {mx.float32}
    assert np.abs(logits(model) - logits(kept)).max() < 0.05 * np.abs(logits(kept)).max()


@pytest.mark.usefixtures("here")
def test_adapters_stay_on_arranged_weights() -> None:
    model = small_model()
    add_adapters(model, AdapterArgs(rank=4))
    expected = logits(model)
    cpu_weights.prepare_for_generation(model, tokens=MANY)
    assert np.abs(logits(model) - expected).max() < 1e-6


@pytest.mark.usefixtures("here")
def test_little_text_is_not_worth_it() -> None:
    model, kept = small_model(mx.bfloat16), small_model(mx.bfloat16)
    cpu_weights.prepare_for_generation(model, tokens=1)
    assert_same_weights(weights_of(model), weights_of(kept))
    cpu_weights.prepare_for_generation(model, tokens=10)
    assert not any(inputs_first(a) for a in weights_of(model).values() if a.ndim == 2)


@pytest.mark.usefixtures("here")
def test_weights_that_would_fill_the_memory_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_weights, "machine_memory", lambda: 100_000)
    model = small_model(mx.float16)
    cpu_weights.prepare_for_generation(model, tokens=MANY)
    assert {a.dtype for a in weights_of(model).values()} == {mx.float16}
    assert "would not fit well" in caplog.text


def test_elsewhere_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "status", "not used: MLX's backend is metal")
    model, kept = small_model(mx.bfloat16), small_model(mx.bfloat16)
    cpu_weights.prepare_for_generation(model, tokens=MANY)
    assert_same_weights(weights_of(model), weights_of(kept))


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_the_commands_prepare_what_they_load(
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_tokenizer: TinyTokenizer,
) -> None:
    half = small_model(mx.bfloat16)
    folder = small_folder(tmp_path / "half", tiny_tokenizer.tokenizer, half)
    half.set_dtype(mx.float32)
    exact = small_folder(tmp_path / "exact", tiny_tokenizer.tokenizer, half)
    arranged: list[object] = []
    monkeypatch.setattr(cpu_weights, "put_inputs_first", arranged.append)
    prompt = ["--prompt", "The sun"] if command == "generate" else []
    said = []
    for path in (folder, exact):
        monkeypatch.setattr("sys.stdin", io.StringIO("The sun\n"))
        done = run_here(capsys, command, "--model", path, *prompt, "--max-tokens", 64, "--temp", 0)
        assert done.code == 0, done.err
        said.append(done.out)
    assert said[0] == said[1]
    assert len(arranged) == 2

"""``openelm convert coreml`` and ``verify-coreml`` as a user runs them."""

import json
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from command_line import run_here
from folder_makers import small_folder, small_model
from tiny_tokenizer import TinyTokenizer

from convert.coreml import export
from convert.coreml_describe import describe
from convert.coreml_lints import lint
from convert.coreml_settings import ExportSettings, recommend, refuse_unsuited
from convert.mil_eval import Package
from openelm_mlx.config import ModelArgs

Capture = pytest.CaptureFixture[str]
SMALL = ("--context", "64", "--prefill", "8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: TinyTokenizer) -> Path:
    """A small model with a tokenizer."""
    return small_folder(tmp_path_factory.mktemp("models") / "m", tiny_tokenizer.tokenizer)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Path:
    """The same in 4 bits."""
    from convert.quantize import quantize

    output = tmp_path_factory.mktemp("models") / "q"
    quantize(folder, output, group_size=32)
    return output


@pytest.mark.slow
def test_a_package_is_exported_verified_and_bundled(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    output = tmp_path / "m.mlpackage"
    done = run_here(capsys, "convert", "coreml", folder, "--output", output, *SMALL)
    assert done.code == 0, done.err
    assert "weights int8" in done.out
    assert "holds (L1" in done.out
    parity = json.loads((tmp_path / "m-bundle" / "parity.json").read_text())
    assert parity["holds"] is True
    assert parity["package"] == "m.mlpackage"
    assert parity["float32"]["relative"] < 1e-3
    assert "It holds." in (tmp_path / "m-bundle" / "parity.md").read_text()
    metadata = Package(output).metadata
    assert metadata["openelm.residual_exponent"] == "0"
    assert json.loads(metadata["openelm.versions"])["coremltools"].startswith("9.0")

    again = run_here(capsys, "convert", "coreml", folder, "--output", output, *SMALL)
    assert "add --overwrite" in again.error
    report = tmp_path / "report.json"
    verify = ("convert", "verify-coreml", output, "--model", folder)
    checked = run_here(capsys, *verify, "--report", report)
    assert checked.code == 0
    assert json.loads(report.read_text())["level"] == "L1"
    assert report.with_suffix(".md").is_file()
    strict = run_here(capsys, *verify, "--tolerance", "1e-9")
    assert strict.code == 1
    assert "DOES NOT HOLD" in strict.out


@pytest.mark.slow
def test_mlx_codes_are_carried_over_and_adapters_fused(
    folder: Path, quantised: Path, tmp_path: Path
) -> None:
    made = export(quantised, tmp_path / "q.mlpackage", context=64, prefill=8)
    assert made.settings.weights == "mlx"
    plain = export(folder, tmp_path / "p.mlpackage", context=64, prefill=8, weights="fp16")
    assert made.bytes < plain.bytes
    assert made.verification is not None
    assert made.verification.holds


@pytest.mark.slow
def test_adapters_are_fused_before_the_export(folder: Path, tmp_path: Path) -> None:
    from openelm_mlx.checkpoint import load_model
    from openelm_mlx.lora import AdapterArgs, add_adapters, save_adapters

    model = load_model(folder)
    adapters = AdapterArgs(rank=2)
    add_adapters(model, adapters)
    for layer in model.layers:
        layer.attn.qkv_proj.lora_b = layer.attn.qkv_proj.lora_b + 0.5
    save_adapters(model, tmp_path / "a", adapters)
    asked: dict[str, Any] = {"context": 64, "prefill": 8, "weights": "fp16"}
    made = export(folder, tmp_path / "m.mlpackage", adapter_path=tmp_path / "a", **asked)
    assert made.verification is not None
    assert made.verification.holds
    base = export(folder, tmp_path / "b.mlpackage", **asked)
    one, other = (Package(p.package).metadata["openelm.adapters"] for p in (made, base))
    assert (one, other) == ("fused", "none")
    weights = [p.package / "Data/com.apple.CoreML/weights/weight.bin" for p in (made, base)]
    assert weights[0].read_bytes() != weights[1].read_bytes()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--context", "32"), "context is 32; it must be 64 or more"),
        (("--context", "64", "--prefill", "65"), "prefill is 65; it must be between 1 and"),
        ((*SMALL, "--target", "ane"), "head_dim 16 is no multiple of 32"),
        (("--context", "80", "--prefill", "8", "--target", "ane"), "multiple of 32"),
        ((*SMALL, "--target", "ane", "--flexible"), "#2548"),
        ((*SMALL, "--target", "gpu", "--flexible"), "stablehlo-coreml #89"),
        ((*SMALL, "--target", "ane", "--stateless"), "leave out stateless"),
        ((*SMALL, "--weights", "mlx"), "is not quantised"),
    ],
)
def test_a_wrong_setting_is_one_line_and_leaves_nothing(
    folder: Path, tmp_path: Path, capsys: Capture, flags: tuple[str, ...], said: str
) -> None:
    output = tmp_path / "m.mlpackage"
    done = run_here(capsys, "convert", "coreml", folder, "--output", output, *flags)
    assert said in done.error
    assert list(tmp_path.iterdir()) == []


def test_the_output_must_be_a_package_by_name(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    done = run_here(capsys, "convert", "coreml", folder, "--output", tmp_path / "m")
    assert "must end in .mlpackage" in done.error


@pytest.mark.slow
def test_a_quantised_folder_is_not_quantised_again(
    quantised: Path, tmp_path: Path, capsys: Capture
) -> None:
    asked = ("convert", "coreml", quantised, "--output", tmp_path / "m.mlpackage", *SMALL)
    done = run_here(capsys, *asked, "--weights", "int8")
    assert "would quantise it a second time" in done.error


@pytest.mark.slow
def test_other_modes_than_affine_are_refused_naming_the_way(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    from convert.quantize import quantize

    quantize(folder, tmp_path / "q", mode="mxfp4")
    done = run_here(
        capsys, "convert", "coreml", tmp_path / "q", "--output", tmp_path / "m.mlpackage", *SMALL
    )
    assert "mxfp4" in done.error
    assert "--dequantize" in done.error


def test_a_model_too_large_for_the_memory_is_refused_with_its_need(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convert.coreml_export.machine_memory", lambda: 10**6)
    done = run_here(capsys, "convert", "coreml", folder, "--output", tmp_path / "m.mlpackage")
    assert "GB of memory and this machine has" in done.error


@pytest.mark.slow
def test_a_package_that_verify_cannot_read_is_told(folder: Path, tmp_path: Path) -> None:
    made = export(folder, tmp_path / "m.mlpackage", context=64, prefill=8, check=False)
    weights = made.package / "Data/com.apple.CoreML/weights/weight.bin"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"weight\.bin"):
        Package(made.package)


@pytest.mark.slow
def test_an_exports_lints_are_clean_and_foreign_metadata_are_not(
    folder: Path, tmp_path: Path
) -> None:
    made = export(folder, tmp_path / "m.mlpackage", context=64, prefill=8, check=False)
    assert [found.text for found in lint(made.package) if found.fault] == []
    assert describe(made.package).metadata["openelm.interface"] == "static"


def test_defaults_are_chosen_by_size_and_kind() -> None:
    sizes = {name: ModelArgs.preset(name) for name in ("270M", "450M", "1.1B", "3B")}
    chosen = {name: recommend(args, quantised=False).weights for name, args in sizes.items()}
    assert chosen == {"270M": "int8", "450M": "int8", "1.1B": "int4", "3B": "int4"}
    assert recommend(sizes["270M"], quantised=True).weights == "mlx"


def test_sizes_that_the_neural_engine_dislikes_are_warned_about() -> None:
    args = ModelArgs.preset("270M")
    assert refuse_unsuited(args, ExportSettings()) == []
    odd = refuse_unsuited(args, ExportSettings(context=1000))
    assert odd == ["context 1000 is no multiple of 32: CPU and GPU only"]
    split = refuse_unsuited(args, ExportSettings(target="ane"))
    assert "parts of at most 16384" in split[0]
    long = refuse_unsuited(args, ExportSettings(context=4096))
    assert "beyond the 2048 tokens" in long[0]


def test_the_lazy_alias_is_the_export() -> None:
    import openelm_mlx

    assert openelm_mlx.export_coreml is export


def test_quantised_layers_of_several_widths_carry_over(tmp_path: Path) -> None:
    model = small_model()
    nn.quantize(
        model,
        class_predicate=lambda path, module: (
            {"group_size": 32, "bits": 8 if "token" in path else 4}
            if hasattr(module, "to_quantized")
            else False
        ),
    )
    from convert.coreml_parameters import stored_parameters

    stored = stored_parameters(model, "mlx").matrices
    table, linear = stored["token_embeddings"], stored["layers_0_ffn_proj_1"]
    assert table.nbytes > table.shape[0] * table.shape[1] > 2 * linear.nbytes

"""What `openelm fuse` puts into its folder beside the weights, and what it refuses."""

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from adapter_folders import rewrite, tensors_of
from folder_makers import assert_same_weights, logits, small_folder, small_model
from fuse_folders import ARGS, WIDE, adapted_logits, adapters, quantised
from golden_lora import largest
from tiny_tokenizer import TinyTokenizer

from openelm_mlx.chat_template import APPLE_INSTRUCT_TEMPLATE
from openelm_mlx.checkpoint import load, load_model
from openelm_mlx.cli import main
from openelm_mlx.fuse import fuse
from openelm_mlx.lora import add_adapters, save_adapters
from openelm_mlx.tokenizer_files import read_settings
from openelm_mlx.weight_files import read_json, read_weights

OUT_PROJ = "transformer.layers.1.attn.out_proj"


@pytest.mark.parametrize("template", ["{{ bos_token }}{{ messages[0]['content'] }}", None])
@pytest.mark.parametrize("ours", [True, False])
def test_the_chat_template_is_kept_as_the_base_has_it(
    template: str | None, ours: bool, tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    base = small_folder(tmp_path / "base", tiny_tokenizer.tokenizer)
    if template:
        file = base / "tokenizer_config.json"
        file.write_text(json.dumps({**read_json(file), "chat_template": template}))
    if not ours:
        (base / "openelm.json").unlink()
    path = adapters(tmp_path / "adapters", small_model())
    fuse(base, path, tmp_path / "out-Instruct")  # the name adds none
    assert read_settings(tmp_path / "out-Instruct").chat_template == template


def test_a_base_named_instruct_without_a_tokenizer_gets_apples_template(
    tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    base = small_folder(tmp_path / "OpenELM-270M-Instruct", None)
    path = adapters(tmp_path / "adapters", small_model())
    command = ["fuse", "--model", str(base), "--adapter-path", str(path)]
    out = ["--output", str(tmp_path / "out"), "--tokenizer", str(tiny_tokenizer.path)]
    assert main([*command, *out]) == 0
    assert load(tmp_path / "out")[1] is not None
    assert read_settings(tmp_path / "out").chat_template == APPLE_INSTRUCT_TEMPLATE


def test_provenance_names_base_and_adapters_and_the_licence_goes_along(tmp_path: Path) -> None:
    base = small_folder(
        tmp_path / "base",
        None,
        provenance={"source": "apple/OpenELM-270M", "licence": "apple-amlr"},
    )
    (base / "LICENSE").write_text("terms")
    path = adapters(tmp_path / "adapters", small_model())
    report = fuse(base, path, tmp_path / "out")
    entries = read_json(tmp_path / "out/openelm.json")
    assert entries["source"] == "base"
    assert entries["sha256"] == digest(base / "model.safetensors")
    assert entries["made_from"]["source"] == "apple/OpenELM-270M"
    assert entries["licence"] == "apple-amlr"
    assert entries["adapters"] == {
        **{"name": "adapters", "sha256": digest(path / "adapters.safetensors")},
        **{"kind": "lora", "rank": 4, "scale": 2.0},
    }
    assert entries["fused"]["logit_error"] == report.cost.logit_error
    assert (tmp_path / "out/LICENSE").read_text() == "terms"


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def full_folder(path: Path, weights: dict[str, mx.array]) -> Path:
    """What mlx_lm's ``--fine-tune-type full`` leaves."""
    path.mkdir()
    (path / "adapter_config.json").write_text('{"fine_tune_type": "full", "num_layers": 2}')
    rewrite(path, weights)
    return path


def test_whole_weights_replace_the_bases(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = small_folder(tmp_path / "base", None)
    new = {f"{OUT_PROJ}.weight": mx.ones((64, 64)) * 0.1}
    path = full_folder(tmp_path / "full", new)
    command = ["fuse", "--model", str(base), "--adapter-path", str(path)]
    assert main([*command, "--output", str(tmp_path / "out")]) == 0
    assert "whole weights put in place of the base's" in capsys.readouterr().out
    assert_same_weights(read_weights(tmp_path / "out"), {**read_weights(base), **new})
    assert read_json(tmp_path / "out/openelm.json")["adapters"]["kind"] == "full"


def test_whole_weights_on_a_quantised_base_can_be_dequantised(tmp_path: Path) -> None:
    base = quantised(tmp_path)
    new = {"transformer.norm.weight": mx.ones(64) * 2}
    path = full_folder(tmp_path / "full", new)
    fuse(base, path, tmp_path / "out", dequantize=True)
    found = load_model(tmp_path / "out")
    assert "quantization" not in read_json(tmp_path / "out/config.json")
    assert largest(logits(found), adapted_logits(base, path)) < 1e-3


def test_adapters_that_were_not_trained_are_said_to_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, model = small_folder(tmp_path / "base", None), small_model()
    add_adapters(model, ARGS)
    save_adapters(model, tmp_path / "adapters", ARGS)
    fuse(base, tmp_path / "adapters", tmp_path / "out")
    assert "the adapters change nothing" in caplog.text
    assert_same_weights(read_weights(tmp_path / "out"), read_weights(base))


def refusal(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of error that the command ends with."""
    assert main(["fuse", *arguments]) == 1
    lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_adapters_of_another_base_are_refused_with_both_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = small_folder(tmp_path / "base", None)
    path = adapters(tmp_path / "adapters", small_model(**WIDE))
    out = str(tmp_path / "out")
    flags = ("--model", str(base), "--adapter-path", str(path), "--output", out)
    message = refusal(*flags, capsys=capsys)
    assert "4 of another shape: transformer.layers.0.ffn.proj_1.lora_b is [4, 128]" in message
    assert "expected [4, 64]" in message
    assert not Path(out).exists()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda path: (path / "adapters.safetensors").unlink(), "holds no adapters.safetensors"),
        (
            lambda path: (path / "adapters.safetensors").rename(path / "adapter_model.safetensors"),
            "is a PEFT adapter (adapter_model.safetensors); convert it first with `openelm convert",
        ),
        (
            lambda path: rewrite(path, {n: a * float("nan") for n, a in tensors_of(path).items()}),
            "8 fused weights are not finite in float32",
        ),
    ],
)
def test_damaged_adapters_are_refused(
    spoil: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = small_folder(tmp_path / "base", None)
    path = adapters(tmp_path / "adapters", small_model())
    spoil(path)
    flags = ("--model", str(base), "--adapter-path", str(path), "--output", str(tmp_path / "out"))
    assert words in refusal(*flags, capsys=capsys)
    assert not (tmp_path / "out").exists()


def test_the_report_is_a_few_lines_and_an_output_is_replaced_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = small_folder(tmp_path / "base", None)
    path = adapters(tmp_path / "adapters", small_model())
    out = str(tmp_path / "out")
    command = ["--model", str(base), "--adapter-path", str(path), "--output", out]
    assert main(["fuse", *command]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == out
    assert lines[1] == (
        "8 layers fused (LoRA, rank 4, scale 2), added in float32, stored in float32"
    )
    assert lines[2].startswith("rounding error as a share of the adapters' change: mean ")
    assert lines[3].startswith("logits on random tokens: the adapters move them by ")
    assert len(lines) == 4
    assert "is not empty; add --overwrite" in refusal(*command, capsys=capsys)
    assert main(["fuse", *command, "--overwrite"]) == 0

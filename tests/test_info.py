"""``openelm info``: numbers from shapes alone, held against published ones and a real model."""

import json
import logging
from pathlib import Path

import mlx.core as mx
import pytest

from openelm_mlx import cli
from openelm_mlx.config import ModelArgs
from openelm_mlx.info import describe
from openelm_mlx.memory import training_memory
from openelm_mlx.training_args import CHECKPOINT_MODES


@pytest.mark.parametrize(
    ("size", "parameters", "kv_bytes"),
    [
        ("270M", 271_527_168, 16_128),
        ("450M", 457_179_136, 23_296),
        ("1.1B", 1_079_891_456, 43_264),
        ("3B", 3_036_647_424, 83_968),
    ],
)
def test_published_sizes_have_their_published_numbers(
    size: str, parameters: int, kv_bytes: int
) -> None:
    report = describe(size)
    assert report["parameters"] == parameters
    assert report["kv_bytes_per_token"] == kv_bytes
    assert all(reason is None for reason in report["runs_in"].values())


def test_layer_rows_add_up_to_the_model(complete_dir: Path) -> None:
    report = describe(str(complete_dir))
    weights = mx.load(str(complete_dir / "model.safetensors"))
    assert report["parameters"] == sum(array.size for array in weights.values())
    assert report["bytes"] == (complete_dir / "model.safetensors").stat().st_size
    per_layer = [
        sum(a.size for n, a in weights.items() if f".layers.{i}." in n)
        for i in range(len(report["layers"]))
    ]
    assert [row["parameters"] for row in report["layers"]] == per_layer
    assert report["tokenizer"]


def test_json_and_table_name_where_a_variant_does_not_run(
    tmp_path: Path, tiny_args: ModelArgs, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_args.to_dict() | {"activation_fn_name": "gelu", "ffn_with_glu": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["info", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert "swish" in report["runs_in"]["mlx_lm"]
    assert "gated" in report["runs_in"]["mlx_lm"]
    assert cli.main(["info", str(tmp_path)]) == 0
    assert "no: it builds a gated FFN" in capsys.readouterr().out


def test_an_unknown_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "nope"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: nope is neither")


def test_checkpointing_and_fewer_trainable_parameters_need_less_memory() -> None:
    args = ModelArgs.preset("270M")
    step = {"batch_size": 4, "max_seq_length": 512}
    full = training_memory(args, trainable=args.num_parameters, **step)
    lora = training_memory(args, trainable=1_000_000, **step)
    assert full.total > lora.total
    modes = [
        training_memory(args, trainable=1_000_000, checkpoint=mode, **step).total
        for mode in CHECKPOINT_MODES
    ]
    assert modes[0] == lora.total
    assert sorted(modes, reverse=True) == modes
    assert full.weights == 2 * 271_527_168


def test_info_does_not_configure_the_root_logger_of_a_library_user() -> None:
    before = list(logging.getLogger().handlers)
    describe("270M")
    assert logging.getLogger().handlers == before

"""CoreNet checkpoints <-> model folders: bit for bit, rows kept, nothing left behind."""

import hashlib
import json
import logging
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import golden_set  # imports openelm_mlx, so that OpenBLAS comes before mlx.core
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from corenet_files import corenet_state, full_disk, write_config, write_state
from folder_makers import assert_same_weights, files, small_folder, small_model
from model_makers import apple_io
from tiny_tokenizer import TinyTokenizer

from convert.corenet import from_corenet, to_corenet
from convert.names import ROWS_FILE, to_huggingface
from convert.pt_file import read, write
from openelm_mlx import cli
from openelm_mlx.checkpoint import load, load_model
from openelm_mlx.weight_files import read_json, read_weights

TABLE = "transformer.token_embeddings.weight"
GOLDEN_PT = [
    name
    for name in golden_set.read_json(golden_set.CUT / "models.json")
    if golden_set.find(f"corenet_pt/{name}.pt") and golden_set.find(f"hf/{name}")
]


def apple_pt(name: str) -> Path:
    path = golden_set.find(f"corenet_pt/{name}.pt")
    assert path is not None
    return path


def apple_folder(name: str) -> Path:
    path = golden_set.find(f"hf/{name}")
    assert path is not None
    return path


def apple_config(name: str, folder: Path) -> Path:
    """The model's ``general_gpt`` mapping as a JSON file."""
    config = golden_set.read_json(golden_set.CUT / "models.json")[name]["config"]
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return path


def assert_same_state(found: Any, expected: Any) -> None:
    """Equal names in equal order, shapes, types and bits."""
    assert list(found) == list(expected)
    assert_same_weights(found, expected)


@pytest.fixture
def state_file(tmp_path: Path) -> Path:
    """A tied model of 40 rows."""
    return write_state(tmp_path / "model.pt")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The config of ``state_file``, without a vocabulary."""
    return write_config(tmp_path / "general_gpt.json", vocab_size=None)


# Apple's files


@pytest.mark.parametrize("name", GOLDEN_PT)
def test_apples_checkpoints_become_apples_folders_bit_for_bit(name: str, tmp_path: Path) -> None:
    folder = from_corenet(apple_pt(name), tmp_path / name, config=apple_config(name, tmp_path))
    expected: Any = mx.load(str(apple_folder(name) / "model.safetensors"))
    expected.pop("transformer.classifier.weight", None)  # Apple's class keeps the head twice
    assert_same_weights(read_weights(folder), expected)


@pytest.mark.parametrize("name", GOLDEN_PT)
def test_apples_checkpoints_give_apples_logits(name: str, tmp_path: Path) -> None:
    folder = from_corenet(apple_pt(name), tmp_path / name, config=apple_config(name, tmp_path))
    io = apple_io(name)
    got = np.array(load_model(folder)(mx.array(io["input_ids"].astype(np.int32))))
    np.testing.assert_allclose(got, io["logits"], atol=1e-4, rtol=0)  # seen: 1.9e-5


@pytest.mark.parametrize("name", GOLDEN_PT)
def test_apples_folders_become_apples_checkpoints_bit_for_bit(name: str, tmp_path: Path) -> None:
    written = to_corenet(apple_folder(name), tmp_path / "out.pt")
    assert_same_state(read(written), read(apple_pt(name)))


@pytest.mark.parametrize("name", GOLDEN_PT)
def test_there_and_back_is_the_same_checkpoint(name: str, tmp_path: Path) -> None:
    folder = from_corenet(apple_pt(name), tmp_path / name, config=apple_config(name, tmp_path))
    assert_same_state(read(to_corenet(folder, tmp_path / "out.pt")), read(apple_pt(name)))


@pytest.mark.slow  # importing torch takes seconds
def test_torch_reads_what_is_written_as_it_reads_apples(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    written = to_corenet(apple_folder("mqa_untied"), tmp_path / "out.pt")
    ours = torch.load(written, weights_only=True)
    apples = torch.load(apple_pt("mqa_untied"), weights_only=True)
    assert type(ours) is OrderedDict
    assert list(ours) == list(apples)
    assert all(ours[name].dtype == apples[name].dtype for name in apples)
    assert all(torch.equal(ours[name], apples[name]) for name in apples)


def test_apples_model_only_file_is_read(tmp_path: Path) -> None:
    source = golden_set.find("checkpoint_formats/checkpoint_epoch_0_iter_4999.pt")
    config = golden_set.find("checkpoint_formats/config.json")
    assert source is not None
    folder = from_corenet(source, tmp_path / "out", config=config)
    expected = {to_huggingface(name): array for name, array in read(source).items()}
    assert_same_weights(read_weights(folder), expected)
    assert read_json(folder / "openelm.json")["corenet_padding_index"] == 60


def test_apples_training_checkpoint_gives_the_model_it_was_saved_with(tmp_path: Path) -> None:
    training = golden_set.find("checkpoint_formats/training_checkpoint_epoch_0_iter_4999.pt")
    if training is None:
        pytest.skip("the training checkpoint is not in the committed cut")
    config = training.parent / "config.json"
    model_only = from_corenet(
        training.parent / "checkpoint_epoch_0_iter_4999.pt", tmp_path / "a", config=config
    )
    folder = from_corenet(training, tmp_path / "b", config=config)
    assert_same_weights(read_weights(folder), read_weights(model_only))
    assert read_json(folder / "openelm.json")["iterations"] == 4999


# What goes into the folder


def test_of_a_training_checkpoint_only_the_model_is_used(tmp_path: Path, config: Path) -> None:
    state = corenet_state()
    tree = {
        "epoch": 3,
        "iterations": 4999,
        "best_metric": 1.5,
        "is_interval_ckpt": True,
        "model_state_dict": state,
        "optim_state_dict": {"state": {0: {"exp_avg": mx.ones((3, 3)), "step": 7}}},
        "gradient_scaler_state_dict": {},
    }
    write(tmp_path / "training_checkpoint.pt", tree)
    folder = from_corenet(tmp_path / "training_checkpoint.pt", tmp_path / "out", config=config)
    assert_same_weights(
        read_weights(folder), {to_huggingface(name): array for name, array in state.items()}
    )
    history = read_json(folder / "openelm.json")
    assert (history["iterations"], history["epoch"]) == (4999, 3)


def test_the_folder_says_which_file_it_came_from(state_file: Path, config: Path) -> None:
    folder = from_corenet(state_file, state_file.parent / "out", config=config)
    history = read_json(folder / "openelm.json")
    assert history["source"] == "model.pt"
    assert history["sha256"] == hashlib.sha256(state_file.read_bytes()).hexdigest()
    assert str(state_file.parent) not in (folder / "openelm.json").read_text()


def test_the_tokenizer_makes_the_folder_self_contained(
    tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    file = write_state(tmp_path / "model.pt", corenet_state(rows=320))
    config = write_config(tmp_path / "general_gpt.json", vocab_size=320)
    folder = from_corenet(file, tmp_path / "out", config=config, tokenizer=tiny_tokenizer.path)
    _, tokenizer = load(folder)
    assert tokenizer is not None
    assert tokenizer.encode("the cat") == tiny_tokenizer.tokenizer.encode("the cat")
    assert tokenizer.chat_template is None


@pytest.mark.parametrize(("name", "flag"), [("out", True), ("OpenELM-Instruct", False)])
def test_instruct_folders_carry_the_chat_template(
    name: str, flag: bool, tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    file = write_state(tmp_path / "model.pt", corenet_state(rows=320))
    config = write_config(tmp_path / "general_gpt.json", vocab_size=320)
    folder = from_corenet(
        file, tmp_path / name, config=config, tokenizer=tiny_tokenizer.path, instruct=flag
    )
    assert "<|assistant|>" in (folder / "tokenizer_config.json").read_text()


def test_a_missing_tokenizer_is_said(
    state_file: Path, config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from_corenet(state_file, state_file.parent / "out", config=config)
    assert "no tokenizer" in caplog.text


def test_a_tokenizer_with_more_pieces_than_rows_is_refused(
    state_file: Path, config: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    with pytest.raises(ValueError, match="320 pieces"):
        from_corenet(
            state_file, state_file.parent / "out", config=config, tokenizer=tiny_tokenizer.path
        )


# Types


def test_every_type_is_kept_where_none_is_asked_for(tmp_path: Path, config: Path) -> None:
    state = corenet_state(dtype=mx.bfloat16)
    state["norm.weight"] = state["norm.weight"].astype(mx.float32)
    folder = from_corenet(write_state(tmp_path / "m.pt", state), tmp_path / "out", config=config)
    assert_same_weights(
        read_weights(folder), {to_huggingface(name): array for name, array in state.items()}
    )
    assert read_json(folder / "config.json")["torch_dtype"] == "bfloat16"


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_float16_is_numpys_and_what_overflows_is_counted(
    tmp_path: Path, config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = corenet_state(dtype=mx.bfloat16)
    state["norm.weight"][3:5] = 1e5
    folder = from_corenet(
        write_state(tmp_path / "m.pt", state), tmp_path / "out", config=config, dtype="float16"
    )
    weights = read_weights(folder)
    for name, array in state.items():
        wide = np.array(array.astype(mx.float32))
        np.testing.assert_array_equal(
            np.array(weights[to_huggingface(name)]), wide.astype(np.float16)
        )
    assert read_json(folder / "config.json")["torch_dtype"] == "float16"
    assert "2 of" in caplog.text
    assert "transformer.norm.weight (2)" in caplog.text


def test_spare_rows_are_cast_with_the_table(tmp_path: Path, config: Path) -> None:
    file = write_state(tmp_path / "m.pt")
    folder = from_corenet(file, tmp_path / "out", config=config, vocab_size=32, dtype="bfloat16")
    rows: Any = mx.load(str(folder / ROWS_FILE))
    assert rows[TABLE].dtype == mx.bfloat16


def test_float64_is_kept_out_until_a_type_is_named(tmp_path: Path, config: Path) -> None:
    state: dict[str, Any] = dict(corenet_state())
    state["norm.weight"] = np.array(state["norm.weight"], np.float64)
    file = tmp_path / "m.pt"
    write(file, state)
    with pytest.raises(ValueError, match=r"1 tensors .* first transformer.norm.weight .*float64"):
        from_corenet(file, tmp_path / "out", config=config)
    folder = from_corenet(file, tmp_path / "out", config=config, dtype="float32")
    assert read_weights(folder)["transformer.norm.weight"].dtype == mx.float32


def test_integers_are_no_weights(tmp_path: Path, config: Path) -> None:
    state = corenet_state()
    state["norm.weight"] = state["norm.weight"].astype(mx.int32)
    with pytest.raises(ValueError, match="is the file quantised"):
        from_corenet(write_state(tmp_path / "m.pt", state), tmp_path / "out", config=config)


# What is written to CoreNet


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_a_folder_of_ours_is_written_in_its_own_type(dtype: mx.Dtype, tmp_path: Path) -> None:
    state = corenet_state(dtype=dtype)
    folder = small_folder(tmp_path / "m", None, small_model(dtype, vocab_size=40))
    assert_same_weights(read(to_corenet(folder, tmp_path / "out.pt")), state)


def test_a_quantised_folder_is_refused(tmp_path: Path) -> None:
    config = {**small_model().args.to_dict(), "quantization": {"group_size": 32, "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="is quantised, which CoreNet cannot read"):
        to_corenet(tmp_path, tmp_path / "out.pt")


def test_what_is_no_model_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no config.json"):
        to_corenet(tmp_path, tmp_path / "out.pt")


# Nothing left behind


def test_a_full_disk_leaves_nothing_and_the_old_folder(state_file: Path, config: Path) -> None:
    place = state_file.parent / "place"
    place.mkdir()
    with full_disk(), pytest.raises(OSError, match="is the disk full"):
        from_corenet(state_file, place / "out", config=config)
    assert files(place) == []
    from_corenet(state_file, place / "out", config=config)
    before = read_weights(place / "out")
    with full_disk(), pytest.raises(OSError, match="cannot be written"):
        from_corenet(state_file, place / "out", config=config, overwrite=True)
    assert files(place) == ["out"]
    assert_same_weights(read_weights(place / "out"), before)


def test_a_full_disk_leaves_no_checkpoint(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "m", None)
    place = tmp_path / "place"
    place.mkdir()
    with full_disk(), pytest.raises(OSError, match=r"(too large|No space).*out\.pt"):
        to_corenet(folder, place / "out.pt")
    assert files(place) == []


def test_what_is_there_is_replaced_only_when_asked(state_file: Path, config: Path) -> None:
    folder, file = state_file.parent / "out", state_file.parent / "back.pt"
    from_corenet(state_file, folder, config=config)
    to_corenet(folder, file)
    with pytest.raises(FileExistsError, match="--overwrite"):
        from_corenet(state_file, folder, config=config)
    with pytest.raises(FileExistsError, match="--overwrite"):
        to_corenet(folder, file)
    from_corenet(state_file, folder, config=config, overwrite=True)
    to_corenet(folder, file, overwrite=True)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no archive", b"hello"])
def test_a_damaged_file_is_refused_in_one_line(
    content: bytes, tmp_path: Path, config: Path
) -> None:
    (tmp_path / "m.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"m\.pt") as caught:
        from_corenet(tmp_path / "m.pt", tmp_path / "out", config=config)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


# The command line


def test_the_two_commands_go_there_and_back(
    state_file: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, back = str(state_file.parent / "out"), str(state_file.parent / "back.pt")
    argv = ["convert", "corenet", str(state_file), "--output", folder, "--config", str(config)]
    assert cli.main([*argv, "--vocab-size", "32"]) == 0
    assert cli.main(["convert", "to-corenet", folder, "--output", back]) == 0
    assert capsys.readouterr().out == f"{folder}\n{back}\n"
    assert_same_weights(read(back), read(state_file))


def test_an_error_is_one_line_and_exit_code_1(
    state_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["convert", "corenet", str(state_file), "--output", str(state_file.parent / "out")]
    assert cli.main(argv) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert "--preset" in captured.err


def test_config_and_preset_together_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["convert", "corenet", "a.pt", "--output", "b", "--config", "c", "--preset", "3B"]
    assert cli.main(argv) == 2
    assert "not allowed with" in capsys.readouterr().err


# Real sizes


PEAK = """
import resource, sys
import openelm_mlx
from convert.corenet import from_corenet, to_corenet

def peak():
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open("/proc/self/status") as status:  # ru_maxrss would count the process that started us
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

if sys.argv[1] == "from":
    from_corenet(sys.argv[2], sys.argv[3], preset="270M")
else:
    to_corenet(sys.argv[2], sys.argv[3])
print(peak())
"""


def peak_bytes(*argv: str | Path) -> int:
    command = [sys.executable, "-c", PEAK, *map(str, argv)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.fixture(scope="module")
def file_270m(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real 270M in bfloat16 with CoreNet's 32128 rows: 543 MB of random bits."""
    shapes = golden_set.read_json(golden_set.CUT / "state_dict_270M_corenet.json")
    generator = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("size") / "270M.pt"
    state = OrderedDict(
        (n, mx.array(generator.integers(0, 0x7F00, s, np.uint16)).view(mx.bfloat16))
        for n, s in shapes.items()
    )
    write(path, state)
    return path


@pytest.mark.slow
def test_270m_goes_there_and_back_in_less_than_1_3_times_its_size(file_270m: Path) -> None:
    folder, back = file_270m.parent / "out", file_270m.parent / "back.pt"
    size = file_270m.stat().st_size
    assert peak_bytes("from", file_270m, folder) < 1.3 * size  # seen: 1.24
    assert read_json(folder / "config.json")["vocab_size"] == 32000
    assert peak_bytes("to", folder, back) < 1.3 * size  # seen: 1.09
    assert_same_state(read(back), read(file_270m))


@pytest.mark.slow
def test_270m_is_known_by_its_shapes_and_gives_the_hubs_names(
    file_270m: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = from_corenet(file_270m, file_270m.parent / "inferred")
    header = read_weights(folder)
    expected = golden_set.read_json(golden_set.CUT / "state_dict_270M_hf.json")
    assert {name: list(array.shape) for name, array in header.items()} == expected
    config = golden_set.read_json(golden_set.CUT / "config_270M_hf.json")
    ours = read_json(folder / "config.json")
    assert {k: ours[k] for k in ours if k in config} == {
        **{k: config[k] for k in ours if k in config},
        "torch_dtype": "bfloat16",
    }
    assert "OpenELM-270M" in read_json(folder / "openelm.json")["config"]
    assert "128" in caplog.text


@pytest.mark.slow
def test_a_quantised_270m_of_corenets_mlx_example_is_read(tmp_path: Path) -> None:
    """It quantises linear layers alone, and its names have no prefix."""
    shapes = golden_set.read_json(golden_set.CUT / "state_dict_270M_corenet.json")
    weights: dict[str, mx.array] = {}
    for name, shape in shapes.items():
        if len(shape) == 2 and not name.startswith("token_embeddings"):
            packed = mx.zeros((shape[0], shape[1] // 8), dtype=mx.uint32)
            weights[name] = packed
            for kind in ("scales", "biases"):
                part = mx.zeros((shape[0], shape[1] // 64), dtype=mx.float16)
                weights[name.replace("weight", kind)] = part
        else:
            weights[name] = mx.ones(shape, dtype=mx.float16)
    mx.save_safetensors(str(tmp_path / "weights.safetensors"), weights)
    config = {"model_name": "OpenELM-270M", "vocab_size": 32128, "max_context_length": 2048}
    config["quantization"] = {"group_size": 64, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path, lazy=True)
    assert isinstance(model.layers[3].attn.qkv_proj, nn.QuantizedLinear)
    assert isinstance(model.transformer.token_embeddings, nn.Embedding)
    ones = mx.ones((1, 1, 1280), dtype=mx.float16)
    hidden = model.layers[3](ones)  # 16-bit arithmetic is slow on a CPU: one layer, not all
    np.testing.assert_array_equal(np.array(hidden), np.array(ones))  # zeros add nothing
    with pytest.raises(ValueError, match="is quantised"):
        to_corenet(tmp_path, tmp_path / "out.pt")

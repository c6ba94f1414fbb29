"""Averages: Apple's numbers, and the mean in float64 of files and folders, whole or not at all."""

import json
import logging
from collections import OrderedDict
from pathlib import Path

import golden_set  # imports openelm_mlx, so that OpenBLAS comes before mlx.core
import mlx.core as mx
import numpy as np
import pytest
from corenet_files import corenet_state, full_disk, write_config, write_state
from folder_makers import assert_same_weights, files, small_folder, small_model, weights_of
from tiny_tokenizer import TinyTokenizer

from convert.average import average
from convert.corenet import from_corenet, to_corenet
from convert.names import ROWS_FILE
from convert.pt_file import read, write
from openelm_mlx import cli
from openelm_mlx.checkpoint import load, load_args
from openelm_mlx.weight_files import ShardWriter, read_json, read_weights

APPLES = [golden_set.CUT / f"average/ckpt_{i}.pt" for i in range(5)]


def random_states(count: int, dtype: mx.Dtype = mx.float32) -> list[dict[str, mx.array]]:
    generator = np.random.default_rng(0)
    return [
        {
            name: mx.array(generator.normal(size=shape).astype(np.float32)).astype(dtype)
            for name, shape in (("a", (7, 5)), ("b", (11,)))
        }
        for _ in range(count)
    ]


def write_states(folder: Path, states: list[dict[str, mx.array]]) -> list[Path]:
    paths = [folder / f"{i}.pt" for i in range(len(states))]
    for path, state in zip(paths, states, strict=True):
        write(path, state)
    return paths


# Files


def test_apples_checkpoints_give_apples_average_bit_for_bit(tmp_path: Path) -> None:
    found = read(average(APPLES, tmp_path / "out.pt"))
    expected = read(golden_set.CUT / "average/average.pt")
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert mx.array_equal(found[name], array).item(), name
    assert {mx.bfloat16, mx.float16, mx.float32, mx.int64} == {a.dtype for a in expected.values()}


def test_the_mean_is_taken_in_float64(tmp_path: Path) -> None:
    states = random_states(3)
    found = read(average(write_states(tmp_path, states), tmp_path / "out.pt"))
    for name in ("a", "b"):
        total = sum(np.array(state[name], np.float64) for state in states)
        np.testing.assert_array_equal(np.array(found[name]), (total / 3).astype(np.float32))


@pytest.mark.slow  # importing torch takes seconds
def test_16_bit_means_are_rounded_as_torch_rounds(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (mx.bfloat16, mx.float16):
        paths = write_states(tmp_path, random_states(5, dtype))
        found = torch.load(average(paths, tmp_path / f"{dtype}.pt"), weights_only=True)
        loaded = [torch.load(path, weights_only=True) for path in paths]
        for name in ("a", "b"):
            total = sum(state[name].to(torch.float64) for state in loaded)
            assert torch.equal(found[name], total.div(5.0).to(loaded[0][name].dtype))


def test_the_mean_of_one_is_itself(tmp_path: Path) -> None:
    state = corenet_state(dtype=mx.bfloat16)
    write_state(tmp_path / "a.pt", state)
    found = read(average([tmp_path / "a.pt"], tmp_path / "out.pt"))
    assert list(found) == list(state)
    assert_same_weights(found, state)


def test_a_tensor_that_some_lack_is_averaged_over_the_others_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states: list[dict[str, mx.array]] = [{"a": mx.zeros(2)}, {"a": mx.ones(2), "b": mx.ones(3)}]
    found = read(average(write_states(tmp_path, states), tmp_path / "out.pt"))
    np.testing.assert_array_equal(np.array(found["a"]), [0.5, 0.5])
    np.testing.assert_array_equal(np.array(found["b"]), [1, 1, 1])
    assert "1 of 2 tensors are not in all 2 checkpoints, first b" in caplog.text


def test_the_first_files_type_is_kept(tmp_path: Path) -> None:
    states = [{"a": mx.ones(2, dtype=mx.float16)}, {"a": mx.zeros(2)}]
    found = read(average(write_states(tmp_path, states), tmp_path / "out.pt"))
    assert found["a"].dtype == mx.float16


def test_of_training_checkpoints_the_model_is_averaged(tmp_path: Path) -> None:
    states = random_states(2)
    write(tmp_path / "a.pt", {"model_state_dict": states[0], "iterations": 4, "optim": [1, 2]})
    write(tmp_path / "b.pt", states[1])
    found = read(average([tmp_path / "a.pt", tmp_path / "b.pt"], tmp_path / "out.pt"))
    plain = read(average(write_states(tmp_path, states), tmp_path / "plain.pt"))
    assert_same_weights(found, plain)


# Folders


def two_folders(
    tmp_path: Path, tiny_tokenizer: TinyTokenizer | None = None, dtype: mx.Dtype = mx.float32
) -> list[Path]:
    tokenizer = tiny_tokenizer.tokenizer if tiny_tokenizer else None
    out = []
    for i in range(2):
        model = small_model(dtype)
        model.update({"transformer": {"norm": {"weight": mx.full((64,), 1.0 + i, dtype=dtype)}}})
        out.append(small_folder(tmp_path / f"m{i}", tokenizer, model))
    return out


def test_folders_average_to_a_folder_that_loads(
    tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    folders = two_folders(tmp_path, tiny_tokenizer, mx.bfloat16)
    found, tokenizer = load(average(folders, tmp_path / "out"))
    weights = weights_of(found)
    expected = read_weights(folders[0])
    expected["transformer.norm.weight"] = mx.full((64,), 1.5, dtype=mx.bfloat16)
    assert_same_weights(weights, expected)
    assert tokenizer is not None
    assert read_json(tmp_path / "out" / "openelm.json")["average_of"] == ["m0", "m1"]
    assert read_json(tmp_path / "out" / "config.json")["torch_dtype"] == "bfloat16"


def test_an_instruct_folders_template_stays(tmp_path: Path, tiny_tokenizer: TinyTokenizer) -> None:
    folder = small_folder(tmp_path / "m", tiny_tokenizer.tokenizer, instruct=True)
    _, tokenizer = load(average([folder], tmp_path / "out"))
    assert tokenizer is not None
    assert tokenizer.chat_template is not None


def test_the_firsts_licence_goes_along(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "m", None, provenance={"licence": "apple-amlr"})
    (folder / "LICENSE").write_text("terms")
    out = average([folder], tmp_path / "out")
    assert (out / "LICENSE").read_text() == "terms"
    assert read_json(out / "openelm.json")["licence"] == "apple-amlr"


def test_sharded_folders_are_averaged_like_whole_ones(tmp_path: Path) -> None:
    folders = two_folders(tmp_path)
    whole = read_weights(average(folders, tmp_path / "whole"))
    weights = read_weights(folders[1])
    (folders[1] / "model.safetensors").unlink()
    writer = ShardWriter(folders[1], shard_bytes=20_000)
    for name, array in weights.items():
        writer.add(name, array)
    writer.close()
    assert len(list(folders[1].glob("*.safetensors"))) > 2
    assert_same_weights(read_weights(average(folders, tmp_path / "out")), whole)


def test_averaging_folders_is_averaging_their_files_spare_rows_too(tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.json")
    paths = []
    for i in range(3):
        state = OrderedDict((k, v * (1 + i / 7)) for k, v in corenet_state().items())
        paths.append(write_state(tmp_path / f"{i}.pt", state))
    folders = [
        from_corenet(path, tmp_path / f"f{path.stem}", config=config, vocab_size=32)
        for path in paths
    ]
    folder = average(folders, tmp_path / "out")
    assert (folder / ROWS_FILE).is_file()
    found = read(to_corenet(folder, tmp_path / "back.pt"))
    assert_same_weights(found, read(average(paths, tmp_path / "mean.pt")))


# What does not fit


def refusal(checkpoints: list[Path], output: Path, kind: type[Exception] = ValueError) -> str:
    before = files(output.parent)
    with pytest.raises(kind) as caught:
        average(checkpoints, output)
    assert "\n" not in str(caught.value)
    assert files(output.parent) == before
    return str(caught.value)


def test_nothing_to_average_is_refused(tmp_path: Path) -> None:
    assert "no checkpoint to average" in refusal([], tmp_path / "out.pt")


def test_missing_checkpoints_are_all_named(tmp_path: Path) -> None:
    paths = [*write_states(tmp_path, random_states(1)), tmp_path / "x.pt", tmp_path / "y.pt"]
    message = refusal(paths, tmp_path / "out.pt", FileNotFoundError)
    assert f"{tmp_path / 'x.pt'}, {tmp_path / 'y.pt'}" in message


def test_files_and_folders_are_not_mixed(tmp_path: Path) -> None:
    paths = [*write_states(tmp_path, random_states(1)), small_folder(tmp_path / "m", None)]
    assert "is a folder and others are files" in refusal(paths, tmp_path / "out.pt")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    assert "is no .pt file" in refusal([tmp_path / "a.txt"], tmp_path / "out.pt")


def test_other_shapes_are_named_with_both_files(tmp_path: Path) -> None:
    paths = write_states(tmp_path, [{"a": mx.ones((2, 3))}, {"a": mx.ones((2, 4))}])
    message = refusal(paths, tmp_path / "out.pt")
    assert f"a is [2, 4] in {paths[1]} and [2, 3] in {paths[0]}" in message


def test_folders_of_other_models_are_refused(tmp_path: Path) -> None:
    folders = [
        small_folder(tmp_path / "a", None),
        small_folder(tmp_path / "b", None, small_model(rope_freq_constant=500)),
    ]
    assert "their configs differ" in refusal(folders, tmp_path / "out")


def test_quantised_folders_are_refused(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "a", None)
    config = {**load_args(folder).to_dict(), "quantization": {"group_size": 32, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(config))
    assert "is quantised and cannot be averaged" in refusal([folder], tmp_path / "out")


def test_what_is_there_is_replaced_only_when_asked(tmp_path: Path) -> None:
    paths = write_states(tmp_path, random_states(2))
    average(paths, tmp_path / "out.pt")
    assert "--overwrite" in refusal(paths, tmp_path / "out.pt", FileExistsError)
    average(paths, tmp_path / "out.pt", overwrite=True)
    assert "is a folder" in refusal(paths, small_folder(tmp_path / "m", None), FileExistsError)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "m", None)
    paths = write_states(tmp_path, [{"a": mx.ones(5000)}])
    with full_disk():
        refusal(paths, tmp_path / "out.pt", OSError)
        refusal([folder], tmp_path / "out", OSError)


def test_the_command_averages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    output = str(tmp_path / "out.pt")
    assert cli.main(["average", *map(str, APPLES), "--output", output]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{output}\n"
    assert cli.main(["average", "nowhere.pt", "--output", output]) == 1
    assert capsys.readouterr().err.startswith("error: no such checkpoint: nowhere.pt")

"""Finding, checking, reading and writing the files that hold a folder's tensors."""

import json
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from layout_makers import INDEX, LAYOUTS, TORCH_INDEX, Layout, one_file, sharded, write_index

from convert import pt_file
from openelm_mlx.weight_files import (
    ShardWriter,
    check_safetensors,
    find_weight_files,
    load_tensor,
    open_weights,
    read_json,
    read_tensor_file,
    read_weights,
    shard_name,
    write_json,
    write_weights,
)

BF16_BITS = [0x3F80, 0x0001, 0x7F80, 0xFF80, 0x7FC1, 0x8000]  # 1, subnormal, +-inf, NaN, -0


def tensors() -> dict[str, mx.array]:
    return {
        "a": mx.arange(6, dtype=mx.float32).reshape(2, 3),
        "b": mx.view(mx.array(BF16_BITS, dtype=mx.uint16), mx.bfloat16),
        "c": mx.array([1.5, -2.0], dtype=mx.float16),
    }


def bits(array: mx.array) -> bytes:
    """The array's memory, so that NaN and -0 count too."""
    raw = mx.view(array, mx.uint32 if array.itemsize == 4 else mx.uint16)
    return np.array(raw).tobytes()


def assert_same(found: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        assert bits(found[name]) == bits(array), name


@pytest.mark.parametrize("make", LAYOUTS)
def test_every_layout_is_read_bit_for_bit(make: Layout, tmp_path: Path) -> None:
    make(tmp_path, tensors())
    assert_same(read_weights(tmp_path), tensors())


@pytest.mark.parametrize("make", LAYOUTS)
def test_shapes_are_known_before_anything_is_loaded(make: Layout, tmp_path: Path) -> None:
    make(tmp_path, tensors())
    with open_weights(tmp_path) as stored:
        assert {k: tuple(t.shape) for k, t in stored.items()} == {
            k: t.shape for k, t in tensors().items()
        }
        assert_same({name: load_tensor(stored[name]) for name in list(stored)}, tensors())


def test_safetensors_are_preferred_to_pytorch_files(tmp_path: Path) -> None:
    one_file(tmp_path, tensors())
    pt_file.write(tmp_path / "pytorch_model.bin", {"a": mx.zeros((2, 3))})
    assert [f.name for f in find_weight_files(tmp_path)] == ["model.safetensors"]


def test_the_index_of_shards_that_were_not_downloaded_does_not_hide_safetensors(
    tmp_path: Path,
) -> None:
    # Guards: Hub downloads take every .json but not the .bin shards it names.
    one_file(tmp_path, tensors())
    write_index(tmp_path, TORCH_INDEX, {"a": "pytorch_model-00001.bin"})
    assert_same(read_weights(tmp_path), tensors())


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(FileNotFoundError, match="holds no weights: looked for") as caught:
        find_weight_files(tmp_path)
    for name in ("model.safetensors", "pytorch_model.bin", "weights.npz", INDEX):
        assert name in str(caught.value)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    sharded(tmp_path, tensors())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="1 of 2 files that are missing, first model-00002"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    "weight_map", [None, {}, ["a"], {"a": 3}, {"a": "../elsewhere.safetensors"}]
)
def test_a_damaged_index_is_refused(weight_map: object, tmp_path: Path) -> None:
    write_index(tmp_path, INDEX, weight_map)
    with pytest.raises(ValueError, match=r"index\.json is damaged: weight_map must"):
        find_weight_files(tmp_path)


def test_a_truncated_file_is_refused_with_both_sizes(tmp_path: Path) -> None:
    one_file(tmp_path, tensors())
    file = tmp_path / "model.safetensors"
    whole = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ValueError, match=f"truncated or damaged: {whole - 7} bytes .* {whole}"):
        read_weights(tmp_path)


@pytest.mark.parametrize("length", [2**63, 10**12, 200])
def test_a_header_longer_than_its_file_is_refused_at_once(length: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + b"{}" + b" " * 50)
    with pytest.raises(ValueError, match=f"header claims {length} bytes and the file has 60"):
        check_safetensors(file)


@pytest.mark.parametrize("content", [b"", b"abc", b"\0" * 8])
def test_a_file_too_short_for_a_header_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"is no (complete )?safetensors file"):
        check_safetensors(file)


@pytest.mark.parametrize(
    "header",
    [
        "not json",
        "[1]",
        '{"a": 1}',
        '{"a": {"dtype": "F32", "shape": [1]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": []}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, "x"]}}',
    ],
)
def test_a_damaged_header_is_refused(header: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode())
    with pytest.raises(ValueError, match="is no safetensors file: its header is damaged"):
        check_safetensors(file)


def with_header(file: Path, dtype: str, shape: list[int], size: int) -> None:
    header = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}})
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + b"\0" * size)


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "message"),
    [
        ("F8_E4M3", [4], 4, "x is stored as F8_E4M3, which MLX cannot read"),
        ("F64", [1], 8, "x is stored as F64, which MLX cannot read"),
        ("FLOAT", [1], 4, "cannot be read: .*unsupported dtype FLOAT"),
        ("F32", [1000], 4, r"cannot be read: .*invalid data offsets"),
        ("F32", [-1], 4, r"cannot be read: .*invalid data offsets"),
    ],
)
def test_a_header_that_lies_about_its_tensors_is_refused(
    dtype: str, shape: list[int], size: int, message: str, tmp_path: Path
) -> None:
    with_header(tmp_path / "model.safetensors", dtype, shape, size)
    with pytest.raises(ValueError, match=message) as caught:
        read_weights(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK\3\4 no zip"])
def test_a_damaged_npz_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "weights.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"weights\.npz cannot be read: .*is it complete\?"):
        read_weights(tmp_path)


def test_a_damaged_pytorch_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin"):
        read_weights(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors does not exist"):
        read_tensor_file(tmp_path / "none.safetensors")


def test_shards_fill_up_and_are_indexed(tmp_path: Path) -> None:
    arrays = {f"t{i}": mx.full((10,), i, dtype=mx.float32) for i in range(5)}  # 40 bytes each
    writer = ShardWriter(tmp_path, shard_bytes=100)
    for name, array in arrays.items():
        writer.add(name, array)
    writer.close()
    names = [shard_name(i, 3) for i in range(3)]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*names, INDEX])
    index = read_json(tmp_path / INDEX)
    assert index["metadata"]["total_size"] == writer.total_bytes == 200
    assert [index["weight_map"][f"t{i}"] for i in range(5)] == [names[i // 2] for i in range(5)]
    assert_same(read_weights(tmp_path), arrays)


def test_full_shards_are_written_before_the_rest_is_known(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, shard_bytes=100)
    for i in range(3):
        writer.add(f"t{i}", mx.zeros(10))
    assert len(list(tmp_path.iterdir())) == 1
    assert list(writer._pending) == ["t2"]


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, shard_bytes=8)
    writer.add("large", mx.zeros(10))
    writer.close()
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_one_shard_has_the_plain_name_and_the_asked_format(tmp_path: Path) -> None:
    assert write_weights(tmp_path, tensors().items()) == 24 + 12 + 4
    assert check_safetensors(tmp_path / "model.safetensors")["__metadata__"] == {"format": "mlx"}
    writer = ShardWriter(tmp_path, form="pt")
    writer.add("a", mx.zeros(1))
    writer.close()
    assert check_safetensors(tmp_path / "model.safetensors")["__metadata__"] == {"format": "pt"}


def test_json_is_written_as_it_is_read(tmp_path: Path) -> None:
    value = {"b": [1, 2.5, None], "a": "ü"}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    assert (tmp_path / "x.json").read_text(encoding="utf-8").endswith("}\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1,}', r"x\.json is not valid JSON: .*line 1 column"),
        (b"\xff\xfe", r"x\.json is not valid JSON"),
        (b"[1]", "must hold a JSON object, not a list"),
    ],
)
def test_wrong_json_is_refused_in_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_json(tmp_path / "x.json")
    assert "\n" not in str(caught.value)


def test_a_missing_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"x\.json does not exist"):
        read_json(tmp_path / "x.json")

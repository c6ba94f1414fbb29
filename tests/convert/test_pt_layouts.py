"""What the reader makes of archives put together by hand, judged by NumPy and by ``pickle``."""

import io
import pickle
import time
import zipfile
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pt_crafting as craft
import pytest

import openelm_mlx  # noqa: F401 - loads OpenBLAS before mlx

import mlx.core as mx  # isort: skip
from convert import pt_file  # isort: skip

VALUES = np.arange(24, dtype=np.float32) * np.float32(1.1)


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (0, (4, 6), (1, 4)),  # transposed
        (3, (2, 3, 2), (8, 2, 1)),  # gaps
        (5, (3, 4), (1, 1)),  # overlapping windows
        (2, (3, 1, 2), (0, 99, 3)),  # expanded, and an axis of one
        (23, (), ()),
        (24, (0, 3), (3, 1)),
        (4, (5,), (1,)),
    ],
)
def test_views_of_a_storage_are_what_numpy_makes_of_them(
    tmp_path: Path, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    base = VALUES[offset:] if offset < 24 else VALUES[:0]
    expected = np.lib.stride_tricks.as_strided(base, shape, [4 * s for s in strides])
    view = craft.tensor_opcodes("FloatStorage", 24, shape, strides, offset=offset)
    other = craft.tensor_opcodes("FloatStorage", 24, (24,), (1,))
    storages = {"0": VALUES.tobytes()}
    alone = craft.save(tmp_path / "alone.pt", craft.whole(view), storages)
    with pt_file.PtFile(alone) as file:
        np.testing.assert_array_equal(np.array(file.tree.load()), expected)
    np.testing.assert_array_equal(np.array(pt_file.read(alone)), expected)
    pair = craft.save(tmp_path / "pair.pt", craft.whole(view + other + b"\x86"), storages)
    shared, full = pt_file.read(pair)
    np.testing.assert_array_equal(np.array(shared), expected)
    np.testing.assert_array_equal(np.array(full), VALUES)
    np.testing.assert_array_equal(np.array(shared + 0), expected)  # MLX's own view of the strides


@pytest.mark.parametrize(
    ("kind", "numpy_type"),
    [("FloatStorage", "f4"), ("DoubleStorage", "f8"), ("ComplexFloatStorage", "c8")],
)
def test_big_endian_archives_are_swapped(tmp_path: Path, kind: str, numpy_type: str) -> None:
    values = np.array([1.5, -2.25, 3e10]).astype(numpy_type)
    opcodes = craft.tensor_opcodes(kind, 3, (3,), (1,))
    stored = {"0": values.astype(f">{numpy_type}").tobytes()}
    path = craft.save(tmp_path / "big.pt", craft.whole(opcodes), stored, byteorder=b"big")
    np.testing.assert_array_equal(np.array(pt_file.read(path)), values)


def test_conjugate_and_negative_views_get_their_values(tmp_path: Path) -> None:
    values = np.array([1 + 2j, 3 - 4j], np.complex64)
    metadata = craft.push({"conj": True, "neg": True})
    opcodes = craft.tensor_opcodes("ComplexFloatStorage", 2, (2,), (1,), tail=metadata)
    path = craft.save(tmp_path / "c.pt", craft.whole(opcodes), {"0": values.tobytes()})
    np.testing.assert_array_equal(np.array(pt_file.read(path)), -values.conj())


@pytest.mark.parametrize("protocol", range(2, 6))
def test_plain_python_and_numpy_state_is_read_as_pickle_reads_it(
    tmp_path: Path, protocol: int
) -> None:
    state = {
        "numpy": [np.float64(0.1), np.int64(-3), np.bool_(True), np.str_("né"), np.float32(2)],
        "arrays": [
            np.arange(6).reshape(2, 3).T,
            np.array(["a", "bcd"]),
            np.array([1.5], ">f8"),
            np.zeros((0, 2), np.uint8),
            np.array(2.5),
        ],
        "python": [set("ab"), frozenset({1}), range(3), deque([1, 2], 5), b"\x80", bytearray(b"z")],
        "counts": defaultdict(list, {np.int64(4): [1]}),
        "rng": np.random.RandomState(3).get_state(),
    }
    data = pickle.dumps(state, protocol)
    loaded = pt_file.read(craft.save(tmp_path / "p.pt", data))
    for ours, theirs in zip(loaded["arrays"], pickle.loads(data)["arrays"], strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)
    assert [type(item) for item in loaded["numpy"]] == [type(item) for item in state["numpy"]]
    assert loaded["numpy"] == state["numpy"]
    assert loaded["python"] == state["python"]
    assert loaded["python"][3].maxlen == 5
    assert loaded["counts"] == state["counts"]
    assert loaded["counts"].default_factory is list
    np.testing.assert_array_equal(loaded["rng"][1], state["rng"][1])


def test_tensors_of_the_oldest_rebuild_function_and_parameters_are_read(tmp_path: Path) -> None:
    arguments = craft.storage_opcodes("FloatStorage", "0", 24) + craft.push(2) + craft.push((3,))
    tensor = b"ctorch._utils\n_rebuild_tensor\n(" + arguments + craft.push((2,)) + b"tR"
    parameter = b"ctorch._utils\n_rebuild_parameter\n" + tensor + b"\x88" + craft.HOOKS + b"\x87R"
    path = craft.save(tmp_path / "v1.pt", craft.whole(parameter), {"0": VALUES.tobytes()})
    np.testing.assert_array_equal(np.array(pt_file.read(path)), VALUES[2:8:2])


def test_tensors_load_from_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SlowFile(io.BufferedReader):
        def seek(self, *where: int) -> int:
            position = super().seek(*where)
            time.sleep(1e-3)  # lets another thread seek elsewhere before this one reads
            return position

    pt_file.write(tmp_path / "t.pt", {f"w{i}": mx.full((300,), float(i)) for i in range(20)})
    monkeypatch.setattr(Path, "open", lambda path, _: SlowFile(io.FileIO(path)))
    with pt_file.PtFile(tmp_path / "t.pt") as file, ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda tensor: np.array(tensor.load()), file.tree.values()))
    for index, array in enumerate(loaded):
        np.testing.assert_array_equal(array, np.full(300, index, np.float32))


def test_an_object_found_twice_stays_one_object(tmp_path: Path) -> None:
    inner: dict[str, object] = {"x": [1]}
    loaded = pt_file.read(craft.save(tmp_path / "o.pt", pickle.dumps([inner, (inner,)], 2)))
    assert loaded[0] is loaded[1][0]


def test_archives_without_checksums_or_byte_order_are_read(tmp_path: Path) -> None:
    pt_file.write(tmp_path / "w.pt", {"x": mx.arange(5)})
    craft.clear_checksums(tmp_path / "w.pt")
    assert pt_file.read(tmp_path / "w.pt")["x"].tolist() == [0, 1, 2, 3, 4]
    with zipfile.ZipFile(tmp_path / "old.pt", "w") as archive:  # PyTorch 1.6 to 2.0
        archive.writestr("archive/data.pkl", pickle.dumps({"a": 1}, 2))
        archive.writestr("archive/version", "3\n")
    assert pt_file.read(tmp_path / "old.pt") == {"a": 1}

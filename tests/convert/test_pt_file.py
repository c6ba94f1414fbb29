"""What ``convert.pt_file`` reads and writes, judged by the bytes in the file and by NumPy."""

import os
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest

import openelm_mlx  # noqa: F401 - loads OpenBLAS before mlx

import mlx.core as mx  # isort: skip
from convert import pt_file  # isort: skip
from openelm_mlx.atomic import atomic_file  # isort: skip

RAW = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
DTYPES = [
    *(mx.float32, mx.float64, mx.float16, mx.bfloat16, mx.complex64, mx.bool_),
    *(mx.int8, mx.int16, mx.int32, mx.int64, mx.uint8, mx.uint16, mx.uint32, mx.uint64),
]


def raw_bytes(array: mx.array) -> bytes:
    """The bits of an array, NaN payloads and negative zeros included."""
    bits = mx.view(mx.contiguous(array, stream=mx.cpu), RAW[array.dtype.size], stream=mx.cpu)
    return np.array(bits).tobytes()


def random_array(dtype: mx.Dtype, shape: tuple[int, ...], seed: int = 0) -> mx.array:
    """Any bits at all, not just those of ordinary numbers."""
    kind = f"u{dtype.size}"
    high = 2 if dtype == mx.bool_ else 256
    count = int(np.prod(shape)) * dtype.size
    data = np.random.default_rng(seed).integers(0, high, count, dtype=np.uint8)
    bits = mx.array(data.view(kind).reshape(shape))
    return mx.view(bits, dtype, stream=mx.cpu)


def records_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (7,)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_is_written_and_read_bit_for_bit(
    tmp_path: Path, dtype: mx.Dtype, shape: tuple[int, ...]
) -> None:
    array = random_array(dtype, shape)
    pt_file.write(tmp_path / "w.pt", {"x": array})
    loaded = pt_file.read(tmp_path / "w.pt")["x"]
    assert (loaded.shape, loaded.dtype) == (shape, dtype)
    assert raw_bytes(loaded) == raw_bytes(array) == records_of(tmp_path / "w.pt")["w/data/0"]


def test_containers_and_scalars_come_back_as_they_were(tmp_path: Path) -> None:
    tree = {
        "numbers": [0, -1, 2**31, -(2**31) - 1, 2**200, 1.5, float("-inf"), True, False, None],
        "text": ("", "päth\n", b"", b"\x00\xff", bytearray(b"ab"), 1 - 2j),
        "nested": OrderedDict([("b", {"c": [(), ((1,),)]}), ("a", {3, "x"})]),
        "count": Counter("aab"),
        "dtype": [mx.bfloat16, mx.uint16],
        7: {(0, "group"): "tuple key"},
    }
    pt_file.write(tmp_path / "t.pt", tree)
    loaded = pt_file.read(tmp_path / "t.pt")
    assert loaded == tree
    assert type(loaded["nested"]) is OrderedDict
    assert type(loaded["count"]) is Counter
    assert list(loaded["nested"]) == ["b", "a"]
    assert type(loaded["numbers"][7]) is bool
    assert type(loaded["text"][4]) is bytearray


def test_strided_and_numpy_arrays_are_written_in_row_major_order(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    tree = {
        "mlx": mx.array(values).T[1:],
        "numpy": values.T[1:],
        "big": values.astype(">f4"),
        "broadcast": mx.broadcast_to(mx.array([1.0, 2.0]), (3, 2)),
        "scalar": np.float32(0.1),
    }
    pt_file.write(tmp_path / "s.pt", tree)
    loaded = pt_file.read(tmp_path / "s.pt")
    np.testing.assert_array_equal(np.array(loaded["mlx"]), values.T[1:])
    np.testing.assert_array_equal(np.array(loaded["numpy"]), values.T[1:])
    np.testing.assert_array_equal(np.array(loaded["big"]), values)
    np.testing.assert_array_equal(np.array(loaded["broadcast"]), [[1, 2]] * 3)
    assert loaded["scalar"] == float(np.float32(0.1))


def test_one_array_at_two_places_is_stored_and_loaded_once(tmp_path: Path) -> None:
    table = mx.arange(64.0).reshape(8, 8)
    pt_file.write(tmp_path / "tied.pt", {"in": table, "out": table, "own": table + 0})
    stored = [name for name in records_of(tmp_path / "tied.pt") if "/data/" in name]
    assert stored == ["tied/data/0", "tied/data/1"]
    loaded = pt_file.read(tmp_path / "tied.pt")
    addresses = {
        name: np.array(array, copy=False).__array_interface__["data"][0]
        for name, array in loaded.items()
    }
    assert addresses["in"] == addresses["out"] != addresses["own"]


def test_the_file_is_the_same_every_time_and_aligned_to_64_bytes(tmp_path: Path) -> None:
    tree = {"a": mx.ones((3,)), "b": mx.zeros((5, 5), dtype=mx.bfloat16)}
    sets = ({0, 8}, {8, 0})
    assert list(sets[0]) != list(sets[1])  # equal, but kept in another order
    for folder, elements in zip(("one", "two"), sets, strict=True):
        with atomic_file(tmp_path / folder / "model.pt") as temporary:
            pt_file.write(temporary, {**tree, "s": elements})
    path = tmp_path / "one" / "model.pt"
    data = path.read_bytes()
    assert data == (tmp_path / "two" / "model.pt").read_bytes()
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            assert entry.filename.startswith("model/")
            name, extra = np.frombuffer(data, "<u2", 2, entry.header_offset + 26)
            assert (entry.header_offset + 30 + int(name) + int(extra)) % 64 == 0


def test_large_records_take_zip64_headers_and_stay_aligned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convert.pt_writer._ZIP64_BYTES", 8)
    array = random_array(mx.float32, (33,))
    pt_file.write(tmp_path / "z.pt", {"x": array})
    with zipfile.ZipFile(tmp_path / "z.pt") as archive:
        offset = archive.getinfo("z/data/0").header_offset
    data = (tmp_path / "z.pt").read_bytes()
    name, extra = (int(n) for n in np.frombuffer(data, "<u2", 2, offset + 26))
    assert (offset + 30 + name + extra) % 64 == 0
    assert data[offset + 30 + name + extra :].startswith(raw_bytes(array))
    assert raw_bytes(pt_file.read(tmp_path / "z.pt")["x"]) == raw_bytes(array)


def test_a_lazy_file_gives_tensors_one_by_one_until_it_is_closed(tmp_path: Path) -> None:
    array = random_array(mx.bfloat16, (4, 6))
    pt_file.write(tmp_path / "l.pt", {"x": array, "step": 3})
    with pt_file.PtFile(tmp_path / "l.pt") as file:
        tensor = file.tree["x"]
        assert (tensor.shape, tensor.dtype, tensor.nbytes) == ((4, 6), mx.bfloat16, 48)
        assert raw_bytes(tensor.load()) == raw_bytes(array)
        assert file.tree["step"] == 3
        pt_file.write(tmp_path / "copy.pt", file.tree)
    assert raw_bytes(pt_file.read(tmp_path / "copy.pt")["x"]) == raw_bytes(array)
    with pytest.raises(ValueError, match=r"l\.pt: is closed; load its tensors inside"):
        tensor.load()


@pytest.mark.parametrize("key", [None, "model_state_dict", "state_dict", "model"])
def test_the_state_dict_is_found_alone_or_in_a_training_checkpoint(
    tmp_path: Path, key: str | None
) -> None:
    weights = OrderedDict([("b.weight", mx.ones((2,))), ("a.weight", mx.zeros((1, 2)))])
    tree = weights if key is None else {"epoch": 1, "ema": mx.ones((1,)), key: weights}
    pt_file.write(tmp_path / "c.pt", tree)
    with pt_file.PtFile(tmp_path / "c.pt") as file:
        found = file.state_dict()
    assert {name: tensor.shape for name, tensor in found.items()} == {
        "b.weight": (2,),
        "a.weight": (1, 2),
    }
    assert list(found) == ["b.weight", "a.weight"]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"epoch": 1, "net": {"w": mx.ones((1,))}}, r"top-level keys are 'epoch', 'net'$"),
        ({}, r"top-level keys are none$"),
        ({"model": {"w": mx.ones((1,)), "cfg": 3}}, r"top-level keys are 'model'$"),
        ([mx.ones((1,))], r"holds a list, expected a state dict"),
    ],
)
def test_a_file_without_a_state_dict_is_refused_with_what_it_holds(
    tmp_path: Path, tree: object, message: str
) -> None:
    pt_file.write(tmp_path / "n.pt", tree)
    with (
        pt_file.PtFile(tmp_path / "n.pt") as file,
        pytest.raises(ValueError, match=rf"n\.pt: .*{message}"),
    ):
        file.state_dict()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": {"b": [object()]}}, r"cannot write the object at a\.b\[0\]"),
        ({"w": np.array([None])}, r"cannot write the NumPy array of object at w"),
        ({"w": np.zeros(2, np.complex128)}, r"NumPy array of complex128 at w: expected one of"),
        ({"d": deque([1])}, r"cannot write the deque at d"),
        ({"n": 1 << 3000}, r"integer of more than 254 bytes"),
    ],
)
def test_what_torch_cannot_hold_is_refused_before_a_file_is_made(
    tmp_path: Path, tree: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        pt_file.write(tmp_path / "no.pt", tree)
    assert not (tmp_path / "no.pt").exists()


def test_writing_a_tree_that_holds_itself_is_refused(tmp_path: Path) -> None:
    tree: list[object] = []
    tree.append(tree)
    with pytest.raises(ValueError, match="more than 100 containers inside each other"):
        pt_file.write(tmp_path / "loop.pt", tree)


MEMORY_SCRIPT = """
import resource, sys
import openelm_mlx
import mlx.core as mx
from convert import pt_file

def peak() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

mode, path = sys.argv[1:]
shapes = [(32128, 1280)] + [(1280, 1280)] * 100 + [(5120, 1280)] * 10 + [(1280,)] * 33
mx.eval(mx.full((4,), 1.0))
before = peak()
if mode == "write":
    pt_file.write(path, {f"t{i}": mx.full(shape, float(i)) for i, shape in enumerate(shapes)})
elif mode == "read":
    tree = pt_file.read(path)
else:
    with pt_file.PtFile(path) as file:
        for i, tensor in enumerate(file.state_dict().values()):
            array = tensor.load()
            assert array.shape == shapes[i] and array.reshape(-1)[-1].item() == float(i)
assert "torch" not in sys.modules
print(peak() - before)
"""


@pytest.mark.slow
def test_a_270m_file_is_written_and_read_within_its_own_size_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "big.pt"

    def added_bytes(mode: str) -> int:
        command = [sys.executable, "-c", MEMORY_SCRIPT, mode, str(path)]
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        return int(run.stdout)

    written = added_bytes("write")
    size = os.path.getsize(path)
    assert size > 1.08e9
    assert written < 1.3 * size  # the tree itself is 1.0
    assert added_bytes("read") < 1.1 * size
    assert added_bytes("tensor by tensor") < 0.25 * size  # the largest tensor is 0.15

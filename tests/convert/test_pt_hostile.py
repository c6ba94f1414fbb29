"""Pickles that lie or try to run code are refused in one line; nothing in them is executed."""

import argparse
import builtins
import os
import pickle
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pt_crafting as craft
import pytest

import openelm_mlx  # noqa: F401 - loads OpenBLAS before mlx

from convert import pt_file  # isort: skip

MIB = 2**20


def refusal_of(tmp_path: Path, data_pkl: bytes, storages: dict[str, bytes] | None = None) -> str:
    return craft.refusal(craft.save(tmp_path / "bad.pt", data_pkl, storages))


class Call:
    """Pickles as a call of ``function(*arguments)``."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize(
    ("function", "name"),
    [
        (os.system, f"{os.system.__module__}.system"),
        (eval, "builtins.eval"),
        (exec, "builtins.exec"),
        (getattr, "builtins.getattr"),
        (builtins.__import__, "builtins.__import__"),
        (open, "io.open"),
        (pickle.loads, "pickle.loads"),
        (np.load, "numpy.load"),
        (argparse.Namespace, "argparse.Namespace"),
        (Path, f"{Path.__module__}.Path"),  # pathlib._local in Python 3.13
    ],
)
def test_a_name_off_the_list_is_refused_and_not_called(
    tmp_path: Path, function: Callable[..., object], name: str, protocol: int
) -> None:
    mark = tmp_path / "executed"
    call = Call(function, f"touch {mark}") if function is os.system else Call(function)
    message = refusal_of(tmp_path, pickle.dumps({"w": [call]}, protocol))
    assert message.startswith("refuses to load '")
    assert f"{name}': only plain tensors and containers are read" in message
    assert "torch.save(d['model_state_dict'], g)" in message
    assert not mark.exists()


def test_settings_pickled_beside_the_weights_are_refused_by_name(tmp_path: Path) -> None:
    state = {"opts": argparse.Namespace(lr=1)}
    assert "'argparse.Namespace'" in refusal_of(tmp_path, pickle.dumps(state, 2))


@pytest.mark.parametrize(
    ("opcodes", "message"),
    [
        (b"(S'touch x'\nios\nsystem\n", "opcode STRING"),
        (b"(X\x01\x00\x00\x00aios\nsystem\n", "opcode INST"),
        (b"(cos\nsystem\no", "refuses to load 'os.system'"),
        (b"(ccollections\nOrderedDict\no", "opcode OBJ"),
        (b"\x82\x01", "opcode EXT1"),
        (b"Pid\n", "opcode PERSID"),
        (b"ccollections\nOrderedDict\n)}\x92", "opcode NEWOBJ_EX"),
        (b"ccollections\nOrderedDict\n}b", "refuses to set the state of a Global"),
        (b"]}b", "refuses to set the state of a list"),
        (b"ctorch\nTensor\n)R", "refuses to call 'torch.Tensor'"),
        (b"X\x01\x00\x00\x00a)R", "refuses to call 'str'"),
        (b"ctorch\nfloat32\n)R", "refuses to call 'Dtype'"),
        (b"ccollections\nOrderedDict\n", "refuses to load 'collections.OrderedDict' as a value"),
        (b"ctorch._utils\n_rebuild_sparse_tensor\n", "'torch._utils._rebuild_sparse_tensor'"),
        (b"ctorch\nload\n", "refuses to load 'torch.load'"),
        (b"\x8c\x03a\nb\x8c\x01c\x93", r"refuses to load 'a\nb.c'"),
        (b"cnumpy\ndtype\nX\x01\x00\x00\x00O\x85R", "refuses NumPy data of type 'O'"),
        (b"}]Ns", "uses a list as a dictionary key"),
        (craft.storage_opcodes("FloatStorage", "0", 1), "holds a bare storage"),
        (b"", "data.pkl is damaged"),
        (b"0", "data.pkl is damaged"),
        (b"h\x05", "data.pkl is damaged"),
        (b"((", "data.pkl is damaged"),
        (b"t", "data.pkl is damaged"),
        (b"NN", "data.pkl is damaged"),
        (b"NNs", "data.pkl is damaged"),
        (b"\xff", "data.pkl is damaged"),
        (b"X\xff\xff\xff\x7fabc", "data.pkl is damaged"),
    ],
)
def test_tricks_with_opcodes_are_refused(tmp_path: Path, opcodes: bytes, message: str) -> None:
    assert message in refusal_of(tmp_path, craft.whole(opcodes), {"0": b"\x00" * 4})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("__builtin__\nbytearray", (10**12,)),
        ("__builtin__\nbytes", (10**12,)),
        ("__builtin__\nset", (range(10**12),)),
        ("_codecs\nencode", ("aaa", "idna")),
        ("collections\nOrderedDict", ([(1, 2)],)),
        ("collections\ndefaultdict", (len.__name__,)),
        ("collections\nCounter", ("aaa",)),
        ("__builtin__\ncomplex", ("1", "2")),
        ("torch._tensor\n_rebuild_from_type_v2", (1, 2, 3, 4)),
        ("torch._utils\n_rebuild_parameter", (1, 2, 3)),
        ("numpy.core.multiarray\nscalar", (1, b"x")),
    ],
)
def test_allowed_names_take_only_the_arguments_torch_gives_them(
    tmp_path: Path, name: str, arguments: tuple[object, ...]
) -> None:
    opcodes = f"c{name}\n".encode() + craft.push(arguments) + b"R"
    assert "data.pkl is damaged" in refusal_of(tmp_path, craft.whole(opcodes))


def test_bombs_are_refused_at_once(tmp_path: Path) -> None:
    start = time.perf_counter()
    text = craft.push("a" * MIB) + b"q\x07" + craft.push("latin1") + b"q\x08"
    encode = b"(" + b"c_codecs\nencode\nh\x07h\x08\x86R" * 50 + b"t"
    assert "unfolds" in refusal_of(tmp_path, craft.whole(text + b"00" + encode))
    nested = b"]" * 5000 + b"a" * 4999
    assert "more than 100 deep" in refusal_of(tmp_path, craft.whole(nested))
    laughs = b")" + b"2\x86" * 60  # 2**60 leaves by 60 doublings
    assert "dictionary key" in refusal_of(tmp_path, craft.whole(b"}" + laughs + b"Ns"))
    numbers = craft.tensor_opcodes("FloatStorage", 1, (2**20, 2**20), (0, 0))
    assert "expands 4 bytes" in refusal_of(tmp_path, craft.whole(numbers), {"0": b"1234"})
    path = craft.save(tmp_path / "memo.pt", craft.whole(b"Nr\xff\xff\xff\xff"))
    assert pt_file.read(path) is None  # memo entry 2**32 - 1 costs no table of that size
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("size", "shape", "strides", "offset", "message"),
    [
        (4, (5,), (1,), 0, "reaches outside its storage"),
        (4, (2,), (4,), 0, "reaches outside its storage"),
        (4, (1,), (1,), 4, "reaches outside its storage"),
        (4, (2, 2), (10**15, 1), 0, "reaches outside its storage"),
        (4, (2, 2), (10**30, 1), 0, "bad offset, shape or stride"),
        (4, (2,), (-1,), 1, "bad offset, shape or stride"),
        (4, (2,), (1,), -1, "bad offset, shape or stride"),
        (4, (2.0,), (1,), 0, "bad offset, shape or stride"),
        (4, (True,), (1,), 0, "bad offset, shape or stride"),
        (4, (2,), (1, 1), 0, "1 axes and 2 strides"),
        (4, (1,) * 65, (1,) * 65, 0, "65 axes"),
        (4, [2], (1,), 0, "data.pkl is damaged"),
        (4, (0, 2**40), (1, 1), 0, "2**31 elements or more"),
        (10**9, (10**9,), (1,), 0, "declares 4000000000 bytes but its record holds 16"),
        (3, (3,), (1,), 0, None),
        (0, (0,), (1,), 0, "declares 0 bytes but its record holds 16"),
        (-1, (0,), (1,), 0, "data.pkl is damaged"),
    ],
)
def test_tensors_stay_within_their_storage(
    tmp_path: Path, size: int, shape: object, strides: object, offset: int, message: str | None
) -> None:
    opcodes = craft.tensor_opcodes("FloatStorage", size, shape, strides, offset=offset)
    storages = {"0": b"\x00" * 16}
    if message is None:  # an odd tail, as an untyped storage may leave, is no fault
        path = craft.save(tmp_path / "odd.pt", craft.whole(opcodes), storages)
        assert pt_file.read(path).shape == shape
    else:
        assert message in refusal_of(tmp_path, craft.whole(opcodes), storages)


def test_types_that_mlx_lacks_are_refused_by_name(tmp_path: Path) -> None:
    v3 = b"ctorch._utils\n_rebuild_tensor_v3\n"
    for name in ("float8_e4m3fn", "float8_e5m2", "complex32"):
        opcodes = craft.tensor_opcodes(
            "torch.storage.UntypedStorage",
            4,
            (1,),
            (1,),
            tail=f"ctorch\n{name}\n".encode(),
            function=v3,
        )
        message = refusal_of(tmp_path, craft.whole(opcodes), {"0": b"1234"})
        assert f"a tensor of torch.{name}, which MLX has no type for; convert it" in message
    opcodes = craft.tensor_opcodes("ComplexDoubleStorage", 1, (1,), (1,))
    message = refusal_of(tmp_path, craft.whole(opcodes), {"0": bytes(16)})
    assert "tensor.to(torch.complex64)" in message
    opcodes = craft.storage_opcodes("QInt8Storage", "0", 1)
    assert "tensor.dequantize()" in refusal_of(tmp_path, craft.whole(opcodes), {"0": b"1"})


def test_damaged_pickles_give_value_errors_and_nothing_else(tmp_path: Path) -> None:
    state = {"a": [np.arange(3), {1: (2.5, None, b"x")}], "b": {"s"}, "c": np.float32(1)}
    tensor = craft.tensor_opcodes("FloatStorage", 4, (2, 2), (2, 1))
    random_bytes = random.Random(1)
    refused = 0
    for data in (pickle.dumps(state, 2), pickle.dumps(state, 5), craft.whole(tensor)):
        for _ in range(100):
            damaged = bytearray(data)
            for _ in range(random_bytes.randint(1, 3)):
                damaged[random_bytes.randrange(len(data))] = random_bytes.randrange(256)
            path = craft.save(tmp_path / "f.pt", bytes(damaged), {"0": bytes(16)})
            refused += craft.outcome(path)[1] is not None
    assert refused > 60

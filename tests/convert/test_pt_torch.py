"""``convert.pt_file`` against PyTorch itself: what torch.save writes and what torch.load reads."""

import argparse
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_set  # imports openelm_mlx before mlx
import mlx.core as mx
import numpy as np
import pytest
from when_used import WhenUsed

from convert import pt_file

pytestmark = pytest.mark.slow  # importing torch takes seconds; test_pt_file has what it wrote
torch: Any = WhenUsed("torch")

GOLDENS = sorted(
    str(path.relative_to(root))
    for root in (golden_set.WHOLE, golden_set.CUT)
    for path in root.rglob("*.pt")
)
DTYPES = [
    *("float32", "float64", "float16", "bfloat16", "complex64", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
]


def torch_bytes(tensor: Any) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def mlx_bytes(array: mx.array) -> bytes:
    raw = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.dtype.size]
    return np.array(mx.view(mx.contiguous(array, stream=mx.cpu), raw, stream=mx.cpu)).tobytes()


def assert_same(ours: Any, theirs: Any, place: str = "top") -> None:
    """Equal trees: names, order, types, shapes, dtypes, and every bit of every tensor."""
    if isinstance(theirs, torch.Tensor):
        dtype = str(ours.dtype).removeprefix("mlx.core.").removesuffix("_")
        assert (dtype, tuple(ours.shape)) == (str(theirs.dtype)[6:], tuple(theirs.shape)), place
        assert mlx_bytes(ours) == torch_bytes(theirs), place
    elif isinstance(theirs, dict):
        assert (type(ours), list(ours)) == (type(theirs), list(theirs)), place
        for key, value in theirs.items():
            assert_same(ours[key], value, f"{place}.{key}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), place
        for index, value in enumerate(theirs):
            assert_same(ours[index], value, f"{place}[{index}]")
    else:
        assert (type(ours), ours) == (type(theirs), theirs), place


def random_tensor(dtype: str, *shape: int) -> Any:
    """Random bits: NaN payloads, infinities and denormals among them."""
    kind = getattr(torch, dtype)
    high = 2 if dtype == "bool" else 256
    size = int(np.prod(shape)) * kind.itemsize
    data = torch.randint(0, high, (size,), generator=torch.Generator().manual_seed(1))
    return data.to(torch.uint8).view(kind).reshape(shape)


def saved(tmp_path: Path, tree: Any, **options: Any) -> Any:
    torch.save(tree, tmp_path / "t.pt", **options)
    return pt_file.read(tmp_path / "t.pt")


@pytest.mark.parametrize("name", sorted(set(GOLDENS)))
def test_golden_files_are_read_and_rewritten_as_torch_reads_them(name: str, tmp_path: Path) -> None:
    path = golden_set.find(name)
    if path is None:
        pytest.skip(f"golden {name} is not at hand")
    theirs = torch.load(path, weights_only=True)
    ours = pt_file.read(path)
    assert_same(ours, theirs)
    pt_file.write(tmp_path / "again.pt", ours)
    assert_same(ours, torch.load(tmp_path / "again.pt", weights_only=True))


def test_the_state_dict_of_corenets_training_checkpoint_is_found() -> None:
    path = golden_set.find(
        "checkpoint_formats/training_checkpoint_epoch_0_iter_4999.pt"
    ) or pytest.skip("the golden training checkpoint is not at hand")
    theirs = torch.load(path, weights_only=True)["model_state_dict"]
    with pt_file.PtFile(path) as file:
        ours = {name: tensor.load() for name, tensor in file.state_dict().items()}
        assert file.tree["iterations"] == 4999
    assert_same(ours, dict(theirs))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_stride_and_shape_is_read_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    base = random_tensor(dtype, 6, 8)
    tree = {
        "whole": base,
        "transposed": base.t(),
        "block": base[1:4, 2:7:2],
        "row": base[3],
        "scalar": base[2, 5],
        "empty": base[:0],
        "expanded": base[:1].expand(4, 8),
        "windows": base.reshape(-1).unfold(0, 5, 2),
        "own": random_tensor(dtype, 3, 4, 2).permute(2, 0, 1),
        "zero_dim": random_tensor(dtype),
    }
    assert_same(saved(tmp_path, tree), tree)
    with pt_file.PtFile(tmp_path / "t.pt") as file:
        assert_same({name: tensor.load() for name, tensor in file.tree.items()}, tree)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mmap", [False, True])
def test_torch_reads_every_dtype_that_we_write(tmp_path: Path, dtype: str, mmap: bool) -> None:
    tree = OrderedDict(
        (name, random_tensor(dtype, *shape))
        for name, shape in {"a": (3, 5), "b": (), "c": (0, 4), "d": (2, 1, 1)}.items()
    )
    ours = saved(tmp_path, tree)
    pt_file.write(tmp_path / "ours.pt", ours)
    theirs = torch.load(tmp_path / "ours.pt", weights_only=True, mmap=mmap)
    assert_same(ours, theirs)
    assert type(theirs) is OrderedDict
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in theirs.values())


def test_torch_reads_the_containers_that_we_write(tmp_path: Path) -> None:
    tree = {
        "numbers": [0, -5, 2**40, -(2**70), 0.1, True, None, 3 - 4j],
        "text": ("päth", b"\x00\xff", bytearray(b"ab")),
        "nested": OrderedDict([("b", {"c": [(), {1, 2}]})]),
        "count": Counter("aab"),
        7: {(0, "x"): 1},
    }
    pt_file.write(tmp_path / "c.pt", {**tree, "dtype": mx.bfloat16, "numpy": np.float64(0.1)})
    theirs = torch.load(tmp_path / "c.pt", weights_only=True)
    assert theirs.pop("dtype") == torch.bfloat16
    assert theirs.pop("numpy") == 0.1
    assert theirs == tree
    assert type(theirs["nested"]) is OrderedDict


def test_one_array_written_twice_is_one_storage_in_torch(tmp_path: Path) -> None:
    table = mx.arange(6.0)
    pt_file.write(tmp_path / "tied.pt", {"in": table, "out": table})
    theirs = torch.load(tmp_path / "tied.pt", weights_only=True)
    assert theirs["in"].data_ptr() == theirs["out"].data_ptr()


@pytest.mark.parametrize("protocol", range(2, 6))
def test_modules_parameters_and_odd_tensors_are_read(tmp_path: Path, protocol: int) -> None:
    attributed = torch.ones(2)
    attributed.note = "kept by torch"
    noted = torch.nn.Parameter(torch.ones(3))
    noted.note = 1
    tree = {
        "model": torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).state_dict(),
        "parameters": [torch.nn.Parameter(torch.arange(4.0)), noted, attributed],
        "views": [random_tensor("complex64", 4).conj(), random_tensor("complex64", 4).imag],
        "negative": random_tensor("complex64", 4).conj().imag,
        "buffer": torch.nn.Buffer(torch.ones(1)),
        "rng": torch.get_rng_state(),
    }
    assert tree["views"][0].is_conj()
    assert tree["negative"].is_neg()
    assert_same(saved(tmp_path, tree, pickle_protocol=protocol), tree)


def test_the_state_of_a_training_run_is_read(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    layer(torch.ones(4, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    tree = {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    assert_same(saved(tmp_path, tree), tree)


def test_torchs_own_small_types_become_plain_values(tmp_path: Path) -> None:
    tree = [
        torch.Size([2, 3]),
        torch.device("cuda:1"),
        torch.device("cpu"),
        torch.float16,
        torch.float8_e5m2,
        torch.strided,
    ]
    assert saved(tmp_path, tree) == [
        (2, 3),
        "cuda:1",
        "cpu",
        mx.float16,
        "torch.float8_e5m2",
        "torch.strided",
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: torch.ones(2).to(torch.float8_e4m3fn),
            "a tensor of torch.float8_e4m3fn, which MLX has",
        ),
        (
            lambda: torch.ones(2, dtype=torch.complex128),
            "a tensor of torch.complex128, which MLX has",
        ),
        (
            lambda: torch.ones(2).to_sparse(),
            "refuses to load 'torch._utils._rebuild_sparse_tensor'",
        ),
        (lambda: torch.ones(2, device="meta"), "_rebuild_meta_tensor_no_storage"),
        (lambda: torch.nn.Linear(1, 1), "refuses to load 'torch.nn.modules.linear.Linear'"),
        (lambda: {"opts": argparse.Namespace(a=1)}, "refuses to load 'argparse.Namespace'"),
        (lambda: torch.ones(2).untyped_storage(), "holds a bare storage"),
    ],
    ids=["float8", "complex128", "sparse", "meta", "module", "settings", "storage"],
)
def test_what_is_no_plain_tensor_is_refused(
    tmp_path: Path, make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=rf"t\.pt: .*({message})"):
        saved(tmp_path, make())


def test_files_of_old_torch_and_torchscript_are_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"before 1\.6; re-save it in PyTorch"):
        pt_file.read(tmp_path / "old.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "script.pt")
    with pytest.raises(ValueError, match="is a TorchScript program, not a checkpoint"):
        pt_file.read(tmp_path / "script.pt")


def test_files_written_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        assert saved(tmp_path, {"a": torch.arange(3)})["a"].tolist() == [0, 1, 2]
    finally:
        torch.serialization.set_crc32_options(True)

"""Damaged, foreign and lying files are refused in one line that says what to do."""

import pickle
import random
import struct
import tarfile
import zipfile
from pathlib import Path

import pt_crafting as craft
import pytest
from pt_crafting import outcome, refusal

import openelm_mlx  # noqa: F401 - loads OpenBLAS before mlx

import mlx.core as mx  # isort: skip
from convert import pt_file  # isort: skip


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    pt_file.write(tmp_path / "whole.pt", {"w": mx.arange(40.0), "n": 1})
    data = (tmp_path / "whole.pt").read_bytes()
    path = tmp_path / "cut.pt"
    for length in [*range(4, len(data) - 1, 37), len(data) - 1]:
        path.write_bytes(data[:length])
        assert "truncated or damaged" in refusal(path)


@pytest.mark.slow
def test_a_flipped_bit_never_gives_other_values(tmp_path: Path) -> None:
    weights = mx.arange(40.0)
    pt_file.write(tmp_path / "good.pt", {"w": weights})
    data = (tmp_path / "good.pt").read_bytes()
    path = tmp_path / "flip.pt"
    flips = random.Random(0)
    refused = 0
    for _ in range(250):
        at = flips.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << flips.randrange(8))]) + data[at + 1 :])
        tree, message = outcome(path)
        refused += message is not None
        if isinstance(tree, dict):  # the bit was in padding or in a field nothing depends on
            assert tree["w"].tolist() == weights.tolist()
    assert refused > 60


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"", "is empty; copy or download it again"),
        (
            b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.",
            "before 1.6; re-save it in PyTorch 1.6 or later with torch.save(torch.load(f), f)",
        ),
        (pickle.dumps({"a": 1}), "is a plain pickle, not written by torch.save"),
        (struct.pack("<Q", 2) + b'{"a": 1}', "is a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "run `git lfs pull`"),
        (b"<html>not found</html>", "is not a PyTorch file: expected a zip archive"),
        (b"PK\x03\x04", "truncated or damaged"),
    ],
)
def test_other_files_are_named_with_what_to_do(tmp_path: Path, head: bytes, message: str) -> None:
    (tmp_path / "x.pt").write_bytes(head)
    assert message in refusal(tmp_path / "x.pt")


def test_other_archives_and_folders_are_named_with_what_to_do(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "old.pt", "w") as archive:
        archive.add(__file__, "storages")
    assert "is a tar file" in refusal(tmp_path / "old.pt")
    with zipfile.ZipFile(tmp_path / "z.pt", "w") as archive:
        archive.writestr("readme.txt", "x")
    assert "is a zip file but not a PyTorch checkpoint" in refusal(tmp_path / "z.pt")
    scripted = craft.save(tmp_path / "s.pt", craft.whole(b"N"), extra={"constants.pkl": b"\x80"})
    assert "torch.jit.load(f).state_dict()" in refusal(scripted)
    assert "is a folder; give the path of" in refusal(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"none\.pt: no such file"):
        pt_file.read(tmp_path / "none.pt")


def test_archives_that_lie_about_their_records_are_refused(tmp_path: Path) -> None:
    one = craft.whole(b"N")
    packed = craft.save(tmp_path / "c.pt", one, compression=zipfile.ZIP_DEFLATED)
    assert "compressed or encrypted records" in refusal(packed)
    odd = craft.save(tmp_path / "o.pt", one, byteorder=b"middle")
    assert "has byte order b'middle', expected" in refusal(odd)
    missing = craft.whole(craft.tensor_opcodes("FloatStorage", 1, (1,), (1,), key="9"))
    assert "lacks the record 'data/9'" in refusal(craft.save(tmp_path / "m.pt", missing))
    lying = craft.save(tmp_path / "l.pt", one, {"0": b"1234"})
    data = bytearray(lying.read_bytes())
    entry = data.rfind(b"PK\x01\x02")
    data[entry + 20 : entry + 28] = struct.pack("<II", 10**9, 10**9)
    lying.write_bytes(data)
    assert "declares more bytes than it has" in refusal(lying)


def test_a_closed_or_refused_file_leaves_no_open_handle(tmp_path: Path) -> None:
    path = craft.save(tmp_path / "h.pt", craft.whole(b"cos\nsystem\n"))
    for _ in range(3):
        refusal(path)  # an unclosed file would fail the test: warnings are errors
    path.unlink()

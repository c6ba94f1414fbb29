"""Files and folders appear whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from openelm_mlx.atomic import (
    atomic_file,
    atomic_folder,
    refuse_existing_file,
    refuse_existing_folder,
)

FAILURES = [
    ValueError("bad record"),
    KeyboardInterrupt(),
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
]


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_file_appears_only_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "new" / "scores.json"
    with atomic_file(target) as temporary:
        temporary.write_text("{}")
        assert not target.exists()
        assert temporary.parent == target.parent  # same file system: the rename cannot copy
        assert temporary.suffix == ".json"  # writers that add a suffix of their own need it
    assert target.read_text() == "{}"
    assert names(target.parent) == ["scores.json"]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda error: type(error).__name__)
def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, failure: BaseException
) -> None:
    target = tmp_path / "model.safetensors"
    target.write_text("old")

    def write() -> None:
        with atomic_file(target) as temporary:
            temporary.write_text("half of the n")
            raise failure

    with pytest.raises(type(failure)):
        write()
    assert target.read_text() == "old"
    assert names(tmp_path) == ["model.safetensors"]


def test_a_full_disk_on_fsync_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model.safetensors"
    target.write_text("old")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(_: int) -> None:
        raise full

    monkeypatch.setattr(os, "fsync", refuse)
    named = r"No space left.*model\.safetensors"
    with pytest.raises(OSError, match=named), atomic_file(target) as temporary:
        temporary.write_text("new")
    assert target.read_text() == "old"
    assert names(tmp_path) == ["model.safetensors"]


def test_a_file_that_was_there_is_refused_without_overwrite(tmp_path: Path) -> None:
    target = tmp_path / "scores.json"
    target.write_text("old")
    with (
        pytest.raises(FileExistsError, match=r"scores\.json exists; add --overwrite"),
        atomic_file(target, overwrite=False),
    ):
        pytest.fail("the block must not run")
    assert target.read_text() == "old"


def test_a_folder_is_never_replaced_by_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="is a folder; give the name of a file"):
        refuse_existing_file(tmp_path, overwrite=True)


def test_a_new_file_has_the_mode_that_open_would_give(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    with atomic_file(tmp_path / "atomic") as temporary:
        temporary.write_text("x")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_appears_only_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "runs" / "model"
    with atomic_folder(target) as temporary:
        (temporary / "config.json").write_text("{}")
        (temporary / "adapters").mkdir()
        (temporary / "adapters" / "weights").write_text("w")
        assert not target.exists()
    assert names(target) == ["adapters", "config.json"]
    assert (target / "adapters" / "weights").read_text() == "w"
    assert names(target.parent) == ["model"]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda error: type(error).__name__)
def test_a_failed_write_leaves_the_old_folder_and_nothing_else(
    tmp_path: Path, failure: BaseException
) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("old")

    def write() -> None:
        with atomic_folder(target, overwrite=True) as temporary:
            (temporary / "config.json").write_text("half of the n")
            raise failure

    with pytest.raises(type(failure)):
        write()
    assert names(tmp_path) == ["model"]
    assert (target / "config.json").read_text() == "old"


@pytest.mark.parametrize("renames_before_the_interrupt", [0, 1])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_an_interrupt_during_the_swap_leaves_a_whole_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames_before_the_interrupt: int, done: bool
) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("old")
    rename, calls = os.rename, []

    def interrupted(source: Path, destination: Path) -> None:
        calls.append(source)
        if len(calls) != renames_before_the_interrupt + 1:
            return rename(source, destination)
        if done:
            rename(source, destination)
        raise KeyboardInterrupt

    def write() -> None:
        with atomic_folder(target, overwrite=True) as temporary:
            (temporary / "config.json").write_text("new")
            monkeypatch.setattr(os, "rename", interrupted)

    with pytest.raises(KeyboardInterrupt):
        write()
    replaced = renames_before_the_interrupt == 1 and done
    assert (target / "config.json").read_text() == ("new" if replaced else "old")
    assert names(tmp_path) == ["model"]


def test_overwrite_replaces_a_model_folder_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("old")
    (target / "stale.safetensors").write_text("old")
    with atomic_folder(target, overwrite=True) as temporary:
        (temporary / "config.json").write_text("new")
    assert names(target) == ["config.json"]
    assert names(tmp_path) == ["model"]


def test_an_empty_folder_counts_as_absent(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with atomic_folder(tmp_path / "model") as temporary:
        (temporary / "config.json").write_text("new")
    assert names(tmp_path / "model") == ["config.json"]


def test_a_full_folder_is_refused_without_overwrite(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with (
        pytest.raises(FileExistsError, match="is not empty; add --overwrite"),
        atomic_folder(tmp_path),
    ):
        pytest.fail("the block must not run")


def test_overwrite_never_deletes_a_folder_that_openelm_did_not_write(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with (
        pytest.raises(FileExistsError, match="did not write"),
        atomic_folder(tmp_path, overwrite=True),
    ):
        pytest.fail("the block must not run")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_core_ml_package_may_be_overwritten(tmp_path: Path) -> None:
    package = tmp_path / "model.mlpackage"
    package.mkdir()
    (package / "Manifest.json").write_text("{}")
    refuse_existing_folder(package, overwrite=True)


def test_a_file_is_never_replaced_by_a_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.write_text("a file")
    with pytest.raises(FileExistsError, match="is a file; give the name of a folder"):
        refuse_existing_folder(target, overwrite=True)

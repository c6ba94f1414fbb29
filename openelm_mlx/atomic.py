"""Files and folders appear whole or not at all: written beside the target, then renamed.

A full disk, an exception or Ctrl-C leaves what was there before.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MARKERS = (
    *("config.json", "openelm.json", "adapter_config.json", "metrics.jsonl", "metadata.json"),
    "state.json",
)


@contextmanager
def atomic_file(target: str | Path, *, overwrite: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the target's folder; rename it to ``target`` on success.

    Args:
        target: the file to appear; missing parent folders are made.
        overwrite: whether a file that is there may be replaced.

    Raises:
        FileExistsError: if ``target`` exists and ``overwrite`` is false, or it is a folder.
    """
    target = Path(target)
    refuse_existing_file(target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(
        prefix=f".{target.name}.", suffix=f".tmp{target.suffix}", dir=target.parent
    )
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_umask())
        _fsync(temporary)
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        _name_target(error, target)
        raise


@contextmanager
def atomic_folder(target: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside ``target``; rename it to ``target`` on success.

    Args:
        target: the folder to appear; missing parents are made; an empty folder counts as absent.
        overwrite: whether a model, adapter or run folder that is there is replaced as a whole.

    Raises:
        FileExistsError: see :func:`refuse_existing_folder`.
    """
    target = Path(target)
    refuse_existing_folder(target, overwrite=overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    suffix = f".tmp{target.suffix}"  # Core ML's tools go by the suffix .mlpackage
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=suffix, dir=target.parent))
    try:
        yield temporary
        os.chmod(temporary, 0o777 & ~_umask())
        flush(temporary)
        _swap(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        _name_target(error, target)
        raise


def flush(folder: Path) -> None:
    """Wait until all files below a folder are on the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            _fsync(file)


def refuse_existing_file(target: str | Path, *, overwrite: bool) -> None:
    """Check early, before slow work, that :func:`atomic_file` will be allowed to write.

    Raises:
        FileExistsError: if ``target`` exists and ``overwrite`` is false, or it is a folder.
    """
    target = Path(target)
    if target.is_dir():
        raise FileExistsError(f"{target} is a folder; give the name of a file")
    if target.exists() and not overwrite:
        raise FileExistsError(f"{target} exists; add --overwrite to replace it")


def refuse_existing_folder(target: str | Path, *, overwrite: bool) -> None:
    """Check early, before slow work, that :func:`atomic_folder` will be allowed to write.

    Raises:
        FileExistsError: if ``target`` is a file, or holds anything and ``overwrite`` is false, or
            holds nothing that marks it as a model, adapter, package or run folder.
    """
    target = Path(target)
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file; give the name of a folder")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise FileExistsError(f"{target} is not empty; add --overwrite to replace it")
    names = {p.name for p in target.iterdir()}
    if not names & set(_MARKERS) and target.suffix != ".mlpackage":
        raise FileExistsError(
            f"{target} holds files that openelm did not write, so --overwrite will not delete it; "
            "give another folder"
        )


def _swap(temporary: Path, target: Path) -> None:
    if not target.exists():
        os.rename(temporary, target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    old = aside / target.name
    try:
        os.rename(target, old)
        os.rename(temporary, target)
    except BaseException:
        if old.exists() and not target.exists():
            os.rename(old, target)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _name_target(error: BaseException, target: Path) -> None:
    """Let "No space left on device" and the like say of which file."""
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        error.filename = str(target)


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

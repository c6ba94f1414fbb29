"""A folder on this machine or a repository on the Hugging Face Hub -> a local folder.

The only module that talks to the Hub; ``huggingface_hub`` goes on after a dropped connection, keeps
finished files in its cache, and reads HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE.
"""

import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

# One set for all commands: a folder in the cache is complete for all of them when offline.
MODEL_FILES = (
    *("*.safetensors", "*.json", "tokenizer.model", "*.jinja", "weights*.npz"),
    *("LICENSE*", "README.md"),
)
TORCH_FILES = ("pytorch_model*.bin",)  # fetched only where there are no safetensors
TOKENIZER_FILES = (
    *("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "generation_config.json"),
)
_REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def local_or_download(
    path_or_repo: str | Path,
    *,
    revision: str | None = None,
    patterns: Sequence[str] = MODEL_FILES,
) -> Path:
    """Find a folder, or download the named repository into the Hub's cache.

    Args:
        path_or_repo: a folder, or a repository id such as ``apple/OpenELM-270M``.
        revision: branch, tag or commit of the repository.
        patterns: file names to download; PyTorch's ``.bin`` files too where there are no others.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: if it is neither a folder nor looks like a repository id, or the Hub
            has no such repository or revision.
        ConnectionError: if the Hub cannot be reached and nothing is cached.
        PermissionError: if the repository is gated or private.
        ValueError: if a revision is asked of a folder.
    """
    path = Path(path_or_repo).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(
                f"{path_or_repo} is a folder here and has no revision {revision!r}; leave out "
                "--revision, or give a Hub repository"
            )
        return path
    name = str(path_or_repo)
    if path.exists() or not _REPO_ID.fullmatch(name) or name.startswith("."):
        what = "is a file, not a model folder" if path.exists() else "does not exist"
        raise FileNotFoundError(
            f"{name} {what}; give a folder with config.json, or a Hub repository such as "
            "apple/OpenELM-270M"
        )
    folder = download(name, revision=revision, patterns=patterns)
    if patterns is MODEL_FILES and not any(
        found for kind in ("*.safetensors", "weights*.npz") for found in folder.glob(kind)
    ):
        folder = download(name, revision=revision, patterns=(*patterns, *TORCH_FILES))
    return folder


def download(repo: str, *, revision: str | None, patterns: Sequence[str]) -> Path:
    """Download the matching files of a repository; see :func:`local_or_download`."""
    from huggingface_hub import errors, snapshot_download

    _quieten()
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns)))
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{repo} is gated: accept its licence on the Hub, then `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"{repo} has no revision {revision!r} on the Hub") from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{repo} is neither a folder here nor a repository on the Hub (private ones need "
            "`hf auth login` or HF_TOKEN)"
        ) from error
    except errors.HFValidationError as error:
        raise FileNotFoundError(f"{repo} is neither a folder here nor a repository id") from error
    except (OSError, errors.HTTPError) as error:  # type: ignore[attr-defined]  # httpx's
        raise _not_downloaded(repo, error) from error


def snapshot_revision(folder: Path) -> str | None:
    """The commit of a folder in the Hub's cache, None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def _not_downloaded(repo: str, error: Exception) -> OSError:
    """The error for everything that is not the Hub's plain no."""
    status = _status(error)
    if status in (401, 403):
        return PermissionError(
            f"{repo} may not be read (HTTP {status}): {_first_line(error)}; check HF_TOKEN or "
            "`hf auth login`"
        )
    return ConnectionError(
        f"{repo} is not a folder here, not complete in the local cache, and cannot be downloaded: "
        f"{_first_line(error)}; check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
    )


def _status(error: BaseException | None) -> int | None:
    """The HTTP status behind an error, None where no answer came."""
    while error is not None:
        response = getattr(error, "response", None)
        if response is not None:
            return int(response.status_code)
        error = error.__cause__
    return None


def _quieten() -> None:
    """Show progress only on a terminal, unless HF_HUB_DISABLE_PROGRESS_BARS says otherwise."""
    from huggingface_hub.constants import HF_HUB_DISABLE_PROGRESS_BARS
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    if HF_HUB_DISABLE_PROGRESS_BARS is None and not sys.stderr.isatty():
        disable_progress_bars()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")

"""The folder or repository that a conversion starts from: config, tokenizer, licence, hashes.

Shared by the converters that read model folders; knows nothing of what they write.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.licence import copy_licence, licence_name
from openelm_mlx.chat_template import is_instruct
from openelm_mlx.checkpoint import load_args
from openelm_mlx.config import ModelArgs
from openelm_mlx.fitting import fitting_model, settle_tying, with_huggingface_names
from openelm_mlx.hub import local_or_download, snapshot_revision
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tokenizer_files import has_tokenizer
from openelm_mlx.tokenizer_search import load_tokenizer
from openelm_mlx.weight_files import (
    StoredTensor,
    find_weight_files,
    load_tensor,
    open_weights,
    read_json,
    write_json,
)

PROVENANCE = "openelm.json"
_GENERATION = "generation_config.json"
_TABLES = ("transformer.token_embeddings.weight", "lm_head.weight", "transformer.classifier.weight")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A model folder on this machine, perhaps a snapshot of a Hub repository."""

    folder: Path
    name: str  # the repository, or the folder's own name: never a path of the user's machine
    repo: str | None  # the repository where one was named
    args: ModelArgs

    @classmethod
    def find(cls, path_or_repo: str | Path, *, revision: str | None = None) -> "Source":
        """Find or download it and read its config.

        Raises:
            FileNotFoundError: if there is no such folder or repository, or it has no config.
            ConnectionError: if it cannot be downloaded.
            PermissionError: if the repository is gated or private.
            ValueError: if the config describes no OpenELM model.
        """
        folder = local_or_download(path_or_repo, revision=revision)
        local = Path(path_or_repo).expanduser().is_dir()
        name = folder.resolve().name if local else str(path_or_repo)
        if local and snapshot_revision(folder):  # …/models--apple--OpenELM-270M/snapshots/COMMIT
            name = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
        repo = None if local else str(path_or_repo)
        return cls(folder=folder, name=name, repo=repo, args=load_args(folder))

    @contextmanager
    def open(self) -> Iterator[tuple[ModelArgs, dict[str, StoredTensor]]]:
        """Check the tensors against the config and yield both, before any layer is loaded.

        Yields:
            The architecture, with tying settled, and every tensor under its name in the model, a
            second copy of the head left out; take them out of the dictionary as they are used.

        Raises:
            FileNotFoundError: if there are no weights.
            ValueError: if a file is damaged, or tensors and config do not fit together.
        """
        with open_weights(self.folder) as found:
            tensors = with_huggingface_names(found)
            found.clear()  # or every tensor would stay in memory after its use
            args = settle_tying(self.args, read_json(self.folder / "config.json"), tensors)
            tables = {n: load_tensor(tensors.pop(n)) for n in _TABLES if n in tensors}
            tensors |= Model(args).sanitize(tables)
            fitting_model(args, tensors, source=str(self.folder))
            yield args, tensors

    @property
    def licence(self) -> str | None:
        """Its licence: as recorded when it was converted, else by its own files."""
        recorded = self._parent().get("licence")
        return recorded if isinstance(recorded, str) else licence_name(self.folder)

    @property
    def is_apples(self) -> bool:
        """Whether the weights are one of Apple's releases, as far as can be told."""
        names = (self.name, self._parent().get("source", ""), self.licence or "")
        return any(str(name).lower().startswith(("apple/", "apple-")) for name in names)

    def provenance(self, form: str) -> dict[str, Any]:
        """Entries for ``openelm.json``; reads the weight files once more for their hashes.

        Args:
            form: what the folder is, for example "Hugging Face".
        """
        files = find_weight_files(self.folder)
        hashes = {file.name: sha256(file) for file in files}
        entries: dict[str, Any] = {"source": self.name, "format": form}
        entries["revision"] = snapshot_revision(self.folder)
        entries["sha256"] = hashes[files[0].name] if len(files) == 1 else hashes
        entries["licence"] = self.licence
        parent = {k: v for k, v in self._parent().items() if k != "versions"}
        entries["made_from"] = parent or None
        return {key: value for key, value in entries.items() if value is not None}

    def companions(
        self, tokenizer: str | Path | None, *, instruct: bool, output: str | Path
    ) -> tuple[Tokenizer | None, bool]:
        """The tokenizer for the new folder, and whether a chat template goes with it.

        A template goes into folders that are named Instruct or asked to be, and from one folder of
        ours into the next. A tokenizer from elsewhere may bring another model's template: dropped.

        Args:
            tokenizer: file, folder or Hub id, in place of the source's own.
            instruct: asked by the user.
            output: the folder to be.
        """
        own = tokenizer is None and has_tokenizer(self.folder)
        found = load_tokenizer(
            tokenizer,
            model_path=self.folder,
            repo=self.repo,
            vocab_size=self.args.vocab_size,
            required=False,
        )
        if found is not None and not own:
            found.chat_template = None
        kept = (
            own and found is not None and found.chat_template is not None and bool(self._parent())
        )
        names = (self.name, Path(output).name)
        return found, instruct or kept or any(is_instruct(name) for name in names)

    def carry_over(self, folder: Path) -> None:
        """Copy what no command reads but users need: licence texts, generation settings.

        Args:
            folder: the new one, with its ``generation_config.json``, whose ids win.
        """
        copy_licence(self.folder, folder)
        theirs = self.folder / _GENERATION
        if theirs.is_file():
            ours = folder / _GENERATION
            write_json(ours, {**read_json(theirs), **read_json(ours)})

    def _parent(self) -> dict[str, Any]:
        """The provenance that a folder of ours carries, empty for others."""
        file = self.folder / PROVENANCE
        return read_json(file) if file.is_file() else {}


def sha256(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()

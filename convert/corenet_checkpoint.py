"""An open CoreNet ``.pt``: weights told from adapters, held against a config, and its history.

Reads shapes and types; the values stay in the file.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from convert.corenet_config import CorenetConfig, folder_rows, parameter_shapes, table_rows
from convert.corenet_lora import base_name, is_adapter
from convert.dtypes import dtype_name
from convert.names import CORENET_ROWS, HUB_ROWS, to_huggingface
from convert.pt_file import PtFile, PtTensor
from openelm_mlx.config import ModelArgs
from openelm_mlx.mismatch import check_tensors

PADDED = (CORENET_ROWS, HUB_ROWS)  # a file with the first fits a config with the second


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The tensors of an open file, by what they are."""

    path: Path
    weights: dict[str, PtTensor]  # under Hugging Face's names
    adapters: dict[str, PtTensor]  # under CoreNet's
    progress: dict[str, int]  # iterations and epoch of a training checkpoint

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face's names -> shapes of the weights."""
        return {name: tensor.shape for name, tensor in self.weights.items()}


def divide(archive: PtFile) -> Checkpoint:
    """Sort the tensors of a model-only, training, averaged or LoRA / DoRA file.

    Of a training checkpoint only ``model_state_dict`` is used.

    Raises:
        ValueError: if there is no state dict, or two of its names mean one parameter.
    """
    weights: dict[str, PtTensor] = {}
    adapters: dict[str, PtTensor] = {}
    for name, tensor in archive.state_dict().items():
        if is_adapter(name):
            adapters[name] = tensor
            continue
        new = to_huggingface(base_name(name))
        if new in weights:
            raise ValueError(f"{archive.path}: two tensors are {new}, one of them called {name}")
        weights[new] = tensor
    tree = archive.tree
    progress = {k: tree[k] for k in ("iterations", "epoch") if isinstance(tree.get(k), int)}
    return Checkpoint(path=archive.path, weights=weights, adapters=adapters, progress=progress)


def refuse_idle_flags(checkpoint: Checkpoint, flags: Mapping[str, object]) -> None:
    """Refuse settings that would do nothing with this kind of file.

    Args:
        checkpoint: the file.
        flags: name of the setting -> value; None or False where not given.

    Raises:
        ValueError: naming those that were given in vain.
    """
    idle: tuple[str, ...]
    if not checkpoint.adapters:
        what, idle = "holds a plain model, without LoRA tensors", ("base", "lora_alpha", "rslora")
    elif checkpoint.weights:
        what, idle = "holds a whole model", ("base",)
    else:
        what, idle = "holds adapters alone", ("preset", "tokenizer", "dtype", "instruct")
    given = [name for name in idle if flags.get(name) not in (None, False)]
    if given:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{checkpoint.path} {what}: {named} would do nothing; leave it out")


def fitting_args(
    checkpoint: Checkpoint, config: CorenetConfig, vocab_size: int | None
) -> ModelArgs:
    """The architecture with the folder's rows, once names and shapes are known to fit.

    Args:
        checkpoint: the file.
        config: what describes it.
        vocab_size: rows asked for; None leaves it to the config and the file.

    Raises:
        ValueError: naming all that does not fit at once.
    """
    rows = table_rows(checkpoint.shapes)
    kept = folder_rows(rows, vocab_size, config.vocab_size)
    resizable = vocab_size is not None or config.vocab_size is None or (rows, kept) == PADDED
    expected = config.args.with_vocab_size(rows if resizable else kept)
    source = f"{checkpoint.path} (config: {config.source})"
    try:
        check_tensors(parameter_shapes(expected), checkpoint.shapes, source=source)
    except ValueError as error:
        if resizable or rows == kept:
            raise
        raise ValueError(
            f"{error}; the config has {kept} vocabulary rows and the file {rows}, of which "
            "--vocab-size N takes the first N"
        ) from error
    return config.args.with_vocab_size(kept)


def check_types(checkpoint: Checkpoint, dtype: mx.Dtype | None) -> None:
    """Refuse weights that no model can have.

    Args:
        checkpoint: the file.
        dtype: what they will be cast to; None keeps them.

    Raises:
        ValueError: if some are integers, or float64 and not to be cast.
    """
    allowed = {mx.float16, mx.bfloat16, mx.float32} | ({mx.float64} if dtype else set())
    odd = [name for name, tensor in checkpoint.weights.items() if tensor.dtype not in allowed]
    if odd:
        kind = dtype_name(checkpoint.weights[odd[0]].dtype)
        advice = "give --dtype float32" if kind == "float64" else "is the file quantised?"
        raise ValueError(
            f"{checkpoint.path}: {len(odd)} tensors are not float16, bfloat16 or float32, first "
            f"{odd[0]} ({kind}); {advice}"
        )


def provenance(checkpoint: Checkpoint, config: CorenetConfig, args: ModelArgs) -> dict[str, object]:
    """What ``openelm.json`` says of the file; reads it once more for its hash."""
    with checkpoint.path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    entries: dict[str, object] = {
        "source": checkpoint.path.name,
        "format": "CoreNet",
        "sha256": digest,
        "config": Path(config.source).name,  # a path would tell of the user's machine
        **checkpoint.progress,
    }
    rows = table_rows(checkpoint.shapes)
    if rows != args.vocab_size:
        entries["corenet_vocab_size"] = rows
    if config.padding_index is not None:
        entries["corenet_padding_index"] = config.padding_index
    return entries

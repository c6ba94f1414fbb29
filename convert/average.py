"""The mean of several checkpoints, ``.pt`` files or model folders, as CoreNet averages them.

Each tensor's mean is taken in float64 over the checkpoints that have it, and stored in the type it
has in the first of them: apple/corenet@1aa3acd ``checkpoint_utils.average_ckpts``.
"""

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

from convert.licence import copy_licence
from convert.names import ROWS_FILE
from openelm_mlx.atomic import (
    atomic_file,
    atomic_folder,
    refuse_existing_file,
    refuse_existing_folder,
)
from openelm_mlx.config import ModelArgs
from openelm_mlx.fitting import quantization_of, with_huggingface_names
from openelm_mlx.weight_files import (
    ShardWriter,
    StoredTensor,
    load_tensor,
    open_tensor_file,
    open_weights,
    read_json,
    write_tensor_file,
)

logger = logging.getLogger(__name__)

_ADVICE = "give CoreNet .pt files, or model folders, but not both"


@dataclass(frozen=True)
class _Source:
    """A checkpoint that is open, its values unread."""

    path: Path
    tensors: dict[str, StoredTensor]


def average(
    checkpoints: Sequence[str | Path], output: str | Path, *, overwrite: bool = False
) -> Path:
    """Average checkpoints of one model, for example the last five of a training run.

    Args:
        checkpoints: CoreNet ``.pt`` files (of training checkpoints, the weights), or model folders.
        output: a ``.pt`` file, or a model folder, whose tokenizer and settings are the first's.
        overwrite: replace what is there.

    Returns:
        ``output``.

    Raises:
        FileNotFoundError: if a checkpoint is missing.
        FileExistsError: if ``output`` is there and may not be replaced.
        ValueError: if there are none, they are of several kinds, or tensors differ in shape.
    """
    paths, output = [Path(path).expanduser() for path in checkpoints], Path(output)
    if not paths:
        raise ValueError(f"no checkpoint to average; {_ADVICE}")
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        raise FileNotFoundError(f"no such checkpoint: {', '.join(missing)}; {_ADVICE}")
    folders = [path.is_dir() for path in paths]
    if all(folders):
        _average_folders(paths, output, overwrite=overwrite)
    elif not any(folders):
        _average_files(paths, output, overwrite=overwrite)
    else:
        raise ValueError(
            f"{paths[folders.index(True)]} is a folder and others are files; {_ADVICE}"
        )
    return output


def _average_files(paths: Sequence[Path], output: Path, *, overwrite: bool) -> None:
    from convert.pt_file import write  # these imports would slow `--help` down

    refuse_existing_file(output, overwrite=overwrite)
    foreign = [str(path) for path in paths if path.suffix not in (".pt", ".pth", ".bin")]
    if foreign:
        raise ValueError(f"{', '.join(foreign)} is no .pt file; {_ADVICE}")
    with ExitStack() as stack:
        sources = [_Source(p, stack.enter_context(open_tensor_file(p))) for p in paths]
        _check_shapes(sources)
        with atomic_file(output, overwrite=overwrite) as temporary:
            write(temporary, dict(_means(sources)))


def _average_folders(paths: Sequence[Path], output: Path, *, overwrite: bool) -> None:
    from openelm_mlx.checkpoint import with_dtype, write_companions
    from openelm_mlx.tokenizer_files import has_tokenizer
    from openelm_mlx.tokenizer_search import load_tokenizer

    refuse_existing_folder(output, overwrite=overwrite)
    args = _common_args(paths)
    own = has_tokenizer(paths[0])
    tokenizer = (
        load_tokenizer(None, model_path=paths[0], vocab_size=args.vocab_size) if own else None
    )
    with ExitStack() as stack:
        sources = [
            _Source(p, with_huggingface_names(stack.enter_context(open_weights(p)))) for p in paths
        ]
        _check_shapes(sources)
        args = with_dtype(args, sources[0].tensors)
        with atomic_folder(output, overwrite=overwrite) as temporary:
            writer = ShardWriter(temporary)
            for name, mean in _means(sources):
                writer.add(name, mean)
            writer.close()
            _average_rows(paths, temporary)
            write_companions(
                temporary,
                args,
                tokenizer=tokenizer,
                instruct=tokenizer is not None and tokenizer.chat_template is not None,
                provenance=_provenance(paths),
            )
            copy_licence(paths[0], temporary)


def _average_rows(paths: Sequence[Path], output: Path) -> None:
    """The rows that CoreNet has beyond the vocabulary, where folders kept them."""
    files = [path / ROWS_FILE for path in paths if (path / ROWS_FILE).is_file()]
    if not files:
        return
    with ExitStack() as stack:
        sources = [_Source(f, stack.enter_context(open_tensor_file(f))) for f in files]
        _check_shapes(sources)
        write_tensor_file(output / ROWS_FILE, dict(_means(sources)))


def _provenance(paths: Sequence[Path]) -> dict[str, object]:
    """The folders' names, and the first's licence where it is recorded."""
    file = paths[0] / "openelm.json"
    licence = read_json(file).get("licence") if file.is_file() else None
    entries: dict[str, object] = {"average_of": [path.resolve().name for path in paths]}
    return entries if licence is None else entries | {"licence": licence}


def _common_args(paths: Sequence[Path]) -> ModelArgs:
    """The architecture, which all folders must share."""
    from openelm_mlx.checkpoint import load_args

    first = load_args(paths[0])
    for path in paths:
        args = load_args(path)
        if quantization_of(args) is not None:
            raise ValueError(f"{path} is quantised and cannot be averaged; average, then quantise")
        if replace(args, extra={}) != replace(first, extra={}):
            raise ValueError(f"{path} is another model than {paths[0]}: their configs differ")
    return first


def _check_shapes(sources: Sequence[_Source]) -> None:
    """Refuse tensors of one name and several shapes; say which are not everywhere."""
    seen: dict[str, tuple[Path, tuple[int, ...]]] = {}
    counts: dict[str, int] = {}
    for source in sources:
        for name, tensor in source.tensors.items():
            path, shape = seen.setdefault(name, (source.path, tuple(tensor.shape)))
            counts[name] = counts.get(name, 0) + 1
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name} is {list(tensor.shape)} in {source.path} and {list(shape)} in {path}; "
                    "average checkpoints of one model"
                )
    partial = [name for name, count in counts.items() if count < len(sources)]
    if partial:
        logger.warning(
            "%d of %d tensors are not in all %d checkpoints, first %s; the mean is over those that "
            "have them",
            *(len(partial), len(counts), len(sources), partial[0]),
        )


def _means(sources: Sequence[_Source]) -> Iterator[tuple[str, mx.array]]:
    """Name and mean of one tensor after another; each is forgotten by its source."""
    names = dict.fromkeys(name for source in sources for name in source.tensors)
    for name in tqdm(names, desc="tensors", disable=None, leave=False):
        stored = [source.tensors.pop(name) for source in sources if name in source.tensors]
        yield name, _mean(stored)


def _mean(stored: list[StoredTensor]) -> mx.array:
    dtype, count = stored[0].dtype, len(stored)
    total: mx.array | None = None
    with mx.stream(mx.cpu):  # the only one with float64
        while stored:
            array = load_tensor(stored.pop(0)).astype(mx.float64)
            total = array if total is None else total + array
            mx.eval(total)
        assert total is not None
        mean = (total / mx.array(count, dtype=mx.float64)).astype(dtype)
        mx.eval(mean)
    return mean


def add_average_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``openelm average``."""
    parser.add_argument("checkpoints", nargs="+", metavar="CKPT", help=".pt files or model folders")
    parser.add_argument("--output", required=True, metavar="FILE_OR_DIR", help=".pt file or folder")
    parser.add_argument("--overwrite", action="store_true", help="replace the output")


def run_average(args: argparse.Namespace) -> int:
    """Run ``openelm average``."""
    written = average(args.checkpoints, args.output, overwrite=args.overwrite)
    sys.stdout.write(f"{written}\n")
    return 0

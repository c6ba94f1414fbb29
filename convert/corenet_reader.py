"""CoreNet's ``.pt`` -> model folder, tensor by tensor; the work behind ``corenet.from_corenet``.

Whole LoRA / DoRA files become DIR and DIR/adapters; files of adapters alone an adapter folder.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
from tqdm import tqdm

from convert.corenet_checkpoint import (
    PADDED,
    Checkpoint,
    check_types,
    divide,
    fitting_args,
    provenance,
    refuse_idle_flags,
)
from convert.corenet_config import folder_rows, parameter_shapes, read_config, resolve, table_rows
from convert.corenet_lora import Scaling, adapter_rows, convert_adapters
from convert.corenet_rows import read_rows
from convert.dtypes import DTYPES, CastReport, cast, dtype_name, parse_dtype, warn_float16
from convert.names import ROWS_FILE, TABLES, split_rows
from convert.pt_file import PtFile
from openelm_mlx.adapter_args import AdapterArgs
from openelm_mlx.adapter_files import write_adapter_files, write_adapter_folder
from openelm_mlx.atomic import atomic_folder, refuse_existing_folder
from openelm_mlx.chat_template import is_instruct
from openelm_mlx.checkpoint import load_args, with_dtype, write_companions
from openelm_mlx.config import ModelArgs
from openelm_mlx.tokenizer_search import load_tokenizer
from openelm_mlx.weight_files import ShardWriter, write_tensor_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReadSettings:
    """The settings of ``from_corenet``, which says what they mean."""

    config: str | Path | None
    preset: str | None
    tokenizer: str | Path | None
    vocab_size: int | None
    dtype: str | None
    lora_alpha: float | None
    rslora: bool
    base: str | Path | None
    instruct: bool


def convert_file(file: Path, output: Path, settings: ReadSettings, *, overwrite: bool) -> None:
    """Make the folder that a file calls for; see :func:`convert.corenet.from_corenet`."""
    refuse_existing_folder(output, overwrite=overwrite)
    with PtFile(file) as archive:
        checkpoint = divide(archive)
        refuse_idle_flags(checkpoint, vars(settings))
        if checkpoint.weights:
            _convert_model(checkpoint, output, settings, overwrite=overwrite)
        else:
            tensors, args = _adapters_alone(checkpoint, settings)
            write_adapter_folder(output, tensors, args, overwrite=overwrite)


def _convert_model(
    checkpoint: Checkpoint, output: Path, settings: ReadSettings, *, overwrite: bool
) -> None:
    """Check all that can be checked from shapes, then write."""
    found = resolve(settings.config, settings.preset, checkpoint.shapes)
    args = fitting_args(checkpoint, found, settings.vocab_size)
    dtype = parse_dtype(settings.dtype)
    check_types(checkpoint, dtype)
    tokenizer = None
    if settings.tokenizer is not None:
        tokenizer = load_tokenizer(settings.tokenizer, vocab_size=args.vocab_size)
        tokenizer.chat_template = None  # it would be another model's
    named_instruct = is_instruct(output.name) or is_instruct(checkpoint.path.name)
    scaling = Scaling(alpha=settings.lora_alpha, use_rslora=settings.rslora, rules=found.rules)
    adapters = _adapters_within(checkpoint, args, scaling) if checkpoint.adapters else None
    with atomic_folder(output, overwrite=overwrite) as temporary:
        args = _write_weights(checkpoint, temporary, args, dtype)
        if adapters is not None:
            (temporary / "adapters").mkdir()
            write_adapter_files(temporary / "adapters", *adapters)
        write_companions(
            temporary,
            args,
            tokenizer=tokenizer,
            instruct=settings.instruct or named_instruct,
            provenance=provenance(checkpoint, found, args),
        )


def _write_weights(
    checkpoint: Checkpoint, folder: Path, args: ModelArgs, dtype: mx.Dtype | None
) -> ModelArgs:
    """Write one tensor after another; return ``args`` with the type they are stored in."""
    writer, report = ShardWriter(folder), CastReport()
    rest: dict[str, mx.array] = {}
    for name in tqdm(checkpoint.weights, desc="tensors", disable=None, leave=False):
        tensor = checkpoint.weights[name]
        array = cast(name, tensor.load(), dtype, report)
        if name in TABLES:
            array, beyond = split_rows(array, args.vocab_size)
            if beyond is not None:
                rest[name] = beyond
        writer.add(name, array)
    writer.close()
    if rest:
        write_tensor_file(folder / ROWS_FILE, rest)
        _say_split(checkpoint, args.vocab_size)
    report.log(dtype)
    args = with_dtype(args, checkpoint.weights)
    if dtype is not None:
        args = replace(args, extra={**args.extra, "torch_dtype": dtype_name(dtype)})
    warn_float16(args.num_transformer_layers, args.model_dim, DTYPES[args.extra["torch_dtype"]])
    return args


def _say_split(checkpoint: Checkpoint, vocab_size: int) -> None:
    rows = table_rows(checkpoint.shapes)
    logger.warning(
        "%s has %d vocabulary rows: the first %d go into the folder, the other %d%s are kept in "
        "its %s, from which to-corenet puts them back; --vocab-size %d leaves all in the model",
        *(checkpoint.path, rows, vocab_size, rows - vocab_size),
        " (padding and spare)" if (rows, vocab_size) == PADDED else "",
        *(ROWS_FILE, rows),
    )


def _adapters_within(
    checkpoint: Checkpoint, args: ModelArgs, scaling: Scaling
) -> tuple[dict[str, mx.array], AdapterArgs]:
    """An adapter folder's content, of a file that has the base weights too."""
    return convert_adapters(
        checkpoint.adapters,
        checkpoint.shapes,
        scaling=scaling,
        rows=table_rows(checkpoint.shapes),
        vocab_size=args.vocab_size,
        source=str(checkpoint.path),
    )


def _adapters_alone(
    checkpoint: Checkpoint, settings: ReadSettings
) -> tuple[dict[str, mx.array], AdapterArgs]:
    """An adapter folder's content, of a file without base weights, for the model in ``base``."""
    base, config = settings.base, settings.config
    if base is None:
        raise ValueError(
            f"{checkpoint.path} holds {len(checkpoint.adapters)} LoRA tensors and no model; give "
            "the folder of the model they belong to with --base"
        )
    args = load_args(base)
    if settings.vocab_size not in (None, args.vocab_size):
        raise ValueError(
            f"--vocab-size {settings.vocab_size} is not the {args.vocab_size} rows of {base}, for "
            "which the adapters are; leave it out"
        )
    rows = adapter_rows(checkpoint.adapters) or args.vocab_size
    kept = next(iter(read_rows(Path(base), args).values()), None)
    padded = args.vocab_size + (0 if kept is None else kept.shape[0])
    fits = rows == padded or folder_rows(rows, settings.vocab_size, None) == args.vocab_size
    rules = read_config(config).rules if config is not None else ()
    return convert_adapters(
        checkpoint.adapters,
        parameter_shapes(args),
        scaling=Scaling(alpha=settings.lora_alpha, use_rslora=settings.rslora, rules=rules),
        rows=rows if fits else args.vocab_size,
        vocab_size=args.vocab_size,
        source=str(checkpoint.path),
    )

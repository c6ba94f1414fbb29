"""Hugging Face checkpoints <-> model folders, tensor by tensor, tokenizer included.

Local or from the Hub; safetensors, sharded, ``.bin``, quantised by MLX. No remote code is ever run:
the folder for Apple's ``modeling_openelm.py`` only names where that file lies.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from convert.dtypes import DTYPES, CastReport, cast, dtype_name, parse_dtype, warn_float16
from convert.huggingface_config import CODE, apples_args, auto_map
from convert.source import PROVENANCE, Source
from openelm_mlx.adapter_layers import dense_weight, is_quantized
from openelm_mlx.atomic import atomic_folder, refuse_existing_folder
from openelm_mlx.checkpoint import load_model, with_dtype, write_companions
from openelm_mlx.config import ModelArgs
from openelm_mlx.fitting import quantization_of
from openelm_mlx.weight_files import (
    SHARD_BYTES,
    ShardWriter,
    StoredTensor,
    load_tensor,
    read_json,
)


def from_hub(
    path_or_repo: str | Path,
    output: str | Path,
    *,
    tokenizer: str | Path | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    instruct: bool = False,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Make a complete model folder of a Hugging Face, mlx_lm or CoreNet-MLX one.

    Args:
        path_or_repo: a folder, or a Hub repository.
        output: the model folder to write.
        tokenizer: file, folder or Hub id, in place of the source's own; Apple's have none.
        dtype: float32, float16 or bfloat16; None keeps every value bit for bit.
        revision: branch, tag or commit of the repository.
        instruct: write the chat template; names with "Instruct" in them get it anyway.
        overwrite: replace a folder that is there.
        shard_bytes: the size at which the next weight file begins.

    Returns:
        ``output``.

    Raises:
        FileNotFoundError: if the folder, the repository, the revision or a file is missing.
        FileExistsError: if ``output`` is there and may not be replaced.
        ConnectionError: if the Hub cannot be reached and the cache is not complete.
        PermissionError: if the repository is gated or private.
        ValueError: if a file is damaged, tensors do not fit, or a setting is wrong.
    """
    output = Path(output)
    refuse_existing_folder(output, overwrite=overwrite)
    target = parse_dtype(dtype)
    source = Source.find(path_or_repo, revision=revision)
    if target is not None and quantization_of(source.args):
        raise ValueError(
            f"{path_or_repo} is quantised and keeps its types; leave out --dtype, or convert the "
            "repository it was made from"
        )
    with (
        source.open() as (args, tensors),
        atomic_folder(output, overwrite=overwrite) as temporary,
    ):
        args = _settled(with_dtype(args, tensors), target, source.name)
        writer = ShardWriter(temporary, shard_bytes)
        _write(tensors, writer, target, args)
        _write_rest(source, temporary, args, output, tokenizer=tokenizer, instruct=instruct)
    return output


def to_hub_folder(
    folder: str | Path,
    output: str | Path,
    *,
    dequantize: bool = False,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a model folder as Apple's ``modeling_openelm.py`` reads it, with equal logits.

    An untied head is written under both of its names there, the config names Apple's code on the
    Hub in ``auto_map`` and types stay as they are. Apple's code needs transformers 4.

    Args:
        folder: a model folder.
        output: the folder to write.
        dequantize: unpack a quantised folder's weights.
        overwrite: replace a folder that is there.
        shard_bytes: the size at which the next weight file begins.

    Returns:
        ``output``.

    Raises:
        FileNotFoundError: if the folder or a file is missing.
        FileExistsError: if ``output`` is there and may not be replaced.
        ValueError: if the folder is quantised and not to be unpacked, damaged, or describes a
            model that Apple's code would build or compute otherwise.
    """
    output = Path(output)
    refuse_existing_folder(output, overwrite=overwrite)
    source = Source.find(folder)
    _check_quantization(source, dequantize)
    apples_args(source.args, str(folder))
    with (
        source.open() as (args, tensors),
        atomic_folder(output, overwrite=overwrite) as temporary,
    ):
        if dequantize:
            tensors = dict(_dequantized(source.folder))
        if not args.share_input_output_layers:  # BEHAVIOURS 15
            tensors["transformer.classifier.weight"] = tensors["lm_head.weight"]
        args = with_dtype(apples_args(args, str(folder)), tensors)
        _write(tensors, ShardWriter(temporary, shard_bytes, form="pt"), None, args)
        _write_rest(source, temporary, args, output, tokenizer=None, instruct=False)
    return output


def _write(
    tensors: dict[str, StoredTensor], writer: ShardWriter, dtype: mx.Dtype | None, args: ModelArgs
) -> None:
    """Cast and write one tensor after another, emptying the dictionary."""
    from tqdm import tqdm

    report = CastReport()
    for name in tqdm(sorted(tensors), desc="tensors", disable=None, leave=False):
        array = load_tensor(tensors.pop(name))
        if array.dtype == mx.float64 and dtype is None:
            raise ValueError(f"{name} is float64, which MLX cannot store; give --dtype float32")
        writer.add(name, cast(name, array, dtype, report))
    writer.close()
    report.log(dtype)
    stored = DTYPES.get(args.extra["torch_dtype"])
    warn_float16(args.num_transformer_layers, args.model_dim, stored)


def _write_rest(
    source: Source,
    folder: Path,
    args: ModelArgs,
    output: Path,
    *,
    tokenizer: str | Path | None,
    instruct: bool,
) -> None:
    """Write all but the weights: config, tokenizer, provenance, licence, generation settings."""
    found, template = source.companions(tokenizer, instruct=instruct, output=output)
    write_companions(
        folder,
        args,
        tokenizer=found,
        instruct=template,
        provenance=source.provenance("Hugging Face"),
    )
    source.carry_over(folder)


def _settled(args: ModelArgs, dtype: mx.Dtype | None, source: str) -> ModelArgs:
    """``args`` with the type to be written and code that is still found from the new folder."""
    extra = dict(args.extra)
    if dtype is not None:
        extra["torch_dtype"] = dtype_name(dtype)
    if "auto_map" in extra:
        extra["auto_map"] = auto_map(
            extra["auto_map"], source if source.startswith("apple/") else CODE
        )
    return replace(args, extra=extra)


def _check_quantization(source: Source, dequantize: bool) -> None:
    if quantization_of(source.args) and not dequantize:
        raise ValueError(
            f"{source.name} is quantised by MLX, which Apple's code cannot read; add --dequantize "
            "to unpack it, or give the folder it was made from"
        )
    if dequantize and not quantization_of(source.args):
        raise ValueError(f"{source.name} is not quantised; leave out --dequantize")


def _dequantized(folder: Path) -> Iterator[tuple[str, mx.array]]:
    """Every tensor of a quantised folder, unpacked, in the type of its norms."""
    model = load_model(folder, lazy=True)
    dtype = model.transformer.norm.weight.dtype
    modules: Any = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    for path, module in modules:
        if is_quantized(module):
            yield f"{path}.weight", dense_weight(module).astype(dtype)
        else:
            yield f"{path}.weight", module.weight


def add_huggingface_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``openelm convert huggingface``."""
    parser.add_argument("source", metavar="REPO_OR_DIR", help="Hub repository or local folder")
    parser.add_argument("--output", required=True, metavar="DIR", help="model folder to write")
    parser.add_argument("--tokenizer", help="tokenizer.model, tokenizer.json, folder or Hub id")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: the source's own")
    parser.add_argument("--revision", help="branch, tag or commit of the repository")
    parser.add_argument("--instruct", action="store_true", help="write the chat template too")
    parser.add_argument("--overwrite", action="store_true", help="replace the output")


def run_huggingface(args: argparse.Namespace) -> int:
    """Run ``openelm convert huggingface``."""
    written = from_hub(
        args.source,
        args.output,
        tokenizer=args.tokenizer,
        dtype=args.dtype,
        revision=args.revision,
        instruct=args.instruct,
        overwrite=args.overwrite,
    )
    sys.stdout.write(f"{written}\n{licence_line(written)}")
    return 0


def add_to_huggingface_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``openelm convert to-huggingface``."""
    parser.add_argument("folder", metavar="DIR", help="model folder")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--dequantize", action="store_true", help="unpack quantised weights")
    parser.add_argument("--overwrite", action="store_true", help="replace the output")


def run_to_huggingface(args: argparse.Namespace) -> int:
    """Run ``openelm convert to-huggingface``."""
    written = to_hub_folder(
        args.folder, args.output, dequantize=args.dequantize, overwrite=args.overwrite
    )
    sys.stdout.write(f"{written}\n{licence_line(written)}")
    return 0


def licence_line(folder: Path) -> str:
    """What is said of the licence of a folder just written; nothing if there is nothing to say."""
    provenance: dict[str, Any] = read_json(folder / PROVENANCE)
    licence = provenance.get("licence")
    if licence:
        return f"licence of the weights: {licence}\n"
    if Source.find(folder).is_apples:
        return "licence of the weights: Apple's, not named in the source; see its repository\n"
    return ""

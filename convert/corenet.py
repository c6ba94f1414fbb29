"""CoreNet ``.pt`` checkpoints <-> model folders: the two functions and their command lines.

Model-only, training and averaged files; whole LoRA / DoRA files become DIR and DIR/adapters. What
does the work is imported when called, so that ``--help`` is quick.
"""

import argparse
import sys
from pathlib import Path

from convert.dtypes import DTYPES


def from_corenet(
    file: str | Path,
    output: str | Path,
    *,
    config: str | Path | None = None,
    preset: str | None = None,
    tokenizer: str | Path | None = None,
    vocab_size: int | None = None,
    dtype: str | None = None,
    lora_alpha: float | None = None,
    rslora: bool = False,
    base: str | Path | None = None,
    instruct: bool = False,
    overwrite: bool = False,
) -> Path:
    """Make a model folder of a CoreNet checkpoint; every value stays as it is in the file.

    Args:
        file: model-only, averaged or ``training_checkpoint_*`` file, also with LoRA / DoRA.
        output: the model folder; adapters go to ``output/adapters``.
        config: CoreNet's YAML, its ``general_gpt`` mapping as JSON, or a config.json.
        preset: a published size; with neither, the shapes decide.
        tokenizer: file, folder or Hub id, saved into the folder.
        vocab_size: rows that go into the folder; the others are kept beside the weights, in
            ``corenet_rows.safetensors``. By default the config's, or 32000 of 32128.
        dtype: float32, float16 or bfloat16; None keeps the file's.
        lora_alpha: of LoRA / DoRA files; by default from the YAML.
        rslora: whether they were scaled by alpha / sqrt(rank).
        base: model folder of a file that holds adapters alone; ``output`` is the adapter folder.
        instruct: write the chat template too.
        overwrite: replace a folder that is there.

    Returns:
        ``output``.

    Raises:
        FileNotFoundError: if a file is missing.
        FileExistsError: if ``output`` is there and may not be replaced.
        ValueError: if the file is damaged, does not fit the config, or a setting is wrong.
    """
    from convert.corenet_reader import ReadSettings, convert_file

    settings = ReadSettings(
        config=config,
        preset=preset,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        dtype=dtype,
        lora_alpha=lora_alpha,
        rslora=rslora,
        base=base,
        instruct=instruct,
    )
    convert_file(Path(file).expanduser(), Path(output), settings, overwrite=overwrite)
    return Path(output)


def to_corenet(
    folder: str | Path,
    output_file: str | Path,
    *,
    vocab_size: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model folder as CoreNet's model-only ``.pt``, every value as it is.

    Args:
        folder: an unquantised model folder.
        output_file: the ``.pt``, which ``torch.load(..., weights_only=True)`` reads.
        vocab_size: rows of the file. By default the rows kept in ``corenet_rows.safetensors`` are
            put back, and without that file the vocabulary is written as it is; more rows are zero.
        overwrite: replace a file that is there.

    Returns:
        ``output_file``.

    Raises:
        FileNotFoundError: if the folder or its weights are missing.
        FileExistsError: if the file is there and may not be replaced.
        ValueError: if the folder is quantised, damaged, or ``vocab_size`` would lose rows.
    """
    from convert.corenet_writer import write_checkpoint

    folder, output = Path(folder).expanduser(), Path(output_file)
    write_checkpoint(folder, output, vocab_size=vocab_size, overwrite=overwrite)
    return output


def add_corenet_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``openelm convert corenet``."""
    parser.add_argument("file", metavar="FILE.pt", help="CoreNet checkpoint, also LoRA / DoRA")
    parser.add_argument("--output", required=True, metavar="DIR", help="model folder to write")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--config", metavar="FILE", help="CoreNet's YAML or JSON, or a config.json")
    source.add_argument("--preset", metavar="SIZE", help="270M, 450M, 1.1B or 3B")
    parser.add_argument("--tokenizer", help="tokenizer.model, tokenizer.json, folder or Hub id")
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="rows in the folder (32000 of CoreNet's 32128)"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="default: the file's")
    parser.add_argument("--lora-alpha", type=float, metavar="A", help="default: the YAML's")
    parser.add_argument("--rslora", action="store_true", help="scaled by alpha / sqrt(rank)")
    parser.add_argument(
        "--base", metavar="DIR", help="model folder of a file that holds adapters alone"
    )
    parser.add_argument("--instruct", action="store_true", help="write the chat template too")
    parser.add_argument("--overwrite", action="store_true", help="replace the output")


def run_corenet(args: argparse.Namespace) -> int:
    """Run ``openelm convert corenet``."""
    written = from_corenet(
        args.file,
        args.output,
        config=args.config,
        preset=args.preset,
        tokenizer=args.tokenizer,
        vocab_size=args.vocab_size,
        dtype=args.dtype,
        lora_alpha=args.lora_alpha,
        rslora=args.rslora,
        base=args.base,
        instruct=args.instruct,
        overwrite=args.overwrite,
    )
    adapters = written / "adapters"
    sys.stdout.write(f"{written}\n{adapters}\n" if adapters.is_dir() else f"{written}\n")
    return 0


def add_to_corenet_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``openelm convert to-corenet``."""
    parser.add_argument("folder", metavar="DIR", help="model folder")
    parser.add_argument("--output", required=True, metavar="FILE.pt", help="file to write")
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="rows of the file; missing ones are zero"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output")


def run_to_corenet(args: argparse.Namespace) -> int:
    """Run ``openelm convert to-corenet``."""
    written = to_corenet(
        args.folder, args.output, vocab_size=args.vocab_size, overwrite=args.overwrite
    )
    sys.stdout.write(f"{written}\n")
    return 0

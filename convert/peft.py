"""PEFT adapter folders <-> adapter folders of ours, for the same logits.

PEFT's folder is ``adapter_config.json`` beside ``adapter_model.safetensors`` or ``.bin``; its
settings are in ``peft_config``, its tensors in ``peft_tensors``; ``peft_adapters`` joins them.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from convert.adapter_merge import target_names
from convert.peft_adapters import (
    check_against_config,
    leaves_for_peft,
    refuse_what_peft_cannot,
    unite,
)
from convert.peft_config import config_for_peft, read_settings
from convert.peft_tensors import from_peft_tensors, to_peft_tensors
from convert.source import PROVENANCE, Source
from openelm_mlx.adapter_args import AdapterArgs, short_name
from openelm_mlx.adapter_files import CONFIG, PEFT_FILES, WEIGHTS_FILES, write_adapter_folder
from openelm_mlx.atomic import atomic_folder, refuse_existing_folder
from openelm_mlx.checkpoint import load_model
from openelm_mlx.lora import (
    adapter_shapes,
    load_adapters,
    module_paths,
    warn_where_mlx_lm_differs,
)
from openelm_mlx.mismatch import check_tensors
from openelm_mlx.weight_files import read_json, read_tensor_file, write_json, write_tensor_file


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was written."""

    folder: Path
    args: AdapterArgs
    modules: list[str]  # paths of the adapted modules
    base_model: str | None  # what the PEFT config names


def from_peft(
    folder: str | Path, model: str | Path, output: str | Path, *, overwrite: bool = False
) -> Report:
    """Convert a PEFT adapter folder to one of ours; the numbers stay in the file's types.

    One folder of ours has one rank and one scale: where PEFT's modules differ, smaller ranks are
    filled with zeros and ``lora_b`` takes the difference in scale.

    Args:
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors`` or ``.bin``.
        model: the base they were trained on, a model folder or Hub repository.
        output: the adapter folder to write.
        overwrite: replace a folder that is there.

    Raises:
        FileNotFoundError: if a folder or file is missing.
        FileExistsError: if ``output`` is there and may not be replaced.
        ValueError: if the config asks for what a folder of ours cannot hold, or the tensors do not
            fit the model or the config.
    """
    refuse_existing_folder(output, overwrite=overwrite)
    folder = Path(folder).expanduser()
    file = _peft_file(folder)
    settings = read_settings(read_json(folder / CONFIG), folder / CONFIG)
    base = load_model(Source.find(model).folder, lazy=True)
    modules = from_peft_tensors(read_tensor_file(file), base, source=str(folder))
    check_against_config(modules, settings, base, folder)
    tensors, args = unite(modules, settings, base, folder)
    check_tensors(
        adapter_shapes(base, args),
        {name: array.shape for name, array in tensors.items()},
        source=str(folder),
    )
    warn_where_mlx_lm_differs(base, args)
    write_adapter_folder(output, tensors, args, overwrite=overwrite)
    return Report(
        folder=Path(output), args=args, modules=list(modules), base_model=settings.base_model
    )


def to_peft(
    folder: str | Path, model: str | Path, output: str | Path, *, overwrite: bool = False
) -> Report:
    """Convert an adapter folder of ours, or mlx_lm's, to PEFT's form.

    PEFT's DoRA gives an embedding a magnitude; where ours has plain LoRA there, it is written as
    the lengths of the adapted columns, which changes nothing, and :func:`from_peft` knows it.

    Args:
        folder: an adapter folder.
        model: the base, a model folder or Hub repository.
        output: the PEFT folder to write.
        overwrite: replace a folder that is there.

    Raises:
        FileNotFoundError: if a folder or file is missing.
        FileExistsError: if ``output`` is there and may not be replaced.
        ValueError: if the adapters do not fit the model, or do what PEFT cannot.
    """
    refuse_existing_folder(output, overwrite=overwrite)
    folder = Path(folder).expanduser()
    if any((folder / name).is_file() for name in PEFT_FILES):
        raise ValueError(f"{folder} is a PEFT adapter already; `convert peft` is the way back")
    source = Source.find(model)
    base = load_model(source.folder, lazy=True)
    args = load_adapters(base, folder)
    if args is None:
        raise ValueError(
            f'{folder} holds whole weights ("full"), no adapters; put them into the model with '
            "`openelm fuse`"
        )
    refuse_what_peft_cannot(args, base, folder)
    modules = leaves_for_peft(base, args)
    config = config_for_peft(
        args,
        ranks={path: leaves["lora_a"].shape[1] for path, leaves in modules.items()},
        targets=target_names(list(modules), module_paths(base)),
        base_model=_public_name(source),
    )
    with atomic_folder(output, overwrite=overwrite) as temporary:
        write_tensor_file(temporary / PEFT_FILES[0], to_peft_tensors(modules), form="pt")
        write_json(temporary / CONFIG, config)
    return Report(
        folder=Path(output),
        args=args,
        modules=list(modules),
        base_model=config["base_model_name_or_path"],
    )


def _peft_file(folder: Path) -> Path:
    """The tensor file of a PEFT folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; give a PEFT adapter folder")
    ours = next((name for name in WEIGHTS_FILES if (folder / name).is_file()), None)
    if ours:
        raise ValueError(
            f"{folder} is an adapter folder for MLX already ({ours}): use it as --adapter-path, or "
            "`openelm convert to-peft` makes a PEFT folder of it"
        )
    found = next((name for name in PEFT_FILES if (folder / name).is_file()), None)
    if found and (folder / CONFIG).is_file():
        return folder / found
    missing = CONFIG if found else " or ".join(PEFT_FILES)
    below = sorted(file.parent.name for file in folder.glob(f"*/{CONFIG}"))
    holds = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
    hint = f"; give one of its folders {', '.join(below)}" if below else f"; it holds {holds}"
    raise FileNotFoundError(f"{folder} holds no {missing}{hint}")


def _public_name(source: Source) -> str:
    """The repository that the base is or was made from, else its folder's name."""
    file = source.folder / PROVENANCE
    recorded = read_json(file).get("source") if file.is_file() else None
    return source.repo or (recorded if isinstance(recorded, str) else source.name)


def add_peft_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``openelm convert peft``."""
    parser.add_argument("folder", metavar="DIR", help="PEFT adapter folder")
    _add_common(parser)


def add_to_peft_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``openelm convert to-peft``."""
    parser.add_argument("folder", metavar="DIR", help="adapter folder of ours or mlx_lm's")
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="M", help="the base: folder or Hub id")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the output")


def run_peft(args: argparse.Namespace) -> int:
    """Run ``openelm convert peft``."""
    report = from_peft(args.folder, args.model, args.output, overwrite=args.overwrite)
    sys.stdout.write(describe(report) + "\n")
    return 0


def run_to_peft(args: argparse.Namespace) -> int:
    """Run ``openelm convert to-peft``."""
    report = to_peft(args.folder, args.model, args.output, overwrite=args.overwrite)
    sys.stdout.write(describe(report) + "\n")
    return 0


def describe(report: Report) -> str:
    """The report for a person."""
    args = report.args
    kind = ("rs" if args.use_rslora else "") + ("DoRA" if args.kind == "dora" else "LoRA")
    names = ", ".join(dict.fromkeys(map(short_name, report.modules)))
    lines = [
        str(report.folder),
        f"{kind}, rank {args.rank}, scale {args.scale:g} (alpha {args.alpha:g}), "
        f"{len(report.modules)} modules: {names}",
    ]
    if report.base_model:
        lines.append(f"base model by the PEFT config: {report.base_model}")
    return "\n".join(lines)

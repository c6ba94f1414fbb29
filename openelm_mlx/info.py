"""Stage: ``openelm info``: what a model folder holds, what it needs, and where it runs.

Reads headers only, never weights.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from openelm_mlx.checkpoint import load_args
from openelm_mlx.compatibility import where_it_runs
from openelm_mlx.config import ModelArgs
from openelm_mlx.fitting import quantization_of
from openelm_mlx.hub import local_or_download
from openelm_mlx.memory import training_memory
from openelm_mlx.weight_files import check_safetensors, find_weight_files

_CONTEXTS = (1024, 2048)
_BATCH, _LENGTH = 4, 512  # of the training step whose memory is estimated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``openelm info``."""
    parser.add_argument("model", metavar="M", help="model folder, Hub id, or 270M, 450M, 1.1B, 3B")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Describe a model on standard output."""
    report = describe(args.model)
    if args.json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        sys.stdout.write(render(report))
    return 0


def describe(model: str) -> dict[str, Any]:
    """Facts about a model folder, a Hub repository's config, or a published size.

    Args:
        model: folder, Hub id (only its config is fetched), or a preset's name.

    Returns:
        JSON-ready: ``layers`` (one row each), ``parameters``, ``bytes``, ``kv_bytes_per_token``,
        ``training_bytes``, ``runs_in`` (runtime -> None, or the reason why not).

    Raises:
        FileNotFoundError: if there is no such model.
        ValueError: if its config or a weight file is damaged.
    """
    folder, args = find_args(model)
    quantization = quantization_of(args)
    files = [] if folder is None else _weight_files(folder)
    dtypes = _dtypes(files)
    lora = 32 * sum(
        4 * args.model_dim + 2 * (q + k) * args.head_dim + (3 if args.ffn_with_glu else 2) * f
        for q, k, f in zip(args.num_query_heads, args.num_kv_heads, args.ffn_dims, strict=True)
    )
    needed = partial(training_memory, args, batch_size=_BATCH, max_seq_length=_LENGTH)
    return {
        "model": model,
        "config": {k: v for k, v in args.to_dict().items() if not isinstance(v, list | dict)},
        "quantization": quantization,
        "layers": [
            {"layer": i, "query_heads": q, "kv_heads": k, "ffn_dim": f, "parameters": p}
            for i, (q, k, f, p) in enumerate(
                zip(
                    args.num_query_heads,
                    args.num_kv_heads,
                    args.ffn_dims,
                    args.layer_parameters,
                    strict=True,
                )
            )
        ],
        "parameters": args.num_parameters,
        "bytes": sum(file.stat().st_size for file in files) or None,
        "dtypes": dtypes or None,
        "kv_bytes_per_token": args.kv_bytes_per_token(),
        "kv_bytes": {str(n): n * args.kv_bytes_per_token() for n in _CONTEXTS},
        "training_bytes": {
            "full, bf16": needed(trainable=args.num_parameters).total,
            "LoRA rank 32, bf16": needed(trainable=lora).total,
            "LoRA rank 32, bf16, --grad-checkpoint": needed(
                trainable=lora, checkpoint="layer"
            ).total,
        },
        "training_step": {"batch_size": _BATCH, "max_seq_length": _LENGTH},
        "tokenizer": folder is not None
        and any((folder / name).is_file() for name in ("tokenizer.model", "tokenizer.json")),
        "runs_in": where_it_runs(args, quantization),
    }


def render(report: dict[str, Any]) -> str:
    """The report of :func:`describe` as a table for a person."""
    lines = [
        f"{report['model']}: {report['parameters']:,} parameters, {len(report['layers'])} layers, "
        f"width {report['config']['model_dim']}, head {report['config']['head_dim']}, "
        f"vocabulary {report['config']['vocab_size']}, "
        f"context {report['config']['max_context_length']}",
        "",
        "layer  query heads  kv heads  FFN width  parameters",
    ]
    lines += [
        f"{row['layer']:5}  {row['query_heads']:11}  {row['kv_heads']:8}  {row['ffn_dim']:9}  "
        f"{row['parameters']:10,}"
        for row in report["layers"]
    ]
    lines.append("")
    if report["bytes"]:
        kinds = ", ".join(f"{n} {dtype}" for dtype, n in report["dtypes"].items())
        lines.append(f"weights on disk   {_size(report['bytes'])} ({kinds} tensors)")
    if report["quantization"]:
        shown = {k: v for k, v in report["quantization"].items() if not isinstance(v, dict)}
        lines.append(f"quantised         {shown}")
    lines.append(
        f"KV cache          {report['kv_bytes_per_token']:,} bytes a token in 16 bit; "
        + ", ".join(f"{_size(size)} at {n}" for n, size in report["kv_bytes"].items())
    )
    step = report["training_step"]
    lines.append(
        f"training          estimate for batches of {step['batch_size']} x "
        f"{step['max_seq_length']} tokens:"
    )
    lines += [f"  {name:38} {_size(size)}" for name, size in report["training_bytes"].items()]
    lines.append(f"tokenizer         {'in the folder' if report['tokenizer'] else 'none'}")
    lines.append("runs in")
    lines += [
        f"  {name:34} {'yes' if reason is None else f'no: {reason}'}"
        for name, reason in report["runs_in"].items()
    ]
    return "\n".join(lines) + "\n"


def find_args(model: str) -> tuple[Path | None, ModelArgs]:
    """The architecture of a folder, a Hub repository or a published size, and its folder if any.

    Raises:
        FileNotFoundError: if there is no such model.
    """
    if not Path(model).expanduser().exists():
        try:
            return None, ModelArgs.preset(model)
        except ValueError:
            if "/" not in model:
                raise FileNotFoundError(
                    f"{model} is neither a folder nor one of 270M, 450M, 1.1B, 3B nor a Hub id"
                ) from None
    folder = local_or_download(model, patterns=["*.json", "tokenizer.model"])
    return folder, load_args(folder)


def _weight_files(folder: Path) -> list[Path]:
    try:
        return find_weight_files(folder)
    except FileNotFoundError:
        return []


def _dtypes(files: list[Path]) -> dict[str, int]:
    """How many tensors there are of each safetensors dtype."""
    counts: dict[str, int] = {}
    for file in files:
        if file.suffix == ".safetensors":
            for name, entry in check_safetensors(file).items():
                if name != "__metadata__":
                    counts[entry["dtype"]] = counts.get(entry["dtype"], 0) + 1
    return counts


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"

"""Model folder -> quantised model folder for MLX, with a look at what it costs.

Affine or microscaled codes in groups along the input axis. Stock ``mlx_lm`` reads the result: a
layer that differs from the rest has its own entry under ``quantization`` in config.json.
"""

import argparse
import logging
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from convert.quantize_check import Quality, compare, make_sample, measure
from convert.quantize_plan import (
    AFFINE_BITS,
    AFFINE_GROUPS,
    MODES,
    UNTOUCHED,
    LayerSettings,
    QuantizeArgs,
    plan_layers,
)
from convert.source import Source
from openelm_mlx.atomic import atomic_folder, refuse_existing_folder
from openelm_mlx.checkpoint import load_model, with_dtype, write_companions
from openelm_mlx.fitting import quantization_of
from openelm_mlx.model import Model
from openelm_mlx.weight_files import write_weights

logger = logging.getLogger(__name__)

_SMALL_MODEL = 500_000_000  # parameters below which 4 bits cost much
_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was done.

    Attributes:
        folder: the folder written.
        quantization: its entry in config.json.
        bits_per_weight: of the whole model, scales included.
        bytes_before: of all weights.
        bytes_after: of all weights.
        smaller_groups: layer -> group, where the asked one does not divide the width.
        left: layers whose width no group divides, or that were to be left.
        quality: logits and perplexity before and after.
    """

    folder: Path
    quantization: dict[str, Any]
    bits_per_weight: float
    bytes_before: int
    bytes_after: int
    smaller_groups: dict[str, int]
    left: list[str]
    quality: Quality


def quantize(
    folder: str | Path,
    output: str | Path,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    mode: str = "affine",
    embedding_bits: int | None = None,
    data: str | Path | None = None,
    overwrite: bool = False,
) -> Report:
    """Quantise a model folder.

    Args:
        folder: a model folder or Hub repository that is not quantised.
        output: the folder to write.
        bits: see :class:`QuantizeArgs`, as the next three.
        group_size: of the weights that share a scale.
        mode: of the codes.
        embedding_bits: of the embedding and the head.
        data: a ``.txt`` or ``.jsonl`` file to measure by; None takes a built-in text.
        overwrite: replace a folder that is there.

    Raises:
        FileNotFoundError: if the folder or ``data`` is missing.
        FileExistsError: if ``output`` is there and may not be replaced.
        ValueError: if a setting is wrong, or the folder is damaged or quantised.
    """
    asked = QuantizeArgs(bits=bits, group_size=group_size, mode=mode, embedding_bits=embedding_bits)
    output = Path(output)
    refuse_existing_folder(output, overwrite=overwrite)
    source = Source.find(folder)
    if quantization_of(source.args):
        raise ValueError(
            f"{source.name} is quantised already; give the folder it was made from, since "
            "quantising twice loses more than it saves"
        )
    tokenizer, template = source.companions(None, instruct=False, output=output)
    sample = make_sample(data, tokenizer, source.args.vocab_size)
    model = load_model(source.folder)
    _advise(model, asked)
    before = measure(model, sample)
    bytes_before = _bytes(model)
    plan = plan_layers(model, asked)
    nn.quantize(model, class_predicate=lambda path, _: plan.get(path) or False)
    quality = compare(sample, before, measure(model, sample))
    report = _report(model, asked, plan, output, bytes_before, quality)
    parameters: Any = tree_flatten(model.parameters())
    extra = {"quantization": report.quantization, "quantization_config": report.quantization}
    args = replace(model.args, extra={**model.args.extra, **extra})
    with atomic_folder(output, overwrite=overwrite) as temporary:
        write_weights(temporary, parameters)
        write_companions(
            temporary,
            with_dtype(args, dict(parameters)),
            tokenizer=tokenizer,
            instruct=template,
            provenance={**source.provenance("model folder"), "quality": asdict(quality)},
        )
        source.carry_over(temporary)
    return report


def _report(
    model: Model,
    asked: QuantizeArgs,
    plan: dict[str, LayerSettings | None],
    output: Path,
    bytes_before: int,
    quality: Quality,
) -> Report:
    default = asked.settings
    own = {path: layer or False for path, layer in plan.items() if layer != default}
    return Report(
        folder=output,
        quantization={**default, **own},
        bits_per_weight=_bytes(model) * 8 / model.args.num_parameters,
        bytes_before=bytes_before,
        bytes_after=_bytes(model),
        smaller_groups={
            path: layer["group_size"]
            for path, layer in plan.items()
            if layer and layer["mode"] == asked.mode and layer["group_size"] != asked.group_size
        },
        left=[path for path, layer in plan.items() if layer is None],
        quality=quality,
    )


def _advise(model: Model, asked: QuantizeArgs) -> None:
    parameters = model.args.num_parameters
    if (asked.bits or 0) <= 4 and parameters < _SMALL_MODEL:
        logger.warning(
            "%d bits cost a model of %.3g M parameters much quality; compare the perplexities, and "
            "try --bits 8 or --embedding-bits 8",
            *(asked.bits, parameters / 1e6),
        )
    if model.transformer.norm.weight.dtype == mx.float32:
        logger.info(
            "the weights are float32, so scales and arithmetic stay float32; a folder converted "
            "with --dtype bfloat16 first becomes smaller and faster"
        )


def _bytes(model: nn.Module) -> int:
    parameters: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in parameters)


def add_quantize_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``openelm convert quantize``."""
    parser.add_argument("folder", metavar="DIR", help="model folder")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--mode", choices=tuple(MODES), default=QuantizeArgs.mode)
    parser.add_argument(
        "--bits", type=int, choices=AFFINE_BITS, help="default: 4; 8 for mxfp8; fixed by mx modes"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=(*AFFINE_GROUPS, 16),
        help="weights that share a scale; default: 64, or the mode's",
    )
    parser.add_argument(
        "--embedding-bits",
        type=int,
        choices=(*AFFINE_BITS, UNTOUCHED),
        metavar="N",
        help="for the embedding and the head; 16 leaves them as they are; default: as the rest",
    )
    parser.add_argument("--data", metavar="FILE", help=".txt or .jsonl text to measure by")
    parser.add_argument("--overwrite", action="store_true", help="replace the output")


def run_quantize(args: argparse.Namespace) -> int:
    """Run ``openelm convert quantize``."""
    report = quantize(
        args.folder,
        args.output,
        bits=args.bits,
        group_size=args.group_size,
        mode=args.mode,
        embedding_bits=args.embedding_bits,
        data=args.data,
        overwrite=args.overwrite,
    )
    sys.stdout.write(describe(report) + "\n")
    return 0


def describe(report: Report) -> str:
    """The report for a person, a few lines."""
    entry, quality = report.quantization, report.quality
    lines = [
        str(report.folder),
        f"{report.bits_per_weight:.3f} bits per weight ({entry['mode']}, {entry['bits']} bits in "
        f"groups of {entry['group_size']}): {report.bytes_before / 1e6:.1f} -> "
        f"{report.bytes_after / 1e6:.1f} MB",
    ]
    if report.smaller_groups:
        groups = [f"{path} ({group})" for path, group in report.smaller_groups.items()]
        lines.append(f"{len(groups)} in smaller groups, which divide their width: {_some(groups)}")
    if report.left:
        lines.append(f"{len(report.left)} not quantised: {_some(report.left)}")
    lines.append(
        f"logits on {quality.text}: mean error {quality.mean_logit_error:.4f}, largest "
        f"{quality.max_logit_error:.4f}, same first choice {quality.same_first_choice:.1%}"
    )
    if quality.perplexity_before is None:
        lines.append("perplexity: not measured, since the folder has no tokenizer")
    else:
        lines.append(
            f"perplexity of {quality.text}, {quality.tokens} tokens: "
            f"{quality.perplexity_before:.3f} -> {quality.perplexity_after:.3f}"
        )
    return "\n".join(lines)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more

"""What fusing adapters cost, measured and put into words."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from openelm_mlx.adapter_args import AdapterArgs
from openelm_mlx.fitting import quantization_of
from openelm_mlx.model import Model

logger = logging.getLogger(__name__)

_MUCH = 0.1  # rounding error / change, from which on it is a warning


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What the fused model loses against base and adapters.

    Attributes:
        lost: path of a fused layer -> norm of (stored - exact) / norm of (exact - base).
        text: the sample that the logits are of.
        logit_change: norm of the change that the adapters make to the base's logits / norm of
            those; None where the folder held whole weights.
        logit_error: norm of what fusing changes of the logits / norm of those.
    """

    lost: dict[str, float]
    text: str
    logit_change: float | None
    logit_error: float

    @property
    def mean_lost(self) -> float:
        """Over the fused layers, each counted once; 0 without any."""
        return sum(self.lost.values()) / max(len(self.lost), 1)

    @property
    def worst(self) -> str:
        """The layer whose change was rounded most."""
        return max(self.lost, key=lambda path: self.lost[path])


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was done.

    Attributes:
        folder: the folder written.
        args: the adapters' settings; None where the folder held whole weights.
        cost: what fusing lost.
        stored: what the layers are stored in, for a person.
        quantized: whether the folder written is.
        head_untied: whether the model got a head of its own.
        no_longer: runtime -> why the folder does not run there, unless the base did not either for
            the same reason.
    """

    folder: Path
    args: AdapterArgs | None
    cost: Cost
    stored: str
    quantized: bool
    head_untied: bool
    no_longer: Mapping[str, str]


def relative(found: mx.array, expected: mx.array) -> float:
    """Norm of the difference / norm of what was expected."""
    return float(mx.linalg.norm(found - expected) / mx.linalg.norm(expected))


def stored_in(model: Model) -> str:
    """What a model keeps its layers in, for a person."""
    entry: dict[str, Any] | None = quantization_of(model.args)
    if entry:
        return f"{entry['bits']}-bit {entry.get('mode', 'affine')}"
    return str(model.transformer.norm.weight.dtype).removeprefix("mlx.core.")


def warn(report: Report) -> None:
    """Say on the log what a user should not overlook."""
    cost = report.cost
    if report.args is None:
        return
    if cost.logit_change == 0:
        logger.warning("the adapters change nothing: they are as they were before training")
    elif report.quantized:
        logger.warning(
            "quantising the fused layers again left an error of %s of the adapters' change on "
            "average; --dequantize stores the whole model in floating point and keeps it",
            percent(cost.mean_lost),
        )
    elif cost.mean_lost > _MUCH:
        logger.warning(
            "rounding to %s left an error of %s of the adapters' change on average; use the "
            "adapters as they are with --adapter-path, or fuse them into a float32 copy of the "
            "base (`openelm convert huggingface BASE --output DIR --dtype float32`)",
            *(report.stored, percent(cost.mean_lost)),
        )


def describe(report: Report) -> str:
    """The report for a person, a few lines."""
    args, cost = report.args, report.cost
    lines = [str(report.folder)]
    if args is None:
        lines.append(f"whole weights put in place of the base's, stored in {report.stored}")
        lines.append(f"logits on {cost.text}: storing moves them by {percent(cost.logit_error)}")
    else:
        kind = "DoRA" if args.kind == "dora" else "LoRA"
        lines += [
            f"{len(cost.lost)} layers fused ({kind}, rank {args.rank}, scale {args.scale:g}), "
            f"added in float32, stored in {report.stored}",
            f"rounding error as a share of the adapters' change: mean {percent(cost.mean_lost)}, "
            f"worst {percent(cost.lost[cost.worst])} ({cost.worst})",
            f"logits on {cost.text}: the adapters move them by {percent(cost.logit_change or 0)}, "
            f"fusing by {percent(cost.logit_error)}",
        ]
    if report.head_untied:
        lines.append(
            "the head is untied: the adapter of the embedding does not reach it, so the base's "
            "table is stored a second time as lm_head"
        )
    lines += [f"does not run in {runtime}: {why}" for runtime, why in report.no_longer.items()]
    return "\n".join(lines)


def percent(share: float) -> str:
    """Three digits, small shares too."""
    return f"{100 * share:.3g}%"

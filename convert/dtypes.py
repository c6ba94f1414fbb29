"""Change the element type of weights, never in silence: range checked, losses counted."""

import logging
from dataclasses import dataclass, field

import mlx.core as mx

logger = logging.getLogger(__name__)

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_BY_RANGE = (mx.float16, mx.bfloat16, mx.float32, mx.float64)  # each ends above those before it
_NARROW_RANGE = "float16 ends at 65504; use bfloat16, which has the range of float32"
_SHOWN = 3
_SHAPE_3B = (36, 3072)  # layers, model_dim


@dataclass
class CastReport:
    """What a change of type did, gathered over the tensors of a checkpoint."""

    sources: set[str] = field(default_factory=set)  # types that were changed
    overflows: dict[str, int] = field(default_factory=dict)  # tensor -> values that became infinite
    values: int = 0  # elements that were changed

    def log(self, dtype: mx.Dtype | None) -> None:
        """Say what was changed to ``dtype``, and warn of what was lost."""
        if dtype is None or not self.sources:
            return
        target = dtype_name(dtype)
        logger.info("weights changed from %s to %s", ", ".join(sorted(self.sources)), target)
        if self.overflows:
            worst = sorted(self.overflows, key=lambda name: -self.overflows[name])
            named = ", ".join(f"{name} ({self.overflows[name]})" for name in worst[:_SHOWN])
            more = f" and {len(worst) - _SHOWN} more" if len(worst) > _SHOWN else ""
            logger.warning(
                "%d of %d values in %d tensors overflow %s and became infinite: %s%s; %s",
                *(sum(self.overflows.values()), self.values, len(worst)),
                *(target, named, more, _NARROW_RANGE),
            )


def parse_dtype(name: str | None) -> mx.Dtype | None:
    """The MLX type of a ``--dtype`` flag, None to keep each tensor's own.

    Raises:
        ValueError: for another name, listing those that exist.
    """
    if name is None:
        return None
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[name]


def dtype_name(dtype: mx.Dtype) -> str:
    """``mx.float16`` -> ``"float16"``, as config.json writes it."""
    return str(dtype).removeprefix("mlx.core.")


def cast(name: str, array: mx.array, dtype: mx.Dtype | None, report: CastReport) -> mx.array:
    """``array`` in ``dtype``, evaluated, with its losses noted in ``report``.

    Args:
        name: of the tensor, for the report.
        array: any shape; integers stay as they are.
        dtype: None keeps the array as it is.
        report: gathers what changed; ``report.log`` says it.
    """
    if dtype is None or array.dtype == dtype or not mx.issubdtype(array.dtype, mx.floating):
        return array
    lost = mx.array(0)
    with mx.stream(mx.cpu):  # the only one that knows float64
        out = array.astype(dtype)
        if _BY_RANGE.index(array.dtype) > _BY_RANGE.index(dtype):  # else nothing can overflow
            lost = mx.isinf(out).sum() - mx.isinf(array).sum()
        mx.eval(out, lost)
    report.sources.add(dtype_name(array.dtype))
    report.values += array.size
    if int(lost) > 0:
        report.overflows[name] = int(lost)
    return out


def warn_float16(num_layers: int, model_dim: int, dtype: mx.Dtype | None) -> None:
    """Warn where the 3B model would be kept in float16, whose range its activations leave.

    Source: apple/corenet@1aa3acd ``mlx_examples/open_elm/README.md``.
    """
    if dtype is not None and dtype == mx.float16 and (num_layers, model_dim) == _SHAPE_3B:
        logger.warning(
            "OpenELM-3B's activations leave the range of float16 and may become infinite; "
            "Apple advises bfloat16: use --dtype bfloat16"
        )

"""What a Core ML export is asked for: checked before anything is read or built.

Knows nothing of weights or of coremltools.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

from openelm_mlx.config import ModelArgs

WeightKind = Literal["fp16", "mlx", "int8", "int4", "palette4", "palette6"]
Target = Literal["all", "gpu", "ane"]
Interface = Literal["static", "flexible", "stateless", "ane"]
NormForm = Literal["fp32", "max", "layer_norm"]

WEIGHT_KINDS: tuple[WeightKind, ...] = get_args(WeightKind)
TARGETS: tuple[Target, ...] = get_args(Target)

MASKED = -30000.0  # finite in fp16, also when a score is added; -inf gives NaN (coremltools #2669)
_LEAST_CONTEXT = 64
ANE_ROWS = 16384  # of a matrix that the Neural Engine takes; larger tables are split
ANE_MULTIPLE = 32  # state sizes the Neural Engine accepts (coremltools #2631)
SMALL_MODEL = 600_000_000  # parameters up to which int8 is the recommended default


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """The form of a package.

    Attributes:
        context: tokens that the cache holds.
        prefill: tokens of one prefill call; with ``target="ane"`` those of the only function.
        weights: how matrices are stored.
        target: the compute units the graph's form is made for.
        flexible: one function of any length, masked by the caller.
        stateless: caches as inputs and outputs.
        all_logits: logits of every position instead of the last.

    Raises:
        ValueError: listing every setting that is wrong or contradicts another.
    """

    context: int = 1024
    prefill: int = 64
    weights: WeightKind = "int8"
    target: Target = "all"
    flexible: bool = False
    stateless: bool = False
    all_logits: bool = False

    def __post_init__(self) -> None:
        found = [*self._numbers(), *self._contradictions()]
        if found:
            raise ValueError("Core ML export: " + "; ".join(found))

    @property
    def most_rows(self) -> int | None:
        """Rows of the largest matrix; None where there is no limit."""
        return most_rows(self.target)

    @property
    def interface(self) -> Interface:
        """The contract with the caller: inputs, states, outputs."""
        if self.target == "ane":
            return "ane"
        return "flexible" if self.flexible else "stateless" if self.stateless else "static"

    def _numbers(self) -> list[str]:
        found = []
        for name, value, known in (
            ("weights", self.weights, WEIGHT_KINDS),
            ("target", self.target, TARGETS),
        ):
            if value not in known:
                found.append(f"{name} is {value!r}; it must be one of {', '.join(known)}")
        if self.context < _LEAST_CONTEXT:
            found.append(f"context is {self.context}; it must be {_LEAST_CONTEXT} or more tokens")
        if not 1 <= self.prefill <= self.context:
            found.append(
                f"prefill is {self.prefill}; it must be between 1 and the context of {self.context}"
            )
        if self.target == "ane" and self.context % ANE_MULTIPLE:
            found.append(
                f"context is {self.context}; the Neural Engine wants a multiple of {ANE_MULTIPLE} "
                "(coremltools #2631)"
            )
        return found

    def _contradictions(self) -> list[str]:
        found = []
        if self.flexible and self.stateless:
            found.append("flexible and stateless exclude each other; choose one")
        if self.target == "ane" and self.flexible:
            found.append(
                "flexible with target ane fails to load: a state with ranged inputs ends in "
                "bad_cast there (coremltools #2500, #2548); leave out one"
            )
        if self.target == "ane" and self.stateless:
            found.append("target ane keeps its cache in states; leave out stateless")
        if self.target == "gpu" and self.flexible:
            found.append(
                "flexible with the fused attention of target gpu runs on the CPU too, where fused "
                "fp16 attention of several queries can crash (stablehlo-coreml #89); leave out "
                "target gpu"
            )
        return found


def most_rows(target: str) -> int | None:
    """Rows of the largest matrix that a target takes."""
    return ANE_ROWS if target == "ane" else None


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """How a graph stays inside fp16's range.

    Attributes:
        residual_exponent: k; the residual stream is kept as 2^-k of its value.
        norm: how RMSNorm is computed: in an fp32 island, scaled by the row's maximum in fp16, or
            as LayerNorm of (x, -x).
    """

    residual_exponent: int = 0
    norm: NormForm = "fp32"


def refuse_unsuited(args: ModelArgs, settings: ExportSettings) -> list[str]:
    """What is worth a warning about an architecture in a form.

    Raises:
        ValueError: where the Neural Engine is asked for and cannot run it.
    """
    warnings = []
    if args.head_dim % ANE_MULTIPLE:
        what = (
            f"head_dim {args.head_dim} is no multiple of {ANE_MULTIPLE}, which the Neural Engine "
            "refuses (coremltools #2631)"
        )
        if settings.target == "ane":
            raise ValueError(f"Core ML export: {what}; leave out --target ane")
        warnings.append(f"{what}: this package will run on CPU and GPU only")
    if settings.target == "all" and settings.context % ANE_MULTIPLE:
        warnings.append(
            f"context {settings.context} is no multiple of {ANE_MULTIPLE}: CPU and GPU only"
        )
    if settings.context > args.max_context_length:
        warnings.append(
            f"context {settings.context} is beyond the {args.max_context_length} tokens that the "
            "model was trained for"
        )
    if settings.target == "ane" and args.vocab_size > ANE_ROWS:
        warnings.append(
            f"embedding and head of {args.vocab_size} rows are split into parts of at most "
            f"{ANE_ROWS}, which the Neural Engine takes"
        )
    return warnings


@dataclass(frozen=True, kw_only=True)
class Recommended:
    """The weights chosen when none are asked for, and why."""

    weights: WeightKind
    reason: str = field(default="")


def recommend(args: ModelArgs, *, quantised: bool) -> Recommended:
    """The default kind of weights for a model.

    Args:
        args: the architecture.
        quantised: whether the folder holds MLX codes already.
    """
    if quantised:
        return Recommended(weights="mlx", reason="the folder is quantised: its codes carry over")
    if args.num_parameters <= SMALL_MODEL:
        return Recommended(weights="int8", reason="recommended up to 450M parameters")
    return Recommended(weights="int4", reason="recommended from 1.1B parameters on, for its size")

"""What verifying a Core ML package saw. Knows nothing of how it was seen."""

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.coreml_parity import Parity

if TYPE_CHECKING:
    from convert.coreml_on_mac import Unit


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What storing the weights cost, apart from the graph.

    Attributes:
        worst_matrix: name of the matrix that moved most.
        worst: its root mean square change, relative.
        max_error: of a logit, stored weights against the original ones, in float32.
        mean_error: the same, on average.
        same_first_choice: share of positions whose likeliest token stays.
    """

    worst_matrix: str
    worst: float
    max_error: float
    mean_error: float
    same_first_choice: float


@dataclass(kw_only=True)
class Verification:
    """All that was seen.

    Attributes:
        package: its name.
        model: the folder's name.
        weights: how matrices are stored.
        interface: how it is called.
        faults: reasons why it does not hold; empty where it does.
        warnings: for a person.
        level: reached, ``L0`` to ``L3``.
        float32: parity of the graph, computed in float32.
        native: parity as declared, in float16.
        native_error: root mean square error of single steps in float16.
        mlx_error: MLX's own, in float16, on the same tokens; None where it was not run.
        rounding: of the weights.
        text: what prompts were made of.
        expected_text: greedy continuation by MLX.
        found_text: greedy continuation by the package in float32.
        units: what Core ML gave on each compute unit, on macOS.
    """

    package: str
    model: str
    weights: str = ""
    interface: str = ""
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    level: str = "none"
    float32: Parity | None = None
    native: Parity | None = None
    native_error: float | None = None
    mlx_error: float | None = None
    rounding: Rounding | None = None
    text: str = ""
    expected_text: str = ""
    found_text: str = ""
    units: "list[Unit]" = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether an app can trust the package, as far as was looked."""
        return not self.faults


def as_dict(result: Verification) -> dict[str, Any]:
    """For JSON; numbers that are not finite become strings."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        if isinstance(value, list):
            return [plain(v) for v in value]
        return str(value) if isinstance(value, float) and not np.isfinite(value) else value

    out: dict[str, Any] = plain(asdict(result))
    for name in ("float32", "native"):
        parity = getattr(result, name)
        if parity is not None:
            out[name] |= plain(
                {
                    "max_error": parity.max_error,
                    "mean_error": parity.mean_error,
                    "scale": parity.scale,
                    "relative": parity.relative,
                    "same_first_choice": parity.same_first_choice,
                }
            )
    return {"holds": result.holds, **out}

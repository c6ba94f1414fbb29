"""What an evaluation found besides its results: values that are not finite or beyond float16."""

from dataclasses import dataclass

import numpy as np

from convert.mil_types import FLOATS, Array

FLOAT16_MAX = 65504.0


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One operation with a value that float16 cannot hold.

    ``value`` is the largest magnitude, or nan / inf; ``dtype`` the declared element type, since
    float32 holds what is beyond float16.
    """

    kind: str  # "non-finite" | "overflow"
    function: str
    op: str
    name: str
    dtype: str
    value: float

    def __str__(self) -> str:
        what = "first value that is not finite" if self.kind == "non-finite" else "beyond 65504"
        return (
            f"{self.function}: {self.op} {self.name} ({self.dtype.lower()}): {what}, {self.value:g}"
        )


class Findings:
    """Collects, over all calls: a function's first non-finite value, its overflows by operation."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], Finding] = {}

    def all(self) -> list[Finding]:
        """In the order in which they were first met."""
        return list(self._found.values())

    def clear(self) -> None:
        """Forget what was found so far."""
        self._found.clear()

    def observe(self, function: str, op: str, name: str, dtype: str, values: Array) -> None:
        """Look at a result; anything but floats is passed over."""
        if dtype not in FLOATS or not values.size:
            return
        peak = float(max(values.max(), -values.min()))  # nan stays nan
        if peak <= FLOAT16_MAX:
            return
        finite = bool(np.isfinite(peak))
        kind = "overflow" if finite else "non-finite"
        key = (kind, function, name if finite else "")
        before = self._found.get(key)
        if before is None or (finite and peak > before.value):
            self._found[key] = Finding(
                kind=kind, function=function, op=op, name=name, dtype=dtype, value=peak
            )

"""What only a Mac can show of a package: that it compiles, predicts, how fast, and on which unit.

Never run on Linux; the macOS job of the workflow runs it.
"""

import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.coreml_client import Client
from convert.coreml_describe import describe
from convert.coreml_parity import Parity, measure_parity, prompt_lengths
from convert.coreml_predictor import UNITS, CoreMLPackage, client_of
from convert.mil_tools import coremltools
from openelm_mlx.model import Model

_TOLERANCE = 3e-2  # of the largest logit, in float16
_TIMED_TOKENS = 20
# Units that a package made for a target has to work on; others are tried and reported.
_REQUIRED = {"all": ("cpu", "gpu"), "gpu": ("gpu",), "ane": ("cpu", "ane")}


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Core ML's predictions on one choice of compute units.

    Attributes:
        units: "all", "cpu", "gpu" or "ane".
        expected: whether the package was made to run there.
        load_seconds: compiling and loading.
        tokens_per_second: single-token decoding.
        parity: against MLX.
        plan: operations by the device that Core ML prefers for them.
        fault: what is wrong; empty where nothing is.
    """

    units: str
    expected: bool
    load_seconds: float = 0.0
    tokens_per_second: float = 0.0
    parity: Parity | None = None
    plan: dict[str, int] = field(default_factory=dict)
    fault: str = ""

    def __str__(self) -> str:
        if self.parity is None:
            return f"{self.units}: {self.fault}"
        placed = ", ".join(f"{count} on {device}" for device, count in self.plan.items())
        return (
            f"{self.units}: load {self.load_seconds:.1f} s, {self.tokens_per_second:.1f} tokens/s, "
            f"max error {self.parity.max_error:.2g} on {self.parity.scale:.3g}; "
            f"operations {placed or 'not known'}"
        )


def compile_package(package: Path) -> str:
    """Run Xcode's ``coremlcompiler``; what it says where it refuses, else an empty string."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["xcrun", "coremlcompiler", "compile", str(package), folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return "Xcode's command line tools are missing: run `xcode-select --install`"
    if done.returncode == 0:
        return ""
    last = (done.stderr or done.stdout).strip().splitlines()[-1:]
    return f"coremlcompiler refuses it: {last[0] if last else done.returncode}"


def predict_on_units(package: Path, reference: Model, ids: Sequence[int]) -> list[Unit]:
    """Predict with the package on each choice of compute units.

    Args:
        package: the ``.mlpackage``.
        reference: MLX model in float32 with the stored weights.
        ids: tokens to draw prompts from.
    """
    target = describe(package).metadata.get("openelm.target", "all")
    return [_unit(package, units, units in _REQUIRED[target], reference, ids) for units in UNITS]


def _unit(package: Path, units: str, expected: bool, reference: Model, ids: Sequence[int]) -> Unit:
    try:
        loaded = CoreMLPackage(package, units)
        client = client_of(loaded, describe(package))
        lengths = prompt_lengths(client.contract)
        parity = measure_parity(client, reference, ids, lengths, text_tokens=0)
        speed = _tokens_per_second(client, ids)
    except ValueError as error:
        return Unit(units=units, expected=expected, fault=f"{units}: {error}")
    fault = ""
    if not parity.relative <= _TOLERANCE:
        fault = f"{units}: Core ML's logits differ by {parity.max_error:.3g} of {parity.scale:.3g}"
    return Unit(
        units=units,
        expected=expected,
        load_seconds=loaded.load_seconds,
        tokens_per_second=speed,
        parity=parity,
        plan=_plan(package, units),
        fault=fault,
    )


def _tokens_per_second(client: Client, ids: Sequence[int]) -> float:
    client.reset()
    client.feed(ids[:1])
    count = min(_TIMED_TOKENS, client.contract.context - 1)
    started = time.perf_counter()
    for _ in range(count):
        client.feed(ids[:1])
    return count / (time.perf_counter() - started)


def _plan(package: Path, units: str) -> dict[str, int]:
    """Operations by preferred device, from Core ML's compute plan; empty where it gives none."""
    ct = coremltools()
    plans = coremltools("models.compute_plan")
    try:
        compiled = coremltools("models.utils").compile_model(str(package))
        plan = plans.MLComputePlan.load_from_path(
            path=str(compiled), compute_units=ct.ComputeUnit[UNITS[units]]
        )
        program = plan.model_structure.program
        counts: Counter[str] = Counter()
        for function in program.functions.values():
            counts.update(_devices(plan, function))
    except Exception:  # a plan is extra information, and its API raises bare exceptions
        return {}
    return dict(counts)


def _devices(plan: Any, function: Any) -> list[str]:
    found = []
    for operation in function.block.operations:
        usage = plan.get_compute_device_usage_for_mlprogram_operation(operation)
        if usage is not None:
            name = type(usage.preferred_compute_device).__name__
            found.append(name.removeprefix("ML").removesuffix("ComputeDevice"))
    return found

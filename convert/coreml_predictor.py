"""Who computes a package: Core ML on macOS, this project's evaluator anywhere; and its client.

The two have one face (``coreml_client.Predictor``), so that all else is the same everywhere.
"""

import logging
import platform
import time
from pathlib import Path
from typing import Any

from convert.coreml_client import CLIENTS, Arrays, Client, Contract, Predictor
from convert.coreml_describe import PackageDescription, describe
from convert.mil_tools import coremltools

logger = logging.getLogger(__name__)

# Core ML's names for them; "all" also tries the Neural Engine for each part of a graph.
UNITS = {"all": "ALL", "cpu": "CPU_ONLY", "gpu": "CPU_AND_GPU", "ane": "CPU_AND_NE"}
_UNITS_OF_TARGET = {"all": "gpu", "gpu": "gpu", "ane": "ane"}  # metadata openelm.target


def on_macos() -> bool:
    """Whether Core ML itself is here."""
    return platform.system() == "Darwin"


class CoreMLPackage:
    """A package compiled, loaded and run by Core ML: macOS 15 or newer.

    Args:
        path: of the ``.mlpackage``.
        units: "all", "cpu", "gpu" (with the CPU) or "ane" (with the CPU).

    Attributes:
        load_seconds: what compiling and loading took.

    Raises:
        ValueError: elsewhere than on macOS 15, for unknown units, or if Core ML refuses it.
    """

    def __init__(self, path: str | Path, units: str = "gpu") -> None:
        if not on_macos():
            raise ValueError(
                "Core ML runs on macOS only; here packages are evaluated in NumPy (leave out "
                "--compute-units)"
            )
        if units not in UNITS:
            raise ValueError(f"compute units are {', '.join(UNITS)}, got {units!r}")
        started = time.perf_counter()
        description = describe(path)
        ct, models = coremltools(), coremltools("models")
        try:
            compiled = coremltools("models.utils").compile_model(str(path))
            self._models = {
                name: models.CompiledMLModel(
                    compiled,
                    compute_units=ct.ComputeUnit[UNITS[units]],
                    function_name=name if description.named else None,
                )
                for name in description.functions
            }
        except Exception as error:  # coremltools raises bare ones
            raise ValueError(
                f"Core ML does not load {path} on {UNITS[units]}: {error}; try other "
                "--compute-units"
            ) from error
        self._default = description.default
        self.functions = list(description.functions)
        self.metadata = description.metadata
        self.load_seconds = time.perf_counter() - started

    def make_state(self, function: str | None = None) -> Any:
        """A state of zeros; one serves all functions of a package."""
        model = self._models[function or self._default]
        return model.make_state()

    def predict(self, inputs: Arrays, state: Any = None, function: str | None = None) -> Arrays:
        """Outputs by name; ``state`` is changed in place.

        Raises:
            ValueError: if Core ML fails.
        """
        model = self._models[function or self._default]
        try:
            outputs: Arrays = model.predict(dict(inputs), state)
        except Exception as error:  # coremltools raises bare ones
            raise ValueError(f"Core ML fails at a prediction: {error}") from error
        return outputs


def open_package(
    path: str | Path, *, units: str | None = None, precision: str = "native"
) -> Predictor:
    """Load a package with Core ML on macOS, with the evaluator elsewhere, which is said.

    Args:
        path: of the ``.mlpackage``.
        units: compute units on macOS; None takes those that the package was made for.
        precision: of the evaluator, see ``mil_eval.Package``.

    Raises:
        FileNotFoundError: if there is no such package.
        ValueError: if it is none, or cannot be loaded.
    """
    if on_macos():
        target = describe(path).metadata.get("openelm.target", "all")
        return CoreMLPackage(path, units or _UNITS_OF_TARGET.get(target, "gpu"))
    if units is not None:
        raise ValueError("--compute-units is for Core ML, which runs on macOS only; leave it out")
    from convert.mil_eval import Package

    logger.warning("Core ML runs on macOS only: evaluating the package in NumPy, which is slow")
    package: Predictor = Package(path, precision=precision)
    return package


def client_of(package: Predictor, description: PackageDescription) -> Client:
    """The client that calls a package as its metadata say.

    Raises:
        ValueError: if they do not say it.
    """
    contract = Contract.from_metadata(description.metadata)
    cache = description.cache()
    shape = [axis for axis in cache.shape if isinstance(axis, int)] if cache else None
    return CLIENTS[contract.interface](package, contract, cache_shape=shape)

"""Evaluate a saved `.mlpackage` in NumPy, on any machine, one operation after another.

It shows what the program computes. It cannot tell whether Core ML's compiler takes it, on which
unit it would run, how fast, nor what that unit's own arithmetic does.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from convert.mil_constants import Constants, Source, to_float16
from convert.mil_features import check_description, check_inputs, check_state
from convert.mil_findings import Finding, Findings
from convert.mil_ops import MOVES, OPS, REUSES, VARIADIC
from convert.mil_package import SavedProgram
from convert.mil_plan import Plan, Step, check_known, make_plan
from convert.mil_types import FLOATS, NUMPY, Array, TensorType

_KINDS = {"BOOL": "b"} | dict.fromkeys(FLOATS, "f")


class Package:
    """A package whose functions can be called.

    Args:
        path: the `.mlpackage` folder.
        precision: "float32" computes every float in float32 and ignores casts to float16, so
            that it shows whether the graph is right; "native" rounds each result to its declared
            type (sums within one operation stay in float32).
        cache_weights: keep decoded weights in memory (4 bytes each); without, every call decodes
            them anew.

    Raises:
        FileNotFoundError: if a part of the package is missing.
        ValueError: if it is damaged, or has operations that are not evaluated here (all listed).
    """

    def __init__(
        self,
        path: str | Path,
        *,
        precision: str = "float32",
        cache_weights: bool = True,
    ) -> None:
        if precision not in ("float32", "native"):
            raise ValueError(f"precision is {precision!r}, expected 'float32' or 'native'")
        self.precision = precision
        self._native = precision == "native"
        self._saved = SavedProgram(Path(path))
        check_known(self._saved)
        self._plans = {name: make_plan(self._saved, name) for name in self._saved.functions}
        self._constants = Constants(self._saved, keep=cache_weights)
        self._findings = Findings()
        self._seen: set[Source] = set()
        for plan in self._plans.values():
            self._check_description(plan)

    @property
    def functions(self) -> tuple[str, ...]:
        """Names of the functions, the default one first."""
        first = self._saved.default_function
        return (first, *sorted(name for name in self._plans if name != first))

    @property
    def metadata(self) -> dict[str, str]:
        """The user-defined metadata of the package."""
        return self._saved.metadata

    @property
    def findings(self) -> list[Finding]:
        """Values that are not finite or beyond float16, over all calls so far."""
        return self._findings.all()

    @property
    def kept_bytes(self) -> int:
        """Memory that decoded weights take; those that functions share count once."""
        return self._constants.kept_bytes

    def clear_findings(self) -> None:
        """Forget the findings so far."""
        self._findings.clear()
        self._seen.clear()

    def make_state(self, function: str | None = None) -> dict[str, Array]:
        """Zeros for each state of a function, which `predict` changes in place.

        Returns:
            Name -> array of the declared shape: float32, or the declared type where native.
        """
        plan = self._plan(function)
        return {
            name: np.zeros(kind.static_shape(), self._dtype(kind))
            for name, kind in plan.states.items()
        }

    def predict(
        self,
        inputs: Mapping[str, Array],
        state: dict[str, Array] | None = None,
        function: str | None = None,
    ) -> dict[str, Array]:
        """Run a function.

        Args:
            inputs: by name, in the declared element types and shapes.
            state: what `make_state` gave; overwritten when the call has succeeded.
            function: its name; None for the package's default.

        Returns:
            Outputs by name: floats as float32, or in their declared type where native.

        Raises:
            ValueError: for wrong inputs or states, an index out of bounds, or a result that is
                not of its declared element type, rank or fixed size; names function and operation.
        """
        plan = self._plan(function)
        described = self._saved.description(plan.function)
        dtypes = {name: self._dtype(kind) for name, kind in plan.states.items()}
        try:
            values = check_inputs(described, inputs, native=self._native)
            check_state(plan.states, state, dtypes)
        except ValueError as error:
            raise ValueError(f"{plan.function}: {error}") from error
        for name, array in values.items():
            self._findings.observe(plan.function, "input", name, plan.inputs[name].dtype, array)
        values |= {name: np.array(array, np.float32) for name, array in (state or {}).items()}
        with np.errstate(all="ignore"):  # overflow is a finding, not a warning
            for step in plan.steps:
                self._run(plan, step, values)
            for name, version in plan.versions.items():
                if state is not None and version != name:
                    state[name][...] = values[version]
        return {name: self._output(plan, values, name) for name in plan.outputs}

    def _plan(self, function: str | None) -> Plan:
        name = function or self._saved.default_function
        if name not in self._plans:
            known = ", ".join(self.functions)
            raise ValueError(f"{self._saved.path}: no function {name}; it has {known}")
        return self._plans[name]

    def _dtype(self, declared: TensorType) -> np.dtype:
        if declared.dtype in FLOATS and not self._native:
            return np.dtype(np.float32)
        return np.dtype(NUMPY[declared.dtype])

    def _check_description(self, plan: Plan) -> None:
        outputs = {name: plan.types[name] for name in plan.outputs}
        described = self._saved.description(plan.function)
        try:
            check_description(described, plan.inputs, plan.states, outputs)
        except ValueError as error:
            raise ValueError(f"{self._saved.path}: {plan.function}: {error}") from error

    def _run(self, plan: Plan, step: Step, values: dict[str, Array]) -> None:
        try:
            results = self._results(plan, step, values)
            for (name, declared), result in zip(step.outputs, results, strict=True):
                values[name] = self._settle(step.op, declared, np.asarray(result))
        except (ValueError, IndexError, TypeError, AttributeError) as error:
            raise ValueError(f"{plan.function}: {step.op} {step.name}: {error}") from error
        if step.op not in MOVES:
            for name, declared in step.outputs:
                self._findings.observe(
                    plan.function, step.op, step.name, declared.dtype, values[name]
                )
        for name in step.frees:
            values.pop(name, None)

    def _results(self, plan: Plan, step: Step, values: dict[str, Array]) -> list[Array]:
        if step.op in ("read_state", "write_state"):
            return [values[step.inputs["x"][0]]]
        operands: dict[str, Array | str | list[Array | str] | bool] = {}
        for parameter, names in step.inputs.items():
            found = [self._value(plan, name, values) for name in names]
            operands[parameter] = found if parameter == VARIADIC else found[0]
        if step.op in REUSES:
            operands["reuse"] = _reusable(step.inputs[REUSES[step.op]][0], step, values)
        result = OPS[step.op](**operands)
        return result if isinstance(result, list) else [result]

    def _value(self, plan: Plan, name: str, values: dict[str, Array]) -> Array | str:
        if name in values:
            return values[name]
        source = plan.constants[name]
        found = self._constants.value(source)
        if source not in self._seen and not isinstance(found, str):
            self._seen.add(source)
            dtype = plan.types[name].dtype
            self._findings.observe(plan.function, "const", name, dtype, found)
        return found

    def _settle(self, op: str, declared: TensorType, result: Array) -> Array:
        kind = "i" if result.dtype.kind == "u" else result.dtype.kind
        if kind != _KINDS.get(declared.dtype, "i") or not declared.fits(result.shape):
            got = f"{result.dtype} {list(result.shape)}"
            raise ValueError(f"gives {got}, the program declares {declared}")
        if kind != "f":
            return result.astype(NUMPY[declared.dtype], copy=False)
        if self._native and declared.dtype == "FLOAT16" and op not in MOVES:
            return to_float16(result)
        return result.astype(np.float32, copy=False)

    def _output(self, plan: Plan, values: dict[str, Array], name: str) -> Array:
        found = values[name] if name in values else np.asarray(self._value(plan, name, values))
        return np.array(found, self._dtype(plan.types[name]))


def _reusable(name: str, step: Step, values: dict[str, Array]) -> bool:
    """Whether nothing but this step needs the memory of a value any more."""
    if name not in step.frees or not values[name].flags.writeable:
        return False
    owner = _owner(values[name])
    return all(_owner(other) is not owner for key, other in values.items() if key != name)


def _owner(array: Array) -> object:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array

"""Every operation of the evaluator, as coremltools saves it, against NumPy and MLX."""

from types import SimpleNamespace
from typing import Any

import mil_cases
import mil_programs
import numpy as np
import pytest

from convert.mil_eval import Package
from convert.mil_ops import OPS, parameters
from convert.mil_tools import coremltools

pytestmark = pytest.mark.slow  # importing coremltools takes seconds

NAMES = {f"out_{place}": case for place, case in enumerate(mil_cases.CASES)}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """All cases as outputs of one package, evaluated once."""

    def body(mb: Any, **variables: Any) -> Any:
        inputs = SimpleNamespace(**variables)
        made = [mil_cases.CASES[case][0](mb, inputs) for case in NAMES.values()]
        return tuple(
            mb.identity(x=result, name=name) for result, name in zip(made, NAMES, strict=True)
        )

    path = tmp_path_factory.mktemp("ops") / "ops.mlpackage"
    mil_programs.save(path, mil_cases.SHAPES, body)
    found = Package(path).predict(mil_cases.inputs())
    return {NAMES[name]: value for name, value in found.items()}


@pytest.mark.parametrize("case", mil_cases.CASES)
def test_an_operation_gives_what_numpy_or_mlx_gives(
    case: str, results: dict[str, np.ndarray]
) -> None:
    expected = np.asarray(mil_cases.CASES[case][1](SimpleNamespace(**mil_cases.inputs())))
    assert results[case].shape == expected.shape
    # float32 with sums of at most 36 terms
    np.testing.assert_allclose(results[case], expected, rtol=2e-6, atol=2e-6)


def test_every_operation_has_a_case() -> None:
    assert {case.split()[0].removesuffix("'s") for case in mil_cases.CASES} == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_parameters_are_those_of_coremltools(op: str) -> None:
    registry = coremltools("converters.mil.mil.ops.registry").SSAOpRegistry
    newest = list(registry.core_ops[op].values())[-1]
    assert parameters(op) == set(newest.input_spec.input_types)

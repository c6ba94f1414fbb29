"""Values of a parameter that only the slow tests take: the quick ones keep a case or two."""

from collections.abc import Sequence
from typing import Any

import pytest


def slow(*values: object) -> list[Any]:
    """For one parameter."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_cases(*cases: Sequence[object]) -> list[Any]:
    """For several parameters at once."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]

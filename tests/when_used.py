"""Judges that take seconds to import, imported by the first test that asks them something."""

import warnings
from typing import Any

import pytest


class WhenUsed:
    """A module, imported at the first use of a name of it; without it the test is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("_", "pytest")):  # pytest looks at whatever a test module holds
            raise AttributeError(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(pytest.importorskip(self._name), name)

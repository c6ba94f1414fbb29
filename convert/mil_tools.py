"""coremltools, imported once, quietly, and without the frameworks that it would pull in.

coremltools looks for torch and TensorFlow when it is imported, which takes seconds and prints
warnings about versions that play no part here. Nothing else of the project imports coremltools.
"""

import importlib
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_UNWANTED = (
    *("torch", "torchvision", "torchaudio", "torchao", "executorch"),
    *("tensorflow", "sklearn", "scipy", "transformers"),
)


def coremltools(submodule: str = "") -> ModuleType:
    """Core ML's tools, or one of their submodules (``"converters.mil"``).

    Raises:
        ValueError: if they are missing or cannot be loaded.
    """
    name = f"coremltools.{submodule}" if submodule else "coremltools"
    if name in sys.modules:
        return sys.modules[name]
    try:
        with _hidden(_UNWANTED), _quiet(logging.getLogger("coremltools")):
            return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"Core ML packages need coremltools 9.0 ({error}); pip install 'coremltools>=9.0,<9.1'"
        ) from error


@contextmanager
def _hidden(names: tuple[str, ...]) -> Iterator[None]:
    """Let ``import name`` fail for modules that nobody has imported yet."""
    absent = [name for name in names if name not in sys.modules]
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]  # how Python marks a failed import
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

"""OpenELM on MLX: train, tune, measure, convert and ship Apple's small language models.

The public names are imported on first use, so that ``import openelm_mlx`` costs milliseconds.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from openelm_mlx.blas import preload_openblas

if TYPE_CHECKING:
    from openelm_mlx.checkpoint import load as load
    from openelm_mlx.config import ModelArgs as ModelArgs
    from openelm_mlx.generate import generate as generate
    from openelm_mlx.generate import stream_generate as stream_generate
    from openelm_mlx.model import Model as Model

__version__ = "0.1.0"

_PUBLIC = {
    "Model": "openelm_mlx.model",
    "ModelArgs": "openelm_mlx.config",
    "load": "openelm_mlx.checkpoint",
    "generate": "openelm_mlx.generate",
    "stream_generate": "openelm_mlx.generate",
    "from_corenet": "convert.corenet",
    "export_coreml": "convert.coreml",
}
_NAMED_OTHERWISE = {"export_coreml": "export"}

__all__ = ["Model", "ModelArgs", "__version__", "generate", "load", "stream_generate"]


class _Package(ModuleType):
    """Keeps public names for what they name: ``generate`` is the function, not its module."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):  # bound by its first import
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
preload_openblas()  # has to come before the first import of mlx.core


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'openelm_mlx' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), _NAMED_OTHERWISE.get(name, name))

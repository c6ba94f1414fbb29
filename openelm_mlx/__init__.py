"""OpenELM on MLX: train, tune, measure, convert and ship Apple's small language models.

The public names are imported on first use, so that ``import openelm_mlx`` costs milliseconds.
"""

from importlib import import_module
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
}

__all__ = ["Model", "ModelArgs", "__version__", "generate", "load", "stream_generate"]

preload_openblas()  # has to come before the first import of mlx.core


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'openelm_mlx' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)

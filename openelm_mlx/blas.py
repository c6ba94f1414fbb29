"""OpenBLAS for MLX's CPU backend on Linux: 30x faster float32 matrix products.

The Linux ``mlx-cpu`` wheel links the reference BLAS. OpenBLAS, loaded with global symbols *before*
``mlx.core``, takes its place. Nothing happens on macOS (Accelerate), with a CUDA backend, where
OpenBLAS is not installed, or with ``OPENELM_MLX_OPENBLAS=0``.
"""

import ctypes
import os
import platform
import sys
from importlib.util import find_spec
from pathlib import Path

SWITCH = "OPENELM_MLX_OPENBLAS"
_LIBRARY = "libopenblas.so.0"

status = "not tried"


def preload_openblas() -> str:
    """Load OpenBLAS once if it helps here, and say what was done.

    Returns:
        One line for ``openelm doctor``; also kept in ``status``.
    """
    global status
    status = _preload()
    return status


def _preload() -> str:
    if platform.system() != "Linux":
        return "not used: MLX brings its own BLAS on this system"
    if os.environ.get(SWITCH, "1") == "0":
        return f"off: {SWITCH}=0"
    if "mlx.core" in sys.modules:
        return "not used: mlx.core was imported before openelm_mlx"
    backend = mlx_backend()
    if backend != "cpu":
        return f"not used: MLX's backend is {backend}"
    try:
        ctypes.CDLL(_LIBRARY, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return f"absent: {_LIBRARY} not found, float32 matrix products on the CPU will be slow"
    return f"loaded: {_LIBRARY}"


def mlx_backend() -> str:
    """The installed MLX backend, found without importing MLX.

    Returns:
        ``"metal"`` on macOS; ``"cuda"``, ``"cpu"`` or ``"none"`` elsewhere.
    """
    if platform.system() == "Darwin":
        return "metal"
    spec = find_spec("mlx")
    folders = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    installed = {p.name for folder in folders for p in folder.parent.glob("mlx_c*.dist-info")}
    if any(name.startswith("mlx_cuda") for name in installed):
        return "cuda"
    return "cpu" if any(name.startswith("mlx_cpu") for name in installed) else "none"

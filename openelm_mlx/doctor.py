"""`openelm doctor`: what is installed, what MLX runs on here, and the command that mends a gap.

Versions are read from package metadata, so nothing but ``mlx.core`` is imported.
"""

import argparse
import json
import os
import platform
import re
import shutil
import sys
import time
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from openelm_mlx import __version__, blas

_REQUIRED = (
    "mlx-lm",
    "numpy",
    "sentencepiece",
    "tokenizers",
    "transformers",
    "huggingface-hub",
    "coremltools",
    "jinja2",
    "pyyaml",
    "tqdm",
)
_OPTIONAL = ("pyarrow", "ftfy", "zstandard", "datasets", "lm-eval", "matplotlib", "coreai-core")
_BACKENDS = ("mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13")
_PACKAGES = ("mlx", *_BACKENDS, *_REQUIRED, *_OPTIONAL, "torch")
_DISTRIBUTED = ("ring", "mpi", "nccl", "jaccl")
_GEMM_SECONDS = 0.1
_DRIVER = Path("/proc/driver/nvidia/version")  # there when the NVIDIA kernel module is loaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``openelm doctor``."""
    parser.add_argument("--json", action="store_true", help="write the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the report to standard output.

    Returns:
        0, or 1 where MLX cannot be imported.
    """
    found = report()
    text = json.dumps(found, indent=2) if args.json else _as_text(found)
    sys.stdout.write(text + "\n")
    return 1 if "import_error" in found else 0


def report() -> dict[str, object]:
    """Look at this machine and this Python; takes under a second.

    Returns:
        ``versions`` (package to version), ``device`` (or ``import_error``, one line, where MLX
        does not import), ``cpu``, ``hub`` and ``to_mend`` (gap to the command that closes it).
        Everything in it can be written as JSON; memory is in GB (1e9 bytes).
    """
    versions = _versions()
    found: dict[str, object] = {"versions": versions}
    gpu = None  # unknown
    try:
        import mlx.core as mx
    except ImportError as error:
        found["import_error"] = explain_import_error(error) or " ".join(str(error).split())
    else:
        gpu = mx.is_available(mx.gpu)
        found["device"] = _device(gpu)
    return found | {"cpu": _cpu(), "hub": _hub(), "to_mend": _to_mend(versions, gpu)}


def explain_import_error(error: ImportError) -> str | None:
    """Turn a failed import of MLX, or of a package of an extra, into a line that mends it.

    Args:
        error: what ``import mlx.core`` or the import of an optional package raised.

    Returns:
        One line with the command, or None where the cause is something else.
    """
    text, module = str(error), (error.name or "").partition(".")[0]
    missing = re.search(
        r"lib(?:cuda|cublas|cudnn|cufft|cusolver|nccl|nvrtc)[\w.-]*\.so[.\d]*", text
    )
    if missing:
        return (
            f"MLX's CUDA backend does not find {missing[0]}; install NVIDIA's driver, or change to "
            f"the CPU: pip uninstall -y mlx-cuda-12 mlx-cuda-13 && {_pip_install('cpu')}"
        )
    if module == "mlx" or "libmlx" in text:
        return f"MLX has no backend here; install one: {_backend_command()}"
    shadow = find_shadowing_convert() if module == "convert" else None
    if shadow is not None:
        return f"{shadow} hides our package `convert`; rename it or work in another folder"
    for extra, packages in _extras().items():
        if module in {name.replace("-", "_") for name in packages}:
            return f"{module} is not installed; add it: {_pip_install(extra)}"
    return None


def find_shadowing_convert() -> Path | None:
    """The file that Python would import as ``convert`` from here in place of our package.

    Returns:
        A ``convert.py`` or foreign ``convert`` package in the working folder or earlier on
        ``sys.path``; None where ours is found.
    """
    ours = Path(__file__).resolve().parent.parent / "convert"
    cwd = Path.cwd()
    for path in (cwd / "convert.py", cwd / "convert" / "__init__.py"):
        if path.is_file() and path.resolve().parent not in (ours, ours.parent):
            return path
    spec = find_spec("convert")
    if spec is None:
        return None
    folders = list(
        spec.submodule_search_locations or []
    )  # a folder without __init__.py has no origin
    found = Path(spec.origin or folders[0])
    return None if ours in (found.resolve(), found.resolve().parent) else found


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "openelm-mlx": __version__}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _device(gpu: bool) -> dict[str, object]:
    import mlx.core as mx

    info = mx.device_info()
    found: dict[str, object] = {
        "default": str(mx.default_device()),
        "name": info.get("device_name", "unknown"),
        "gpu": gpu,
    }
    for key, value in info.items():  # Metal and CUDA name their sizes, in bytes
        if "memory" in key or "working_set" in key:
            found[f"{key}_gb"] = round(int(value) / 1e9, 1)
    found["float32_gflops"] = _gemm_gflops(2048 if gpu else 512)
    found["distributed"] = [name for name in _DISTRIBUTED if mx.distributed.is_available(name)]
    return found


def _gemm_gflops(size: int) -> float:
    """Float32 products of two (size, size) matrices on the default device, in GFLOP/s."""
    import mlx.core as mx

    products, seconds, batch = 0, 0.0, 1
    matrix = mx.random.normal((size, size), dtype=mx.float32)
    mx.eval(matrix @ matrix)
    while seconds < _GEMM_SECONDS:
        start = time.perf_counter()
        mx.eval([matrix @ matrix for _ in range(batch)])
        seconds += time.perf_counter() - start
        products += batch
        batch = min(2 * batch, 8)
    return round(2 * size**3 * products / seconds / 1e9, 1)


def _cpu() -> dict[str, object]:
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count() or 0,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "blas": blas.status,
        "compiler": shutil.which("g++") or "none",  # the command that MLX's CPU compile runs
    }


def _hub() -> dict[str, object]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()
    token_file = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    return {
        "cache": str(os.environ.get("HF_HUB_CACHE") or home / "hub"),
        "token": "set" if os.environ.get("HF_TOKEN") or token_file.is_file() else "not set",
        "offline": offline,
    }


def _to_mend(versions: dict[str, str], gpu: bool | None) -> dict[str, str]:
    gaps = _backend_gaps(versions, gpu)
    needed = [name for name in _REQUIRED if name not in versions]
    if needed:
        gaps[f"{', '.join(needed)} absent"] = "pip install openelm-mlx"
    if blas.status.startswith("absent"):
        gaps["OpenBLAS is absent: float32 on the CPU is slow"] = (
            "apt-get install libopenblas0-pthread   (Fedora: dnf install openblas)"
        )
    if gpu is False and shutil.which("g++") is None:
        gaps["g++ is absent: no mx.compile on the CPU"] = "apt-get install g++"
    shadow = find_shadowing_convert()
    if shadow is not None:
        gaps[f"{shadow} hides the package `convert`"] = "rename it or work in another folder"
    for extra, packages in _extras().items():
        absent = [name for name in packages if name not in versions]
        if absent and extra in ("data", "eval", "plot", "coreai"):
            gaps[f"{', '.join(absent)} absent (optional)"] = _pip_install(extra)
    return gaps


def _backend_gaps(versions: dict[str, str], gpu: bool | None) -> dict[str, str]:
    backends = [name for name in _BACKENDS if name in versions]
    remove = f"pip uninstall -y {' '.join(backends)}"
    if len(backends) > 1:
        clean = f"{remove} mlx && {_backend_command()}"
        return {f"{' and '.join(backends)} overwrite each other's files": clean}
    if gpu is None and backends:
        return {"MLX does not import": f"{remove} mlx && {_backend_command()}"}
    if gpu is False and backends == ["mlx-cpu"] and _DRIVER.exists():
        change = f"{remove} && {_pip_install('cuda13')}"
        return {"an NVIDIA GPU is here, but MLX's CPU backend": change}
    if gpu is False and backends and "cuda" in backends[0]:
        return {f"{backends[0]} finds no GPU": f"{remove} && {_pip_install('cpu')}"}
    return {}


def _extras() -> dict[str, list[str]]:
    """Each extra's packages, from the installed metadata of openelm-mlx."""
    try:
        lines = requires("openelm-mlx") or []
    except PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for line in lines:
        match = re.match(r"([\w.-]+).*;.*\bextra == ['\"]([\w-]+)['\"]", line)
        if match:
            found.setdefault(match[2], []).append(match[1])
    return found


def _backend_command() -> str:
    if platform.system() == "Darwin":
        return "pip install --force-reinstall mlx   (needs an arm64 Python on Apple silicon)"
    return f"{_pip_install('cpu')}   (NVIDIA GPU: cuda12 or cuda13 in place of cpu)"


def _pip_install(extra: str) -> str:
    return f'pip install "openelm-mlx[{extra}]"'


def _as_text(found: dict[str, object]) -> str:
    lines = []
    for title, section in found.items():
        lines.append(title.replace("_", " "))
        rows = section if isinstance(section, dict) else {section: ""}
        words = {str(key): _as_words(value) for key, value in rows.items()}
        width = max(map(len, words), default=0)
        lines += [f"  {key:<{width}}  {value}".rstrip() for key, value in words.items()]
        lines += [] if words else ["  nothing"]
    return "\n".join(lines)


def _as_words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)

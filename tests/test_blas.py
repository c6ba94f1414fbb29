"""OpenBLAS under MLX's CPU backend: loaded where it helps, left alone elsewhere."""

import ctypes
import json
import os
import platform
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from openelm_mlx import blas

GEMM = """
import {first}
import {second}
import json, time
import mlx.core as mx
from openelm_mlx import blas
a = mx.random.normal((512, 512), dtype=mx.float32)
mx.eval(a @ a)
times = []
for _ in range(3):
    start = time.perf_counter()
    mx.eval(a @ a)
    times.append(time.perf_counter() - start)
print(json.dumps([blas.status, min(times)]))
"""


def run_gemm(
    first: str = "openelm_mlx", second: str = "mlx.core", switch: str = "1"
) -> tuple[str, float]:
    """The status line and the seconds of one float32 product in a fresh interpreter."""
    code = GEMM.format(first=first, second=second)
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {blas.SWITCH: switch},
        capture_output=True,
        text=True,
        check=True,
    )
    status, seconds = json.loads(result.stdout)
    return status, seconds


def fake_mlx(monkeypatch: pytest.MonkeyPatch, site: Path, *installed: str) -> None:
    """Let ``mlx`` be found in ``site``, with the metadata of the packages ``installed``."""
    (site / "mlx").mkdir()
    for name in installed:
        (site / f"{name}-0.32.4.dist-info").mkdir()
    spec = ModuleSpec("mlx", None, is_package=True)
    spec.submodule_search_locations = [str(site / "mlx")]
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(blas, "find_spec", lambda name: spec)


def pretend_fresh_linux(monkeypatch: pytest.MonkeyPatch, backend: str) -> list[str]:
    """A Linux process that has not imported MLX; returns the libraries it asks for."""
    asked: list[str] = []
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(blas, "mlx_backend", lambda: backend)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.delenv(blas.SWITCH, raising=False)
    monkeypatch.setattr(blas, "status", "not tried")
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: asked.append(name))
    return asked


@pytest.mark.parametrize(
    ("installed", "backend"),
    [
        (["mlx_cpu"], "cpu"),
        (["mlx_cuda_12"], "cuda"),
        (["mlx_cuda_13"], "cuda"),
        ([], "none"),
    ],
)
def test_the_backend_is_read_from_the_installed_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: list[str], backend: str
) -> None:
    fake_mlx(monkeypatch, tmp_path, "mlx", "mlx_lm", *installed)
    assert blas.mlx_backend() == backend


def test_without_mlx_there_is_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(blas, "find_spec", lambda name: None)
    assert blas.mlx_backend() == "none"


def test_macos_always_has_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert blas.mlx_backend() == "metal"


def test_the_cpu_backend_gets_openblas_with_global_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_fresh_linux(monkeypatch, "cpu")
    modes: list[int] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode: modes.append(mode))
    assert blas.preload_openblas() == "loaded: libopenblas.so.0"
    assert modes == [ctypes.RTLD_GLOBAL]
    assert blas.status == "loaded: libopenblas.so.0"


@pytest.mark.parametrize("backend", ["cuda", "none"])
def test_other_backends_are_left_alone_and_named(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    asked = pretend_fresh_linux(monkeypatch, backend)
    assert blas.preload_openblas() == f"not used: MLX's backend is {backend}"
    assert asked == []


def test_macos_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend_fresh_linux(monkeypatch, "cpu")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert blas.preload_openblas().startswith("not used")
    assert asked == []


def test_the_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = pretend_fresh_linux(monkeypatch, "cpu")
    monkeypatch.setenv(blas.SWITCH, "0")
    assert blas.preload_openblas() == f"off: {blas.SWITCH}=0"
    assert asked == []


def test_a_missing_library_is_said_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_fresh_linux(monkeypatch, "cpu")

    def not_found(name: str, mode: int) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", not_found)
    assert blas.preload_openblas().startswith("absent: libopenblas.so.0 not found")


def test_importing_the_package_runs_mlx_on_openblas() -> None:
    status, seconds = run_gemm()
    if not status.startswith("loaded"):
        pytest.skip(f"OpenBLAS is not used here ({status})")
    off, slow_seconds = run_gemm(switch="0")
    assert off.startswith("off")
    assert seconds < slow_seconds / 2  # measured 1/20; the reference BLAS has one thread, no SIMD


@pytest.mark.slow  # two processes
def test_importing_mlx_first_is_noticed() -> None:
    if not run_gemm()[0].startswith("loaded"):
        pytest.skip("OpenBLAS is not used here")
    status, _ = run_gemm(first="mlx.core", second="openelm_mlx")
    assert status == "not used: mlx.core was imported before openelm_mlx"

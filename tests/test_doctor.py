"""`openelm doctor` tells what is here, and each gap with the command that closes it."""

import argparse
import builtins
import json
import platform
import subprocess
import sys
import timeit
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from openelm_mlx import blas, doctor

NO_BACKEND = "libmlx.so: cannot open shared object file: No such file or directory"  # mlx 0.32.4
OLDER_THAN_THE_WHEEL = "/lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found"


def run_doctor(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    code = doctor.run(parser.parse_args(flags))
    return code, capsys.readouterr().out


def install(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Let exactly these packages (``_`` for ``-``) look installed, on Linux."""
    known = {name.replace("_", "-"): value for name, value in versions.items()}

    def version(name: str) -> str:
        if name not in known:
            raise PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(platform, "system", lambda: "Linux")


def break_mlx(monkeypatch: pytest.MonkeyPatch, error: ImportError) -> None:
    real = builtins.__import__

    def fails(name: str, *args: Any, **kwargs: Any) -> ModuleType:
        if name.startswith("mlx"):
            raise error
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fails)


def to_mend(monkeypatch: pytest.MonkeyPatch, *, gpu: bool = False) -> str:
    """The gaps and commands as text, on a machine with or without a GPU."""
    monkeypatch.setattr(mx, "is_available", lambda device: gpu)
    monkeypatch.setattr(doctor, "_device", lambda gpu: {})  # measures; says nothing of gaps
    gaps = doctor.report()["to_mend"]
    assert isinstance(gaps, dict)
    return "\n".join(f"{gap}: {command}" for gap, command in gaps.items())


def test_the_report_matches_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run_doctor(capsys, "--json")
    found = json.loads(text)
    assert code == 0
    assert found["versions"]["mlx"] == installed_version("mlx")
    assert found["versions"]["python"] == platform.python_version()
    assert found["device"]["default"] == str(mx.default_device())
    assert found["device"]["gpu"] == mx.is_available(mx.gpu)
    assert found["device"]["float32_gflops"] > 0.1
    assert ("ring" in found["device"]["distributed"]) == mx.distributed.is_available("ring")
    assert found["cpu"]["blas"] == blas.status
    assert 0.5 < found["cpu"]["memory_gb"] < 10_000


def test_the_text_is_aligned_and_holds_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run_doctor(capsys)
    assert code == 0
    rows = text.split("device\n")[0].splitlines()[1:]
    columns = {row.index(row.split()[1], len(row.split()[0]) + 2) for row in rows}
    assert len(columns) == 1
    assert f"mlx {installed_version('mlx')}" in " ".join(text.split())
    assert blas.status in text
    assert len(text.splitlines()) < 50


def test_gflops_agree_with_a_direct_measurement() -> None:
    if mx.is_available(mx.gpu):
        pytest.skip("one product of this size does not fill a GPU")
    reports = [doctor._gemm_gflops(256) for _ in range(2)]
    a = mx.random.normal((256, 256), dtype=mx.float32)
    seconds = min(timeit.repeat(lambda: mx.eval(a @ a), number=5, repeat=3)) / 5
    direct = 2 * 256**3 / seconds / 1e9
    assert direct / 20 < max(reports) < 20 * direct  # a busy machine; a wrong unit is off by 1000


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from openelm_mlx import doctor; doctor.report(); "
        "print(sorted({'mlx_lm', 'transformers', 'torch', 'coremltools', 'numpy', 'convert',"
        " 'huggingface_hub', 'sentencepiece'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_mlx_that_does_not_import_ends_in_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, mlx="0.32.4")
    break_mlx(monkeypatch, ImportError(NO_BACKEND, name="core"))
    code, text = run_doctor(capsys)
    assert code == 1
    assert 'MLX has no backend here; install one: pip install "openelm-mlx[cpu]"' in text
    assert "python" in text  # the rest of the report is there


def test_an_unexplained_failure_of_mlx_is_shown_with_a_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, mlx="0.32.4", mlx_cpu="0.32.4")
    break_mlx(monkeypatch, ImportError(OLDER_THAN_THE_WHEEL, name="core"))
    code, text = run_doctor(capsys)
    assert code == 1
    assert OLDER_THAN_THE_WHEEL in text
    assert "pip uninstall -y mlx-cpu mlx && pip install" in text


def test_two_backends_are_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mlx_cpu="0.32.4", mlx_cuda_13="0.32.4")
    text = to_mend(monkeypatch)
    assert "mlx-cpu and mlx-cuda-13 overwrite each other's files" in text
    assert "pip uninstall -y mlx-cpu mlx-cuda-13 mlx && pip install" in text


def test_an_nvidia_gpu_beside_the_cpu_backend_is_a_gap(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, mlx_cpu="0.32.4")
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "absent")
    assert "cuda13" not in to_mend(monkeypatch)
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path)
    assert 'pip uninstall -y mlx-cpu && pip install "openelm-mlx[cuda13]"' in to_mend(monkeypatch)


def test_a_cuda_backend_without_a_gpu_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mlx_cuda_12="0.32.4")
    assert "mlx-cuda-12 finds no GPU" in to_mend(monkeypatch)
    assert "mlx-cuda-12" not in to_mend(monkeypatch, gpu=True)


def test_slow_blas_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "status", "loaded: libopenblas.so.0")
    assert "libopenblas0-pthread" not in to_mend(monkeypatch)
    monkeypatch.setattr(blas, "status", "absent: libopenblas.so.0 not found")
    assert "apt-get install libopenblas0-pthread" in to_mend(monkeypatch)


def test_no_compiler_is_a_gap_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert "apt-get install g++" in to_mend(monkeypatch)
    assert "g++" not in to_mend(monkeypatch, gpu=True)


def test_absent_packages_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, mlx_cpu="0.32.4", pyarrow="24.0", numpy="2.4")
    text = to_mend(monkeypatch)
    data = next(line for line in text.splitlines() if "[data]" in line)
    assert "zstandard" in data
    assert "pyarrow" not in data
    assert 'pip install "openelm-mlx[plot]"' in text
    assert 'pip install "openelm-mlx[eval]"' in text
    needed = next(line for line in text.splitlines() if line.endswith("pip install openelm-mlx"))
    assert "sentencepiece" in needed
    assert "numpy" not in needed


@pytest.mark.parametrize("name", ["convert.py", "convert/__init__.py"])
def test_a_convert_in_the_working_folder_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor.find_shadowing_convert() is None
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("print('the user wrote this')\n")
    assert doctor.find_shadowing_convert() == tmp_path / name
    assert f"{tmp_path / name} hides the package `convert`" in to_mend(monkeypatch)


def test_the_token_is_never_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_TOKEN_PATH", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert doctor._hub() == {"cache": f"{tmp_path}/hub", "token": "not set", "offline": False}
    (tmp_path / "token").write_text("hf_from_a_file")
    assert doctor._hub()["token"] == "set"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _, text = run_doctor(capsys, "--json")
    assert json.loads(text)["hub"]["token"] == "set"
    assert json.loads(text)["hub"]["offline"] is True
    assert "hf_" not in text


@pytest.mark.slow  # three processes
def test_hub_settings_agree_with_huggingface_hub(tmp_path: Path) -> None:
    code = (
        "import json; from huggingface_hub import constants as c; "
        "from openelm_mlx.doctor import _hub; "
        "print(json.dumps([c.HF_HUB_CACHE, c.HF_HUB_OFFLINE, _hub()]))"
    )
    environment = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    for extra in ({}, {"HF_HOME": "~/hf", "HF_HUB_OFFLINE": "yes"}, {"HF_HUB_CACHE": "/c"}):
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=environment | extra,
            capture_output=True,
            text=True,
            check=True,
        )
        cache, offline, ours = json.loads(result.stdout)
        assert ours["cache"] == cache
        assert ours["offline"] == offline

"""A failed import of MLX, of an extra or of `convert` becomes one line that mends it."""

import platform
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from openelm_mlx import doctor

NO_BACKEND = "libmlx.so: cannot open shared object file: No such file or directory"  # mlx 0.32.4
OLDER_THAN_THE_WHEEL = "/lib/libstdc++.so.6: version `GLIBCXX_3.4.30' not found"


@pytest.mark.parametrize(
    "error",
    [
        ImportError(NO_BACKEND, name="core"),
        ModuleNotFoundError("No module named 'mlx'", name="mlx"),
        ModuleNotFoundError("No module named 'mlx.core'", name="mlx.core"),
    ],
)
def test_without_a_backend_one_line_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, error: ImportError
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    line = doctor.explain_import_error(error)
    assert line is not None
    assert 'pip install "openelm-mlx[cpu]"' in line
    assert "\n" not in line


def test_on_macos_the_line_names_mlx_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    line = doctor.explain_import_error(ModuleNotFoundError("No module named 'mlx'", name="mlx"))
    assert line is not None
    assert "pip install --force-reinstall mlx " in line


def test_a_missing_cuda_library_is_named() -> None:
    error = ImportError("libcuda.so.1: cannot open shared object file", name="core")
    line = doctor.explain_import_error(error)
    assert line is not None
    assert "libcuda.so.1" in line
    assert 'pip install "openelm-mlx[cpu]"' in line


def test_a_missing_optional_package_names_its_extra() -> None:
    error = ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow")
    assert doctor.explain_import_error(error) == (
        'pyarrow is not installed; add it: pip install "openelm-mlx[data]"'
    )
    error = ModuleNotFoundError("No module named 'lm_eval'", name="lm_eval.api")
    assert doctor.explain_import_error(error) == (
        'lm_eval is not installed; add it: pip install "openelm-mlx[eval]"'
    )


def test_an_import_error_of_another_kind_is_not_explained_away() -> None:
    assert doctor.explain_import_error(ImportError(OLDER_THAN_THE_WHEEL, name="core")) is None
    assert doctor.explain_import_error(ImportError("cannot import name 'a' from 'b'")) is None


def test_a_convert_folder_earlier_on_the_path_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "convert").mkdir()
    spec = ModuleSpec("convert", None, is_package=True)  # a namespace package: no __init__.py
    spec.submodule_search_locations = [str(tmp_path / "convert")]
    monkeypatch.setattr(doctor, "find_spec", lambda name: spec)
    assert doctor.find_shadowing_convert() == tmp_path / "convert"


def test_a_hidden_convert_is_one_line_for_who_runs_into_it(tmp_path: Path) -> None:
    (tmp_path / "convert.py").write_text("print('the user wrote this')\n")
    code = (
        "from openelm_mlx.doctor import explain_import_error\n"
        "try:\n    import convert.names\n"
        "except ImportError as error:\n    print(explain_import_error(error))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    line = result.stdout.splitlines()[-1]
    assert line.startswith(f"{tmp_path / 'convert.py'} hides our package `convert`; rename it")


def test_our_own_folder_does_not_shadow_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(doctor.__file__).parent.parent
    for folder in (root, root / "convert"):
        monkeypatch.chdir(folder)
        assert doctor.find_shadowing_convert() is None

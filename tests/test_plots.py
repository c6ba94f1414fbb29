"""The loss chart: drawn where matplotlib is, and never a reason for a run to fail."""

import json
import sys
from pathlib import Path

import pytest

from openelm_mlx import cli
from openelm_mlx.plots import loss_label, try_plot_losses

LINES = [
    {"step": i, "loss": 5 - i / 20, "learning_rate": 1e-3, "seconds": 0.1} for i in range(1, 61)
] + [{"step": 30, "val_loss": 4.1}, {"step": 60, "val_loss": 3.3}]


def write_run(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in LINES))


def test_plot_draws_a_picture_with_axes_units_and_title(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    write_run(tmp_path)
    assert cli.main(["plot", str(tmp_path)]) == 0
    picture = tmp_path / "loss.png"
    assert capsys.readouterr().out.strip() == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_without_matplotlib_a_run_goes_on_and_the_command_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    write_run(tmp_path)
    assert not try_plot_losses(LINES, tmp_path / "loss.png", title="run")
    assert cli.main(["plot", str(tmp_path)]) == 1
    assert 'pip install "openelm-mlx[plot]"' in capsys.readouterr().err
    assert not (tmp_path / "loss.png").exists()


def test_the_axis_names_what_the_loss_is_of() -> None:
    assert loss_label(LINES) == "loss (nats a token)"
    assert loss_label([{"step": 1, "loss": 0.69, "margin": 0.0}]) == "loss (a pair)"


def test_a_folder_without_metrics_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plot", str(tmp_path)]) == 1
    assert "holds no metrics.jsonl" in capsys.readouterr().err

"""Charts: titles and units, series told apart without colour, paper that is white everywhere."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import run_here

from openelm_mlx.config import ModelArgs
from openelm_mlx.plots import (
    bar_look,
    curves_figure,
    line_look,
    loss_figure,
    loss_label,
    plot_curves,
    try_plot_losses,
)
from openelm_mlx.plots_bench import bench_figure, short_number
from openelm_mlx.plots_layers import layers_figure, plot_layers

LINES = [
    {"step": i, "loss": 5 - i / 20, "learning_rate": 1e-3, "seconds": 0.1} for i in range(1, 61)
] + [{"step": 30, "val_loss": 4.1}, {"step": 60, "val_loss": 3.3}]
ROWS = [
    {"case": case, "who": who, "unit": unit, "median": median, "low": low, "high": 1.1 * median}
    for case, unit in (("decode, 128 + 32 tokens", "tokens/s"), ("host time a token", "ms"))
    for who, median, low in (("openelm", 6.0, 5.5), ("openelm compiled", 7.0, 6), ("mlx_lm", 5, 5))
]
RUNS = [[(0, 4.0), (10, 3.0 + seed / 10)] for seed in range(3)]


def needs_matplotlib() -> None:
    pytest.importorskip("matplotlib")


def write_run(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in LINES))


def looks(axes: Any) -> set[tuple[str, str]]:
    """Line style and marker of every named series."""
    return {
        (line.get_linestyle(), str(line.get_marker()))
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def assert_opaque_white(picture: Path) -> None:
    """White paper, nothing to see through: as readable on a dark page as on a white one."""
    from PIL import Image

    with Image.open(picture) as image:
        pixels = image.convert("RGBA")
        width, height = pixels.size
        corners = [(0, 0), (width - 1, 0), (0, height - 1), (width - 1, height - 1)]
        assert {pixels.getpixel(corner) for corner in corners} == {(255, 255, 255, 255)}
        assert pixels.getextrema()[3] == (255, 255)


@pytest.mark.slow
def test_plot_draws_a_picture_with_axes_units_and_title(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_matplotlib()
    write_run(tmp_path)
    outcome = run_here(capsys, "plot", tmp_path)
    assert outcome.code == 0, outcome.err
    picture = tmp_path / "loss.png"
    assert outcome.out.strip() == str(picture)
    assert_opaque_white(picture)
    top, bottom = loss_figure(LINES, title="run").axes
    assert (top.get_title(), top.get_ylabel()) == ("run", "loss (nats a token)")
    assert (bottom.get_xlabel(), bottom.get_ylabel()) == ("update", "learning rate")
    assert {"training, smoothed", "validation"} <= {str(x.get_label()) for x in top.get_lines()}
    assert len(looks(top)) > 1


@pytest.mark.slow
def test_curves_of_runs_differ_in_style_and_marker_and_name_their_mean() -> None:
    needs_matplotlib()
    figure = curves_figure(
        {"uniform": RUNS, "layer-wise": RUNS}, title="t", x_label="update", y_label="loss (nats)"
    )
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("update", "loss (nats)")
    assert len(looks(axes)) == 2
    mean = next(line for line in axes.get_lines() if line.get_label() == "uniform, mean of 3")
    assert list(mean.get_ydata()) == pytest.approx([4.0, 3.1])
    assert len(axes.get_lines()) == 8


@pytest.mark.slow
def test_runs_measured_at_different_points_are_refused(tmp_path: Path) -> None:
    needs_matplotlib()
    with pytest.raises(ValueError, match="same points"):
        plot_curves({"a": [[(0, 1.0)], [(1, 1.0)]]}, tmp_path / "x.png", title="t")


@pytest.mark.slow
def test_layers_are_drawn_for_each_size_with_names_and_units(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_matplotlib()
    args = {size: ModelArgs.preset(size) for size in ("270M", "3B")}
    query, ffn, parameters = layers_figure(args, title="Layer-wise scaling").axes
    assert query.get_title() == "Layer-wise scaling"
    assert query.get_ylabel() == "query width"
    assert ffn.get_ylabel() == "feed-forward width"
    assert parameters.get_ylabel() == "parameters (millions)"
    assert parameters.get_xlabel() == "layer, counted from the input"
    for axes in (query, ffn, parameters):
        assert len(looks(axes)) == 2
    first = ffn.get_lines()[0].get_ydata()
    assert (first[0], first[-1], len(first)) == (768, 5120, 16)  # 270M, as Apple's code has it
    picture = tmp_path / "layers.png"
    assert run_here(capsys, "plot", "270M", "3B", "--output", picture).code == 0
    assert_opaque_white(picture)
    shown = plot_layers(args, picture)
    assert shown._repr_png_() == picture.read_bytes()


@pytest.mark.slow
def test_bars_of_a_bench_differ_in_hatch_and_have_units(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_matplotlib()
    figure = bench_figure(ROWS, title="OpenELM 270M")
    decode, host = figure.axes
    assert figure.get_suptitle() == "OpenELM 270M"
    assert decode.get_title() == "decode, 128 + 32 tokens"
    assert decode.get_xlabel() == "tokens/s, more is better"
    assert host.get_xlabel() == "ms, less is better"
    assert [text.get_text() for text in host.get_yticklabels()] == [
        *("openelm", "openelm compiled", "mlx_lm")
    ]
    assert len({bar.get_hatch() for bar in decode.patches}) == 3
    assert [bar.get_hatch() for bar in decode.patches] == [bar.get_hatch() for bar in host.patches]
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"model": "270M", "rows": [{**row, "ratio": None} for row in ROWS]}))
    outcome = run_here(capsys, "plot", file)
    assert outcome.out.strip() == str(tmp_path / "bench.png")
    assert_opaque_white(tmp_path / "bench.png")


def test_no_two_series_of_a_chart_look_alike() -> None:
    lines = [line_look(i) for i in range(28)]
    assert len({(look["linestyle"], look["marker"]) for look in lines}) == 28
    bars = [bar_look(i) for i in range(49)]
    assert len({(look["color"], look["hatch"]) for look in bars}) == 49
    assert len({look["hatch"] for look in bars[:7]}) == 7


@pytest.mark.parametrize(
    ("value", "text"), [(0.0082, "0.0082"), (5.324, "5.32"), (99.94, "99.9"), (7742.3, "7742")]
)
def test_numbers_beside_bars_have_three_digits_or_all_before_the_point(
    value: float, text: str
) -> None:
    assert short_number(value) == text


def test_a_bench_without_rows_has_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        bench_figure([], title="empty")


def test_without_matplotlib_a_run_goes_on_and_the_command_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    write_run(tmp_path)
    assert not try_plot_losses(LINES, tmp_path / "loss.png", title="run")
    assert 'pip install "openelm-mlx[plot]"' in run_here(capsys, "plot", tmp_path).error
    assert not (tmp_path / "loss.png").exists()
    refused = run_here(capsys, "bench", "--size", "3B", "--plot", tmp_path / "b.png")
    assert 'pip install "openelm-mlx[plot]"' in refused.error  # before anything is measured


def test_the_axis_names_what_the_loss_is_of() -> None:
    assert loss_label(LINES) == "loss (nats a token)"
    assert loss_label([{"step": 1, "loss": 0.69, "margin": 0.0}]) == "loss (a pair)"


def test_what_cannot_be_drawn_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "holds no metrics.jsonl" in run_here(capsys, "plot", tmp_path).error
    write_run(tmp_path)
    assert "one run a picture" in run_here(capsys, "plot", tmp_path, tmp_path).error
    assert "is neither a folder" in run_here(capsys, "plot", "nowhere").error

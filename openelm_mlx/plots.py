"""Charts: how all of them look, the loss of a run, and curves of several runs side by side.

Readable on white and on dark pages and without colour: the paper is opaque white, and series differ
in line style, marker or hatch. Needs matplotlib (the plot extra); nothing here knows models.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openelm_mlx.atomic import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

# Okabe and Ito's colours, told apart by all common kinds of colour vision
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
HATCHES = ("", "//", "..", "xx", "\\\\", "++", "--")
_EXTRA = 'charts need matplotlib: pip install "openelm-mlx[plot]"'

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Picture:
    """A PNG file; at the end of a notebook's cell it is shown."""

    path: Path

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


def have_matplotlib() -> bool:
    """Whether charts can be drawn here."""
    from importlib.util import find_spec

    return find_spec("matplotlib") is not None


def new_figure(width: float = 7.0, height: float = 4.0) -> "Figure":
    """An empty figure that needs no display.

    Raises:
        ValueError: where matplotlib is not installed, naming the extra.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(_EXTRA) from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: "Figure", path: str | Path, *, overwrite: bool = True) -> Picture:
    """Write a PNG, whole or not at all."""
    with atomic_file(path, overwrite=overwrite) as temporary:
        figure.savefig(temporary, format="png")
    return Picture(Path(path))


def line_look(number: int) -> dict[str, Any]:
    """Colour, line style and marker of series number ``number``: no two of 28 are alike."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": STYLES[number % len(STYLES)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 4,
    }


def bar_look(number: int) -> dict[str, Any]:
    """Colour and hatch of the bars of series number ``number``: no two of 49 are alike."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "hatch": HATCHES[(number + number // len(COLOURS)) % len(HATCHES)],
        "edgecolor": "white",
    }


def plot_losses(
    lines: Sequence[Mapping[str, Any]], path: str | Path, *, title: str, overwrite: bool = True
) -> Picture:
    """Draw training and validation loss and the learning rate over the updates.

    Args:
        lines: of a run's ``metrics.jsonl``.
        path: of the PNG.
        title: above the chart.
        overwrite: replace a file that is there.

    Raises:
        ValueError: if there is no step, or matplotlib is missing.
    """
    return save_figure(loss_figure(lines, title=title), path, overwrite=overwrite)


def loss_figure(lines: Sequence[Mapping[str, Any]], *, title: str) -> "Figure":
    """The figure of :func:`plot_losses`."""
    train = [(m["step"], m["loss"]) for m in lines if "loss" in m]
    valid = [(m["step"], m["val_loss"]) for m in lines if "val_loss" in m]
    rates = [(m["step"], m["learning_rate"]) for m in lines if "learning_rate" in m]
    if not train:
        raise ValueError(f"{title}: no training step is recorded yet, so there is nothing to draw")
    figure = new_figure(height=5.0)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    faint = 0.35 if len(train) > 40 else 1.0
    top.plot(*_columns(train), "-", color=COLOURS[0], alpha=faint, label="training, each step")
    if len(train) > 40:
        top.plot(*_columns(_smooth(train)), "-", color=COLOURS[0], lw=2, label="training, smoothed")
    if valid:
        top.plot(*_columns(valid), "--o", color=COLOURS[1], ms=4, lw=2, label="validation")
    top.set_ylabel(loss_label(lines))
    top.set_title(title)
    top.legend()
    top.grid(alpha=0.3)
    bottom.plot(*_columns(rates), "-", color=COLOURS[6])
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("update")
    bottom.grid(alpha=0.3)
    return figure


def loss_label(lines: Sequence[Mapping[str, Any]]) -> str:
    """What the loss of a run is measured in: preference runs, which have a margin, count pairs."""
    return "loss (a pair)" if any("margin" in line for line in lines) else "loss (nats a token)"


def try_plot_losses(lines: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> bool:
    """As :func:`plot_losses`, but a run does not fail for a chart; says what was missing."""
    if not have_matplotlib():
        logger.info("no %s: %s", path.name, _EXTRA)
        return False
    try:
        plot_losses(lines, path, title=title)
    except (ValueError, OSError) as error:
        logger.warning("no %s: %s", path.name, error)
        return False
    return True


def plot_curves(
    groups: Mapping[str, Sequence[Points]],
    path: str | Path,
    *,
    title: str,
    x_label: str = "update",
    y_label: str = "validation loss (nats a token)",
) -> Picture:
    """Draw runs of several kinds: each run thin, the mean of each kind thick.

    Args:
        groups: kind -> its runs, one a seed, all with the same x values.
        path: of the PNG.
        title: above the chart.
        x_label: with its unit.
        y_label: with its unit.

    Raises:
        ValueError: if runs of a kind differ in their x values, or matplotlib is missing.
    """
    figure = curves_figure(groups, title=title, x_label=x_label, y_label=y_label)
    return save_figure(figure, path)


def curves_figure(
    groups: Mapping[str, Sequence[Points]], *, title: str, x_label: str, y_label: str
) -> "Figure":
    """The figure of :func:`plot_curves`."""
    figure = new_figure()
    axes = figure.subplots()
    for number, (name, runs) in enumerate(groups.items()):
        look = line_look(number)
        for run in runs:
            axes.plot(*_columns(run), color=look["color"], linestyle=look["linestyle"], lw=0.7)
        label = f"{name}, mean of {len(runs)}" if len(runs) > 1 else name
        axes.plot(*_columns(_mean(name, runs)), **look, lw=2, label=label)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def _mean(name: str, runs: Sequence[Points]) -> Points:
    at = [[x for x, _ in run] for run in runs]
    if not at or any(xs != at[0] for xs in at):
        raise ValueError(f"{name}: its runs were not measured at the same points; give equal ones")
    return [(x, sum(run[i][1] for run in runs) / len(runs)) for i, x in enumerate(at[0])]


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _smooth(points: Points) -> Points:
    """Exponential mean over some 2 % of the points, corrected for its start."""
    weight = 1 - 1 / max(len(points) / 50, 2)
    value = norm = 0.0
    out = []
    for x, y in points:
        value, norm = weight * value + (1 - weight) * y, weight * norm + (1 - weight)
        out.append((x, value / norm))
    return out

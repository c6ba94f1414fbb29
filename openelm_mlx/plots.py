"""Charts: the loss of a run, and others as stages need them.

Readable on white and on dark paper and without colour: opaque background, line styles and markers.
Needs matplotlib (the plot extra); nothing here knows models.
"""

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openelm_mlx.atomic import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

# Okabe and Ito's colours, told apart by all common kinds of colour vision
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
_EXTRA = 'charts need matplotlib: pip install "openelm-mlx[plot]"'


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


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a PNG, whole or not at all."""
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format="png")


def plot_losses(lines: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Draw training and validation loss and the learning rate over the steps.

    Args:
        lines: of a run's ``metrics.jsonl``.
        path: of the PNG.
        title: above the chart.

    Raises:
        ValueError: if there is no step, or matplotlib is missing.
    """
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
    save_figure(figure, path)


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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``openelm plot``."""
    parser.add_argument("run", metavar="RUN", help="folder of a training run")
    parser.add_argument("--output", metavar="FILE.png", help="default: RUN/loss.png")


def run(args: argparse.Namespace) -> int:
    """Draw the loss of a run; prints the name of the picture."""
    from openelm_mlx.metrics import METRICS_FILE, read_metrics

    folder = Path(args.run)
    if not (folder / METRICS_FILE).is_file():
        raise FileNotFoundError(f"{folder} holds no {METRICS_FILE}; give the --output of a run")
    path = Path(args.output) if args.output else folder / "loss.png"
    plot_losses(read_metrics(folder), path, title=folder.resolve().name)
    sys.stdout.write(f"{path}\n")
    return 0


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _smooth(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Exponential mean over some 2 % of the points, corrected for its start."""
    weight = 1 - 1 / max(len(points) / 50, 2)
    value = norm = 0.0
    out = []
    for x, y in points:
        value, norm = weight * value + (1 - weight) * y, weight * norm + (1 - weight)
        out.append((x, value / norm))
    return out

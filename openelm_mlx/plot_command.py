"""Stage: ``openelm plot``: the loss of a run, the numbers of a bench, or the layers of models."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from openelm_mlx.plots import Picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``openelm plot``."""
    add = parser.add_argument
    add(
        "what",
        nargs="+",
        metavar="WHAT",
        help="folder of a run: its loss; FILE.json of a bench: its numbers; model folders or 270M, "
        "450M, 1.1B, 3B: widths and parameters of their layers",
    )
    add("--layers", action="store_true", help="draw a run's model, not its loss")
    add("--output", metavar="FILE.png", help="default: RUN/loss.png, FILE.png or layers.png")


def run(args: argparse.Namespace) -> int:
    """Draw, and print the name of the picture."""
    sys.stdout.write(f"{_draw(args).path}\n")
    return 0


def _draw(args: argparse.Namespace) -> Picture:
    from openelm_mlx.metrics import METRICS_FILE

    first = Path(args.what[0])
    if not args.layers:
        if first.suffix == ".json":
            return _bench(args.what, args.output or first.with_suffix(".png"))
        if (first / METRICS_FILE).is_file():
            return _loss(args.what, args.output)
        if first.is_dir() and not (first / "config.json").is_file():
            raise FileNotFoundError(
                f"{first} holds no {METRICS_FILE} and no config.json; give the --output of a run, "
                "or a model folder"
            )
    return _layers(args.what, args.output or "layers.png")


def _loss(runs: Sequence[str], output: str | None) -> Picture:
    from openelm_mlx.metrics import read_metrics
    from openelm_mlx.plots import plot_losses

    if len(runs) > 1:
        raise ValueError(f"one run a picture, got {len(runs)}; call openelm plot for each")
    folder = Path(runs[0])
    path = output or folder / "loss.png"
    return plot_losses(read_metrics(folder), path, title=folder.resolve().name)


def _bench(files: Sequence[str], output: str | Path) -> Picture:
    from openelm_mlx.bench_report import read_report
    from openelm_mlx.plots_bench import plot_bench

    reports = [read_report(file) for file in files]
    rows = [row for report in reports for row in report["rows"]]
    names = dict.fromkeys(str(report.get("model", "")) for report in reports)
    return plot_bench(rows, output, title=f"OpenELM {', '.join(names)}")


def _layers(names: Sequence[str], output: str | Path) -> Picture:
    from openelm_mlx.info import find_args
    from openelm_mlx.plots_layers import plot_layers

    return plot_layers({name: find_args(name)[1] for name in names}, output)

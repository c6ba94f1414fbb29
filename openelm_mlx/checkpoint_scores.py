"""``openelm evaluate --checkpoints``: every saved step of a run scored, and a chart of it."""

import argparse
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from openelm_mlx.atomic import refuse_existing_file
from openelm_mlx.checkpoint_finder import Checkpoint, Found, find_checkpoints
from openelm_mlx.evaluation import measure
from openelm_mlx.evaluation_args import PerplexityArgs, TaskArgs
from openelm_mlx.evaluation_record import Partial, record_of, today, write_result
from openelm_mlx.plots import COLOURS, STYLES, have_matplotlib, new_figure, save_figure
from openelm_mlx.scored_models import of_model
from openelm_mlx.suites import headline

logger = logging.getLogger(__name__)

_MARKERS = {"average": "*", "best": "D", "result": "s"}
_LABELS = {"average": "average", "best": "best validation loss", "result": "result"}


def score_checkpoints(
    args: argparse.Namespace, text: PerplexityArgs | None, tasks: TaskArgs | None
) -> int:
    """Score all that a run left, print a table, and write JSON and a chart.

    Args:
        args: the flags of ``openelm evaluate``.
        text: what text to score.
        tasks: which tasks to score.

    Returns:
        The exit code.

    Raises:
        FileNotFoundError: if there is nothing to score.
        FileExistsError: if a file would be replaced without ``--overwrite``.
    """
    chart = Path(args.output).with_suffix(".png") if args.output else None
    if chart is not None:
        refuse_existing_file(chart, overwrite=args.overwrite)
    with find_checkpoints(
        args.checkpoints,
        base=args.model[0] if args.model else None,
        tokenizer=args.tokenizer,
        average_last=args.average_last,
    ) as found:
        record = record_of(
            text,
            tasks,
            checkpoints=args.checkpoints,
            average_last=args.average_last,
            tokenizer=found.tokenizer.source,
            float32=args.float32,
        )
        partial = Partial(args.output, record)
        rows = _rows(args, found, text, tasks, partial)
    result = {"checkpoints": rows, **record, "date": today()}
    sys.stdout.write(render_table(rows))
    if args.output and chart is not None:
        draw_scores(rows, chart, title=Path(args.checkpoints).resolve().name)
        write_result(args.output, result, overwrite=args.overwrite)
        partial.remove()
    return 0


def _rows(
    args: argparse.Namespace,
    found: Found,
    text: PerplexityArgs | None,
    tasks: TaskArgs | None,
    partial: Partial,
) -> list[dict[str, Any]]:
    rows = []
    for i, checkpoint in enumerate(found.checkpoints):
        model = of_model(
            checkpoint.model(),
            found.tokenizer,
            name=checkpoint.name,
            kind="model",
            files=list(checkpoint.files),
            float32=args.float32,
        )
        row = partial.load(f"{i} row", key=model.hash)
        if row is None:
            measured = measure(model, text, tasks, partial, name=f"{i} ")
            row = {**_facts(checkpoint), **measured, "sha256": model.hash}
            partial.save(row, f"{i} row", key=model.hash, now=True)
        rows.append(row)
        del model
        mx.clear_cache()
    return rows


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"name": checkpoint.name, "kind": checkpoint.kind, "step": checkpoint.step}


def scores_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The columns of a table: score -> value of each row; accuracies of tasks after perplexity."""
    columns: dict[str, list[float]] = {}
    if rows and "perplexity" in rows[0]:
        columns["perplexity"] = [row["perplexity"] for row in rows]
        columns["bits a byte"] = [row["bits_per_byte"] for row in rows]
    for task in rows[0].get("results", {}) if rows else ():
        columns[task] = [headline(row["results"][task]) for row in rows]
    return columns


def render_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line a checkpoint."""
    columns = scores_of(rows)
    width = max(len(row["name"]) for row in rows)
    widths = [max(len(name), 10) for name in columns]
    header = [
        f"{'step':>8}  {'':8}  {'':{width}}",
        *(f"{name:>{w}}" for name, w in zip(columns, widths, strict=True)),
    ]
    lines = ["  ".join(header)]
    for i, row in enumerate(rows):
        step = "" if row["step"] is None else row["step"]
        cells = [f"{v[i]:{w}.4f}" for v, w in zip(columns.values(), widths, strict=True)]
        lines.append("  ".join([f"{step:>8}  {row['kind']:8}  {row['name']:{width}}", *cells]))
    return "\n".join(lines) + "\n"


def draw_scores(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> bool:
    """Draw the scores over the steps, with averages, the best weights and the result marked.

    Args:
        rows: of the result's ``checkpoints``.
        path: of the PNG.
        title: above the chart.

    Returns:
        Whether there is a chart: it needs matplotlib, which is said.
    """
    if not have_matplotlib():
        logger.info('no %s: charts need matplotlib: pip install "openelm-mlx[plot]"', path.name)
        return False
    columns = scores_of(rows)
    columns.pop("bits a byte", None)
    losses = {name: v for name, v in columns.items() if name == "perplexity"}
    tasks = {name: v for name, v in columns.items() if name != "perplexity"}
    panels = [(p, label) for p, label in ((losses, "perplexity"), (tasks, "accuracy")) if p]
    figure = new_figure(height=1.0 + 3.0 * len(panels))
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    last = max((row["step"] for row in rows if row["step"] is not None), default=0)
    for ax, (panel, label) in zip(axes, panels, strict=True):
        for i, (name, values) in enumerate(panel.items()):
            _draw(ax, rows, values, name, i, last)
        ax.set_ylabel(label)
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7)
    axes[0].set_title(title)
    axes[-1].set_xlabel("update")
    save_figure(figure, path)
    return True


def _draw(
    ax: Any,
    rows: Sequence[Mapping[str, Any]],
    values: Sequence[float],
    name: str,
    number: int,
    last: int,
) -> None:
    """One score: saved steps as a line, all else as marks; what has no step stands at the last."""
    colour, style = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
    points = [
        (row["kind"], last if row["step"] is None else row["step"], value)
        for row, value in zip(rows, values, strict=True)
    ]
    line = [(step, value) for kind, step, value in points if kind not in _MARKERS]
    if line:
        ax.plot(*zip(*line, strict=True), style, marker="o", ms=4, color=colour, label=name)
    for kind, marker in _MARKERS.items():
        marks = [(step, value) for own, step, value in points if own == kind]
        if marks:
            ax.plot(
                *zip(*marks, strict=True),
                marker=marker,
                ls="none",
                ms=11 if kind == "average" else 7,
                mfc=colour if kind == "average" else "none",
                mec="black" if kind == "average" else colour,
                label=_LABELS[kind] if number == 0 or not line else None,
            )

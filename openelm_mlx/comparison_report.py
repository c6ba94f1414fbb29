"""How a comparison of models looks: a table for the terminal, Markdown, and a bar chart."""

import logging
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openelm_mlx.plots import COLOURS, have_matplotlib, new_figure, save_figure
from openelm_mlx.suites import headline

logger = logging.getLogger(__name__)

KINDS = {"model": "MLX", "adapters": "MLX + adapters", "coreml": "Core ML", "coreai": "Core AI"}
_NAME, _SAMPLE, _LINES = 28, 40, 10  # characters of a name and of a sample's line; lines of it
_BARS = (  # key, title, unit, how the value is written
    ("bits_per_byte", "bits a byte (less is better)", 1.0, "{:.4f}"),
    ("size", "MB on disk", 1e6, "{:,.3g}"),
    ("tokens_per_second", "tokens scored a second", 1.0, "{:,.0f}"),
)


def table_of(result: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and cells, one row a model.

    Args:
        result: of ``openelm evaluate --compare``; perplexity, accuracy and speed are there if text
            was scored, and a column a task if tasks were.
    """
    models = result["models"]
    rows = list(models.values())
    columns: list[tuple[str, Any]] = [("kind", lambda r: KINDS[r["kind"]])]
    if any("perplexity" in row for row in rows):
        columns += [
            ("perplexity", lambda r: f"{r['perplexity']:.4f}"),
            ("change", lambda r: _change(r, rows[0])),
            ("bits a byte", lambda r: f"{r['bits_per_byte']:.4f}"),
            ("tokens right", lambda r: f"{r['token_accuracy']:.2%}"),
        ]
    for task in dict.fromkeys(task for row in rows for task in row.get("results", {})):
        columns.append((task, lambda r, task=task: _accuracy(r, task)))
    columns.append(("size", lambda r: _size(r["size"])))
    if any("tokens_per_second" in row for row in rows):
        columns.append(("tokens/s", lambda r: f"{r['tokens_per_second']:,.0f}"))
    names = short_names(list(models))
    cells = [
        [name, *(cell(row) for _, cell in columns)] for name, row in zip(names, rows, strict=True)
    ]
    return ["model", *(head for head, _ in columns)], cells


def render_table(result: Mapping[str, Any]) -> str:
    """The table in columns, and the samples below, for a terminal."""
    header, cells = table_of(result)
    widths = [max(len(row[i]) for row in [header, *cells]) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [header, *cells]
    ]
    for sample in result["samples"]:
        lines += ["", repr(sample["prompt"])]
        names = short_names(list(sample["continuations"]))
        width = max(map(len, names))
        for name, text in zip(names, sample["continuations"].values(), strict=True):
            lines.append(f"  {name.ljust(width)}  {text!r}")
    return "\n".join(lines) + "\n"


def render_markdown(result: Mapping[str, Any], picture: str | None) -> str:
    """The table, the chart and the samples side by side.

    Args:
        result: of ``openelm evaluate --compare``.
        picture: name of the chart beside; None where there is none.
    """
    header, cells = table_of(result)
    lines = ["# Models compared", "", *_markdown(header, cells)]
    lines += ["", *result["notes"]] if result["notes"] else []
    lines += ["", f"![bits a byte, size and speed]({picture})"] if picture else []
    if result["samples"]:
        names = short_names(list(result["models"]))
        rows = [
            [_cell(s["prompt"]), *map(_cell, s["continuations"].values())]
            for s in result["samples"]
        ]
        lines += ["", "The likeliest continuation:", "", *_markdown(["prompt", *names], rows)]
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    return "\n".join([*lines, "", f"{result['date']}; {versions}", ""])


def render_chart(result: Mapping[str, Any], path: Path) -> bool:
    """Draw bars of quality, size and speed, with the first sample of each model below.

    Returns:
        Whether there is a chart: it needs matplotlib, which is said, and scored text.
    """
    rows = list(result["models"].values())
    if not all("perplexity" in row for row in rows):
        logger.info("no %s: it shows text, so give --data", path.name)
        return False
    if not have_matplotlib():
        logger.info('no %s: charts need matplotlib: pip install "openelm-mlx[plot]"', path.name)
        return False
    sample = next(iter(result["samples"]), None)
    names = short_names(list(result["models"]))
    bars = 1.0 + 0.4 * len(rows)
    figure = new_figure(max(9.0, 1.9 * len(rows)), bars + (2.0 if sample else 0.5))
    parts: Any = figure.subfigures(2, 1, height_ratios=[bars, 1.8]) if sample else [figure]
    panels = parts[0].subplots(1, len(_BARS), sharey=True)
    for axes, (key, label, unit, written) in zip(panels, _BARS, strict=True):
        _bars(axes, names, [row[key] / unit for row in rows], label, written)
    if sample:
        _texts(parts[1], names, sample)
    with warnings.catch_warnings():  # a script that the font lacks shows as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        save_figure(figure, path)
    return True


def short_names(names: Sequence[str]) -> list[str]:
    """The last part of each path, or the whole where two would look alike."""
    last = [Path(name).name or name for name in names]
    return [
        short if last.count(short) == 1 else name for short, name in zip(last, names, strict=True)
    ]


def _bars(
    axes: Any, names: Sequence[str], values: Sequence[float], label: str, written: str
) -> None:
    drawn = axes.barh(
        range(len(names)),
        values,
        color=[COLOURS[i % len(COLOURS)] for i in range(len(names))],
        edgecolor="black",
    )
    axes.bar_label(drawn, [written.format(value) for value in values], fontsize=8, padding=3)
    axes.set_yticks(range(len(names)), [_wrapped(name, _NAME) for name in names], fontsize=8)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.25)
    axes.set_title(label, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _texts(figure: Any, names: Sequence[str], sample: Mapping[str, Any]) -> None:
    figure.suptitle(f"{sample['prompt'][:100]} …", fontsize=9)
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    width = _SAMPLE if len(names) < 4 else _SAMPLE * 3 // 4
    for axes, name, text in zip(panels, names, sample["continuations"].values(), strict=True):
        axes.set_title(_wrapped(name, _NAME), fontsize=8)
        axes.axis("off")
        printable = "".join(c if c.isprintable() else " " for c in text)
        shown = _wrapped(" ".join(printable.split()), width, _LINES).replace("$", r"\$")
        axes.text(0, 1, shown, va="top", fontsize=7, transform=axes.transAxes)


def _wrapped(text: str, width: int, lines: int = 3) -> str:
    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder=" …"))


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(header)} |",
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", r"\|").split())


def _change(row: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    return "" if row is first else f"{row['perplexity'] / first['perplexity'] - 1:+.2%}"


def _accuracy(row: Mapping[str, Any], task: str) -> str:
    values = row.get("results", {}).get(task)
    return "" if values is None else f"{headline(values):.4f}"


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"

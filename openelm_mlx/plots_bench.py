"""Chart of ``openelm bench``'s numbers: a panel for each case, a bar for each contender."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openelm_mlx.plots import Picture, bar_look, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = 2
_RATES = ("tokens/s",)  # units of which more is better, where a file does not say


def plot_bench(
    rows: Sequence[Mapping[str, Any]], path: str | Path, *, title: str, overwrite: bool = True
) -> Picture:
    """Draw measured medians with their spread.

    Args:
        rows: as :func:`openelm_mlx.bench_run.measure` gives them.
        path: of the PNG.
        title: above all panels.
        overwrite: replace a file that is there.

    Raises:
        ValueError: if there is no row, or matplotlib is missing.
    """
    return save_figure(bench_figure(rows, title=title), path, overwrite=overwrite)


def bench_figure(rows: Sequence[Mapping[str, Any]], *, title: str) -> "Figure":
    """The figure of :func:`plot_bench`."""
    if not rows:
        raise ValueError(f"{title}: no case was measured, so there is nothing to draw")
    cases = list(dict.fromkeys(row["case"] for row in rows))
    looks = {who: bar_look(i) for i, who in enumerate(dict.fromkeys(row["who"] for row in rows))}
    of = {case: [row for row in rows if row["case"] == case] for case in cases}
    lines = [cases[i : i + _COLUMNS] for i in range(0, len(cases), _COLUMNS)]
    heights = [1.2 + 0.3 * max(len(of[case]) for case in line) for line in lines]
    figure = new_figure(width=5.0 * min(len(cases), _COLUMNS), height=sum(heights) + 0.4)
    grid = figure.subplots(
        len(lines), min(len(cases), _COLUMNS), squeeze=False, height_ratios=heights
    )
    panels = list(grid.flat)
    for axes, case in zip(panels, cases, strict=False):
        _panel(axes, case, of[case], looks)
    for axes in panels[len(cases) :]:
        axes.set_visible(False)
    figure.suptitle(title)
    return figure


def short_number(value: float) -> str:
    """Three digits, or all before the point: 0.0082, 5.32, 7742."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _panel(
    axes: Any, case: str, rows: Sequence[Mapping[str, Any]], looks: Mapping[str, dict[str, Any]]
) -> None:
    """One case: bars from the top, whiskers over the spread, each median written beside."""
    furthest = max(row["high"] for row in rows)
    for place, row in enumerate(rows):
        spread = [[row["median"] - row["low"]], [row["high"] - row["median"]]]
        axes.barh(
            place,
            row["median"],
            xerr=spread if row["low"] < row["high"] else None,
            error_kw={"ecolor": "black", "capsize": 3},
            **looks[row["who"]],
        )
        axes.text(
            row["high"] + 0.02 * furthest,
            place,
            short_number(row["median"]),
            va="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(rows)), [row["who"] for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.25 * furthest)
    more = rows[0].get("higher_is_better", rows[0]["unit"] in _RATES)
    axes.set_title(case, fontsize=9)
    axes.set_xlabel(f"{rows[0]['unit']}, {'more' if more else 'less'} is better", fontsize=8)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)

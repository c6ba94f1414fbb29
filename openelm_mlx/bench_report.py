"""What ``openelm bench`` says: its lines, its file, and a Markdown table of saved files."""

import json
import platform
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from openelm_mlx.bench_shared import STOCK
from openelm_mlx.plots_bench import short_number

HEADER = f"{'case':34} {'who':22} {'median':>10}  {'spread':>21}  {'unit':14} ratio"

# Tokens/s of prompt, generation and both on an M2 Max, from the OpenELM paper (Mehta et al. 2024,
# arXiv 2404.14619) as it is quoted; not checked against its text, so always shown as reported.
REPORTED: dict[str, dict[str, tuple[float, float, float]]] = {
    "270M": {"16 bit": (1151.41, 212.40, 218.45), "4 bit": (803.99, 256.35, 262.70)},
    "450M": {"16 bit": (910.61, 147.26, 151.57), "4 bit": (883.19, 197.81, 203.16)},
    "1.1B": {"16 bit": (508.56, 78.72, 81.04), "4 bit": (554.17, 117.90, 121.14)},
    "3B": {"16 bit": (234.96, 33.96, 34.97), "4 bit": (211.32, 60.33, 61.83)},
}


def render(row: Mapping[str, Any]) -> str:
    """One row as a line of the terminal."""
    spread = f"[{row['low']:.4g} - {row['high']:.4g}]"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}x of {row['against']}"
    return (
        f"{row['case']:34} {row['who']:22} {row['median']:10.4g}  {spread:>21}  "
        f"{row['unit']:14} {ratio}{_share_words(row)}"
    ).rstrip()


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    device = mx.default_device()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(device.type).rpartition(".")[2],
        "device_info": {k: v for k, v in mx.device_info().items() if isinstance(v, int | str)},
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("openelm-mlx", "mlx", "mlx-lm")},
        "date": time.strftime("%Y-%m-%d"),
    }


def read_report(path: str | Path) -> dict[str, Any]:
    """A file that ``openelm bench --output`` wrote.

    Raises:
        ValueError: if it is something else.
    """
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        _ = [(row["case"], row["who"], row["unit"], row["median"]) for row in report["rows"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result of `openelm bench --output`") from error
    return dict(report)


def markdown(reports: Sequence[Mapping[str, Any]]) -> str:
    """Tables of saved results, each below its command and machine, and what the paper reports.

    Args:
        reports: as :func:`read_report` gives them.
    """
    parts = []
    for report in reports:
        table = [
            f"`{report.get('command', 'openelm bench')}`, {_machine_words(report)}",
            "",
            "| case | openelm | mlx_lm | ratio |",
            "|---|---|---|---|",
            *_table_rows(report["rows"]),
        ]
        parts.append("\n".join(table))
    sizes = [report.get("model") for report in reports]
    parts += reported(size for size in dict.fromkeys(sizes) if size in REPORTED)
    return "\n\n".join(parts) + "\n"


def reported(sizes: Any) -> list[str]:
    """What the OpenELM paper reports for a Mac, as Markdown tables marked as such."""
    rows = [
        f"| {size}, {bits} | {' | '.join(f'{x:g}' for x in numbers)} |"
        for size in sizes
        for bits, numbers in REPORTED[size].items()
    ]
    if not rows:
        return []
    head = [
        "As reported by the OpenELM paper for an M2 Max with MLX (2024), tokens/s; not measured "
        "here:",
        "",
        "| model | prompt | generation | total |",
        "|---|---|---|---|",
    ]
    return ["\n".join([*head, *rows])]


def _table_rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each contender but plain mlx_lm, whose number stands beside ours."""
    lines = []
    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        stock = next((row for row in of_case if row["who"] == STOCK), None)
        for row in of_case:
            if row is not stock:
                lines.append(_table_row(row, stock))
    return lines


def _table_row(row: Mapping[str, Any], stock: Mapping[str, Any] | None) -> str:
    detail = row["who"].removeprefix("openelm").strip(" ,")
    label = f"{row['case']}, {detail}" if detail else row["case"]
    if row["who"].startswith(STOCK):  # in another mode of its own
        return f"| {label} | - | {_number(row)} | - |"
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    if row.get("against") not in (STOCK, None):
        ratio += f" of {row['against']}"
    theirs = _number(stock) if stock else "-"
    return f"| {label} | {_number(row)}{_share_words(row)} | {theirs} | {ratio} |"


def _number(row: Mapping[str, Any]) -> str:
    low, high = row["low"], row["high"]
    spread = "" if low == high else f" [{short_number(low)}-{short_number(high)}]"
    return f"{short_number(row['median'])} {row['unit']}{spread}"


def _share_words(row: Mapping[str, Any]) -> str:
    """Shares of a GPU's limits; nothing on a CPU."""
    parts = [
        f"{row[key]:.0%} of {what}"
        for key, what in (("bandwidth_share", "bandwidth"), ("flops_share", "FLOPs"))
        if row.get(key) is not None
    ]
    return f" ({', '.join(parts)})" if parts else ""


def _machine_words(report: Mapping[str, Any]) -> str:
    found = report.get("machine", {})
    versions = found.get("versions", {})
    device = found.get("device_info", {}).get("device_name", "")
    words = [
        f"{found.get('system', '')} {found.get('device', '')} {device}".strip(),
        f"MLX {versions.get('mlx')}" if "mlx" in versions else "",
        f"mlx-lm {versions.get('mlx-lm')}" if "mlx-lm" in versions else "",
        str(report.get("dtype", "")),
        f"median of {report['trials']} [spread]" if "trials" in report else "",
        str(found.get("date", "")),
    ]
    return ", ".join(word for word in words if word)

"""Stage: ``openelm bench``: speed and memory, ours and mlx_lm's alternately in one process.

A B A B on the same weights, medians and spread; ratios say how many times as fast ours is. The
cases themselves are in ``bench_cases``.
"""

import argparse
import json
import logging
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from openelm_mlx.atomic import atomic_file, refuse_existing_file
from openelm_mlx.bench_cases import CASES
from openelm_mlx.bench_shared import Bench, Case
from openelm_mlx.checkpoint import load
from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Model

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``openelm bench``."""
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="M", help="model folder or Hub id")
    what.add_argument("--size", metavar="S", help="random weights: 270M, 450M, 1.1B or 3B")
    add("--against", choices=["mlx_lm"], help="measure stock mlx_lm beside it")
    add("--cases", nargs="+", choices=sorted(CASES), metavar="CASE", help=f"of {', '.join(CASES)}")
    add("--trials", type=int, default=3, metavar="N", help="rounds a case (default 3)")
    add("--full", action="store_true", help="512 prompt, 1024 generated tokens, 5 trials")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bf16 on a GPU")
    add("--output", metavar="FILE.json", help="write the numbers")
    add("--overwrite", action="store_true", help="replace FILE.json")


def run(args: argparse.Namespace) -> int:
    """Measure and print a table on standard output."""
    if args.trials < 1:
        raise ValueError(f"--trials must be at least 1, got {args.trials}")
    if args.output:
        refuse_existing_file(args.output, overwrite=args.overwrite)
    bench = Bench(
        model=_model(args),
        name=args.model or args.size,
        against=args.against is not None,
        prompt_tokens=512 if args.full else 128,
        new_tokens=1024 if args.full else 32,
        trials=max(args.trials, 5) if args.full else args.trials,
    )
    rows = []
    sys.stdout.write(HEADER + "\n")
    for name in args.cases or CASES:
        for row in measure(CASES[name], bench):
            rows.append(row)
            sys.stdout.write(render(row) + "\n")
            sys.stdout.flush()
    if args.output:
        report = {"machine": machine(), "model": bench.name, "trials": bench.trials, "rows": rows}
        with atomic_file(args.output, overwrite=args.overwrite) as temporary:
            Path(temporary).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def measure(case: Case, bench: Bench) -> list[dict[str, Any]]:
    """Run one case: each contender in turn, once to warm up and then ``trials`` times.

    Returns:
        A row for each contender: ``case``, ``who``, ``unit``, ``median``, ``low``, ``high``, and
        ``ratio``, how many times as good as the reference contender (mlx_lm where it runs).
    """
    contenders = case.prepare(bench)
    values: dict[str, list[float]] = {name: [] for name in contenders}
    rounds = 1 if case.exact else bench.trials
    for trial in range(rounds + (0 if case.exact else 1)):
        for name, contender in contenders.items():
            value = contender()
            if trial or case.exact:
                values[name].append(value)
            mx.clear_cache()
    reference = statistics.median(values[case.reference]) if case.reference in values else None
    rows = []
    for name, measured in values.items():
        median = statistics.median(measured)
        ratio = None
        if reference and name != case.reference:
            ratio = median / reference if case.higher_is_better else reference / median
        rows.append(
            {
                "case": case.label(bench),
                "who": name,
                "unit": case.unit,
                "median": median,
                "low": min(measured),
                "high": max(measured),
                "ratio": ratio,
                "against": case.reference if ratio is not None else None,
            }
        )
    return rows


HEADER = f"{'case':34} {'who':22} {'median':>10}  {'spread':>21}  {'unit':14} ratio"


def render(row: dict[str, Any]) -> str:
    """One row of the table."""
    spread = f"[{row['low']:.4g} - {row['high']:.4g}]"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}x of {row['against']}"
    return (
        f"{row['case']:34} {row['who']:22} {row['median']:10.4g}  {spread:>21}  "
        f"{row['unit']:14} {ratio}"
    ).rstrip()


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    device = mx.default_device()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "device": str(device.type),
        "device_info": {k: v for k, v in mx.device_info().items() if isinstance(v, int | str)},
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("openelm-mlx", "mlx", "mlx-lm")},
        "date": time.strftime("%Y-%m-%d"),
    }


def _model(args: argparse.Namespace) -> Model:
    on_gpu = mx.default_device().type == mx.gpu
    dtype = getattr(mx, args.dtype or ("bfloat16" if on_gpu else "float32"))
    if args.model:
        model, _ = load(args.model)
        if args.dtype:
            model.set_dtype(dtype)
        return model
    mx.random.seed(0)
    model = Model(ModelArgs.preset(args.size))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    model.eval()
    return model


def run_cases(names: Sequence[str], bench: Bench) -> list[dict[str, Any]]:
    """Measure several cases from Python; see :func:`measure`."""
    return [row for name in names for row in measure(CASES[name], bench)]

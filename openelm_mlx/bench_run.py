"""``openelm bench`` at work: ours and mlx_lm's alternately in one process, medians and spread.

A B A B on the same weights; ratios say how many times as good ours is. The cases themselves are in
``bench_cases``.
"""

import argparse
import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from openelm_mlx.atomic import atomic_file, refuse_existing_file
from openelm_mlx.bench_cases import CASES
from openelm_mlx.bench_report import HEADER, machine, markdown, read_report, render
from openelm_mlx.bench_shared import Bench, Case
from openelm_mlx.bench_work import Limits, device_limits, shares
from openelm_mlx.checkpoint import load
from openelm_mlx.compatibility import where_it_runs
from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import Tokenizer

_MEASURING = ("against", "cases", "full", "dtype", "output")  # flags that saved numbers do not need


def bench(args: argparse.Namespace) -> int:
    """Measure and print a table on standard output, or show saved numbers.

    Args:
        args: the flags of ``openelm bench``.

    Returns:
        The exit code.

    Raises:
        FileExistsError: if a file is there and may not be replaced.
        ValueError: if flags do not go together, or a chart is asked for without matplotlib.
    """
    if args.trials < 1:
        raise ValueError(f"--trials must be at least 1, got {args.trials}")
    for file in (args.output, args.plot):
        if file:
            refuse_existing_file(file, overwrite=args.overwrite)
    if args.plot:
        from openelm_mlx.plots import new_figure

        new_figure()  # says what is missing before the long part
    if args.results:
        return _show(args)
    report = _measure_all(args)
    if args.output:
        with atomic_file(args.output, overwrite=args.overwrite) as temporary:
            Path(temporary).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    _draw(args, [report])
    return 0


def measure(case: Case, bench: Bench, limits: Limits | None = None) -> list[dict[str, Any]]:
    """Run one case: each contender in turn, once to warm up and then ``trials`` times.

    Args:
        case: what to run.
        bench: on what.
        limits: of the GPU, for shares of them.

    Returns:
        A row for each contender: ``case``, ``who``, ``unit``, ``values``, ``median``, ``low``,
        ``high``; ``ratio``, how many times as good as the contender ``against`` (mlx_lm where it
        runs); and for speeds what :func:`openelm_mlx.bench_work.shares` gives.
    """
    contenders = case.prepare(bench)
    values: dict[str, list[float]] = {name: [] for name in contenders}
    rounds = 1 if case.exact else bench.trials + 1  # the first warms up
    for trial in range(rounds):
        for name, contender in contenders.items():
            value = contender()
            if trial or case.exact:
                values[name].append(value)
            mx.clear_cache()
    return _rows(case, bench, values, limits)


def _rows(
    case: Case, bench: Bench, values: dict[str, list[float]], limits: Limits | None
) -> list[dict[str, Any]]:
    reference = statistics.median(values[case.reference]) if case.reference in values else None
    work = case.work(bench) if case.work else None
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
                "values": measured,
                "median": median,
                "low": min(measured),
                "high": max(measured),
                "ratio": ratio,
                "against": case.reference if ratio is not None else None,
                "higher_is_better": case.higher_is_better,
                **(shares(work, median, limits) if work else {}),
            }
        )
    return rows


def _measure_all(args: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = _model(args)
    reason = where_it_runs(model.args)["mlx_lm"]
    if args.against and reason:
        raise ValueError(f"mlx_lm runs another model: {reason}; leave out --against")
    setting = Bench(
        model=model,
        tokenizer=tokenizer,
        name=args.model or args.size,
        against=args.against is not None,
        prompt_tokens=512 if args.full else 128,
        new_tokens=1024 if args.full else 32,
        trials=max(args.trials, 5) if args.full else args.trials,
    )
    dtype = setting.model.transformer.norm.weight.dtype
    limits = device_limits(dtype)
    report: dict[str, Any] = {
        "command": _command(args),
        "machine": machine(),
        "model": setting.name,
        "parameters": setting.model.args.num_parameters,
        "dtype": str(dtype).rpartition(".")[2],
        "trials": setting.trials,
        "limits": vars(limits) if limits else None,
        "rows": [],
    }
    sys.stdout.write(HEADER + "\n")
    for name in args.cases or CASES:
        for row in measure(CASES[name], setting, limits):
            report["rows"].append(row)
            sys.stdout.write(render(row) + "\n")
            sys.stdout.flush()
    sys.stdout.write(_limit_words(limits))
    return report


def _limit_words(limits: Limits | None) -> str:
    if limits is None:
        return "shares of memory bandwidth and FLOPs: not measured on a CPU\n"
    bandwidth = f"{limits.gb_per_s:g} GB/s, the maker's number" if limits.gb_per_s else "unknown"
    return (
        f"shares of: memory bandwidth {bandwidth}; {limits.tflop_per_s:.1f} TFLOP/s, a large "
        "matrix product here\n"
    )


def _show(args: argparse.Namespace) -> int:
    """Print saved numbers as Markdown, and draw them where asked for."""
    given = [f"--{name}" for name in _MEASURING if getattr(args, name)]
    if given:
        raise ValueError(f"{', '.join(given)} has no effect with --results; leave it out")
    reports = [read_report(file) for file in args.results]
    sys.stdout.write(markdown(reports))
    _draw(args, reports)
    return 0


def _draw(args: argparse.Namespace, reports: list[dict[str, Any]]) -> None:
    if not args.plot:
        return
    from openelm_mlx.plots_bench import plot_bench

    names = dict.fromkeys(str(report.get("model", "")) for report in reports)
    rows = [row for report in reports for row in report["rows"]]
    plot_bench(rows, Path(args.plot), title=f"OpenELM {', '.join(names)}", overwrite=args.overwrite)
    sys.stdout.write(f"{args.plot}\n")


def _command(args: argparse.Namespace) -> str:
    """The command line that gives these numbers again."""
    words = ["openelm", "bench", *(["--model", args.model] if args.model else [])]
    words += ["--size", args.size] if args.size else []
    words += ["--against", args.against] if args.against else []
    words += ["--full"] if args.full else []
    words += ["--dtype", args.dtype] if args.dtype else []
    words += ["--trials", str(args.trials)] if args.trials != 3 else []
    words += ["--cases", *args.cases] if args.cases else []
    return shlex.join(words)


def _model(args: argparse.Namespace) -> tuple[Model, Tokenizer | None]:
    on_gpu = mx.default_device().type == mx.gpu
    dtype = getattr(mx, args.dtype or ("bfloat16" if on_gpu else "float32"))
    if args.model:
        model, tokenizer = load(args.model)
        if args.dtype:
            model.set_dtype(dtype)
        return model, tokenizer
    mx.random.seed(0)
    model = Model(ModelArgs.preset(args.size))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    model.eval()
    return model, None

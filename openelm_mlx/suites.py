"""Suites of tasks, and tasks by name: run on one model, set beside what was published, shown.

``zero-shot``, ``openllm`` and ``llm360`` are lm-eval tasks, ``commonsense`` needs nothing but its
files. Which tasks a suite has, and their published scores, is in ``published``.
"""

import logging
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from openelm_mlx.evaluation_args import TaskArgs
from openelm_mlx.model import Model
from openelm_mlx.published import SUITE_TASKS, beside_published
from openelm_mlx.scoring import Memory
from openelm_mlx.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SHOWN = ("acc", "acc_norm", "pct_stereotype")
_NO_SCORES = ("n", "num_fewshot")


def run_tasks(
    model: Model,
    tokenizer: Tokenizer,
    args: TaskArgs,
    *,
    name: str = "",
    memory: Memory | None = None,
) -> dict[str, Any]:
    """Score a suite, or tasks by name.

    Args:
        model: in eval mode.
        tokenizer: of the model.
        args: what to score.
        name: of the model; where it says a published size, ``published`` is added.
        memory: of what was answered before an interruption.

    Returns:
        ``results``: task -> ``acc``, ``acc_norm`` or other metrics as fractions, their standard
        errors (``acc_stderr``, …) and ``n``; of a suite whose tasks were all scored ``average``,
        as in the paper's table; and perhaps ``published``, see
        :func:`openelm_mlx.published.beside_published`.

    Raises:
        ImportError: if lm-eval is needed and missing.
        FileNotFoundError: if data are missing.
        ValueError: if lm-eval has no such task, or an item is damaged.
    """
    if args.suite == "commonsense":
        results = _commonsense(model, tokenizer, args, memory)
    else:
        results = _harness(model, tokenizer, args, memory)
    scored: dict[str, Any] = {"results": results}
    if args.suite is not None:
        scored["average"] = _average(args.suite, results)
        scored["published"] = beside_published(args.suite, name, results)
    return {key: value for key, value in scored.items() if value is not None}


def _average(suite: str, results: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Mean of the metrics that the paper's table has, where all its tasks were scored."""
    tasks = SUITE_TASKS[suite]
    if any(task.metric not in results.get(task.task, {}) for task in tasks):
        return None
    return sum(results[task.task][task.metric] for task in tasks) / len(tasks)


def headline(scores: Mapping[str, Any]) -> float:
    """The one number to show of a task: its accuracy, or else the first metric it has."""
    return float(scores[_names(scores)[0]])


def _commonsense(
    model: Model, tokenizer: Tokenizer, args: TaskArgs, memory: Memory | None
) -> dict[str, dict[str, Any]]:
    from openelm_mlx.commonsense import evaluate_commonsense

    assert args.data_dir is not None  # TaskArgs saw to it
    with tqdm(unit="option", disable=not sys.stderr.isatty()) as bar:

        def show(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        return evaluate_commonsense(
            *(model, tokenizer, args.data_dir),
            batch_size=args.batch_size,
            max_length=args.max_seq_length,
            limit=args.limit,
            progress=show,
            memory=memory,
        )


def _harness(
    model: Model, tokenizer: Tokenizer, args: TaskArgs, memory: Memory | None
) -> dict[str, dict[str, Any]]:
    from openelm_mlx.lm_tasks import run_harness

    by_shots: dict[int | None, list[str]] = defaultdict(list)
    if args.suite is None:
        by_shots[args.num_fewshot] = list(args.tasks)
    else:
        for task in SUITE_TASKS[args.suite]:
            by_shots[task.shots].append(task.task)
    results: dict[str, dict[str, Any]] = {}
    for shots, tasks in by_shots.items():
        results |= run_harness(
            *(model, tokenizer, tasks),
            num_fewshot=shots,
            batch_size=args.batch_size,
            max_length=args.max_seq_length,
            limit=args.limit,
            memory=memory,
        )
    return results


def render_tasks(scored: Mapping[str, Any]) -> str:
    """The scores as a table, in per cent where they are accuracies, a line a task.

    Args:
        scored: from :func:`run_tasks`.
    """
    beside = scored.get("published")
    rows = [["task", "n", *_columns(scored), *(["published", "difference"] if beside else [])]]
    for task, scores in scored["results"].items():
        row = [task, f"{scores['n']:,}", *(_score(scores, name) for name in _columns(scored))]
        rows.append([*row, *_compared(beside, beside and beside["tasks"].get(task))])
    if "average" in scored:
        row = [
            "average (the paper's metrics)",
            "",
            f"{100 * scored['average']:.2f}",
            *("" for _ in _columns(scored)[1:]),
        ]
        rows.append([*row, *_compared(beside, beside and beside.get("average"))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in rows
    ]
    if beside:
        lines.append(f"published: {beside['model']}, {beside['source']}; differences in points")
    return "\n".join(lines) + "\n"


def _columns(scored: Mapping[str, Any]) -> list[str]:
    """Names of the metrics that any task has; accuracies first."""
    found = dict.fromkeys(name for scores in scored["results"].values() for name in _names(scores))
    return sorted(found, key=_place)


def _names(scores: Mapping[str, Any]) -> list[str]:
    """The metrics of one task, accuracies first."""
    names = [n for n in scores if n not in _NO_SCORES and not n.endswith("_stderr")]
    return sorted(names, key=_place)


def _place(name: str) -> int:
    return _SHOWN.index(name) if name in _SHOWN else len(_SHOWN)


def _score(scores: Mapping[str, Any], name: str) -> str:
    if name not in scores:
        return ""
    scale, digits = (100, 2) if name in _SHOWN else (1, 4)
    error = scores.get(f"{name}_stderr")
    text = f"{scale * scores[name]:.{digits}f}"
    return text if error is None else f"{text} ± {scale * error:.{digits}f}"


def _compared(beside: Any, task: Mapping[str, Any] | None) -> list[str]:
    if not beside:
        return []
    if task is None:
        return ["", ""]
    error = "" if task["stderr"] is None else f" ± {task['stderr']:.2f}"
    metric = f" ({task['metric']})" if "metric" in task else ""
    return [f"{task['published']:.2f}{metric}", f"{task['difference']:+.2f}{error}"]

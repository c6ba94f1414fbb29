"""The scores that Apple published for OpenELM, in per cent, and measured ones beside them.

Sources: the model card (zero-shot, OpenLLM and LLM360 sets; CARD below), and the paper's table of
parameter-efficient tuning. Names of the sets are the paper's; the card has the two headings
"OpenLLM" and "LLM360" the other way round: the paper's 45.93 for the 1.1B on the OpenLLM
leaderboard's tasks stands under LLM360 there.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CARD = "model card of apple/OpenELM on the Hugging Face Hub"
PAPER = "reported by the paper, arXiv 2404.14619, table of parameter-efficient tuning"
# "<number>-shot" stands in TASKS; the card names no metric. acc_norm is taken where lm-eval has it
# and the published values are its (SciQ's are too high for acc_norm).


@dataclass(frozen=True, kw_only=True)
class SuiteTask:
    """One column of a table.

    Attributes:
        task: lm-eval's name, or the folder of LLM-Adapters.
        label: as the paper writes it.
        shots: examples before the question.
        metric: the one that was published.
        items: of the whole test set, for the published value's standard error.
    """

    task: str
    label: str
    shots: int
    metric: str
    items: int


def _tasks(table: str) -> tuple[SuiteTask, ...]:
    rows = (line.split() for line in table.splitlines() if line.strip())
    return tuple(
        SuiteTask(task=task, label=label, shots=int(shots), metric=metric, items=int(items))
        for task, label, shots, metric, items in rows
    )


_OPENLLM = """
arc_challenge        ARC-c        25  acc_norm        1172
hellaswag            HellaSwag    10  acc_norm        10042
mmlu                 MMLU         5   acc             14042
truthfulqa_mc2       TruthfulQA   0   acc             817
winogrande           WinoGrande   5   acc             1267
"""
SUITE_TASKS: Mapping[str, tuple[SuiteTask, ...]] = {
    "zero-shot": _tasks("""
        arc_challenge        ARC-c        0   acc_norm        1172
        arc_easy             ARC-e        0   acc_norm        2376
        boolq                BoolQ        0   acc             3270
        hellaswag            HellaSwag    0   acc_norm        10042
        piqa                 PIQA         0   acc_norm        1838
        sciq                 SciQ         0   acc             1000
        winogrande           WinoGrande   0   acc             1267
    """),
    "openllm": _tasks(_OPENLLM),
    "llm360": _tasks(
        _OPENLLM
        + """
        crows_pairs_english  CrowS-Pairs  25  pct_stereotype  1677
        piqa                 PIQA         0   acc_norm        1838
        race                 RACE         0   acc             1045
    """
    ),
    "commonsense": _tasks("""
        ARC-Challenge        ARC-c        0   acc             1172
        ARC-Easy             ARC-e        0   acc             2376
        boolq                BoolQ        0   acc             3270
        hellaswag            HellaSwag    0   acc             10042
        piqa                 PIQA         0   acc             1838
        social_i_qa          SIQA         0   acc             1954
        winogrande           WinoGrande   0   acc             1267
        openbookqa           OBQA         0   acc             500
    """),
}
_EIGHT = """
270M           27.65 47.15 25.72 39.24 53.83  66.79 69.75 30.91  45.13
270M-Instruct  32.51 51.58 26.70 38.72 53.20  66.01 70.78 33.78  46.66
450M           30.20 53.86 26.01 40.18 57.22  68.63 72.31 33.11  47.69
450M-Instruct  33.53 59.31 25.41 40.48 58.33  67.44 72.63 36.84  49.25
1.1B           36.69 65.71 27.05 36.98 63.22  71.74 75.57 36.46  51.68
1.1B-Instruct  41.55 71.83 25.65 45.95 64.72  71.02 75.03 39.43  54.40
3B             42.24 73.28 26.76 34.98 67.25  73.29 78.24 38.76  54.35
3B-Instruct    47.70 76.87 24.80 38.76 67.96  72.33 79.00 38.47  55.73
"""
_OF_FIVE = ["38.72", "40.54", "41.50", "43.41", "45.93", "49.94", "48.90", "51.22"]
# Rows: model, one value a task in the order above, and the average as published.
TABLES: Mapping[str, str] = {
    "zero-shot": """
270M           26.45 45.08 53.98 46.71 69.75 84.70 53.91  54.37
270M-Instruct  30.55 46.68 48.56 52.07 70.78 84.40 52.72  55.11
450M           27.56 48.06 55.78 53.97 72.31 87.20 58.01  57.56
450M-Instruct  30.38 50.00 60.37 59.34 72.63 88.00 58.96  59.95
1.1B           32.34 55.43 63.58 64.81 75.57 90.60 61.72  63.44
1.1B-Instruct  37.97 52.23 70.00 71.20 75.03 89.30 62.75  65.50
3B             35.58 59.89 67.40 72.44 78.24 92.70 65.51  67.39
3B-Instruct    39.42 61.74 68.17 76.36 79.00 92.50 66.85  69.15
""",
    "openllm": "\n".join(
        " ".join([*row.split()[:6], average])
        for row, average in zip(_EIGHT.strip().splitlines(), _OF_FIVE, strict=True)
    ),
    "llm360": _EIGHT,
    "commonsense": """
270M-LoRA  24.57 26.60 62.14 24.84 50.05 42.02 49.88 28.00  38.51
270M-DoRA  26.19 28.07 62.20 25.22 50.11 44.42 50.12 31.20  39.69
450M-LoRA  28.67 29.88 62.29 25.85 52.39 49.59 50.91 33.20  41.60
450M-DoRA  28.33 30.39 62.26 25.12 52.29 49.28 50.83 32.00  41.31
1.1B-LoRA  45.14 61.11 61.77 77.95 72.31 69.70 61.64 59.20  63.60
1.1B-DoRA  44.11 61.49 61.68 78.92 71.38 69.04 64.01 58.80  63.68
3B-LoRA    46.93 66.25 62.48 81.22 75.19 70.62 65.51 58.20  65.80
3B-DoRA    46.50 66.46 62.35 80.84 75.73 70.83 63.77 58.20  65.59
""",
}
_SIZE = re.compile(r"(?<![a-z0-9.])(270m|450m|1[._]1b|3b)(?![a-z0-9])", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Published:
    """One row of a table.

    Attributes:
        model: "270M", "1.1B-Instruct", "3B-DoRA", …
        scores: task -> per cent.
        average: as published, per cent.
        source: where it stands.
    """

    model: str
    scores: Mapping[str, float]
    average: float
    source: str


def rows(suite: str) -> dict[str, Published]:
    """All that was published for a suite, by model."""
    tasks = SUITE_TASKS[suite]
    source = PAPER if suite == "commonsense" else CARD
    found = {}
    for line in TABLES[suite].strip().splitlines():
        model, *values = line.split()
        *scores, average = map(float, values)
        by_task = {task.task: score for task, score in zip(tasks, scores, strict=True)}
        found[model] = Published(model=model, scores=by_task, average=average, source=source)
    return found


def published_for(suite: str, name: str) -> Published | None:
    """The row for a model, by what its name says.

    Args:
        suite: one of ``SUITE_TASKS``.
        name: folder or Hub id with "270M", "450M", "1_1B" or "3B" in it, and "Instruct" or "DoRA"
            where it is that; of tuned models LoRA is assumed.

    Returns:
        The row; None where the name does not say a size, or nothing was published.
    """
    sizes = {size.upper().replace("_", ".") for size in _SIZE.findall(name)}
    if len(sizes) != 1 or suite not in TABLES:
        return None
    kind = "-Instruct" if "instruct" in name.lower() else ""
    if suite == "commonsense":
        kind = "-DoRA" if "dora" in name.lower() else "-LoRA"
    return rows(suite).get(sizes.pop() + kind)


def beside_published(
    suite: str, name: str, results: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Measured scores beside those of the same model in the paper.

    The standard error of a difference treats the two as measured on different items. They are the
    same ones where the whole set is scored, so it is an upper bound there.

    Args:
        suite: one of ``SUITE_TASKS``.
        name: of the measured model, see :func:`published_for`.
        results: task -> metric -> a fraction, and ``<metric>_stderr``.

    Returns:
        ``model``, ``source``, ``tasks`` (task -> ``metric``, ``published``, ``measured``,
        ``difference`` and ``stderr``, in per cent) and, where all tasks were measured, ``average``
        with the same. None where nothing was published for the model.
    """
    row = published_for(suite, name)
    if row is None:
        return None
    tasks = {
        task.task: _difference(task, row.scores[task.task], results[task.task])
        for task in SUITE_TASKS[suite]
        if task.metric in results.get(task.task, {})
    }
    beside: dict[str, Any] = {"model": row.model, "source": row.source, "tasks": tasks}
    if len(tasks) == len(SUITE_TASKS[suite]):
        measured = math.fsum(task["measured"] for task in tasks.values()) / len(tasks)
        errors = [task["stderr"] for task in tasks.values()]
        beside["average"] = {
            "published": row.average,
            "measured": measured,
            "difference": measured - row.average,
            "stderr": None if None in errors else math.hypot(*errors) / len(tasks),
        }
    return beside


def _difference(task: SuiteTask, published: float, scores: Mapping[str, Any]) -> dict[str, Any]:
    measured = 100 * scores[task.metric]
    error = scores.get(f"{task.metric}_stderr")
    own = math.sqrt(published * (100 - published) / (task.items - 1))
    return {
        "metric": task.metric,
        "published": published,
        "measured": measured,
        "difference": measured - published,
        "stderr": None if error is None else math.hypot(100 * error, own),
    }

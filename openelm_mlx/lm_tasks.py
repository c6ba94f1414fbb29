"""lm-eval's tasks by name, or from local YAML files, scored and told as plain numbers.

lm-eval and the Hugging Face data sets that its tasks take are imported when asked for.
"""

import io
import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partialmethod
from numbers import Real
from pathlib import Path
from typing import Any

from tqdm import tqdm

from openelm_mlx.lm_harness import harness_class
from openelm_mlx.model import Model
from openelm_mlx.scoring import Memory
from openelm_mlx.tokenizer import Tokenizer

# Where lm-eval has the tasks of the paper's tables: its whole index takes 15 s.
FOLDERS = {
    **dict.fromkeys(("arc_challenge", "arc_easy"), "arc"),
    **{name: name for name in ("hellaswag", "piqa", "race", "sciq", "winogrande")},
    "boolq": "super_glue/boolq",
    "crows_pairs_english": "crows_pairs",
    "mmlu": "mmlu/default",
    "truthfulqa_mc2": "truthfulqa",
}
_BOOTSTRAPS = 1000  # for the standard errors that have no formula


def run_harness(
    model: Model,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    num_fewshot: int | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    limit: int | None = None,
    memory: Memory | None = None,
) -> dict[str, dict[str, Any]]:
    """Score lm-eval tasks.

    Args:
        model: in eval mode.
        tokenizer: of the model.
        tasks: names of tasks or groups, or YAML files of local tasks.
        num_fewshot: examples in place of a task's own number; a task whose configuration says 0
            keeps 0, as in lm-eval.
        batch_size: contexts a forward pass.
        max_length: by default the model's context.
        limit: items a task: the first ones.
        memory: of log-likelihoods that were computed before an interruption.

    Returns:
        For each task, group and part of a group: the metrics without lm-eval's filter names
        (``acc``, ``acc_stderr``, …), ``n`` and, of tasks, ``num_fewshot``.

    Raises:
        ImportError: if lm-eval is not installed.
        FileNotFoundError: if a YAML file is missing, or data cannot be had.
        ValueError: if lm-eval has no such task.
    """
    asked = [_task_name(task) for task in tasks]
    names = [name for name, _ in asked]
    adapter = harness_class()(
        *(model, tokenizer), batch_size=batch_size, max_length=max_length, memory=memory
    )
    from lm_eval import simple_evaluate

    manager = _task_manager(names, {name: folder for name, folder in asked if folder})
    _check_names(names, manager.all_tasks)
    with _in_one_process(), _quiet_harness(), _explained(names):
        found = simple_evaluate(
            model=adapter,
            tasks=names,
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            bootstrap_iters=_BOOTSTRAPS,
            log_samples=False,
        )
    return _plain(found)


def _task_manager(names: Sequence[str], local: Mapping[str, Path]) -> Any:
    """lm-eval's index of tasks; of all 14,000 files only where a name asks for it (15 s)."""
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    inside = [name for name in names if "/" not in name and name not in local]
    folders = {root / FOLDERS.get(name, "") for name in inside}
    if root in folders or not all(folder.is_dir() for folder in folders):
        return lm_eval.tasks.TaskManager(include_path=sorted(set(local.values())))
    folders |= set(local.values())
    return lm_eval.tasks.TaskManager(include_defaults=False, include_path=sorted(folders))


def _task_name(task: str) -> tuple[str, Path | None]:
    """A task's name; of a local YAML file its full path, or a group's name and its folder.

    lm-eval looks for the parts of a group in the folders it is given.
    """
    if not task.endswith((".yaml", ".yml")):
        return task, None
    path = Path(task).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"{task} does not exist; give the YAML file of a task, or a name")
    path = path.resolve()
    group = re.search(r"^group:\s*[\"']?([\w-]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    return (group[1], path.parent) if group else (str(path), None)


def _check_names(names: Sequence[str], known: Sequence[str]) -> None:
    from difflib import get_close_matches

    all_known = set(known)
    for name in names:
        if "/" in name or name in all_known:
            continue
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "`lm-eval ls tasks` lists them"
        raise ValueError(f"lm-eval has no task {name!r}; {hint}")


@contextmanager
def _in_one_process() -> Iterator[None]:
    """lm-eval would fork for its bootstraps, which MLX's threads do not survive."""
    before = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before


@contextmanager
def _quiet_harness() -> Iterator[None]:
    """Without what lm-eval prints and logs on its way, and without bars where nobody sees them."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets", "huggingface_hub")]
    levels = [log.level for log in loggers]
    make_bar = vars(tqdm)["__init__"]
    for log in loggers:
        log.setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)  # type: ignore[assignment]
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        tqdm.__init__ = make_bar  # type: ignore[method-assign]
        for log, level in zip(loggers, levels, strict=True):
            log.setLevel(level)


@contextmanager
def _explained(names: Sequence[str]) -> Iterator[None]:
    """Data that cannot be had is the usual failure: say which tasks wanted them, in one line."""
    try:
        yield
    except (ConnectionError, OSError) as error:
        said = " ".join(str(error).split())
        raise FileNotFoundError(
            f"the data of {', '.join(names)} cannot be had: {said[:300]}; lm-eval takes them from "
            "the Hugging Face Hub, which this machine must reach, or have in its cache"
        ) from error


def _plain(found: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """lm-eval's results as task -> metric -> number."""
    counts = {name: n["effective"] for name, n in found.get("n-samples", {}).items()}
    parts = found.get("group_subtasks", {})
    shots = found.get("n-shot", {})

    def items(name: str) -> int:
        inner = parts.get(name)
        return sum(map(items, inner)) if inner else counts.get(name, 0)

    results = {}
    for name, metrics in found["results"].items():
        plain = {
            key.partition(",")[0]: float(value)
            for key, value in metrics.items()
            if isinstance(value, Real) and "," in key  # NumPy's numbers too, "N/A" not
        }
        results[name] = {**plain, "n": items(name)}
        if name in shots:
            results[name]["num_fewshot"] = shots[name]
    return results

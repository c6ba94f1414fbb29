"""Suites: which tasks run with how many examples, and how scores are shown."""

import sys
from typing import Any

import pytest

from openelm_mlx import lm_tasks
from openelm_mlx.evaluation_args import SUITES, TaskArgs
from openelm_mlx.lm_harness import _generation_settings, harness_class
from openelm_mlx.published import SUITE_TASKS
from openelm_mlx.suites import headline, render_tasks, run_tasks

NOTHING: Any = None  # model and tokenizer: the runs below score nothing


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What would have been run; every task scores one half."""
    seen: list[dict[str, Any]] = []

    def run(_: Any, __: Any, tasks: list[str], **settings: Any) -> dict[str, dict[str, Any]]:
        seen.append({"tasks": tasks, **settings})
        score = {"acc": 0.5, "acc_stderr": 0.1, "acc_norm": 0.5, "acc_norm_stderr": 0.1, "n": 25}
        return {task: {**score, "pct_stereotype": 0.5} for task in tasks}

    monkeypatch.setattr(lm_tasks, "run_harness", run)
    return seen


def test_the_suites_are_those_of_the_command_line() -> None:
    assert set(SUITES) == set(SUITE_TASKS)


def test_a_suite_runs_each_task_with_its_own_number_of_examples(
    runs: list[dict[str, Any]],
) -> None:
    args = TaskArgs(suite="llm360", limit=7, batch_size=3, max_seq_length=99)
    scored = run_tasks(NOTHING, NOTHING, args, name="OpenELM-270M")
    assert {run["num_fewshot"]: run["tasks"] for run in runs} == {
        25: ["arc_challenge", "crows_pairs_english"],
        10: ["hellaswag"],
        5: ["mmlu", "winogrande"],
        0: ["truthfulqa_mc2", "piqa", "race"],
    }
    assert all((run["limit"], run["batch_size"], run["max_length"]) == (7, 3, 99) for run in runs)
    assert scored["published"]["average"]["published"] == 45.13


def test_tasks_by_name_keep_their_own_number_unless_one_is_given(
    runs: list[dict[str, Any]],
) -> None:
    run_tasks(NOTHING, NOTHING, TaskArgs(tasks=("a", "b")), name="OpenELM-270M")
    scored = run_tasks(NOTHING, NOTHING, TaskArgs(tasks=("a",), num_fewshot=3))
    assert [run["num_fewshot"] for run in runs] == [None, 3]
    assert "published" not in scored


def test_the_table_shows_published_scores_and_differences(runs: list[dict[str, Any]]) -> None:
    args = TaskArgs(suite="openllm")
    table = render_tasks(run_tasks(NOTHING, NOTHING, args, name="OpenELM-270M-Instruct"))
    head, *lines = table.splitlines()
    assert head.split() == [
        *("task", "n", "acc", "acc_norm", "pct_stereotype", "published", "difference")
    ]
    (line,) = [line for line in lines if line.startswith("hellaswag")]
    assert "25  50.00 ± 10.00  50.00 ± 10.00" in line
    assert line.split()[-5:] == ["51.58", "(acc_norm)", "-1.58", "±", "10.01"]
    assert lines[-2].startswith("average (the paper's metrics)")
    assert lines[-2].split()[4:6] == ["50.00", "40.54"]
    assert lines[-1].startswith("published: 270M-Instruct, model card")


def test_the_average_is_of_the_metrics_that_were_published(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Any, __: Any, tasks: list[str], **___: Any) -> dict[str, dict[str, Any]]:
        return {task: {"acc": 0.25, "acc_norm": 0.5, "n": 4} for task in tasks if task != missing}

    monkeypatch.setattr(lm_tasks, "run_harness", run)
    missing = ""
    scored = run_tasks(NOTHING, NOTHING, TaskArgs(suite="zero-shot"))
    assert scored["average"] == pytest.approx((4 * 0.5 + 3 * 0.25) / 7)
    missing = "sciq"
    assert "average" not in run_tasks(NOTHING, NOTHING, TaskArgs(suite="zero-shot"))


def test_the_number_to_show_of_a_task_is_its_accuracy_where_it_has_one() -> None:
    assert headline({"acc_norm": 0.5, "acc_norm_stderr": 0.1, "acc": 0.25, "n": 3}) == 0.25
    assert headline({"likelihood_diff": 3.5, "pct_stereotype": 0.6, "n": 3}) == 0.6
    assert headline({"word_perplexity": 12.0, "n": 3, "num_fewshot": 0}) == 12.0


def test_without_lm_eval_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(ImportError, match=r"openelm-mlx\[eval\]") as error:
        harness_class.__wrapped__()
    assert error.value.name == "lm_eval"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"until": "."}, {"stop": (".",), "max_tokens": 256}),
        ({"until": ["a", ""], "max_gen_toks": 9}, {"stop": ("a",), "max_tokens": 9}),
        ({"temperature": 0.7, "max_new_tokens": 3}, {"stop": (), "max_tokens": 3}),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_tokens": 5},
            {"stop": (), "max_tokens": 5, "temp": 0.7, "top_p": 0.9},
        ),
    ],
)
def test_generation_is_greedy_unless_sampling_is_asked_for(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert _generation_settings(given) == expected


def test_the_table_shows_other_metrics_as_they_are() -> None:
    scored = {
        "results": {
            "perplexing": {"word_perplexity": 12.34567, "n": 3},
            "choosing": {"acc": 0.25, "acc_stderr": None, "n": 4},
        }
    }
    assert render_tasks(scored).splitlines() == [
        "task        n    acc  word_perplexity",
        "perplexing  3                 12.3457",
        "choosing    4  25.00",
    ]

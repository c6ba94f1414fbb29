"""The published scores are whole and agree with themselves; measured ones stand beside them."""

import math

import pytest

from openelm_mlx.published import SUITE_TASKS, beside_published, published_for, rows

SIZES = ("270M", "450M", "1.1B", "3B")


@pytest.mark.parametrize("suite", SUITE_TASKS)
def test_every_row_has_a_score_a_task_and_its_average(suite: str) -> None:
    kinds = ("LoRA", "DoRA") if suite == "commonsense" else ("", "Instruct")
    expected = {"-".join(filter(None, (size, kind))) for size in SIZES for kind in kinds}
    found = rows(suite)
    assert set(found) == expected
    for row in found.values():
        assert list(row.scores) == [task.task for task in SUITE_TASKS[suite]]
        mean = math.fsum(row.scores.values()) / len(row.scores)
        assert row.average == pytest.approx(mean, abs=0.0065)  # two were cut, not rounded
        assert "arXiv 2404.14619" in row.source or "model card" in row.source


def test_the_sets_have_the_papers_names_and_numbers_of_examples() -> None:
    openllm = {task.task: task.shots for task in SUITE_TASKS["openllm"]}
    assert openllm == {
        **{"arc_challenge": 25, "hellaswag": 10, "mmlu": 5},
        **{"truthfulqa_mc2": 0, "winogrande": 5},
    }
    llm360 = {task.task: task.shots for task in SUITE_TASKS["llm360"]}
    assert llm360 == {**openllm, "crows_pairs_english": 25, "piqa": 0, "race": 0}
    assert {task.shots for task in SUITE_TASKS["zero-shot"]} == {0}
    # The paper's table 1: 45.93 is the 1.1B's average of the OpenLLM leaderboard's tasks.
    assert rows("openllm")["1.1B"].average == 45.93


def test_the_two_sets_share_five_columns_and_zero_shot_piqa_is_that_of_llm360() -> None:
    for model, row in rows("openllm").items():
        eight = rows("llm360")[model].scores
        assert row.scores.items() <= eight.items()
        assert rows("zero-shot")[model].scores["piqa"] == eight["piqa"]


@pytest.mark.parametrize(
    ("name", "suite", "model"),
    [
        ("apple/OpenELM-270M", "zero-shot", "270M"),
        ("models/openelm-1_1b-instruct", "openllm", "1.1B-Instruct"),
        ("OpenELM-1.1B", "llm360", "1.1B"),
        ("openelm-3B-4bit", "zero-shot", "3B"),
        ("runs/270m-lora", "commonsense", "270M-LoRA"),
        ("runs/450m-dora", "commonsense", "450M-DoRA"),
    ],
)
def test_a_models_name_says_which_row_is_its(name: str, suite: str, model: str) -> None:
    row = published_for(suite, name)
    assert row is not None
    assert row.model == model


@pytest.mark.parametrize("name", ["tiny", "llama-13b", "270m-or-450m", "openelm3b", "3bit"])
def test_a_name_without_one_size_has_no_row(name: str) -> None:
    assert published_for("zero-shot", name) is None
    assert beside_published("zero-shot", name, {}) is None


def test_differences_are_in_points_with_the_error_of_both() -> None:
    results = {
        "arc_easy": {"acc": 0.5, "acc_norm": 0.46, "acc_norm_stderr": 0.01, "n": 2376},
        "sciq": {"acc": 0.85, "acc_stderr": 0.02, "acc_norm": 0.7, "n": 300},
        "boolq": {"acc": 0.5, "n": 1},
    }
    beside = beside_published("zero-shot", "OpenELM-270M", results)
    assert beside is not None
    assert set(beside["tasks"]) == {"arc_easy", "sciq", "boolq"}
    assert "average" not in beside
    easy = beside["tasks"]["arc_easy"]
    assert (easy["metric"], easy["published"]) == ("acc_norm", 45.08)
    assert easy["measured"] == pytest.approx(46)
    assert easy["difference"] == pytest.approx(0.92)
    published_error = 100 * math.sqrt(0.4508 * 0.5492 / 2375)
    assert easy["stderr"] == pytest.approx(math.sqrt(1 + published_error**2))
    assert beside["tasks"]["sciq"]["metric"] == "acc"
    assert beside["tasks"]["boolq"]["stderr"] is None


def test_the_average_is_compared_where_all_tasks_were_measured() -> None:
    results = {
        task.task: {task.metric: 0.5, f"{task.metric}_stderr": 0.01, "n": 9}
        for task in SUITE_TASKS["llm360"]
    }
    beside = beside_published("llm360", "OpenELM-3B", results)
    assert beside is not None
    average = beside["average"]
    assert (average["published"], average["measured"]) == (54.35, 50.0)
    errors = [task["stderr"] for task in beside["tasks"].values()]
    assert average["stderr"] == pytest.approx(math.sqrt(sum(e * e for e in errors)) / 8)

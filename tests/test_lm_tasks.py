"""lm-eval tasks from local YAML over local JSON lines: scores as by hand, refusals in one line."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizer as tiny
from command_line import run_here
from tqdm import tqdm

from openelm_mlx.checkpoint import load
from openelm_mlx.commonsense import encode_pair
from openelm_mlx.lm_tasks import FOLDERS, _plain, run_harness
from openelm_mlx.published import SUITE_TASKS
from openelm_mlx.scoring import log_likelihoods

lm_eval = pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
# datasets and dill leave files and sockets open, and warn of their own old habits
pytestmark = pytest.mark.filterwarnings("ignore")

CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}, train: {data}}}}}
output_type: multiple_choice
test_split: test
training_split: train
fewshot_split: train
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLLING = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: bits_per_byte}}]
"""
WRITTEN = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "x"
generation_kwargs: {{until: ["."], max_gen_toks: 4}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Data sets are cached among the test's files, and nothing is asked of the Hub."""
    import datasets

    cache = tmp_path_factory.getbasetemp() / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture
def docs() -> list[dict[str, Any]]:
    texts = tiny.sentences(12, seed=11)
    choices = ["the king", "a wolf", "red"]
    return [{"question": t, "choices": choices, "answer": i % 3} for i, t in enumerate(texts)]


@pytest.fixture
def task(offline: None, tmp_path: Path, docs: list[dict[str, Any]]) -> Callable[[str, str], Path]:
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))

    def write(name: str, yaml: str) -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.format(name=name, data=data))
        return path

    return write


@pytest.mark.slow
def test_local_tasks_of_all_three_kinds_score_as_by_hand(
    task: Callable[[str, str], Path],
    docs: list[dict[str, Any]],
    complete_dir: Path,
    tiny_tokenizer: tiny.TinyTokenizer,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model, tokenizer = load(complete_dir)[0], tiny_tokenizer.tokenizer
    files = [task("choose", CHOICE), task("roll", ROLLING), task("write", WRITTEN)]
    make_bar, level = vars(tqdm)["__init__"], logging.getLogger("lm_eval").level
    results = run_harness(model, tokenizer, [str(file) for file in files], limit=9)
    assert capfd.readouterr() == ("", "")  # neither bars nor chatter where nobody sees them
    assert (vars(tqdm)["__init__"], logging.getLogger("lm_eval").level) == (make_bar, level)

    assert list(results) == ["choose", "roll", "write"]
    assert {scores["n"] for scores in results.values()} == {9}
    right = 0
    for doc in docs[:9]:
        context = f"Question: {doc['question']}\nAnswer:"
        pairs = [encode_pair(tokenizer, context, f" {choice}") for choice in doc["choices"]]
        scores = [score.logprob for score in log_likelihoods(model, pairs, share=False)]
        right += scores.index(max(scores)) == doc["answer"]
    assert results["choose"]["acc"] == right / 9
    assert {"acc_norm", "acc_stderr", "num_fewshot"} <= set(results["choose"])
    assert results["roll"]["bits_per_byte"] > 0
    assert 0 <= results["write"]["exact_match"] <= 1


@pytest.mark.slow
def test_examples_before_the_question_change_the_score_and_are_counted(
    task: Callable[[str, str], Path], complete_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = task("choose_few", CHOICE)
    out = file.with_suffix(".json")
    model = ["evaluate", "--model", complete_dir, "--output", out, "--tasks", file]
    outcome = run_here(capsys, *model, "--num-fewshot", 3, "--limit", 6)
    assert outcome.code == 0, outcome.err
    result = json.loads(out.read_text())
    scores = result["results"]["choose_few"]
    assert (scores["n"], scores["num_fewshot"]) == (6, 3)
    assert result["versions"]["lm-eval"] == lm_eval.__version__
    assert "choose_few  6" in outcome.out


@pytest.mark.slow
def test_a_local_group_is_scored_with_its_parts(
    task: Callable[[str, str], Path], complete_dir: Path, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    parts = [task("part_a", CHOICE), task("part_b", CHOICE.replace("Question: ", ""))]
    group = parts[0].with_name("group.yaml")
    group.write_text(
        "group: both\ntask: [part_a, part_b]\n"
        "aggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    model = load(complete_dir)[0]
    results = run_harness(model, tiny_tokenizer.tokenizer, [str(group)], limit=5)
    assert {name: scores["n"] for name, scores in results.items()} == {
        **{"both": 10, "part_a": 5, "part_b": 5},
    }
    assert results["both"]["acc"] == (results["part_a"]["acc"] + results["part_b"]["acc"]) / 2


def test_results_are_numbers_whatever_kind_lm_eval_makes() -> None:
    found = {
        "results": {
            "group": {"alias": "group", "acc,none": 0.5, "acc_stderr,none": "N/A"},
            "a": {"acc,none": np.float32(0.5), "exact_match,strict": np.int64(1)},
        },
        "n-samples": {"a": {"original": 5, "effective": 3}},
        "group_subtasks": {"group": ["a"]},
        "n-shot": {"a": 5},
    }
    assert json.loads(json.dumps(_plain(found))) == {
        "group": {"acc": 0.5, "n": 3},
        "a": {"acc": 0.5, "exact_match": 1.0, "n": 3, "num_fewshot": 5},
    }


@pytest.mark.slow
def test_the_tasks_of_the_papers_tables_are_found_without_the_whole_index() -> None:
    from openelm_mlx.lm_tasks import _task_manager

    names = {task.task for key in SUITE_TASKS if key != "commonsense" for task in SUITE_TASKS[key]}
    assert names == set(FOLDERS)
    for name in names:
        manager = _task_manager([name], {})
        assert name in manager.all_tasks
        assert len(manager.all_tasks) < 200


def test_a_missing_yaml_file_is_said(
    complete_dir: Path, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    model = load(complete_dir)[0]
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml does not exist"):
        run_harness(model, tiny_tokenizer.tokenizer, ["nowhere.yaml"])


def test_an_unknown_task_is_said_with_the_nearest_name() -> None:
    from openelm_mlx.lm_tasks import _check_names

    with pytest.raises(ValueError, match="no task 'arc_esy'; did you mean arc_easy"):
        _check_names(["/tmp/x.yaml", "arc_esy"], ["arc_easy", "piqa"])
    with pytest.raises(ValueError, match="`lm-eval ls tasks` lists them"):
        _check_names(["zzz"], ["arc_easy", "piqa"])


def test_data_that_cannot_be_had_are_said_in_one_line() -> None:
    from openelm_mlx.lm_tasks import _explained

    with (
        pytest.raises(
            FileNotFoundError, match="data of piqa, race cannot be had: no route; lm-eval"
        ),
        _explained(["piqa", "race"]),
    ):
        raise ConnectionError("no\nroute")

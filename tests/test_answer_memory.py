"""Answers to tasks outlast an interruption, and belong to one model and one set of settings."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer as tiny
from command_line import Outcome, run_here
from folder_makers import small_model

from openelm_mlx import scoring
from openelm_mlx.answer_memory import AnswerMemory
from openelm_mlx.evaluation_record import Partial
from openelm_mlx.scoring import Likelihood, log_likelihoods
from openelm_mlx.scoring_plan import Request

REQUESTS: list[Request] = [([1, 5 + i % 4, 7], [9 + i, 3]) for i in range(8)]
ANSWERS = [(request, Likelihood(-1.5 / (i + 3), i % 2 == 0)) for i, request in enumerate(REQUESTS)]


def memory(path: Path, work: str = "w", key: str = "k") -> AnswerMemory:
    return AnswerMemory(path, work=work, key=key)


def test_answers_come_back_bit_for_bit(tmp_path: Path) -> None:
    kept = memory(tmp_path / "a")
    kept.put(ANSWERS[:3])
    kept.put(ANSWERS[3:5])
    again = memory(tmp_path / "a")
    assert [again.get(request) for request in REQUESTS] == [a for _, a in ANSWERS[:5]] + [None] * 3


def test_another_models_answers_are_not_taken(tmp_path: Path) -> None:
    memory(tmp_path / "a").put(ANSWERS)
    other = memory(tmp_path / "a", key="other weights")
    assert other.get(REQUESTS[0]) is None
    other.put([(REQUESTS[0], Likelihood(-9.0, False))])
    assert memory(tmp_path / "a").get(REQUESTS[0]) == ANSWERS[0][1]


@pytest.mark.parametrize("content", ["", "no JSON\n", "[]\n", '{"work": "w"}\n["a"]\n'])
def test_what_cannot_be_used_is_thrown_away_and_said(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a"
    path.write_text(content)
    found = memory(path)
    assert found.get(REQUESTS[0]) is None
    assert "is of another evaluation" in caplog.text
    found.put(ANSWERS)
    assert memory(path).get(REQUESTS[0]) == ANSWERS[0][1]


def test_answers_under_other_settings_are_thrown_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory(tmp_path / "a").put(ANSWERS)
    assert memory(tmp_path / "a", work="other").get(REQUESTS[0]) is None
    assert "is of another evaluation" in caplog.text


def test_a_torn_last_line_costs_that_answer_alone(tmp_path: Path) -> None:
    path = tmp_path / "a"
    memory(path).put(ANSWERS)
    path.write_bytes(path.read_bytes()[:-7])
    torn = memory(path)
    assert [torn.get(r) is None for r in REQUESTS] == [False] * 7 + [True]
    torn.put(ANSWERS[7:])
    assert [memory(path).get(r) for r in REQUESTS] == [answer for _, answer in ANSWERS]


def test_what_is_known_is_not_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model()
    plain = log_likelihoods(model, REQUESTS)
    half = memory(tmp_path / "a")
    half.put(list(zip(REQUESTS[::2], plain[::2], strict=True)))
    seen: list[int] = []
    found = log_likelihoods(model, REQUESTS, memory=half, progress=seen.append)
    assert [a.logprob for a in found] == pytest.approx([a.logprob for a in plain], abs=1e-5)
    assert found[::2] == plain[::2]
    assert seen[0] == 4
    assert sum(seen) == 8
    monkeypatch.setattr(scoring, "_score", None)  # nothing is left to compute
    assert log_likelihoods(model, REQUESTS, memory=memory(tmp_path / "a")) == found


def interrupt_after(monkeypatch: pytest.MonkeyPatch, batches: int) -> list[int]:
    """Ctrl-C in the batch after so many; returns a count of the batches."""
    score, calls = scoring._score, [0]

    def interrupted(*arguments: Any) -> Iterator[Any]:
        calls[0] += 1
        if calls[0] > batches:
            raise KeyboardInterrupt
        return score(*arguments)

    monkeypatch.setattr(scoring, "_score", interrupted)
    return calls


CHOICE = """
task: choose
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{question}}"
doc_to_choice: ["the king", "a wolf"]
doc_to_target: 0
metric_list: [{metric: acc}]
"""


@pytest.fixture(params=["commonsense", pytest.param("lm-eval", marks=pytest.mark.slow)])
def task_flags(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Sequence[object]:
    """Ten items of two answers, as a task of each kind."""
    texts = tiny.sentences(10, seed=3)
    if request.param == "commonsense":
        last = "Answer format: true/false"
        items = [{"instruction": f"{t}\n\n{last}", "input": "", "answer": "true"} for t in texts]
        (tmp_path / "data" / "boolq").mkdir(parents=True)
        (tmp_path / "data" / "boolq" / "test.json").write_text(json.dumps(items))
        return ["--suite", "commonsense", "--data-dir", tmp_path / "data"]
    datasets = pytest.importorskip("datasets")
    pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    data = tmp_path / "docs.jsonl"
    data.write_text("".join(json.dumps({"question": t}) + "\n" for t in texts))
    (tmp_path / "choose.yaml").write_text(CHOICE.replace("DATA", str(data)))
    return ["--tasks", tmp_path / "choose.yaml"]


@pytest.mark.filterwarnings("ignore")  # datasets and dill warn of their own old habits
def test_an_interrupted_task_goes_on_where_it_was(
    task_flags: Sequence[object],
    complete_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "new" / "scores.json"

    def evaluate() -> Outcome:
        flags = [*task_flags, "--batch-size", 2, "--output", out]
        return run_here(capsys, "evaluate", "--model", complete_dir, *flags)

    assert evaluate().code == 0
    whole = json.loads(out.read_text())
    out.unlink()
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(patch, 3)
        assert evaluate().code == 130
    assert not out.exists()
    with pytest.MonkeyPatch.context() as patch:
        calls = interrupt_after(patch, 2)  # four items are left
        outcome = evaluate()
    assert outcome.code == 0, outcome.err
    assert calls == [2]
    assert "12 answers are known already" in outcome.err
    assert json.loads(out.read_text())["results"] == whole["results"]
    assert [path.name for path in out.parent.iterdir()] == ["scores.json"]


def test_without_a_result_file_nothing_is_kept(tmp_path: Path) -> None:
    assert Partial(None, {}).answers(key="k") is None
    assert not list(tmp_path.iterdir())

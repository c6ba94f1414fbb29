"""The eight commonsense tasks: prompts, options and order as CoreNet's, scores as by hand."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_tokenizer as tiny
from command_line import run_here

from openelm_mlx.checkpoint import load
from openelm_mlx.commonsense import (
    Item,
    choose,
    encode_pair,
    evaluate_commonsense,
    read_items,
    read_tasks,
    summary,
)
from openelm_mlx.scoring import Likelihood

REAL = Path(__file__).parent.parent.parent / "shared" / "data" / "benchmarks"
# The last lines of LLM-Adapters' instructions, by task.
FORMATS = {
    "boolq": ("Answer format: true/false", ("true", "false")),
    "piqa": ("Answer format: solution1/solution2", ("solution1", "solution2")),
    "social_i_qa": ("Answer format: answer1/answer2/answer3", ("answer1", "answer2", "answer3")),
    "hellaswag": (
        "Answer format: ending1/ending2/ending3/ending4",
        ("ending1", "ending2", "ending3", "ending4"),
    ),
    "winogrande": ("Option1: a Option2: b Answer format: option1/option2", ("option1", "option2")),
}


def item(
    question: str = "who was it?", last: str = "Answer format: true/false", **more: Any
) -> Any:
    return {"instruction": f"{question}\n\n{last}", "input": "", "answer": "true", **more}


def write(path: Path, records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records))
    return path


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Two tasks of some items each."""
    words = tiny.sentences(5, seed=2)
    write(tmp_path / "data" / "boolq" / "test.json", [item(text) for text in words])
    last, options = FORMATS["social_i_qa"]
    records = [item(text, last, answer=options[i % 3]) for i, text in enumerate(words[:5])]
    write(tmp_path / "data" / "social_i_qa" / "test.json", records)
    return tmp_path / "data"


def test_the_prompt_has_apples_bytes(golden: Callable[[str], Path], tmp_path: Path) -> None:
    records = json.loads(golden("data/commonsense.json").read_text())
    prompts = json.loads(golden("data/commonsense_expected.json").read_text())["prompts"]
    (first,) = read_items(write(tmp_path / "test.json", records[:1]))
    assert first.context + first.continuations[0] == prompts[0]
    assert first.context.endswith("### Response:\n" + " " * 16)
    (second,) = read_items(write(tmp_path / "test.json", records[1:2]))
    assert "two spaces" in records[1]["input"]
    assert "two spaces" not in second.context  # CoreNet passes "input": ""


@pytest.mark.parametrize("task", FORMATS)
def test_the_options_are_those_that_the_last_line_names(task: str, tmp_path: Path) -> None:
    last, options = FORMATS[task]
    (found,) = read_items(write(tmp_path / "test.json", [item(last=last)]))
    assert found.options == options
    assert found.continuations[1] == f"the correct answer is {options[1]}"


def test_the_order_is_pythons_shuffle_with_apples_seed_and_the_limit_comes_after(
    tmp_path: Path,
) -> None:
    records = [item(f"question {number}?") for number in range(50)]
    expected = list(records)
    random.seed(83652)
    random.shuffle(expected)
    found = read_items(write(tmp_path / "test.json", records), limit=5)
    assert len(found) == 5
    for one, record in zip(found, expected, strict=False):
        assert record["instruction"] in one.context


def test_tasks_come_in_the_papers_order_and_others_after_them(data_dir: Path) -> None:
    write(data_dir / "another" / "test.json", [item()])
    write(data_dir / "ARC-Easy" / "test.json", [item()])
    assert list(read_tasks(data_dir)) == ["ARC-Easy", "boolq", "social_i_qa", "another"]


def test_the_first_of_equal_options_is_chosen() -> None:
    one = Item(context="c", options=("answer1", "answer2", "answer3"), answer="answer2")
    scores = [Likelihood(x, False) for x in (-2.0, -1.0, -1.0)]
    assert choose(one, scores) == ("answer2", "answer2")


def test_acc_norm_is_by_character_of_the_sentence() -> None:
    one = Item(context="c", options=("true", "false"), answer="true")
    lengths = [len(sentence) for sentence in one.continuations]
    assert lengths == [26, 27]
    scores = [Likelihood(-26.0, False), Likelihood(-26.5, False)]
    assert choose(one, scores) == ("true", "false")  # -1.0 a character against -0.981


def test_accuracies_have_the_standard_error_of_a_proportion() -> None:
    found = summary([(True, False)] * 3 + [(False, False)])
    assert (found["acc"], found["acc_norm"], found["n"]) == (0.75, 0.0, 4)
    assert found["acc_stderr"] == pytest.approx(np.std([1, 1, 1, 0], ddof=1) / 2)
    assert summary([(True, True)])["acc_stderr"] is None


def test_every_task_is_scored_as_by_hand(
    complete_dir: Path, tiny_tokenizer: tiny.TinyTokenizer, data_dir: Path
) -> None:
    model, tokenizer = load(complete_dir)[0], tiny_tokenizer.tokenizer
    results = evaluate_commonsense(model, tokenizer, data_dir, batch_size=3)
    assert list(results) == ["boolq", "social_i_qa"]
    for task, items in read_tasks(data_dir).items():
        right = 0
        for one in items:
            scores = []
            for sentence in one.continuations:
                ids = tokenizer.encode(one.context + sentence)
                start = len(tokenizer.encode(one.context.rstrip()))
                logits = model(mx.array([ids[:-1]]))[0]
                logprobs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
                scores.append(sum(logprobs[i - 1, ids[i]] for i in range(start, len(ids))))
            right += one.options[int(np.argmax(scores))] == one.answer
        assert results[task]["acc"] == right / len(items)
        assert results[task]["n"] == len(items)


def test_white_space_before_the_answer_is_scored_with_it(
    tiny_tokenizer: tiny.TinyTokenizer,
) -> None:
    tokenizer = tiny_tokenizer.tokenizer
    context, continuation = encode_pair(tokenizer, "the king\n  ", "was old")
    assert context == tokenizer.encode("the king")
    assert context[0] == tokenizer.bos_id
    assert [*context, *continuation] == tokenizer.encode("the king\n  was old")
    assert tokenizer.bos_id not in continuation


def test_the_command_writes_scores_by_the_names_of_the_folders(
    complete_dir: Path, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.json"
    arguments = ["--suite", "commonsense", "--data-dir", data_dir, "--limit", 5, "--output", out]
    outcome = run_here(capsys, "evaluate", "--model", complete_dir, *arguments)
    assert outcome.code == 0, outcome.err
    results = json.loads(out.read_text())["results"]
    assert list(results) == ["boolq", "social_i_qa"]
    for task, scores in results.items():
        assert scores["n"] == 5
        assert {"acc", "acc_norm", "acc_stderr", "acc_norm_stderr"} <= set(scores)
        assert f"{task} " in outcome.out
        assert f"{100 * scores['acc']:.2f} ± {100 * scores['acc_stderr']:.2f}" in outcome.out


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "a list of items, with one at least"),
        ({"a": 1}, "a list of items, with one at least"),
        ([item(), item(last="Answer:")], "item 2: the instruction's last line names no options"),
        ([item(), item(last="Answer format: answer0")], "item 2: the instruction's last line"),
        ([item(), "text"], "item 2: is no object"),
        ([item(), {"instruction": "x"}], "item 2: has no key 'answer'"),
    ],
)
def test_a_damaged_file_is_refused_by_item(records: object, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "test.json", records)
    with pytest.raises(ValueError, match=message) as error:
        read_items(path)
    assert str(path) in str(error.value)


def test_what_is_no_json_and_folders_without_tasks_are_refused(tmp_path: Path) -> None:
    (tmp_path / "test.json").write_bytes(b"[\xff")
    with pytest.raises(ValueError, match="is no JSON"):
        read_items(tmp_path / "test.json")
    with pytest.raises(FileNotFoundError, match="holds no <task>/test"):
        read_tasks(tmp_path)
    with pytest.raises(FileNotFoundError, match="is no folder"):
        read_tasks(tmp_path / "nowhere")


@pytest.mark.skipif(not REAL.is_dir(), reason="the real items are not at hand")
def test_the_real_items_of_all_eight_tasks_are_understood() -> None:
    tasks = read_tasks(REAL)
    assert len(tasks) == 8
    for items in tasks.values():
        assert len(items) == 200
        assert all(one.answer in one.options for one in items)

"""Records become samples: formats, and which tokens are learned."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer as tiny
from tuning_makers import CHAT, learned, load, whole, write

from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tuning_data import TuningArgs, describe_samples, load_split

SHARED = Path(__file__).parent.parent.parent / "shared" / "data"


@pytest.fixture
def tokenizer(tiny_tokenizer: tiny.TinyTokenizer) -> Tokenizer:
    """A tokenizer of its own, as a chat template may be put into it."""
    return Tokenizer.from_path(tiny_tokenizer.path)


def test_b27_every_text_gets_one_bos_and_one_eos(tmp_path: Path, tokenizer: Tokenizer) -> None:
    records: list[list[dict[str, Any]]] = [
        [{"text": "the young queen"}],
        [{"prompt": "the old", "completion": "king"}],
        [{"messages": CHAT[:2]}],
        [{"instruction": "say", "input": "", "output": "king"}],
        [{"instruction": "say", "input": "", "output": "king", "answer": "king"}],
    ]
    for i, part in enumerate(records):
        (sample,) = load(write(tmp_path / str(i), *part), tokenizer)
        ids = sample.tokens.tolist()
        assert ids[0] == tokenizer.bos_id
        assert ids[-1] == tokenizer.eos_id
        assert ids.count(1) == 1
        # the conversation's empty system message and its question end in EOS too
        assert ids.count(2) == (3 if "messages" in part[0] else 1)


def test_all_but_bos_is_learned_without_a_mask(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (sample,) = load(write(tmp_path, {"prompt": "the old", "completion": "king"}), tokenizer)
    assert sample.mask.tolist() == [False] + [True] * (len(sample.tokens) - 1)


def test_a_masked_prompt_leaves_the_completion_and_its_eos(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    record = {"prompt": "the old king went", "completion": "to forest."}
    (sample,) = load(write(tmp_path, record), tokenizer, mask_prompt=True)
    assert whole(sample, tokenizer) == "<s>the old king went to forest.</s>"
    assert learned(sample, tokenizer) == "to forest.</s>"
    # the prompt is what generation will give the model
    context = sample.tokens[~sample.mask].tolist()
    assert context == tokenizer.encode(record["prompt"])


@pytest.mark.parametrize(
    ("prompt", "completion", "text"),
    [
        ("the old", "king", "the old king"),
        ("the old ", "king", "the old king"),
        ("the old", " king", "the old king"),
        ("the old\n", "king", "the old\nking"),
        ("", "king", "king"),
    ],
)
def test_prompt_and_completion_are_one_text_with_white_space_between(
    prompt: str, completion: str, text: str, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    record = {"prompt": prompt, "completion": completion}
    (sample,) = load(write(tmp_path, record), tokenizer, mask_prompt=True)
    assert sample.tokens.tolist() == tokenizer.encode(text, eos=True)
    assert learned(sample, tokenizer).strip() == "king</s>"


def test_only_what_the_assistant_says_is_learned_of_a_chat(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = write(tmp_path, {"messages": CHAT}, {"messages": CHAT[:2]})
    two_turns, one_turn = load(path, tokenizer, mask_prompt=True)
    assert whole(two_turns, tokenizer) == (
        "<s><|system|>\n</s>\n<|user|>\nthe old king</s>\n<|assistant|>\nwent to forest</s>\n"
        "<|user|>\nand the wolf</s>\n<|assistant|>\nsaw a girl</s>"
    )
    assert learned(two_turns, tokenizer) == "went to forest</s>saw a girl</s>"
    assert learned(one_turn, tokenizer) == "went to forest</s>"
    load(path, tokenizer)
    assert caplog.text.count("Apple's instruct template") == 1


def test_a_chat_that_ends_with_a_question_learns_the_answers_before_it(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (sample,) = load(write(tmp_path, {"messages": CHAT[:3]}), tokenizer, mask_prompt=True)
    assert learned(sample, tokenizer) == "went to forest</s>"
    assert whole(sample, tokenizer).endswith("and the wolf</s>\n")


def test_b27_a_template_without_an_end_gets_one_eos(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    (sample,) = load(write(tmp_path, {"messages": CHAT[:2]}), tokenizer, mask_prompt=True)
    assert sample.tokens.tolist().count(2) == 1
    assert learned(sample, tokenizer).strip() == "went to forest\n</s>"


def test_a_message_cannot_end_its_own_turn(tmp_path: Path, tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "a</s>b"}, {"role": "assistant", "content": "king"}]
    (sample,) = load(write(tmp_path, {"messages": chat}), tokenizer, mask_prompt=True)
    assert sample.tokens.tolist().count(2) == 3  # system, user, assistant
    assert learned(sample, tokenizer) == "king</s>"


def test_a_template_that_rewrites_turns_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(ValueError, match="line 1: the chat template does not keep message 2"):
        load(write(tmp_path, {"messages": CHAT}), tokenizer, mask_prompt=True)


def test_completions_can_go_through_the_chat_template(tmp_path: Path, tokenizer: Tokenizer) -> None:
    record = {"prompt": "the old king", "completion": "went to forest"}
    (plain,) = load(write(tmp_path / "a", record), tokenizer, use_chat_template=True)
    (chat,) = load(write(tmp_path / "b", {"messages": CHAT[:2]}), tokenizer)
    assert plain.tokens.tolist() == chat.tokens.tolist()
    with pytest.raises(ValueError, match="use_chat_template is for prompt and completion"):
        load(write(tmp_path / "c", {"text": "a"}), tokenizer, use_chat_template=True)


def test_commonsense_prompts_are_corenets_byte_for_byte(golden: Callable[[str], Path]) -> None:
    expected = json.loads(golden("data/commonsense_expected.json").read_text())
    tokenizer = Tokenizer.from_path(golden("data/tokenizer.model"))
    run = expected["runs"]["world=1 rank=0 seq=256"]
    pytest.importorskip("ftfy", reason="CoreNet's tokenizer mends characters")
    samples = load_split(
        golden("data/commonsense.json"),
        "train",
        tokenizer,
        TuningArgs(max_seq_length=run["sequence_length"], fix_text=True),
    )
    for index, content in zip(run["order_of_records"], run["content"], strict=True):
        ids = samples[index].tokens.tolist()
        assert ids == [i for i in content if i != run["pad_token_id"]]
        assert samples[index].mask.tolist() == [False] + [True] * (len(ids) - 1)


def test_commonsense_texts_are_corenets_without_ftfy_too(golden: Callable[[str], Path]) -> None:
    expected = json.loads(golden("data/commonsense_expected.json").read_text())
    tokenizer = Tokenizer.from_path(golden("data/tokenizer.model"))
    samples = load_split(golden("data/commonsense.json"), "train", tokenizer, TuningArgs())
    texts = [tokenizer.encode(text, eos=True) for text in expected["prompts"]]
    assert [sample.tokens.tolist() for sample in samples] == texts


def test_commonsense_and_alpaca_are_told_apart(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fields = {"instruction": "say", "input": "here", "output": "king"}
    (alpaca,) = load(write(tmp_path / "a", fields), tokenizer, mask_prompt=True)
    assert "format alpaca, 1 samples" in caplog.text
    assert whole(alpaca, tokenizer).endswith(
        "### Instruction:\nsay\n\n### Input:\nhere\n\n### Response:\nking</s>"
    )
    assert learned(alpaca, tokenizer) == "king</s>"
    commonsense = write(tmp_path / "b", {**fields, "answer": "king"})
    (sample,) = load(commonsense, tokenizer, mask_prompt=True)
    assert "format commonsense, 1 samples" in caplog.text
    assert learned(sample, tokenizer).strip() == "king</s>"
    (forced,) = load(commonsense, tokenizer, format="alpaca")
    assert forced.tokens.tolist() == alpaca.tokens.tolist()


def test_an_empty_or_missing_input_is_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    fields = {"instruction": "say", "output": "king"}
    path = write(tmp_path, fields, {**fields, "input": ""}, {**fields, "input": None})
    first, *others = (sample.tokens.tolist() for sample in load(path, tokenizer))
    assert others == [first, first]


def test_b8_the_test_split_is_masked_as_the_training_split(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    record = {"prompt": "the old", "completion": "king"}
    folder = write(tmp_path, record)
    write(tmp_path, record, name="test.jsonl")
    args = TuningArgs(mask_prompt=True)
    (train,) = load_split(folder, "train", tokenizer, args)
    (test,) = load_split(folder, "test", tokenizer, args)
    assert (test.tokens == train.tokens).all()
    assert (test.mask == train.mask).all()


def test_the_first_samples_are_shown_with_what_is_learned(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    record = {"prompt": "the old king went", "completion": "to forest."}
    samples = load(write(tmp_path, record, record), tokenizer, mask_prompt=True)
    text = describe_samples(samples, tokenizer, 1)
    assert text.splitlines() == [
        f"train.jsonl:1: {len(samples[0].tokens)} tokens, {samples[0].num_targets} learned",
        "  context '<s>the old king went'",
        "  learned 'to forest.</s>'",
    ]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not here")
@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("commonsense_chat", "messages", 1200),
        ("commonsense_completions", "completions", 1200),
        ("commonsense_mini.json", "commonsense", 2200),
    ],
)
@pytest.mark.slow
def test_real_sets_are_read_whole(
    name: str, kind: str, count: int, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    samples = load(SHARED / "train" / name, tokenizer, mask_prompt=True)
    assert len(samples) == count
    assert f"format {kind}" in caplog.text
    answers = [learned(sample, tokenizer).strip() for sample in samples]
    assert all(text.startswith("the correct answer is") for text in answers)
    assert all(text.endswith("</s>") for text in answers)

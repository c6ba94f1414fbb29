"""Conversations: the cache is a short cut, never a change of the answer."""

import io
from dataclasses import replace
from pathlib import Path

import pytest

from openelm_mlx import cli
from openelm_mlx.chat import Conversation
from openelm_mlx.chat_template import APPLE_INSTRUCT_TEMPLATE
from openelm_mlx.checkpoint import load
from openelm_mlx.generate import generate
from openelm_mlx.generation_settings import GenerateArgs


@pytest.fixture
def conversation(complete_dir: Path) -> Conversation:
    model, tokenizer = load(complete_dir)
    assert tokenizer is not None
    tokenizer.chat_template = APPLE_INSTRUCT_TEMPLATE
    return Conversation(model, tokenizer, GenerateArgs(max_tokens=12))


def answer(conversation: Conversation, text: str) -> str:
    return "".join(part.text for part in conversation.ask(text))


def test_the_cached_second_turn_equals_one_computed_anew(conversation: Conversation) -> None:
    answer(conversation, "the cat sat")
    second = answer(conversation, "and then?")
    ids = conversation.tokenizer.encode_chat(conversation.messages[:-1])
    anew = generate(conversation.model, conversation.tokenizer, ids, max_tokens=12)
    assert second == anew


def test_a_conversation_begins_with_exactly_one_bos(conversation: Conversation) -> None:
    answer(conversation, "the cat sat")
    bos = conversation.tokenizer.bos_id
    assert conversation._cached_ids[0] == bos
    assert conversation._cached_ids.count(bos) == 1


def test_an_interrupted_answer_does_not_spoil_the_next(conversation: Conversation) -> None:
    parts = conversation.ask("the cat sat")
    for _ in range(3):
        next(parts)
    parts.close()  # type: ignore[attr-defined]
    second = answer(conversation, "and then?")
    ids = conversation.tokenizer.encode_chat(conversation.messages[:-1])
    assert second == generate(conversation.model, conversation.tokenizer, ids, max_tokens=12)


def test_a_full_context_forgets_the_oldest_exchange(
    conversation: Conversation, caplog: pytest.LogCaptureFixture
) -> None:
    model = conversation.model
    model.args = replace(model.args, max_context_length=120)
    for turn in range(6):
        answer(conversation, f"the cat sat on the mat number {turn}")
    assert "forgot the oldest" in caplog.text
    assert len(conversation.messages) < 12
    assert "number 5" in conversation.messages[-2]["content"]


def test_reset_starts_a_new_conversation(conversation: Conversation) -> None:
    first = answer(conversation, "the cat sat")
    answer(conversation, "and then?")
    conversation.reset()
    assert answer(conversation, "the cat sat") == first


def test_chat_with_a_base_model_warns_and_answers_each_line(
    complete_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the cat\n\n/reset\nthe cat\n/quit\nnever read\n"))
    code = cli.main(["chat", "--model", str(complete_dir), "--max-tokens", "5", "--temp", "0"])
    captured = capsys.readouterr()
    assert code == 0
    assert "no chat template" in captured.err
    first, second = captured.out.rstrip("\n").rsplit("\n", 1)
    assert first == second

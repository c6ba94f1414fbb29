"""Apple's instruct format, one BOS, and messages that try to write control tokens."""

import json
from pathlib import Path

import pytest
import tiny_tokenizer as tiny

from openelm_mlx.chat_template import is_instruct, protect, render
from openelm_mlx.tokenizer import APPLE_INSTRUCT_TEMPLATE, Tokenizer

USER = {"role": "user", "content": "What is 2+2?"}
ANSWER = {"role": "assistant", "content": "4"}


@pytest.fixture(params=["sentencepiece", "tokenizers"])
def tokenizer(
    request: pytest.FixtureRequest, tiny_tokenizer: tiny.TinyTokenizer, tmp_path: Path
) -> Tokenizer:
    """The tiny tokenizer of either kind in an Instruct folder."""
    tiny_tokenizer.tokenizer.save(tmp_path, chat_template=APPLE_INSTRUCT_TEMPLATE)
    if request.param == "tokenizers":
        (tmp_path / "tokenizer.model").unlink()
    found = Tokenizer.from_path(tmp_path)
    assert found.kind == request.param
    return found


def with_template(tokenizer: tiny.TinyTokenizer, template: str | None) -> Tokenizer:
    found = Tokenizer.from_path(tokenizer.path)
    found.chat_template = template
    return found


def test_apples_format_is_rendered_as_alignment_handbook_does(tokenizer: Tokenizer) -> None:
    prompt = "<s><|system|>\n</s>\n<|user|>\nWhat is 2+2?</s>\n"
    assert tokenizer.render_chat([USER]) == prompt + "<|assistant|>\n"
    whole = tokenizer.render_chat([USER, ANSWER], add_generation_prompt=False)
    assert whole == prompt + "<|assistant|>\n4</s>\n"
    alone = tokenizer.render_chat([ANSWER], add_generation_prompt=False)
    assert alone == "<s><|assistant|>\n4</s>\n"
    assert tokenizer.render_chat([], add_generation_prompt=False) == "<s>"


def test_a_system_message_takes_the_place_of_the_empty_one(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, USER]
    start = "<s><|system|>\nBe brief.</s>\n<|user|>\n"
    assert tokenizer.render_chat(messages).startswith(start)


def test_a_chat_has_one_bos_and_an_eos_after_each_turn(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([USER, ANSWER], add_generation_prompt=False)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 1, 3)
    text = "<s><|system|>\n</s>\n<|user|>\nWhat is 2+2?</s>\n<|assistant|>\n4</s>\n"
    assert tokenizer.encode_rendered(text) == ids
    assert tokenizer.encode_rendered(text.removeprefix("<s>"), bos=False) == ids[1:]


def test_the_prompt_of_a_chat_is_the_start_of_the_whole(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode_chat([USER])
    whole = tokenizer.encode_chat([USER, ANSWER], add_generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    assert tokenizer.decode(whole[len(prompt) :]).strip() == "4"


@pytest.mark.parametrize("content", ["</s>", "a </s>\n<s> b", "<s", "/s></s></s>", "<", "</s"])
def test_a_message_cannot_write_control_tokens(content: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([{"role": "user", "content": content}])
    assert (ids.count(1), ids.count(2)) == (1, 2)
    text = tokenizer.decode(ids)
    assert f"<|user|>\n{content}" in text
    assert all(ord(character) < 0x80 for character in text)  # no guard left behind


@pytest.mark.parametrize(
    ("template", "content"),
    [("{{ messages[0].content }}/s>", "<"), ("<{{ messages[0].content }}", "/s>")],
)
def test_a_template_cannot_be_completed_by_a_message(
    template: str, content: str, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    joined = with_template(tiny_tokenizer, template)
    assert joined.encode_chat([{"role": "user", "content": content}]) == joined.encode("</s>")


def test_a_template_without_bos_gets_one(tiny_tokenizer: tiny.TinyTokenizer) -> None:
    bare = with_template(tiny_tokenizer, "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert bare.encode_chat([USER]) == bare.encode(USER["content"])


def test_without_a_template_there_is_an_error(tiny_tokenizer: tiny.TinyTokenizer) -> None:
    with pytest.raises(ValueError, match="has no chat template: use a model tuned on instr"):
        with_template(tiny_tokenizer, None).encode_chat([USER])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user"}], "message 0 needs the keys 'role' and 'content', got {'role'"),
        (["hello"], "message 0 needs the keys 'role' and 'content', got 'hello'"),
        ([{"role": "tool", "content": "x"}], "roles are system, user and assistant, got tool"),
        ([{"role": "user", "content": [{"text": "x"}]}], "cannot render these messages"),
    ],
)
def test_messages_that_do_not_fit_are_refused_in_one_line(
    messages: list[dict[str, str]], message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        tokenizer.render_chat(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages.append(1) }}", "{{ x.y.z }}"])
def test_a_template_that_is_wrong_or_unsafe_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match="the chat template cannot render these messages: "):
        render(template, [USER], add_generation_prompt=True, special_tokens={})


def test_what_transformers_gives_templates_is_there() -> None:
    template = """\
{% generation %}{{ strftime_now('%Y') | length }}{% endgeneration %}
{% for m in messages %}
    {%- if loop.index > 1 %}{% break %}{% endif %}
    {{- m | tojson }}
{% endfor %}
{{ add_generation_prompt }}{{ eos_token }}"""
    messages = [{"role": "user", "content": "<é>"}, ANSWER]
    text = render(template, messages, add_generation_prompt=True, special_tokens={"eos_token": "E"})
    assert text == '4{"role": "user", "content": "<é>"}\nTrueE'


def test_the_guard_is_a_character_no_message_holds() -> None:
    messages, guard = protect([{"role": "user", "content": "\ue000</s>"}], ["</s>"])
    assert guard == "\ue001"
    assert messages == [{"role": "user", "content": "\ue000<\ue001/s>"}]


def test_templates_are_found_in_every_file_that_may_hold_them(
    tiny_tokenizer: tiny.TinyTokenizer, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(tiny_tokenizer.path.read_bytes())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "list"}]
    files = {
        "chat_template.json": {"chat_template": "json"},
        "tokenizer_config.json": {"chat_template": named},
    }
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
        expected = "json" if name == "chat_template.json" else "list"
        assert Tokenizer.from_path(tmp_path).chat_template == expected
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert Tokenizer.from_path(tmp_path).chat_template == "jinja"


def test_instruct_folders_are_known_by_name() -> None:
    assert is_instruct("apple/OpenELM-270M-Instruct")
    assert is_instruct("my-instruct-4bit")
    assert not is_instruct("apple/OpenELM-270M")
    assert not is_instruct(None)

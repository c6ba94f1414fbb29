"""Prompts answered together come out as they would alone; files of prompts in, JSON lines out."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from chain_model import chain, chain_model
from command_line import run_here
from slow_params import slow
from tiny_tokenizer import TinyTokenizer

from openelm_mlx.batch import BatchResult, check_settings, generate_batch
from openelm_mlx.batch_file import Request, read_requests, run_file, run_requests
from openelm_mlx.checkpoint import save_model
from openelm_mlx.config import ModelArgs
from openelm_mlx.generate import stream_generate
from openelm_mlx.generation_settings import GenerateArgs
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import APPLE_INSTRUCT_TEMPLATE, Tokenizer

PROMPTS: list[str | list[int]] = [
    "The king",
    "",
    "Once upon a time there was a little girl who saw a wolf. " * 2,
    [5, 6, 7],
    "A",
    "The old queen went to the river, and there",
    [1, 300, 12],
]


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: TinyTokenizer) -> Tokenizer:
    return Tokenizer.from_path(tiny_tokenizer.path)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Model:
    """Random weights, unequal layers, float32; two rows of padding."""
    mx.random.seed(4)
    args = ModelArgs.from_scaling(
        num_transformer_layers=2,
        model_dim=32,
        head_dim=8,
        qkv_multipliers=(0.5, 1.0),
        ffn_multipliers=(0.5, 1.0),
        num_gqa_groups=2,
        ffn_dim_divisor=8,
        vocab_size=tokenizer.vocab_size + 2,
    )
    model = Model(args)
    model.eval()
    mx.eval(model.parameters())
    return model


def alone(
    model: Model, tokenizer: Tokenizer, prompt: str | list[int], settings: GenerateArgs
) -> BatchResult:
    parts = list(stream_generate(model, tokenizer, prompt, args=settings))
    tokens = [part.token for part in parts if part.token is not None]
    return BatchResult(
        text="".join(part.text for part in parts),
        tokens=tokens,
        finish_reason=str(parts[-1].finish_reason),
        generation_tokens=parts[-1].generation_tokens,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temp": 1.0, "top_k": 20, "seed": 1, "repetition_penalty": 1.3, "repetition_window": 10},
        *slow(
            {"temp": 0.9, "top_p": 0.9, "seed": 3},
            {"repetition_penalty": 1.3, "prefill_step": 7},
            {"stop": ["e", "the"], "temp": 1.0, "seed": 2},
        ),
    ],
    ids=lambda s: "-".join(s) or "greedy",
)
@pytest.mark.parametrize("batch_size", [3, *slow(1, 2, 16)])
@pytest.mark.slow  # importing mlx_lm takes seconds
def test_each_row_comes_out_as_it_would_alone(
    model: Model, tokenizer: Tokenizer, settings: dict[str, Any], batch_size: int
) -> None:
    args = GenerateArgs(max_tokens=12, **settings)
    found = generate_batch(model, tokenizer, PROMPTS, args, batch_size=batch_size)
    assert found == [alone(model, tokenizer, prompt, args) for prompt in PROMPTS]


@pytest.mark.slow  # importing mlx_lm takes seconds
def test_rows_end_for_their_own_reasons(tokenizer: Tokenizer) -> None:
    words = {tokenizer.piece(i): i for i in range(tokenizer.vocab_size)}
    the, saw, old = words["▁the"], words["▁sa"], words["▁o"]
    model = chain_model(
        chain([the, saw, 2], [old, old]), vocab_size=tokenizer.vocab_size, context=8
    )
    prompts = [[the], [old], [old] * 5, [saw]]
    found = generate_batch(model, tokenizer, prompts, GenerateArgs(max_tokens=5))
    assert [(r.finish_reason, r.generation_tokens) for r in found] == [
        ("stop", 2),
        ("length", 5),
        ("context", 2),
        ("stop", 1),
    ]
    assert [r.tokens for r in found] == [[saw], [old] * 5, [old] * 2, []]
    assert found[0].text == "sa"


@pytest.mark.slow  # importing mlx_lm takes seconds
def test_progress_hears_of_every_row_once(model: Model, tokenizer: Tokenizer) -> None:
    heard: dict[int, BatchResult] = {}
    found = generate_batch(
        model,
        tokenizer,
        PROMPTS,
        GenerateArgs(max_tokens=3),
        batch_size=2,
        progress=lambda index, result: heard.update({index: result}),
    )
    assert [heard[i] for i in range(len(PROMPTS))] == found


@pytest.mark.slow  # importing mlx_lm takes seconds
def test_without_a_seed_rows_draw_for_themselves(model: Model, tokenizer: Tokenizer) -> None:
    settings = GenerateArgs(max_tokens=12, temp=1.0)
    found = generate_batch(model, tokenizer, ["A"] * 6, settings, batch_size=4)
    assert len({tuple(result.tokens) for result in found}) == 6


@pytest.mark.slow  # importing mlx_lm takes seconds
def test_no_prompts_give_no_results(model: Model, tokenizer: Tokenizer) -> None:
    assert generate_batch(model, tokenizer, [], GenerateArgs()) == []


def test_a_prompt_beyond_the_context_is_named(tokenizer: Tokenizer) -> None:
    model = chain_model({}, vocab_size=tokenizer.vocab_size, context=6)
    with pytest.raises(ValueError, match="prompt 2: the prompt has 9 tokens"):
        generate_batch(model, tokenizer, [[4], [4] * 8], GenerateArgs())


@pytest.mark.parametrize(
    ("settings", "draft", "message"),
    [
        ({"kv_bits": 8}, False, "cannot use kv_bits"),
        ({"max_kv_size": 64}, False, "cannot use max_kv_size"),
        ({"prompt_lookup": 4}, False, "cannot use prompt_lookup"),
        ({"kv_bits": 8}, True, "cannot use kv_bits or a draft model; leave that out"),
    ],
)
def test_what_a_batch_cannot_do_is_refused(
    settings: dict[str, int], draft: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_settings(GenerateArgs(**settings), batch_size=4, draft=draft)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        check_settings(GenerateArgs(), batch_size=0)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_file_may_hold_prompts_messages_and_strings(tmp_path: Path) -> None:
    file = write(
        tmp_path / "p.jsonl",
        '{"prompt": "Öl"}',
        "",
        '"plain"\r',
        '{"messages": [{"role": "user", "content": "hi"}], "id": 3}',
        "",
    )
    assert read_requests(file) == [
        Request(source=f"{file}:1", prompt="Öl"),
        Request(source=f"{file}:3", prompt="plain"),
        Request(source=f"{file}:4", messages=[{"role": "user", "content": "hi"}]),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "x"', "2: not a line of JSON"),
        ("{'prompt': 1}", "2: not a line of JSON"),
        ("3", "2: expected .* got 3"),
        ("{}", "2: expected"),
        ('{"prompt": 3}', "2: expected"),
        ('{"messages": []}', "2: expected"),
        ('{"messages": "hi"}', "2: expected"),
        ('{"prompt": "a", "messages": [{}]}', "2: expected"),
        ("[" * 100_000, "2: not a line of JSON"),
        ('{"text": "' + "x" * 500 + '"}', r"2: expected .*\.\.\.$"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = write(tmp_path / "p.jsonl", '{"prompt": "good"}', line)
    with pytest.raises(ValueError, match=message) as error:
        read_requests(file)
    assert str(error.value).startswith(f"{file}:2: ")
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'"ok"\n"\xff"\n')
    with pytest.raises(ValueError, match=r"p\.jsonl:2: not a line of JSON"):
        read_requests(file)


def test_a_missing_and_an_empty_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl is not a file"):
        read_requests(tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no prompts"):
        read_requests(write(tmp_path / "empty.jsonl", "", ""))


@pytest.mark.slow  # importing mlx_lm takes seconds
def test_lines_are_answered_in_their_order(
    model: Model, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [p for p in PROMPTS if isinstance(p, str)]
    file = write(tmp_path / "p.jsonl", *(json.dumps({"prompt": p}) for p in texts))
    settings = GenerateArgs(max_tokens=8)
    assert run_file(model, tokenizer, file, settings, batch_size=2) == 0
    captured = capsys.readouterr()
    assert captured.err == ""  # no progress bar where standard error is no terminal
    found = [json.loads(line) for line in captured.out.splitlines()]
    for prompt, record in zip(texts, found, strict=True):
        single = alone(model, tokenizer, prompt, settings)
        assert record == {
            "prompt": prompt,
            "text": single.text,
            "finish_reason": single.finish_reason,
            "generation_tokens": single.generation_tokens,
        }


@pytest.mark.slow  # importing mlx_lm takes seconds
def test_conversations_are_answered_by_the_chat_template(
    model: Model, tiny_tokenizer: TinyTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Tokenizer.from_path(tiny_tokenizer.path)
    messages = [{"role": "user", "content": "The king"}]
    request = Request(source="p.jsonl:1", messages=messages)
    settings = GenerateArgs(max_tokens=4)
    with pytest.raises(ValueError, match=r"p\.jsonl:1: .* has no chat template"):
        run_requests(model, tokenizer, [request], settings)
    tokenizer.chat_template = APPLE_INSTRUCT_TEMPLATE
    run_requests(model, tokenizer, [request], settings)
    record = json.loads(capsys.readouterr().out)
    assert record["messages"] == messages
    single = alone(model, tokenizer, tokenizer.encode_chat(messages), settings)
    assert record["text"] == single.text


@pytest.mark.slow  # importing mlx_lm takes seconds
def test_the_command_answers_a_file_and_checks_it_before_loading(
    model: Model, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    save_model(model, folder, tokenizer=tokenizer)
    good = write(tmp_path / "good.jsonl", '"The king"', '{"prompt": ""}')
    command = ["generate", "--model", folder, "--max-tokens", 4, "--prompts"]
    outcome = run_here(capsys, *command, good)
    assert outcome.code == 0
    assert [json.loads(line)["prompt"] for line in outcome.out.splitlines()] == ["The king", ""]
    bad = write(tmp_path / "bad.jsonl", '"fine"', "damaged")
    outcome = run_here(capsys, "generate", "--model", "/nowhere", "--prompts", bad)
    assert f"{bad}:2: not a line of JSON" in outcome.error
    assert "kv_bits" in run_here(capsys, *command, good, "--kv-bits", 8).error
    assert "draft model" in run_here(capsys, *command, good, "--draft-model", folder).error

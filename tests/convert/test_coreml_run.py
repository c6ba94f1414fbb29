"""Text from a package: judged by ``openelm generate`` on the same model."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer as tiny
from command_line import run_here
from fake_package import FakePackage
from small_packages import small_package

from convert.coreml_bundle import bundle_folder, write_bundle
from convert.coreml_client import Client, ContextFull
from convert.coreml_run import stream
from openelm_mlx.checkpoint import load_model
from openelm_mlx.generate import Response, stream_generate
from openelm_mlx.generation_settings import GenerateArgs
from openelm_mlx.model import Model

PROMPT = "Once upon a time there was"


@pytest.fixture(scope="module")
def model(complete_dir: Path) -> Model:
    return load_model(complete_dir)


@pytest.fixture(scope="module")
def package(complete_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real package with its bundle beside it."""
    path = tmp_path_factory.mktemp("app") / "Complete.mlpackage"
    small_package(path, load_model(complete_dir))
    write_bundle(bundle_folder(path), package=path, model_dir=complete_dir)
    return path


def client(model: Model, interface: str = "static", context: int = 64) -> Client:
    """Of a package that computes in float32, as MLX does."""
    return FakePackage(model, interface, context=context, prefill=8).client()


def parts(responses: Iterator[Response]) -> list[tuple[str, int | None, str | None]]:
    return [(r.text, r.token, r.finish_reason) for r in responses]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temp": 0.8, "top_p": 0.9, "seed": 7},
        {"repetition_penalty": 1.5, "repetition_window": 6},
        {"temp": 1.0, "top_k": 5, "min_p": 0.01, "seed": 1, "repetition_penalty": 1.2},
        {"stop": ("e",)},
    ],
)
def test_a_package_continues_as_the_model_does(
    model: Model, tiny_tokenizer: tiny.TinyTokenizer, settings: dict[str, Any]
) -> None:
    args = GenerateArgs(max_tokens=16, **settings)
    expected = parts(stream_generate(model, tiny_tokenizer.tokenizer, PROMPT, args=args))
    found = parts(stream(client(model), tiny_tokenizer.tokenizer, PROMPT, args))
    assert found == expected
    assert len(expected) > 1


def test_a_text_that_fills_the_context_says_so(
    model: Model, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    tokenizer = tiny_tokenizer.tokenizer
    fed = client(model, context=24)
    used = len(tokenizer.encode(PROMPT))
    found = list(stream(fed, tokenizer, PROMPT, GenerateArgs(max_tokens=100)))
    assert found[-1].finish_reason == "context"
    assert found[-1].generation_tokens == 24 - used
    again = list(stream(fed, tokenizer, PROMPT, GenerateArgs(max_tokens=3)))
    assert [r.token for r in again[:3]] == [r.token for r in found[:3]]  # nothing is left over


def test_a_prompt_beyond_the_context_is_refused_with_both_lengths(
    model: Model, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    with pytest.raises(ContextFull, match=r"has 24 tokens and the package's context is 24"):
        stream(client(model, context=24), tiny_tokenizer.tokenizer, list(range(3, 26)))


@pytest.mark.slow
def test_the_command_prints_what_generate_prints(
    package: Path, complete_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--prompt", PROMPT, "--max-tokens", 12]
    expected = run_here(capsys, "generate", "--model", complete_dir, *flags)
    found = run_here(capsys, "convert", "run-coreml", package, *flags, "--verbose")
    assert (found.code, found.out) == (0, expected.out)
    assert "which is slow" in found.err
    assert "output 12 tokens" in found.err


@pytest.mark.slow
def test_the_command_needs_a_tokenizer_and_takes_one(
    package: Path, tmp_path: Path, tiny_tokenizer: tiny.TinyTokenizer, capsys: Any
) -> None:
    lonely = tmp_path / "Lonely.mlpackage"
    shutil.copytree(package, lonely)
    flags = ["convert", "run-coreml", lonely, "--prompt", PROMPT, "--max-tokens", 2]
    refused = run_here(capsys, *flags)
    assert "Lonely-bundle holds no tokenizer; give one with --tokenizer" in refused.error
    taken = run_here(capsys, *flags, "--tokenizer", tiny_tokenizer.path)
    assert taken.code == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temp", "-1"], "temp must be 0 or more"),
        (["--prompt", "once " * 80], "tokens and the package's context is 64"),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_run_is_said_in_one_line(
    package: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_here(capsys, "convert", "run-coreml", package, "--prompt", PROMPT, *flags)
    assert message in outcome.error


def test_a_missing_package_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "no.mlpackage"
    outcome = run_here(capsys, "convert", "run-coreml", missing, "--prompt", PROMPT)
    assert "no.mlpackage does not exist" in outcome.error

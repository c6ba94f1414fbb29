"""The command line: help, exit codes and one-line errors."""

import io
import logging
import os
import resource
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from statistics import median

import pytest
from chain_model import PIECES, TEXT, chain_model, save_talker
from command_line import Outcome, run_apart, run_here
from tiny_tokenizer import TinyTokenizer

import openelm_mlx
from openelm_mlx import cli
from openelm_mlx.checkpoint import save_model

HEAVY = ["mlx_lm", "transformers", "torch", "huggingface_hub", "sentencepiece", "tokenizers"]
HEAVY += ["coremltools", "matplotlib", "datasets", "pyarrow", "lm_eval", "jinja2"]
COMMANDS = sorted(cli.COMMANDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: TinyTokenizer) -> Path:
    """A model folder that continues an empty prompt with TEXT."""
    return save_talker(tmp_path_factory.mktemp("models") / "talker", tiny_tokenizer.tokenizer)


def test_help_of_every_command_works_and_imports_nothing_heavy() -> None:
    code = f"""
import sys
from openelm_mlx.cli import COMMANDS, main
codes = [main([]), *(main([name, "--help"]) for name in COMMANDS), main(["--help"])]
print(codes, [name for name in {HEAVY} if name in sys.modules])
"""
    outcome = run_apart(code=code)
    out = outcome.out.splitlines()
    assert out[-1] == f"{[2, *[0] * (len(COMMANDS) + 1)]} []", outcome.err
    assert set(COMMANDS) <= {line.split()[0] for line in out if line.strip()}


@pytest.mark.benchmark  # a time: run by hand on a quiet machine
@pytest.mark.parametrize("command", ["generate", "finetune", "convert", "doctor"])
def test_help_takes_less_than_a_third_of_a_second(command: str) -> None:
    def seconds() -> float:  # of processor time, which other programs do not lengthen much
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run_apart(command, "--help").code == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert median(seconds() for _ in range(7)) < 0.3


def test_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_here(capsys, "--version")
    assert outcome == Outcome(0, f"openelm-mlx {openelm_mlx.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["generat"], "invalid choice: 'generat'"),
        (["generate"], "the following arguments are required: --model"),
        (["generate", "--model", "m"], "one of the arguments --prompt --prompts is required"),
        (["generate", "--model", "m", "--prompt", "a", "--temp", "x"], "invalid float value: 'x'"),
        (["generate", "--model", "m", "--prompt", "a", "--frob"], "unrecognized arguments: --frob"),
        (["convert"], "the following arguments are required: COMMAND"),
        (["convert", "gguf"], "invalid choice: 'gguf'"),
    ],
)
def test_usage_errors_are_one_line_and_exit_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_here(capsys, *arguments)
    assert outcome.code == 2
    assert message in outcome.error
    assert "--help" in outcome.error


def test_generate_writes_the_text_alone_to_standard_output(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_here(capsys, "generate", "--model", folder, "--prompt", "")
    assert (outcome.code, outcome.out) == (0, TEXT + "\n")
    outcome = run_here(capsys, "generate", "--model", folder, "--prompt", "", "--verbose")
    assert outcome.out == TEXT + "\n"
    assert "prompt 1 tokens" in outcome.err
    assert f"output {len(PIECES) + 1} tokens" in outcome.err


@pytest.mark.slow  # importing mlx_lm takes seconds
def test_flags_reach_the_generation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*flags: object) -> str:
        return run_here(capsys, "generate", "--model", folder, "--prompt", "", *flags).out

    assert text("--max-tokens", 3) == "the hou\n"
    assert text("--stop", "zebra", "--stop", "use") == "the ho\n"
    assert text("--prompt-lookup", 4) == TEXT + "\n"
    assert text("--draft-model", folder, "--num-draft-tokens", 2) == TEXT + "\n"
    assert text("--kv-bits", 8, "--kv-group-size", 32) == TEXT + "\n"
    assert text("--max-kv-size", 32) == TEXT + "\n"
    # A penalty beyond Apple's 1.2 sends the second token elsewhere; the same in every run.
    hot = ("--temp", 60, "--seed", 1, "--repetition-penalty", 1.2, "--max-tokens", 20)
    assert text(*hot) == text(*hot) != text(*hot[:3], 2, *hot[4:])


def test_a_prompt_may_come_from_standard_input(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("the"))
    assert (
        run_here(capsys, "generate", "--model", folder, "--prompt", "-").out == "house said onc.\n"
    )


def test_a_full_context_is_a_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", folder, "--prompt", "", "--temp", 1e9, "--seed", 1, "--max-tokens", 100]
    outcome = run_here(capsys, "generate", *flags)
    assert outcome.code == 0
    assert "warning: stopped: the model's context is full" in outcome.err


def test_a_tokenizer_from_elsewhere_is_used(
    folder: Path,
    tiny_tokenizer: TinyTokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # REPORTS A2, A3
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((folder / name).read_bytes())
    outcome = run_here(capsys, "generate", "--model", bare, "--prompt", "")
    assert outcome.code == 1
    assert "LLaMA 1/2 tokenizer (SentencePiece, 32000 pieces)" in outcome.error
    assert "--tokenizer" in outcome.error
    for source in (tiny_tokenizer.path, folder):
        flags = ["--model", bare, "--tokenizer", source, "--prompt", ""]
        assert run_here(capsys, "generate", *flags).out == TEXT + "\n"


def test_flags_that_exclude_each_other_are_refused_before_loading(
    capsys: pytest.CaptureFixture[str],
) -> None:
    start = ["generate", "--model", "/nowhere", "--prompt", "a"]
    cases = {
        "cannot be combined": ["--kv-bits", 8, "--max-kv-size", 64],
        "a draft model and prompt_lookup": ["--draft-model", "d", "--prompt-lookup", 2],
        "leave out max_kv_size": ["--draft-model", "d", "--max-kv-size", 64],
        "--num-draft-tokens needs": ["--num-draft-tokens", 2],
        "max_tokens must be at least 1": ["--max-tokens", 0],
        "temp must be 0 or more": ["--temp", -1],
    }
    for message, flags in cases.items():
        assert message in run_here(capsys, *start, *flags).error


def test_a_draft_that_reads_other_ids_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # REPORTS D12
    import tiny_tokenizer

    from openelm_mlx.tokenizer import Tokenizer

    smaller = chain_model({}, vocab_size=300)
    save_model(smaller, tmp_path / "smaller")
    path = tiny_tokenizer.train(tmp_path / "other.model", max_sentencepiece_length=2)
    other = Tokenizer.from_path(path)
    save_model(chain_model({}, vocab_size=320), tmp_path / "other", tokenizer=other)
    start = ["generate", "--model", folder, "--prompt", "a", "--draft-model"]
    error = run_here(capsys, *start, tmp_path / "smaller").error
    assert "the draft model's vocabulary has 300 tokens and the model's 320" in error
    assert "gives other ids than" in run_here(capsys, *start, tmp_path / "other").error


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (ValueError("two\nlines"), 1, "error: two lines\n"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), 1, "error: x.json: No such"),
        (MemoryError(), 1, "error: out of memory"),
        (RuntimeError(), 1, "error: RuntimeError\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_failures_are_one_line(
    raised: BaseException,
    code: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(_: object) -> int:
        raise raised

    monkeypatch.setattr(import_module("openelm_mlx.generate"), "run", run)
    outcome = run_here(capsys, "generate", "--model", "m", "--prompt", "a")
    assert outcome.code == code
    assert outcome.err.startswith(said)
    assert outcome.err.count("\n") == 1


def test_tracebacks_are_shown_when_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENELM_MLX_TRACEBACK", "1")
    with pytest.raises(ValueError, match="max_tokens"):
        run_here(capsys, "generate", "--model", "m", "--prompt", "a", "--max-tokens", 0)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], []])
def test_a_reader_that_leaves_early_is_no_error(arguments: list[str], folder: Path) -> None:
    arguments = arguments or ["generate", "--model", str(folder), "--prompt", ""]
    process = subprocess.Popen(
        [sys.executable, "-m", "openelm_mlx.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0
    assert not [line for line in said.splitlines() if not line.startswith("info: ")]


@pytest.mark.slow
def test_the_command_runs_in_a_process_of_its_own(folder: Path) -> None:
    outcome = run_apart("generate", "--model", folder, "--prompt", "-", stdin="the")
    assert (outcome.code, outcome.out) == (0, "house said onc.\n")
    outcome = run_apart("generate", "--model", folder / "no", "--prompt", "a")
    assert outcome.code == 1
    assert str(folder / "no") in outcome.error


def test_information_is_given_once_and_warnings_each_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that loads one tokenizer several times says once which it is."""
    logger = logging.getLogger("openelm_mlx.doctor")

    def run(args: object) -> int:
        for _ in range(2):
            logger.info("the same")
            logger.warning("the same")
        return 0

    monkeypatch.setattr("openelm_mlx.doctor.run", run)
    outcome = run_here(capsys, "doctor")
    assert outcome.err.splitlines() == ["info: the same", "warning: the same", "warning: the same"]

"""``openelm evaluate --data`` from the command line: the result file, resuming, and refusals."""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizer as tiny
from command_line import Outcome, run_here
from folder_makers import small_folder

from openelm_mlx.evaluation_record import partial_file
from openelm_mlx.token_scoring import ModelScorer, TokenScores, Window

CLOCK = {"seconds", "tokens_per_second", "date"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: tiny.TinyTokenizer) -> Path:
    return small_folder(tmp_path_factory.mktemp("models") / "small", tiny_tokenizer.tokenizer)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "docs.jsonl"
    texts = tiny.sentences(6, seed=4)
    path.write_text("".join(json.dumps({"text": text, "other": "x"}) + "\n" for text in texts))
    return path


class Evaluation:
    """Runs ``openelm evaluate`` into a file."""

    def __init__(self, capsys: pytest.CaptureFixture[str], model: Path, output: Path) -> None:
        self._capsys, self._model, self.output = capsys, model, output

    def run(self, *arguments: object) -> Outcome:
        start = ["evaluate", "--model", self._model, "--output", self.output]
        return run_here(self._capsys, *start, *arguments)

    def __call__(self, *arguments: object) -> dict[str, Any]:
        outcome = self.run("--overwrite", *arguments)
        assert outcome.code == 0, outcome.err
        result: dict[str, Any] = json.loads(self.output.read_text())
        return result


@pytest.fixture
def evaluation(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> Evaluation:
    return Evaluation(capsys, folder, tmp_path / "result.json")


def test_the_result_says_what_was_measured_with_what(
    evaluation: Evaluation, folder: Path, data: Path
) -> None:
    result = evaluation("--data", data, "--max-seq-length", 16, "--stride", 8)
    assert result["documents"] == 6
    assert result["perplexity"] == pytest.approx(math.exp(result["nll"] / result["tokens"]))
    size = sum(len(json.loads(line)["text"].encode()) for line in data.read_text().splitlines())
    assert result["bits_per_byte"] == pytest.approx(result["nll"] / math.log(2) / size)
    assert (result["window"], result["stride"], result["bytes"]) == (16, 8, size)
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    text = hashlib.sha256(data.read_bytes()).hexdigest()
    assert result["hashes"] == {"weights": weights, "data": {str(data): text}}
    assert {"openelm-mlx", "mlx"} <= set(result["versions"])
    assert result["settings"]["batch_size"] == 8
    assert not partial_file(evaluation.output).exists()


def test_the_result_is_printed_in_one_line(
    capsys: pytest.CaptureFixture[str], folder: Path, data: Path
) -> None:
    outcome = run_here(capsys, "evaluate", "--model", folder, "--data", data, "--limit", 2)
    assert outcome.code == 0
    assert outcome.out.startswith("perplexity ")
    assert outcome.out.count("\n") == 1
    assert "of 2 documents" in outcome.out


def test_a_text_file_is_one_document_and_each_record_one(
    evaluation: Evaluation, data: Path, tmp_path: Path
) -> None:
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    whole = tmp_path / "whole.txt"
    whole.write_text("\n\n".join(texts))
    assert evaluation("--data", whole)["documents"] == 1
    both = evaluation("--data", data, whole)
    assert both["documents"] == 7
    assert list(both["hashes"]["data"]) == [str(data), str(whole)]
    named = tmp_path / "named.jsonl"
    named.write_text("".join(json.dumps({"story": text}) + "\n" for text in texts))
    same = evaluation("--data", named, "--text-key", "story")
    assert same["nll"] == evaluation("--data", data)["nll"]


def test_b5_every_document_is_scored_once_and_a_limit_takes_the_first(
    evaluation: Evaluation, data: Path, tmp_path: Path
) -> None:
    """REPORTS B5: mlx_lm's perplexity indexes past a finite data set."""
    all_of_them = evaluation("--data", data, "--limit", 1000)
    assert all_of_them["documents"] == 6
    first = tmp_path / "first.jsonl"
    first.write_text("".join(data.read_text().splitlines(keepends=True)[:3]))
    assert evaluation("--data", data, "--limit", 3)["nll"] == evaluation("--data", first)["nll"]


def _interrupt_after(monkeypatch: pytest.MonkeyPatch, batches: int) -> None:
    score, calls = ModelScorer.score, [0]

    def interrupted(self: ModelScorer, windows: Sequence[Window]) -> list[TokenScores]:
        calls[0] += 1
        if calls[0] > batches:
            raise KeyboardInterrupt
        return score(self, windows)

    monkeypatch.setattr(ModelScorer, "score", interrupted)


def _without_clock(result: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in result.items() if k not in CLOCK}


def test_ctrl_c_keeps_what_was_scored_and_the_next_run_goes_on(
    evaluation: Evaluation, data: Path
) -> None:
    flags = ["--data", data, "--batch-size", 2, "--max-seq-length", 16, "--stride", 8]
    whole = evaluation(*flags)
    evaluation.output.unlink()
    with pytest.MonkeyPatch.context() as patch:
        _interrupt_after(patch, 3)
        assert evaluation.run(*flags).code == 130
    assert not evaluation.output.exists()
    assert partial_file(evaluation.output).is_file()
    with pytest.MonkeyPatch.context() as patch:
        _interrupt_after(patch, -(-whole["windows"] // 2) - 3)  # the others only
        outcome = evaluation.run(*flags)
    assert outcome.code == 0, outcome.err
    assert "continuing an evaluation that was interrupted" in outcome.err
    assert _without_clock(json.loads(evaluation.output.read_text())) == _without_clock(whole)
    assert not partial_file(evaluation.output).exists()


def test_partial_sums_of_other_settings_are_not_used(evaluation: Evaluation, data: Path) -> None:
    flags = ["--data", data, "--batch-size", 2]
    with pytest.MonkeyPatch.context() as patch:
        _interrupt_after(patch, 1)
        assert evaluation.run(*flags, "--max-seq-length", 16).code == 130
    outcome = evaluation.run(*flags, "--max-seq-length", 20)
    assert outcome.code == 0
    assert "is of another evaluation; starting anew" in outcome.err
    found = json.loads(evaluation.output.read_text())
    assert found["nll"] == evaluation(*flags, "--max-seq-length", 20)["nll"]


def test_float32_computes_in_float32_whatever_the_weights_are(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    data: Path,
    tmp_path: Path,
    tiny_tokenizer: tiny.TinyTokenizer,
) -> None:
    import mlx.core as mx

    from openelm_mlx.checkpoint import load_model

    model = load_model(folder)
    model.set_dtype(mx.bfloat16)
    half = small_folder(tmp_path / "half", tiny_tokenizer.tokenizer, model)
    model.set_dtype(mx.float32)
    rounded = small_folder(tmp_path / "rounded", tiny_tokenizer.tokenizer, model)
    found = [
        Evaluation(capsys, path, tmp_path / "o.json")("--data", data, *flags)["nll"]
        for path, flags in ((half, ["--float32"]), (rounded, []), (half, ["--no-float32"]))
    ]
    assert found[0] == found[1]
    assert found[2] != found[0]
    assert found[2] == pytest.approx(found[0], rel=1e-2)  # bfloat16 has 8 bits


def test_float32_that_memory_hardly_holds_is_told(
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    data: Path,
    tmp_path: Path,
    tiny_tokenizer: tiny.TinyTokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import mlx.core as mx

    from openelm_mlx import cpu_weights
    from openelm_mlx.checkpoint import load_model

    model = load_model(folder)
    model.set_dtype(mx.bfloat16)
    half = small_folder(tmp_path / "half", tiny_tokenizer.tokenizer, model)
    for memory, told in ((1 << 40, False), (1000, True)):
        monkeypatch.setattr(cpu_weights, "machine_memory", lambda memory=memory: memory)
        evaluation = Evaluation(capsys, half, tmp_path / f"{memory}.json")
        outcome = evaluation.run("--data", data, "--float32")
        assert outcome.code == 0, outcome.err
        assert ("--no-float32 computes with the weights as they are" in outcome.err) == told


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "nothing to score"),
        (["--data", "{data}", "--stride", 9, "--max-seq-length", 8], "stride 9 is more than"),
        (["--data", "{data}", "--batch-size", 0], "batch_size must be at least 1, got 0"),
        (["--data", "{data}", "--num-fewshot", 3], "--num-fewshot has no effect without --tasks"),
        (["--tasks", "x", "--stride", 3], "--stride has no effect without --data"),
        (["--suite", "commonsense"], "needs --data-dir"),
        (["--suite", "openllm", "--data-dir", "x"], "only the commonsense suite reads --data-dir"),
        (["--data", "missing.txt"], "missing.txt does not exist"),
        (["--data", "{data}", "--text-key", "body"], 'has no key "body"'),
        (["--data", "{data}", "--checkpoints", "x", "--compare", "a", "b"], "scores one run"),
        (["--data", "{data}", "--compare"], "--compare needs two models"),
        (["--data", "{data}", "--average-last", 3], "goes with --checkpoints"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(
    evaluation: Evaluation, data: Path, flags: list[object], message: str
) -> None:
    given = [str(flag).format(data=data) for flag in flags]
    outcome = evaluation.run(*given)
    assert message in outcome.error
    assert not evaluation.output.exists()


def test_no_model_is_refused(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    assert "give --model M" in run_here(capsys, "evaluate", "--data", data).error


def test_a_result_is_replaced_only_when_asked(evaluation: Evaluation, data: Path) -> None:
    evaluation.output.write_text("precious")
    outcome = evaluation.run("--data", data)
    assert "add --overwrite" in outcome.error
    assert evaluation.output.read_text() == "precious"
    assert evaluation("--data", data)["documents"] == 6


def test_windows_longer_than_the_context_are_told(evaluation: Evaluation, data: Path) -> None:
    outcome = evaluation.run("--data", data, "--max-seq-length", 5000)
    assert outcome.code == 0
    assert "windows of 5000 tokens are longer than the context of 2048" in outcome.err

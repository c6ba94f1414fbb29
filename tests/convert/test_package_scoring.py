"""Exported models score tokens as the MLX model does, by whatever interface they are called."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_tokenizer as tiny
from command_line import run_here
from folder_makers import small_folder, small_model
from small_packages import small_package

from convert.coreml_predictor import on_macos
from openelm_mlx.model import Model
from openelm_mlx.package_scoring import package_context, package_scorer
from openelm_mlx.token_scoring import ModelScorer, Window

pytestmark = pytest.mark.slow  # importing coremltools takes seconds

FORMS: dict[str, dict[str, Any]] = {
    "static": {},
    "all logits": {"all_logits": True},
    "flexible": {"flexible": True},
    "stateless": {"stateless": True},
    "ane": {"target": "ane"},
}
QUICK = [("static", True), ("all logits", True)]
CASES = [
    pytest.param(form, float32, marks=[] if (form, float32) in QUICK else pytest.mark.slow)
    for form in FORMS
    for float32 in (True, False)
]
TABLES = 5e-4  # nats: the package keeps its tables of cosines and sines in float16
WINDOWS = [
    Window(ids=[1, 17, 260, 3, 300, 45, 12, 9, 77, 31], first=6),
    Window(ids=[1, *range(10, 26)], first=13),
]


@pytest.fixture(scope="module")
def model() -> Model:
    """Float32, of values that float16 holds too, so that a package has the same weights."""
    model = small_model(mx.float16)
    model.set_dtype(mx.float32)
    return model


@pytest.mark.parametrize(("form", "float32"), CASES)
def test_a_package_scores_as_its_model(
    model: Model, tmp_path: Path, form: str, float32: bool
) -> None:
    path = small_package(tmp_path / "Small.mlpackage", model, **FORMS[form])
    assert package_context(path) == 64
    scorer = package_scorer(path, float32=float32)
    assert (scorer.context, scorer.vocab_size) == (64, 320)
    exact = float32 and form != "stateless" and not on_macos()  # its caches pass in float16
    scores = scorer.score(WINDOWS)
    for mine, theirs in zip(ModelScorer(model).score(WINDOWS), scores, strict=True):
        assert theirs.logprobs == pytest.approx(mine.logprobs, abs=TABLES if exact else 5e-2)
        assert len(theirs.right) == len(mine.right)
    if exact:
        prompt = [1, 17, 260, 3]
        assert scorer.greedy(prompt, 4) == ModelScorer(model).greedy(prompt, 4)


def _compared(capsys: pytest.CaptureFixture[str], output: Path, *names: object) -> dict[str, Any]:
    data = output.with_suffix(".jsonl")
    texts = [text[:20] for text in tiny.sentences(2, seed=4)]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    flags = ["--data", data, "--float32", "--sample-tokens", 3, "--output", output]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("openelm_mlx.comparison.render_chart", lambda *_: False)
        outcome = run_here(capsys, "evaluate", "--compare", *names, *flags)
    assert outcome.code == 0, outcome.err
    result: dict[str, Any] = json.loads(output.read_text())
    return result


def test_a_package_stands_beside_its_model_in_a_comparison(
    capsys: pytest.CaptureFixture[str],
    model: Model,
    tmp_path: Path,
    tiny_tokenizer: tiny.TinyTokenizer,
) -> None:
    base = small_folder(tmp_path / "base", tiny_tokenizer.tokenizer, model)
    package = small_package(tmp_path / "Small.mlpackage", model)
    result = _compared(capsys, tmp_path / "o.json", base, package)
    mine, theirs = result["models"].values()
    assert (mine["kind"], theirs["kind"]) == ("model", "coreml")
    assert mine["window"] == theirs["window"] == 64
    assert mine["tokens"] == theirs["tokens"]
    assert theirs["perplexity"] == pytest.approx(
        mine["perplexity"], rel=1e-2 if on_macos() else 1e-4
    )
    assert theirs["size"] > model.args.num_parameters * 2
    assert result["notes"] == []


def test_a_core_ai_bundle_stands_beside_its_model_in_a_comparison(
    capsys: pytest.CaptureFixture[str],
    model: Model,
    tmp_path: Path,
    tiny_tokenizer: tiny.TinyTokenizer,
) -> None:
    pytest.importorskip("coreai")
    base = small_folder(tmp_path / "base", tiny_tokenizer.tokenizer, model)
    made = run_here(
        *(capsys, "convert", "coreai", base, "--output", tmp_path / "bundle"),
        *("--weights", "fp32", "--no-verify"),
    )
    assert made.code == 0, made.err
    result = _compared(capsys, tmp_path / "o.json", base, tmp_path / "bundle")
    mine, theirs = result["models"].values()
    assert (mine["kind"], theirs["kind"]) == ("model", "coreai")
    assert theirs["perplexity"] == pytest.approx(mine["perplexity"], rel=1e-5)
    for sample in result["samples"]:
        first, second = sample["continuations"].values()
        assert first == second


def test_a_package_without_a_tokenizer_or_a_model_beside_it_is_refused(
    capsys: pytest.CaptureFixture[str], model: Model, tmp_path: Path
) -> None:
    package = small_package(tmp_path / "Small.mlpackage", model)
    (tmp_path / "x.txt").write_text("the wolf")
    outcome = run_here(capsys, "evaluate", "--model", package, "--data", tmp_path / "x.txt")
    assert "brings no tokenizer; give --tokenizer" in outcome.err


def test_tasks_need_an_mlx_model(
    capsys: pytest.CaptureFixture[str],
    model: Model,
    tmp_path: Path,
    tiny_tokenizer: tiny.TinyTokenizer,
) -> None:
    package = small_package(tmp_path / "Small.mlpackage", model)
    flags = ["--tasks", "piqa", "--tokenizer", tiny_tokenizer.path]
    outcome = run_here(capsys, "evaluate", "--model", package, *flags)
    assert outcome.code == 1
    assert "is no MLX model, and tasks need one" in outcome.err


def test_tasks_of_a_comparison_are_scored_for_mlx_models_only(
    capsys: pytest.CaptureFixture[str],
    model: Model,
    tmp_path: Path,
    tiny_tokenizer: tiny.TinyTokenizer,
) -> None:
    base = small_folder(tmp_path / "base", tiny_tokenizer.tokenizer, model)
    package = small_package(tmp_path / "Small.mlpackage", model)
    file = tmp_path / "tasks" / "boolq" / "test.json"
    file.parent.mkdir(parents=True)
    question = "was it a wolf?\n\nAnswer format: true/false"
    items = [{"instruction": question, "input": "", "answer": a} for a in ("true", "false")]
    file.write_text(json.dumps(items))
    output = tmp_path / "o.json"
    outcome = run_here(
        *(capsys, "evaluate", "--compare", base, package, "--suite", "commonsense"),
        *("--data-dir", tmp_path / "tasks", "--output", output),
    )
    assert outcome.code == 0, outcome.err
    assert "is no MLX model, so it gets no tasks" in outcome.err
    result = json.loads(output.read_text())
    mine, theirs = result["models"].values()
    assert mine["results"]["boolq"]["acc"] == 0.5  # one option is likelier, and right once
    assert "results" not in theirs
    assert list(result["hashes"]["data"]) == [str(file)]
    assert [line.split()[0] for line in outcome.out.splitlines()] == [
        *("model", "base", "Small.mlpackage")
    ]

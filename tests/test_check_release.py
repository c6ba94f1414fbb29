"""The verdict on a release: true only where tensors, config, count and text all hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_set
import mlx.core as mx
import numpy as np
import pytest
import reference
from folder_makers import foreign_folder, weights_of
from golden_set import numpy_weights
from model_makers import random_model
from tiny_tokenizer import VOCAB_SIZE, TinyTokenizer

from convert.quantize import quantize
from openelm_mlx import check_release as stage
from openelm_mlx import config as config_module
from openelm_mlx.cli import main
from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Model

PROMPT = "The old king went to the"
TOKENS = 6
INSTRUCT = "OpenELM-270M-Instruct"
Release = Callable[..., Path]


@pytest.fixture(scope="module")
def model() -> Model:
    """A model whose widths are worked out as those of the published sizes, only smaller."""
    args = ModelArgs.from_scaling(
        num_transformer_layers=2, model_dim=64, head_dim=16, ffn_dim_divisor=256
    )
    model = random_model({k: v for k, v in args.to_dict().items() if k != "architectures"})
    table = model.transformer.token_embeddings
    table.weight = table.weight * (mx.arange(args.vocab_size) < VOCAB_SIZE)[:, None]
    return model  # which never chooses an id that the tokenizer lacks


@pytest.fixture
def release(model: Model, tiny_tokenizer: TinyTokenizer, tmp_path: Path) -> Release:
    """``release(name, **changes to its config)``: a fake release with a tokenizer."""

    def make(name: str = INSTRUCT, **changes: Any) -> Path:
        config = {**model.args.to_dict(), **changes}
        folder = foreign_folder(tmp_path / name, config, weights_of(model))
        tiny_tokenizer.tokenizer.save(folder)
        return folder

    return make


def continuation(model: Model, ids: list[int]) -> list[int]:
    """Greedy tokens by the independent NumPy model."""
    config, weights = model.args.to_dict(), numpy_weights(model)
    for _ in range(TOKENS):
        scores = reference.forward(config, weights, np.array([ids]))[0, -1]
        ids = [*ids, int(scores.argmax())]
    return ids[-TOKENS:]


@pytest.fixture
def published(
    model: Model, tiny_tokenizer: TinyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> stage.Continuation:
    """Facts that hold for the fake release, in place of Apple's."""
    tokenizer = tiny_tokenizer.tokenizer
    ids = tokenizer.encode(PROMPT)
    whole = tokenizer.decode([*ids, *continuation(model, ids)])
    fact = stage.Continuation(
        prompt=PROMPT,
        prompt_ids=tuple(ids),
        tokens=TOKENS,
        text=whole.removeprefix(tokenizer.decode(ids)),
        source="here",
    )
    count = sum(w.size for w in weights_of(model).values())
    monkeypatch.setitem(config_module._PRESETS, "270m", (2, 64, 16))
    monkeypatch.setitem(stage.PARAMETERS, "270M", count)
    monkeypatch.setitem(stage.CONTINUATIONS, "270M-Instruct", fact)
    return fact


def verdict_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    code = main(["check-release", *map(str, arguments)])
    return code, json.loads(capsys.readouterr().out)


def test_the_published_counts_are_those_of_the_configurations() -> None:
    path = golden_set.find("presets.json")
    assert path is not None
    presets = golden_set.read_json(path)
    for size, count in stage.PARAMETERS.items():
        assert presets[f"OpenELM-{size.replace('.', '_')}"]["hf_release"]["num_parameters"] == count
    assert set(stage.PARAMETERS) == {"270M", "450M", "1.1B", "3B"}


def test_a_release_that_holds_exits_with_0(
    release: Release, published: stage.Continuation, capsys: pytest.CaptureFixture[str]
) -> None:
    code, verdict = verdict_of(capsys, release())
    assert code == 0
    assert verdict["ok"] is True
    assert verdict["release"] == INSTRUCT
    assert {name: check["ok"] for name, check in verdict["checks"].items()} == dict.fromkeys(
        ("config", "tensors", "parameters", "continuation"), True
    )
    assert verdict["checks"]["continuation"]["found"] == published.text != ""


def test_another_continuation_is_a_no(
    release: Release,
    published: stage.Continuation,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    apples = stage.Continuation(**{**vars(published), "text": " a man named John Smith."})
    monkeypatch.setitem(stage.CONTINUATIONS, "270M-Instruct", apples)
    code, verdict = verdict_of(capsys, release())
    assert (code, verdict["ok"]) == (1, False)
    check = verdict["checks"].pop("continuation")
    assert (check["expected"], check["found"]) == (apples.text, published.text)
    assert all(other["ok"] for other in verdict["checks"].values())


def test_a_fake_release_fails_apples_facts(
    release: Release, capsys: pytest.CaptureFixture[str]
) -> None:
    code, verdict = verdict_of(capsys, release())
    assert (code, verdict["ok"]) == (1, False)
    checks = verdict["checks"]
    assert checks["parameters"]["expected"] == 271_527_168
    assert checks["parameters"]["found"] < 3_000_000
    assert checks["config"]["differences"]["model_dim"] == {"expected": 1280, "found": 64}
    assert checks["continuation"]["problem"] == "the tokenizer gives other ids for the prompt"


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"rope_freq_constant": 500}, "rope_freq_constant"),
        ({"eos_token_id": 7}, "eos_token_id"),
        ({"max_context_length": 4096}, "max_context_length"),
    ],
)
def test_another_config_is_named_field_by_field(
    changes: dict[str, Any],
    field: str,
    release: Release,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, verdict = verdict_of(capsys, release(**changes))
    assert code == 1
    assert list(verdict["checks"]["config"]["differences"]) == [field]


@pytest.mark.usefixtures("published")
def test_tensors_that_do_not_fit_are_a_verdict_too(
    release: Release, capsys: pytest.CaptureFixture[str]
) -> None:
    code, verdict = verdict_of(capsys, release(model_dim=128))
    assert code == 1
    assert "of another shape" in verdict["checks"]["tensors"]["problem"]
    assert "continuation" not in verdict["checks"]


@pytest.mark.usefixtures("published")
def test_a_release_without_a_published_text_is_judged_by_the_rest(
    release: Release, capsys: pytest.CaptureFixture[str]
) -> None:
    code, verdict = verdict_of(capsys, release("OpenELM-270M"))
    assert code == 0
    assert verdict["checks"]["continuation"]["ok"] is None


@pytest.mark.usefixtures("published")
def test_a_quantised_release_keeps_its_logical_count(
    release: Release, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(PROMPT)
    quantize(release(), tmp_path / f"{INSTRUCT}-4bit", data=tmp_path / "text.txt")
    code, verdict = verdict_of(capsys, tmp_path / f"{INSTRUCT}-4bit")
    assert code == 0
    assert "unquantised" in verdict["checks"]["continuation"]["reason"]


def test_weights_in_16_bit_are_run_in_float32(
    model: Model,
    published: stage.Continuation,
    tiny_tokenizer: TinyTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    halves = {n: w.astype(mx.float16) for n, w in weights_of(model).items()}
    folder = foreign_folder(tmp_path / INSTRUCT, model.args.to_dict(), halves)
    seen = []

    def generate(model: Model, *_: object, max_tokens: int) -> str:
        seen.append(({w.dtype for w in weights_of(model).values()}, max_tokens))
        return published.text

    monkeypatch.setattr(stage, "generate", generate)
    assert stage.check_release(folder, tokenizer=tiny_tokenizer.path)["ok"]
    assert seen == [({mx.float32}, TOKENS)]


@pytest.mark.usefixtures("published")
def test_without_a_tokenizer_the_text_cannot_hold(
    model: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = foreign_folder(tmp_path / INSTRUCT, model.args.to_dict(), weights_of(model))
    code, verdict = verdict_of(capsys, folder)
    assert code == 1
    assert "--tokenizer" in verdict["checks"]["continuation"]["problem"]


@pytest.mark.usefixtures("published")
def test_the_release_is_known_from_where_the_folder_came_from(
    release: Release, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = ["convert", "huggingface", str(release()), "--output", str(tmp_path / "mine")]
    assert main(made) == 0
    capsys.readouterr()
    code, verdict = verdict_of(capsys, tmp_path / "mine")
    assert (code, verdict["release"]) == (0, INSTRUCT)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("OpenELM-1_1B-Instruct", "OpenELM-1.1B-Instruct"),
        ("openelm-3b", "OpenELM-3B"),
        ("OpenELM-450M-Instruct-8bit", "OpenELM-450M-Instruct"),
    ],
)
def test_names_of_all_sizes_are_understood(name: str, expected: str, release: Release) -> None:
    assert stage.check_release(release(name))["release"] == expected


def test_another_name_is_an_error(release: Release, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-release", str(release("MyModel"))]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: " in err
    assert "is named like no published OpenELM" in err

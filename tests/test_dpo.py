"""``openelm dpo`` on a small model: its reference, what it learns, and what it refuses."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_tokenizer as tiny
from dpo_runs import CHOSEN, REJECTED, Preferring, make_pairs
from finetune_runs import adapters, comparable, losses, make_base, without_plots
from folder_makers import assert_same_weights, files, logits, weights_of
from ranks import alone, ring
from slow_params import slow, slow_cases
from test_finetune_resume import break_off
from tuning_makers import write

from convert.quantize import quantize
from openelm_mlx.checkpoint import load, load_model
from openelm_mlx.dpo_run import kept_references, reference_logprobs
from openelm_mlx.metrics import read_metrics
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tuning_pairs import Pair, PairArgs, load_pairs

KINDS = ["lora", *slow("full")]
AT_ZERO = {"sigmoid": math.log(2), "hinge": 1.0, "rso": 1.0, "ipo": (1 / (2 * 0.1)) ** 2}
# README-instruct.md of Apple's: the loss of each size
APPLES = {"dpo_270m": "hinge", "dpo_450m": "hinge", "dpo_1_1b": "sigmoid", "dpo_3b": "hinge"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: tiny.TinyTokenizer) -> Path:
    return make_base(tmp_path_factory.mktemp("base"), tiny_tokenizer.tokenizer)


@pytest.fixture
def dpo(capsys: pytest.CaptureFixture[str], base: Path, tmp_path: Path) -> Preferring:
    return Preferring(capsys, base, make_pairs(tmp_path / "pairs"))


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    without_plots(monkeypatch)


def pairs_of(dpo: Preferring, split: str = "train") -> list[Pair]:
    args = PairArgs(max_seq_length=96, max_prompt_length=64)
    return load_pairs(dpo.data, split, Tokenizer.from_path(dpo.base), args)


def reference_in(folder: Path) -> np.ndarray:
    read: Any = mx.load(str(folder / "reference.safetensors"))
    ((_, array),) = read.items()
    return np.array(array)


def answer_logprob(model: Any, tokenizer: Tokenizer, prompt: str, answer: str) -> float:
    """By hand, one text alone without padding: only the answer and its EOS count."""
    start = tokenizer.encode(prompt, bos=True)
    ids = tokenizer.encode(f"{prompt} {answer}", bos=True, eos=True)
    assert ids[: len(start)] == start
    row = np.array(model(mx.array([ids]))[0].astype(mx.float32), np.float64)
    logprobs = row - np.log(np.exp(row - row.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logprobs -= row.max(-1, keepdims=True)
    return float(sum(logprobs[i - 1, ids[i]] for i in range(len(start), len(ids))))


@pytest.mark.parametrize("recipe", sorted(APPLES))
def test_apples_recipes_resolve(recipe: str, dpo: Preferring, tmp_path: Path) -> None:
    outcome = dpo("--recipe", recipe, "--dry-run", "--output", tmp_path / "run")
    assert outcome.code == 0, outcome.err
    assert f"loss: {APPLES[recipe]}" in " ".join(outcome.out.split())
    assert "fine_tune_type: full" in " ".join(outcome.out.split())


@pytest.mark.parametrize(
    ("kind", "loss"),
    [
        ("full", "ipo"),
        *slow_cases(
            ("lora", "sigmoid"),
            ("full", "sigmoid"),
            ("full", "hinge"),
            ("full", "rso"),
            ("dora", "hinge"),
        ),
    ],
)
def test_b30_at_step_1_the_policy_is_the_reference(
    kind: str, loss: str, dpo: Preferring, tmp_path: Path
) -> None:
    flags = ["--fine-tune-type", kind, "--loss", loss, "--iters", 3, "--steps-per-eval", 0]
    dpo.run(tmp_path / "run", *flags)
    first, *_, last = (line for line in read_metrics(tmp_path / "run") if "loss" in line)
    assert first["loss"] == pytest.approx(AT_ZERO[loss], rel=1e-4)
    for name in ("margin", "chosen_reward", "rejected_reward"):
        assert abs(first[name]) < 1e-4  # float32 sums in another order
    assert abs(last["loss"] - first["loss"]) > 1e-2


@pytest.mark.slow
def test_b30_the_reference_is_the_model_before_training_and_does_not_move(
    dpo: Preferring, base: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    dpo.run(run, "--fine-tune-type", "full", "--iters", 2)
    kept = (run / "reference.safetensors").read_bytes()
    model, tokenizer = load(base)
    assert tokenizer is not None
    expected = [
        [answer_logprob(model, tokenizer, sentence, answer) for answer in (CHOSEN, REJECTED)]
        for sentence in tiny.sentences(17, seed=5)
    ]
    np.testing.assert_allclose(reference_in(run), expected, rtol=1e-4)
    dpo.run(run, "--fine-tune-type", "full", "--iters", 6, "--resume")
    assert (run / "reference.safetensors").read_bytes() == kept
    tuned = load_model(run)
    moved = answer_logprob(tuned, tokenizer, tiny.sentences(1, seed=5)[0], CHOSEN)
    assert abs(moved - expected[0][0]) > 1  # the model itself has


def test_b3_the_reference_depends_on_no_padding(dpo: Preferring, base: Path) -> None:
    model, pairs = load_model(base), pairs_of(dpo)
    alone_, some, all_ = (reference_logprobs(model, pairs, batch_size=n) for n in (1, 4, 13))
    np.testing.assert_allclose(np.array(alone_), np.array(some), rtol=1e-5)
    np.testing.assert_allclose(np.array(alone_), np.array(all_), rtol=1e-5)


def test_a_reference_of_other_pairs_is_computed_anew(
    dpo: Preferring, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, pairs = load_model(base), pairs_of(dpo)
    run = tmp_path / "run"
    run.mkdir()
    kept_references(run, model, pairs, batch_size=4)
    other = [*pairs[1:], *pairs_of(dpo, "valid")]
    with caplog.at_level(logging.WARNING):
        found = kept_references(run, model, other, batch_size=4)
    assert "is of other pairs and is computed anew" in caplog.text
    fresh = reference_logprobs(model, other, batch_size=4)
    assert mx.array_equal(found, fresh).item()
    caplog.clear()
    weights_before = {k: mx.array(v) for k, v in weights_of(model).items()}
    model.transformer.norm.weight = weights_before["transformer.norm.weight"] * 2
    again = kept_references(run, model, other, batch_size=4)
    assert mx.array_equal(again, fresh).item()  # read, though the model has moved
    assert caplog.text == ""


@pytest.mark.slow
def test_changed_pairs_are_no_resumed_run(dpo: Preferring, tmp_path: Path) -> None:
    dpo.run(tmp_path / "run", "--iters", 2)
    with (dpo.data / "train.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    refused = dpo("--iters", 4, "--resume", "--output", tmp_path / "run")
    assert "data set (or how it is encoded) has changed" in refused.error


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_the_better_answer_wins(kind: str, dpo: Preferring, base: Path, tmp_path: Path) -> None:
    flags = ["--fine-tune-type", kind, "--iters", 20, "--loss", "sigmoid", "--epochs", "none"]
    out = dpo.run(tmp_path / "run", *flags)
    lines = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["accuracy"] == 1.0
    assert lines[-1]["margin"] > 1 > abs(lines[0]["margin"])
    assert lines[-1]["margin"] == pytest.approx(
        lines[-1]["chosen_reward"] - lines[-1]["rejected_reward"], rel=1e-3
    )
    assert np.mean(losses(tmp_path / "run")[-3:]) < 0.5 * math.log(2)
    assert read_metrics(tmp_path / "run")[-1]["val_loss"] < 0.5 * math.log(2)
    assert f"finished at step 20, {lines[-1]['tokens']} pairs" in out
    adapter = tmp_path / "run" if kind == "lora" else None
    model, tokenizer = load(base if kind == "lora" else tmp_path / "run", adapter_path=adapter)
    assert tokenizer is not None
    unseen = tiny.sentences(17, seed=5)[15]
    margins = [
        answer_logprob(m, tokenizer, unseen, CHOSEN)
        - answer_logprob(m, tokenizer, unseen, REJECTED)
        for m in (load_model(base), model)
    ]
    assert margins[1] > margins[0] + 5


@pytest.mark.slow
def test_micro_batches_add_up_to_one_large_batch(dpo: Preferring, tmp_path: Path) -> None:
    same = ["--iters", 3, "--steps-per-eval", 0]
    dpo.run(tmp_path / "one", *same, "--batch-size", 13)
    dpo.run(tmp_path / "many", *same, "--batch-size", 1, "--grad-accumulation-steps", 13)
    # one epoch an update, whatever the order; float32 sums in another order
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "many"), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_b9_a_resumed_run_equals_an_uninterrupted_one(
    kind: str, dpo: Preferring, tmp_path: Path
) -> None:
    flags = ["--fine-tune-type", kind, "--iters", 10, "--save-every", 3, "--steps-per-eval", 2]
    dpo.run(tmp_path / "whole", *flags, "--keep-states", 9)
    broken = break_off(tmp_path / "whole", tmp_path / "broken", at=6)
    dpo.run(broken, *flags, "--keep-states", 9, "--resume")
    assert comparable(broken) == comparable(tmp_path / "whole")
    if kind == "full":
        found, expected = (weights_of(load_model(f)) for f in (broken, tmp_path / "whole"))
    else:
        found, expected = adapters(broken), adapters(tmp_path / "whole")
    assert_same_weights(found, expected)


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is(dpo: Preferring, tmp_path: Path) -> None:
    run = tmp_path / "run"
    dpo.run(run, "--iters", 2)
    names = ("metrics.jsonl", "model.safetensors", "reference.safetensors")
    before = [(run / name).read_bytes() for name in names]
    dpo.run(run, "--resume", "--iters", 2)
    assert [(run / name).read_bytes() for name in names] == before


@pytest.mark.slow
def test_adapters_train_on_a_quantised_model(
    capsys: pytest.CaptureFixture[str], dpo: Preferring, base: Path, tmp_path: Path
) -> None:
    quantize(base, tmp_path / "q4", bits=4, group_size=32)
    quantised = Preferring(capsys, tmp_path / "q4", dpo.data)
    quantised.run(tmp_path / "run", "--fine-tune-type", "lora", "--iters", 15)
    lines = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert lines[-1]["margin"] > lines[0]["margin"] + 0.5
    model, _ = load(tmp_path / "q4", adapter_path=tmp_path / "run")
    assert np.isfinite(logits(model)).all()
    refused = quantised("--fine-tune-type", "full", "--iters", 1, "--output", tmp_path / "full")
    assert "is quantised, so its weights cannot train; use --fine-tune-type lora" in refused.error


def test_pairs_without_a_difference_are_left_out_and_counted(
    capsys: pytest.CaptureFixture[str], base: Path, tmp_path: Path
) -> None:
    data = write(
        tmp_path / "some",
        {"prompt": "the old king", "chosen": "went", "rejected": "saw"},
        {"prompt": "the old king", "chosen": "went", "rejected": "went"},
        {"prompt": "the old king", "chosen": "went", "rejected": " "},
    )
    outcome = Preferring(capsys, base, data)("--dry-run", "--output", tmp_path / "run")
    assert outcome.code == 0
    assert "2 pairs left out, with equal or empty answers" in outcome.err
    assert "pairs train 1, valid 0" in " ".join(outcome.out.split())


def test_a_dry_run_shows_plan_and_pairs_and_writes_nothing(dpo: Preferring, tmp_path: Path) -> None:
    outcome = dpo("--dry-run", "--iters", 5, "--output", tmp_path / "run")
    assert outcome.code == 0
    words = " ".join(outcome.out.split())
    for part in ("preference tuning", "pairs train 13, valid 4", "5 of 4 pairs", "loss: hinge"):
        assert part in words
    first, second = tiny.sentences(2, seed=5)
    for text in (first, second, CHOSEN, REJECTED):
        assert text in outcome.out
    assert "train.jsonl:1" in outcome.out
    assert "train.jsonl:3" not in outcome.out
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_folder_with_a_run_is_refused_before_anything_is_read(
    dpo: Preferring, tmp_path: Path
) -> None:
    dpo.run(tmp_path / "run", "--iters", 1)
    before = files(tmp_path / "run")
    refused = dpo("--output", tmp_path / "run", "--model", "/nowhere")
    assert "is not empty; add --resume" in refused.error
    lost = dpo("--output", tmp_path / "run", "--overwrite", "--data", "/nowhere")
    assert "/nowhere" in lost.error
    assert files(tmp_path / "run") == before
    dpo.run(tmp_path / "run", "--iters", 2, "--overwrite")
    assert len(losses(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--loss", "orpo"], "loss 'orpo' is not one of sigmoid, hinge, rso, ipo"),
        (["--beta", "0"], "beta must be positive, got 0"),
        (["--max-prompt-length", "96"], "max_prompt_length 96 must be at least 2 and less than"),
        (["--iters", "3", "--epochs", "1"], "iters and epochs exclude each other"),
        (["--recipe", "dpo_270"], "did you mean dpo_270m"),
        (["--resume", "--overwrite"], "contradict each other"),
    ],
)
def test_mistakes_are_one_line(
    argv: list[str], message: str, dpo: Preferring, tmp_path: Path
) -> None:
    outcome = dpo("--output", tmp_path / "run", *argv)
    assert message in outcome.error


@pytest.mark.slow  # three processes
def test_two_ranks_agree_with_one_and_resume_from_the_first_ones_disk(
    dpo: Preferring, tmp_path: Path
) -> None:
    flags = ["--fine-tune-type", "full", "--iters"]
    for folder, start in ((tmp_path / "one", alone), (tmp_path / "two", ring)):
        folder.mkdir()
        for iters in (3, 5):
            words = dpo.words(*flags, iters, "--output", folder / "run", "--resume")
            (folder / "argv.json").write_text(json.dumps([str(word) for word in words]))
            ended = start("command", folder)
            for rank in ended if isinstance(ended, list) else [ended]:
                assert rank.code == 0, rank.err
    one, two = tmp_path / "one" / "run", tmp_path / "two" / "run"
    np.testing.assert_allclose(reference_in(two), reference_in(one), rtol=1e-5)
    assert losses(two) == pytest.approx(losses(one), rel=1e-3)
    assert len(losses(two)) == 5

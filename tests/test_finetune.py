"""``openelm finetune`` on a small model: what it learns, writes and refuses."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny_tokenizer as tiny
from command_line import Outcome, run_here
from finetune_runs import Tuner, adapters, losses, make_base, make_data, without_plots
from folder_makers import files, logits, small_folder, small_model, weights_of
from tuning_makers import CHAT, write

from convert.quantize import quantize
from openelm_mlx.adapter_layers import dense_weight
from openelm_mlx.checkpoint import load, load_model
from openelm_mlx.lora import get_module
from openelm_mlx.metrics import read_metrics
from openelm_mlx.objectives import language_model_loss
from openelm_mlx.recipe import load_recipe
from openelm_mlx.tokenizer import APPLE_INSTRUCT_TEMPLATE, Tokenizer
from openelm_mlx.tuning_batches import EvalBatches
from openelm_mlx.tuning_data import TuningArgs, load_split
from openelm_mlx.validation import evaluate


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: tiny.TinyTokenizer) -> Path:
    return make_base(tmp_path_factory.mktemp("base"), tiny_tokenizer.tokenizer)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def tuner(capsys: pytest.CaptureFixture[str], base: Path, data: Path) -> Tuner:
    return Tuner(capsys, base, data)


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    without_plots(monkeypatch)


@pytest.mark.parametrize(
    "kind", ["lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dora", "full"))]
)
@pytest.mark.slow
def test_the_loss_falls(kind: str, tuner: Tuner, tmp_path: Path) -> None:
    flags = ["--fine-tune-type", kind, "--mask-prompt", "--iters", 30, "--learning-rate", 1e-2]
    out = tuner.run(tmp_path / "run", *flags)
    found = losses(tmp_path / "run")
    assert len(found) == 30
    assert np.mean(found[-5:]) < 0.6 * found[0]
    assert read_metrics(tmp_path / "run")[-1]["val_loss"] < 0.6 * found[0]
    assert "finished at step 30" in out


def test_a_run_leaves_what_the_design_promises(tuner: Tuner, tmp_path: Path) -> None:
    tuner.run(tmp_path / "lora", "--iters", 2)
    kept = {"metrics.jsonl", "recipe.yaml", "states", "best"}
    found = set(files(tmp_path / "lora"))
    assert found == kept | {"adapters.safetensors", "adapter_config.json"}
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert config["fine_tune_type"] == "lora"
    assert config["lora_parameters"]["rank"] == load_recipe("finetune_lora").values["rank"]
    tuner.run(tmp_path / "full", "--iters", 2, "--fine-tune-type", "full")
    model = {"config.json", "generation_config.json", "model.safetensors", "openelm.json"}
    tokenizer = {"tokenizer.json", "tokenizer.model", "tokenizer_config.json"}
    found = set(files(tmp_path / "full")) - {"special_tokens_map.json"}
    assert found == kept | model | tokenizer


def test_the_adapters_of_a_run_are_the_model_it_measured(
    tuner: Tuner, base: Path, data: Path, tmp_path: Path
) -> None:
    tuner.run(tmp_path / "run", "--iters", 12, "--learning-rate", 1e-2)
    model, tokenizer = load(base, adapter_path=tmp_path / "run")
    assert tokenizer is not None
    samples = load_split(data, "valid", tokenizer, TuningArgs(max_seq_length=64))
    batches = EvalBatches(samples, batch_size=4, max_seq_length=64)
    loss, targets = evaluate(model, batches, language_model_loss())
    last = read_metrics(tmp_path / "run")[-1]
    assert targets == last["val_tokens"] == sum(sample.num_targets for sample in samples)
    assert loss == pytest.approx(last["val_loss"], rel=1e-5)
    assert np.abs(logits(model) - logits(load_model(base))).max() > 0.1


@pytest.mark.slow
def test_adapters_of_a_run_are_used_by_generate(
    capsys: pytest.CaptureFixture[str], tuner: Tuner, base: Path, tmp_path: Path
) -> None:
    flags = ["--iters", 40, "--learning-rate", 1e-2, "--mask-prompt"]
    tuner.run(tmp_path / "run", *flags)
    prompt = tiny.sentences(17, seed=5)[0]
    argv = ["generate", "--model", base, "--prompt", prompt, "--max-tokens", 24]
    without = run_here(capsys, *argv).out
    tuned = run_here(capsys, *argv, "--adapter-path", tmp_path / "run").out
    assert "the wolf saw a girl." in tuned
    assert "the wolf saw a girl." not in without


def test_full_tuning_moves_every_parameter(tuner: Tuner, base: Path, tmp_path: Path) -> None:
    tuner.run(tmp_path / "run", "--iters", 2, "--fine-tune-type", "full")
    before, after = weights_of(load_model(base)), weights_of(load_model(tmp_path / "run"))
    assert set(before) == set(after)
    still = [name for name in before if mx.array_equal(before[name], after[name]).item()]
    assert still == []  # stock mlx_lm leaves embedding and final norm where they were
    assert json.loads((tmp_path / "run" / "openelm.json").read_text())["stage"] == "finetune"


@pytest.mark.slow
def test_b25_under_dora_the_magnitudes_move(tuner: Tuner, base: Path, tmp_path: Path) -> None:
    tuner.run(tmp_path / "run", "--iters", 2, "--fine-tune-type", "dora")
    model = load_model(base)
    found = {name: m for name, m in adapters(tmp_path / "run").items() if name.endswith(".m")}
    assert len(found) == 4 * len(model.layers)
    for name, magnitude in found.items():
        weight = dense_weight(get_module(model, name.removesuffix(".m")))
        change: Any = mx.abs(magnitude - mx.linalg.norm(weight, axis=1)).max().item()
        assert change > 1e-5, name


@pytest.mark.slow
def test_adapters_train_on_a_quantised_model(
    capsys: pytest.CaptureFixture[str], base: Path, data: Path, tmp_path: Path
) -> None:
    quantize(base, tmp_path / "q4", bits=4, group_size=32)
    tuner = Tuner(capsys, tmp_path / "q4", data)
    tuner.run(tmp_path / "run", "--iters", 20, "--learning-rate", 1e-2, "--mask-prompt")
    found = losses(tmp_path / "run")
    assert np.mean(found[-5:]) < 0.7 * found[0]
    model, _ = load(tmp_path / "q4", adapter_path=tmp_path / "run")
    assert np.isfinite(logits(model)).all()
    refused = tuner("--fine-tune-type", "full", "--iters", 1, "--output", tmp_path / "full")
    assert "is quantised, so its weights cannot train; use --fine-tune-type lora" in refused.error


@pytest.mark.slow
def test_a_base_in_16_bit_keeps_its_type(
    capsys: pytest.CaptureFixture[str],
    data: Path,
    tiny_tokenizer: tiny.TinyTokenizer,
    tmp_path: Path,
) -> None:
    base = small_folder(tmp_path / "b", tiny_tokenizer.tokenizer, small_model(mx.bfloat16))
    tuner = Tuner(capsys, base, data)
    tuner.run(tmp_path / "full", "--iters", 2, "--fine-tune-type", "full")
    found = {array.dtype for array in weights_of(load_model(tmp_path / "full")).values()}
    assert found == {mx.bfloat16}
    tuner.run(tmp_path / "lora", "--iters", 2)
    assert {array.dtype for array in adapters(tmp_path / "lora").values()} == {mx.float32}


@pytest.mark.slow
def test_b31_the_same_seed_gives_the_same_run_and_another_one_does_not(
    tuner: Tuner, tmp_path: Path
) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        tuner.run(tmp_path / name, "--iters", 3, "--seed", seed)
    first, again, other = (adapters(tmp_path / name) for name in "abc")
    assert all(mx.array_equal(first[name], again[name]).item() for name in first)
    assert not all(mx.array_equal(first[name], other[name]).item() for name in first)
    assert losses(tmp_path / "a") == losses(tmp_path / "b") != losses(tmp_path / "c")


def test_b7_training_data_alone_are_enough(
    capsys: pytest.CaptureFixture[str], base: Path, tmp_path: Path
) -> None:
    folder = write(tmp_path / "data", {"text": "the old king"}, {"text": "the young queen"})
    tuner = Tuner(capsys, base, folder)
    outcome = tuner("--iters", 3, "--output", tmp_path / "run")  # a batch holds 4, there are 2
    assert outcome.code == 0
    assert outcome.err.count("has no validation data") == 1
    assert not any("val_loss" in line for line in read_metrics(tmp_path / "run"))


@pytest.mark.slow
def test_b8_the_test_split_is_measured_when_asked_for(tuner: Tuner, tmp_path: Path) -> None:
    trained = tuner.run(tmp_path / "run", "--iters", 2, "--mask-prompt", "--test")
    (line,) = [line for line in trained.splitlines() if line.startswith("test loss")]
    alone = tuner.run(tmp_path / "run", "--iters", 2, "--mask-prompt", "--test", "--resume")
    assert line in alone


@pytest.mark.slow
def test_b12_micro_batches_add_up_to_one_large_batch(tuner: Tuner, tmp_path: Path) -> None:
    same = ["--iters", 3, "--dropout", 0, "--no-share-rows"]
    tuner.run(tmp_path / "one", *same, "--batch-size", 13)
    tuner.run(tmp_path / "many", *same, "--batch-size", 1, "--grad-accumulation-steps", 13)
    # one epoch an update, whatever the order; float32 sums in another order
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "many"), rel=1e-4)


def test_epochs_end_with_the_last_sample(tuner: Tuner, data: Path, tmp_path: Path) -> None:
    tuner.run(tmp_path / "run", "--epochs", 2, "--grad-accumulation-steps", 3)
    steps = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert len(steps) == 3  # 2 epochs of 4 batches, 3 an update
    tokenizer = Tokenizer.from_path(tuner.base)
    samples = load_split(data, "train", tokenizer, TuningArgs(max_seq_length=64))
    assert steps[-1]["tokens"] == 2 * sum(sample.num_targets for sample in samples)


@pytest.mark.slow
def test_b32_the_plan_and_the_recipe_say_what_was_chosen(tuner: Tuner, tmp_path: Path) -> None:
    outcome = tuner("--iters", 1, "--rank", 3, "--output", tmp_path / "run")
    words = " ".join(outcome.out.split())
    for part in ("batch_size: 4", "rank: 3", "iters: 1", "memory a step", "this machine has"):
        assert part in words
    assert "samples train 13, valid 4" in words
    tuner.run(tmp_path / "again", "--recipe", tmp_path / "run" / "recipe.yaml")
    assert losses(tmp_path / "again") == losses(tmp_path / "run")


def test_samples_longer_than_the_models_context_are_pointed_out(
    capsys: pytest.CaptureFixture[str],
    data: Path,
    tiny_tokenizer: tiny.TinyTokenizer,
    tmp_path: Path,
) -> None:
    model = small_model(max_context_length=32)
    tuner = Tuner(capsys, small_folder(tmp_path / "b", tiny_tokenizer.tokenizer, model), data)
    outcome = tuner("--iters", 1, "--dry-run", "--output", tmp_path / "run")
    assert "more than the 32 that the model was made for; --max-seq-length 32" in outcome.err
    cut = tuner("--iters", 1, "--dry-run", "--max-seq-length", 32, "--output", tmp_path / "run")
    assert "was made for" not in cut.err


def test_a_dry_run_shows_plan_and_samples_and_writes_nothing(tuner: Tuner, tmp_path: Path) -> None:
    outcome = tuner("--iters", 5, "--mask-prompt", "--dry-run", "--output", tmp_path / "run")
    assert outcome.code == 0
    assert "supervised fine-tuning" in outcome.out
    assert "learned 'the wolf saw a girl.</s>'" in outcome.out
    assert f"context '<s>{tiny.sentences(17, seed=5)[0]}'" in outcome.out
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_chat_gives_the_tuned_model_its_template(
    capsys: pytest.CaptureFixture[str], base: Path, tmp_path: Path
) -> None:
    chat = write(tmp_path / "chat", {"messages": CHAT})
    text = write(tmp_path / "text", {"text": "the old king"})
    for folder, template in ((chat, APPLE_INSTRUCT_TEMPLATE), (text, None)):
        out = tmp_path / f"{folder.name}-run"
        Tuner(capsys, base, folder).run(out, "--iters", 1, "--fine-tune-type", "full")
        assert Tokenizer.from_path(out).chat_template == template


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rank", "0"], "adapter rank must be a positive integer"),
        (["--fine-tune-type", "full", "--rank", "4"], "--rank has no effect: fine_tune_type full"),
        (["--target-modules", "q_proj"], "OpenELM has no module 'q_proj'"),
        (["--num-layers", "9"], "num_layers is 9, but the model has 2"),
        (["--recipe", "finetune_lroa"], "did you mean finetune_lora"),
        (["--max-seq-length", "3", "--mask-prompt"], "no sample has anything to learn"),
        (["--iters", "3", "--epochs", "1"], "iters and epochs exclude each other"),
        (["--data", "/nowhere"], "/nowhere does not exist"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--resume", "--overwrite"], "contradict each other"),
    ],
)
def test_mistakes_are_one_line(argv: list[str], message: str, tuner: Tuner, tmp_path: Path) -> None:
    outcome = tuner("--output", tmp_path / "run", *argv)
    assert message in outcome.error


@pytest.mark.slow
def test_a_folder_with_a_run_is_refused_before_anything_is_read(
    tuner: Tuner, tmp_path: Path
) -> None:
    tuner.run(tmp_path / "run", "--iters", 1)
    before = files(tmp_path / "run")
    refused: Outcome = tuner("--output", tmp_path / "run", "--model", "/nowhere")
    assert "is not empty; add --resume" in refused.error
    lost: Outcome = tuner("--output", tmp_path / "run", "--overwrite", "--data", "/nowhere")
    assert "/nowhere" in lost.error
    assert files(tmp_path / "run") == before  # nothing is thrown away for a run that cannot start
    tuner.run(tmp_path / "run", "--iters", 2, "--overwrite")
    assert len(losses(tmp_path / "run")) == 2


def test_ranks_that_would_be_idle_are_pointed_out(
    monkeypatch: pytest.MonkeyPatch, tuner: Tuner, tmp_path: Path
) -> None:
    class Four:
        """A group of four, as ``world`` gives it, of which this is the first."""

        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 4

    monkeypatch.setattr("openelm_mlx.tuning_run.world", Four)
    argv = ["--dry-run", "--output", tmp_path / "run"]
    assert "1 rows for 4 ranks, some of which will be idle" in tuner(*argv).err
    assert "idle" not in tuner(*argv, "--no-share-rows").err

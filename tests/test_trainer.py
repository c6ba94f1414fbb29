"""The loop: parity with Apple's trainer, exact resume, and endings that lose nothing."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from slow_params import slow_cases
from training_makers import CountingBatches, equal_weights, make_batch, make_model, weights_of

from convert.pt_file import read
from openelm_mlx import cpu_exp
from openelm_mlx.batches import Batch
from openelm_mlx.config import ModelArgs
from openelm_mlx.fitting import build_model
from openelm_mlx.losses import LossArgs
from openelm_mlx.metrics import WALL_CLOCK, read_metrics
from openelm_mlx.objectives import language_model_loss
from openelm_mlx.optim import OptimizerArgs, ScheduleArgs
from openelm_mlx.replay import replay
from openelm_mlx.trainer import NonFiniteError, Outcome, train
from openelm_mlx.training_args import TrainArgs
from openelm_mlx.training_state import BEST, STATES, load_best, load_latest, verify
from openelm_mlx.training_step import set_grad_checkpoint
from openelm_mlx.validation import evaluate

Golden = Callable[[str], Path]
SCHEDULE = ScheduleArgs(learning_rate=0.02, warmup_steps=2, iters=12)


def run(folder: Path | None, *, resume: bool = False, **settings: Any) -> tuple[Any, Outcome]:
    """Train the little model; returns it and how the run ended."""
    iters = settings.pop("iters", SCHEDULE.iters)
    batches = settings.pop("batches", None) or CountingBatches()
    validation = settings.pop("validation", None)
    model = make_model()
    args = {"save_every": 4, "steps_per_eval": 0, **settings}
    outcome = train(
        model,
        OptimizerArgs().build(),
        batches,
        language_model_loss(),
        TrainArgs(**args),
        schedule=ScheduleArgs(learning_rate=0.02, warmup_steps=2, iters=iters),
        validation=validation,
        run_folder=folder,
        resume=resume,
    )
    return model, outcome


def comparable(folder: Path) -> list[dict[str, Any]]:
    """Metric lines without what depends on the hour."""
    return [{k: v for k, v in m.items() if k not in WALL_CLOCK} for m in read_metrics(folder)]


@pytest.mark.parametrize(
    ("run_name", "accumulation", "checkpointing"),
    [
        ("accum1", 1, "scores"),
        *slow_cases(("accum1", 1, "x86"), ("accum2", 2, "layer")),
        *slow_cases(("accum1", 1, "none"), ("accum2", 2, "none"), ("accum1", 1, "layer")),
        *slow_cases(("accum1", 1, "attention"), ("accum2", 2, "attention")),
    ],
)
def test_apples_training_run_is_reproduced(
    golden: Golden,
    monkeypatch: pytest.MonkeyPatch,
    run_name: str,
    accumulation: int,
    checkpointing: str,
) -> None:
    if checkpointing == "x86":  # attention as such a CPU would take it for longer sequences
        monkeypatch.setattr(cpu_exp, "_X86", True)
        monkeypatch.setattr(cpu_exp, "_MANY", 1)
        checkpointing = "none"
    facts = json.loads(golden("train/steps.json").read_text())
    arrays = mx.load(str(golden("train/batches.safetensors")))
    weights = read(golden("train/train_tiny_init.pt"))
    model = build_model(ModelArgs(**facts["config"]), weights, source="golden")
    set_grad_checkpoint(model, checkpointing)
    optim, scheduler = facts["optim"], facts["scheduler"]
    results = replay(
        model,
        [(arrays["samples"][i], arrays["targets"][i]) for i in range(20)],
        ignore_index=facts["padding_index"],
        optimizer=OptimizerArgs(weight_decay=optim["weight_decay"]),
        schedule=ScheduleArgs(
            learning_rate=scheduler["max_lr"],
            min_learning_rate=scheduler["min_lr"],
            warmup_steps=scheduler["warmup_iterations"],
            warmup_init=scheduler["warmup_init_lr"],
            iters=scheduler["max_iterations"],
            corenet_rounding=True,
        ),
        loss=LossArgs(z_loss=1e-4, corenet_z_loss=True, loss_chunk=16),
        args=TrainArgs(
            grad_accumulation_steps=accumulation,
            max_grad_norm=optim["grad_clip"],
            corenet_accumulation=True,
        ),
    )
    expected = facts[run_name]
    expected = expected if isinstance(expected, list) else expected["steps"]
    assert len(results) == len(expected)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.micro_losses == pytest.approx(
            [m["total_loss"] for m in theirs["micro_losses"]], abs=1e-4
        )
        assert ours.grad_norm == pytest.approx(theirs["grad_norm_before_clip"], rel=1e-3)
    after = {
        "accum1": lambda: read(golden("train/train_tiny_after20.pt")),
        "accum2": lambda: mx.load(str(golden("train/train_tiny_accum2_after10.safetensors"))),
    }[run_name]()
    final = weights_of(model)
    for name, array in after.items():
        np.testing.assert_allclose(
            np.array(final[f"transformer.{name}"]), np.array(array), atol=5e-4, err_msg=name
        )


def test_gradients_equal_apples(golden: Golden) -> None:
    facts = json.loads(golden("train/steps.json").read_text())
    batch = mx.load(str(golden("train/loss_batch.safetensors")))
    expected = mx.load(str(golden("train/grads.safetensors")))
    weights = read(golden("train/train_tiny_init.pt"))
    model = build_model(ModelArgs(**facts["config"]), weights, source="golden")
    model.train()
    import mlx.nn as nn

    from openelm_mlx.replay import replayed_batch

    loss = language_model_loss(LossArgs(z_loss=1e-4, loss_chunk=24))
    data = replayed_batch(batch["samples"], batch["targets"], facts["padding_index"])

    def mean(model: Any) -> mx.array:
        total, n = loss(model, data)
        return total / n

    _, gradients = nn.value_and_grad(model, mean)(model)
    from mlx.utils import tree_flatten

    ours: Any = dict(tree_flatten(gradients))
    for name, array in expected.items():
        if name.startswith("ls0.0."):
            np.testing.assert_allclose(
                np.array(ours["transformer." + name.removeprefix("ls0.0.")]),
                np.array(array),
                atol=5e-5,
                err_msg=name,
            )


def test_accumulation_equals_one_large_batch() -> None:
    """Micro-batches with different numbers of targets: token-weighted (REPORTS B12)."""
    whole = make_batch(5, rows=6)
    parts = [
        Batch(
            tokens=whole.tokens[i : i + 2],
            targets=whole.targets[i : i + 2],
            mask=whole.mask[i : i + 2],
        )
        for i in (0, 2, 4)
    ]
    results = []
    for micro in ([whole], parts):
        model = make_model()
        train(
            model,
            OptimizerArgs(optimizer="sgd", beta1=0.0).build(),
            _Fixed(micro),
            language_model_loss(),
            TrainArgs(grad_accumulation_steps=len(micro)),
            schedule=ScheduleArgs(learning_rate=0.1, iters=1, lr_schedule="constant"),
        )
        results.append(weights_of(model))
    for name, array in results[0].items():
        np.testing.assert_allclose(np.array(array), np.array(results[1][name]), atol=1e-6)


class _Fixed(CountingBatches):
    """A finite list of batches."""

    def __init__(self, batches: list[Batch]) -> None:
        super().__init__()
        self.batches = batches

    def __next__(self) -> Batch:
        if self.position >= len(self.batches):
            raise StopIteration
        self.position += 1
        return self.batches[self.position - 1]


@pytest.mark.slow
def test_training_lowers_the_loss_and_repeats_with_its_seed(tmp_path: Path) -> None:
    first, _ = run(tmp_path / "a", iters=30)
    second, _ = run(tmp_path / "b", iters=30)
    losses = [m["loss"] for m in read_metrics(tmp_path / "a")]
    assert losses[-1] < 0.6 * losses[0]
    assert equal_weights(first, second)
    assert comparable(tmp_path / "a") == comparable(tmp_path / "b")


def test_resume_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    straight, _ = run(tmp_path / "straight", iters=12)
    model = make_model()
    train(  # stops at 8 of a schedule of 12, as a kill after the state of step 8 would
        model,
        OptimizerArgs().build(),
        _Stopping(8),
        language_model_loss(),
        TrainArgs(save_every=4, steps_per_eval=0),
        schedule=SCHEDULE,
        run_folder=tmp_path / "resumed",
    )
    resumed, outcome = run(tmp_path / "resumed", resume=True, iters=12)
    assert outcome.reason == "finished"
    assert outcome.state.step == 12
    assert equal_weights(straight, resumed)
    assert comparable(tmp_path / "straight") == comparable(tmp_path / "resumed")


class _Stopping(CountingBatches):
    """Ends after some batches."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __next__(self) -> Batch:
        if self.position >= self.count:
            raise StopIteration
        return super().__next__()


@pytest.mark.slow
def test_resume_cuts_the_metrics_back_to_the_restored_step(tmp_path: Path) -> None:
    run(tmp_path, iters=6)
    newest = sorted((tmp_path / STATES).iterdir())[-1]
    (newest / "weights.safetensors").write_bytes(b"torn")
    straight, _ = run(tmp_path / "straight", iters=6)
    resumed, outcome = run(tmp_path, resume=True, iters=6)
    assert outcome.state.step == 6
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert equal_weights(straight, resumed)


def test_a_torn_newest_state_gives_way_to_the_one_before_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(tmp_path, iters=8)
    newest = sorted((tmp_path / STATES).iterdir())[-1]
    with (newest / "optimizer.safetensors").open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"xyz")
    model, optimizer = make_model(), OptimizerArgs().build()
    optimizer.init(model.trainable_parameters())
    restored = load_latest(tmp_path, model, optimizer)
    assert restored is not None
    assert restored[0].step == 4
    assert "torn or damaged" in caplog.text
    (sorted((tmp_path / STATES).iterdir())[0] / "state.json").unlink()
    with pytest.raises(ValueError, match="none of 2 saved states can be read"):
        load_latest(tmp_path, model, optimizer)


def test_only_the_last_states_are_kept(tmp_path: Path) -> None:
    run(tmp_path, iters=12, save_every=2, keep_states=3)
    names = [p.name for p in sorted((tmp_path / STATES).iterdir())]
    assert names == ["step-00000008", "step-00000010", "step-00000012"]
    assert all(verify(tmp_path / STATES / name) for name in names)


def test_resuming_where_nothing_was_saved_starts_anew_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, outcome = run(tmp_path, resume=True, iters=2)
    assert outcome.state.step == 2
    assert "starting anew" in caplog.text


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    finished, _ = run(tmp_path, iters=4)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    again, outcome = run(tmp_path, resume=True, iters=4)
    assert outcome.state.step == 4
    assert equal_weights(finished, again)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


def test_the_first_loss_that_is_no_number_stops_and_keeps_the_last_state(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"step 6.*batch 5 row 0.*--resume"):
        run(tmp_path, batches=CountingBatches(fail_at=6))
    states = sorted((tmp_path / STATES).iterdir())
    assert [s.name for s in states] == ["step-00000004"]
    assert verify(states[0])


def test_a_step_that_is_not_finite_leaves_the_weights_alone() -> None:
    model = make_model()
    before = {name: mx.array(array) for name, array in weights_of(model).items()}
    with pytest.raises(NonFiniteError):
        train(
            model,
            OptimizerArgs().build(),
            CountingBatches(fail_at=1),
            language_model_loss(),
            TrainArgs(),
            schedule=SCHEDULE,
        )
    for name, array in weights_of(model).items():
        assert mx.array_equal(array, before[name]).item()


def test_validation_keeps_the_best_weights_and_stops_early(tmp_path: Path) -> None:
    _, outcome = run(
        tmp_path,
        iters=60,
        steps_per_eval=2,
        early_stopping=2,
        validation=lambda: [_shuffled_targets(make_batch(99))],
    )
    lines = [m for m in read_metrics(tmp_path) if "val_loss" in m]
    best = min(lines, key=lambda m: m["val_loss"])
    assert outcome.reason == "early"
    assert outcome.state.best_step == best["step"] < outcome.state.step
    model = make_model()
    assert load_best(tmp_path, model).best_loss == best["val_loss"]
    loss, n = evaluate(model, [_shuffled_targets(make_batch(99))], language_model_loss())
    assert loss == pytest.approx(best["val_loss"], rel=1e-6)
    assert n == best["val_tokens"]
    assert (tmp_path / BEST).is_dir()


def _shuffled_targets(batch: Batch) -> Batch:
    """Targets that training makes less likely."""
    return Batch(tokens=batch.tokens, targets=(batch.targets + 7) % 23, mask=batch.mask)


def test_padding_ids_do_not_change_the_loss() -> None:
    model, loss = make_model(), language_model_loss()
    batch = make_batch(3)
    other = Batch(
        tokens=mx.where(batch.mask > 0, batch.tokens, 0),
        targets=mx.where(batch.mask > 0, batch.targets, 0),
        mask=batch.mask,
    )
    assert evaluate(model, [batch], loss) == evaluate(model, [other], loss)


def test_documents_of_a_packed_row_do_not_see_each_other() -> None:
    model, loss = make_model(), language_model_loss()
    a, b = make_batch(1, rows=1, length=5), make_batch(2, rows=1, length=3)
    ones = [mx.ones_like(x.mask) for x in (a, b)]
    separate = sum(
        loss(model, Batch(tokens=x.tokens, targets=x.targets, mask=m))[0].item()
        for x, m in zip((a, b), ones, strict=True)
    )
    packed = Batch(
        tokens=mx.concatenate([a.tokens, b.tokens], axis=1),
        targets=mx.concatenate([a.targets, b.targets], axis=1),
        mask=mx.concatenate(ones, axis=1),
        segments=mx.array([[0] * 5 + [1] * 3]),
    )
    assert loss(model, packed)[0].item() == pytest.approx(separate, rel=1e-5)


def test_all_mistakes_in_the_settings_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"grad_accumulation_steps.*keep_states.*grad_checkpoint"):
        TrainArgs(grad_accumulation_steps=0, keep_states=0, grad_checkpoint="all")


def test_a_full_disk_is_one_error_and_the_last_state_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, iters=4)

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("[save_safetensors] No space left on device")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(OSError, match="cannot be written"):
        run(tmp_path, resume=True, iters=8)
    monkeypatch.undo()
    states = list((tmp_path / STATES).iterdir())
    assert [s.name for s in states] == ["step-00000004"]
    assert verify(states[0])


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
import openelm_mlx
from test_trainer import CountingBatches, run
from training_makers import weights_of
import mlx.core as mx

class Slow(CountingBatches):
    def __next__(self):
        time.sleep(0.03)
        print("step", self.position, flush=True)
        return super().__next__()

model, outcome = run(Path(sys.argv[1]), batches=Slow(), iters=40, save_every=3, resume=True)
mx.save_safetensors(sys.argv[2], weights_of(model))
sys.exit(130 if outcome.reason == "interrupted" else 0)
"""


def start(folder: Path, out: Path) -> "subprocess.Popen[str]":
    script = textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parent))
    return subprocess.Popen(
        [sys.executable, "-c", script, str(folder), str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(process: "subprocess.Popen[str]", number: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[-1] == str(number):
            return
    raise AssertionError(process.stderr.read() if process.stderr else "ended early")


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights_and_metrics(tmp_path: Path) -> None:
    process = start(tmp_path / "killed", tmp_path / "none")
    wait_for_step(process, 17)
    process.kill()
    process.communicate()
    again = start(tmp_path / "killed", tmp_path / "killed.safetensors")
    assert again.wait(timeout=120) == 0
    again.communicate()
    straight = start(tmp_path / "straight", tmp_path / "straight.safetensors")
    assert straight.wait(timeout=120) == 0
    straight.communicate()
    a, b = (mx.load(str(tmp_path / f"{n}.safetensors")) for n in ("killed", "straight"))
    assert all(mx.array_equal(a[name], b[name]).item() for name in b)
    assert comparable(tmp_path / "killed") == comparable(tmp_path / "straight")


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_saves_and_exits_130(tmp_path: Path) -> None:
    process = start(tmp_path / "run", tmp_path / "out.safetensors")
    wait_for_step(process, 5)
    process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + 60
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() < deadline
    assert process.returncode == 130, errors
    state = sorted((tmp_path / "run" / STATES).iterdir())[-1]
    lines = read_metrics(tmp_path / "run")
    assert verify(state)["state"]["step"] == lines[-1]["step"] >= 5


COMPILED = """
import sys
sys.path.insert(0, {tests!r})
import openelm_mlx
from training_makers import CountingBatches, make_model, weights_of
from openelm_mlx.lora import AdapterArgs, add_adapters
from openelm_mlx.objectives import language_model_loss
from openelm_mlx.optim import OptimizerArgs, ScheduleArgs
from openelm_mlx.trainer import train
from openelm_mlx.training_args import TrainArgs
import mlx.core as mx

for adapters in (False, True):
    found = []
    for compiled in (False, True):
        model = make_model()
        if adapters:
            add_adapters(model, AdapterArgs(rank=2, scale=1.0, dropout=0.1))
        train(
            model,
            OptimizerArgs().build(),
            CountingBatches(),
            language_model_loss(),
            TrainArgs(compile=compiled, grad_accumulation_steps=2),
            schedule=ScheduleArgs(learning_rate=0.02, iters=4),
        )
        found.append(weights_of(model))
    worst = max(mx.abs(found[0][k] - found[1][k]).max().item() for k in found[0])
    assert worst < 1e-5, (adapters, worst)
"""


@pytest.mark.slow
def test_compiled_steps_equal_eager_ones_dropout_included() -> None:
    """In a process of its own: `make test` turns compilation off for the others."""
    environment = {k: v for k, v in os.environ.items() if k != "MLX_DISABLE_COMPILE"}
    script = textwrap.dedent(COMPILED).format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


class Ticks:
    """A clock that goes on by a hundredth of a second whenever it is read: thrice a step."""

    def __init__(self) -> None:
        self.now = 0

    def perf_counter(self) -> float:
        self.now += 1
        return self.now / 100


@pytest.mark.slow
def test_a_run_that_is_bounded_by_time_ends_there_with_its_schedule_run_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openelm_mlx.trainer.time", Ticks())
    _, outcome = run(tmp_path, iters=100_000, max_seconds=1)
    steps = read_metrics(tmp_path)
    assert (outcome.reason, outcome.state.step) == ("time", 33)
    assert outcome.state.seconds == pytest.approx(1)
    rates = [line["learning_rate"] for line in steps]
    assert max(rates) == pytest.approx(0.02, rel=0.1)
    assert rates[-1] < 0.001  # 100,000 updates would have stayed at the highest
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    _, again = run(tmp_path, resume=True, iters=100_000, max_seconds=1)
    assert (again.reason, again.state.step) == ("time", 33)
    assert before == {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_time_that_is_not_needed_changes_nothing(tmp_path: Path) -> None:
    straight, _ = run(tmp_path / "straight")
    bounded, outcome = run(tmp_path / "bounded", max_seconds=1e6)
    assert outcome.reason == "finished"
    assert equal_weights(straight, bounded)


def test_a_resumed_run_has_only_the_time_that_is_left(tmp_path: Path) -> None:
    _, first = run(tmp_path, iters=4, max_seconds=1000)
    assert 0 < first.state.seconds < 1000
    spent = 1e-3  # less than four steps and the state on disk took, however busy the machine
    assert first.state.seconds > 2 * spent
    _, outcome = run(tmp_path, resume=True, iters=100_000, max_seconds=spent)
    assert (outcome.reason, outcome.state.step) == ("time", 4)

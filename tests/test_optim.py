"""Optimizers and schedules against Apple's recipes and a NumPy AdamW."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from openelm_mlx.optim import OPTIMIZERS, OptimizerArgs, ScheduleArgs

Golden = Callable[[str], Path]


def test_all_eight_recipes_follow_corenets_schedule(golden: Golden) -> None:
    for name, recipe in json.loads(golden("schedules.json").read_text()).items():
        settings: dict[str, Any] = {
            "learning_rate": recipe["max_lr"],
            "min_learning_rate": recipe["min_lr"],
            "warmup_steps": recipe["warmup_iterations"],
            "warmup_init": recipe["warmup_init_lr"],
            "iters": recipe["max_iterations"],
        }
        exact = ScheduleArgs(**settings)
        rounded = ScheduleArgs(**settings, corenet_rounding=True)
        for step, rates in recipe["lr"].items():
            assert exact.at(int(step)) == pytest.approx(rates["get_lr"], rel=1e-9), name
            assert rounded.at(int(step)) == rates["applied_lr"], (name, step)


def test_linear_and_constant_schedules_warm_up_and_end_where_they_should() -> None:
    linear = ScheduleArgs(
        learning_rate=1.0, warmup_steps=10, warmup_init=0.0, iters=110, lr_schedule="linear"
    )
    assert [linear.at(i) for i in (0, 5, 10)] == [0.0, 0.5, 1.0]
    assert linear.at(60) == pytest.approx(1 - 50 / 101)
    assert linear.at(10**6) == 0
    constant = ScheduleArgs(learning_rate=0.5, iters=3, lr_schedule="constant")
    assert {constant.at(i) for i in range(9)} == {0.5}


def adamw_steps(args: OptimizerArgs, dtype: mx.Dtype, steps: int = 4) -> dict[str, mx.array]:
    optimizer = args.build()
    weights = {
        "matrix": mx.array([[1.0, -2.0], [0.5, 3.0]], dtype=dtype),
        "norm": mx.array([1.0, 2.0], dtype=dtype),
    }
    optimizer.init(weights)
    for i in range(steps):
        optimizer.learning_rate = 0.01 * (i + 1)
        gradients = {k: (v * 0.1 + 0.01 * i).astype(dtype) for k, v in weights.items()}
        weights = optimizer.apply_gradients(gradients, weights)
    mx.eval(weights)
    return weights


def test_adamw_is_bias_corrected_and_decays_matrices_only() -> None:
    args = OptimizerArgs(weight_decay=0.1)
    got = adamw_steps(args, mx.float32)
    start = {"matrix": np.array([[1.0, -2.0], [0.5, 3.0]]), "norm": np.array([1.0, 2.0])}
    for name, w in start.items():
        m = v = np.zeros_like(w)
        for i in range(4):
            lr, g = 0.01 * (i + 1), w * 0.1 + 0.01 * i
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            step = (m / (1 - 0.9 ** (i + 1))) / (np.sqrt(v / (1 - 0.95 ** (i + 1))) + 1e-8)
            w = w * (1 - lr * (0.1 if w.ndim > 1 else 0)) - lr * step
        np.testing.assert_allclose(np.array(got[name]), w, rtol=1e-5)


def test_master_weights_keep_what_bfloat16_would_round_away() -> None:
    lost = OptimizerArgs(weight_decay=0.0).build()
    kept = OptimizerArgs(weight_decay=0.0, master_weights=True).build()
    results = []
    for optimizer in (lost, kept):
        weights = {"w": mx.array([[1.0, 1.0]], dtype=mx.bfloat16)}
        optimizer.init(weights)
        for _ in range(100):
            optimizer.learning_rate = 1e-4
            weights = optimizer.apply_gradients({"w": mx.ones((1, 2), mx.bfloat16)}, weights)
        assert weights["w"].dtype == mx.bfloat16
        results.append(weights["w"][0, 0].item())
    assert results[0] == 1.0
    assert results[1] == pytest.approx(0.99, abs=0.003)
    assert kept.state["w"]["master"].dtype == kept.state["w"]["m"].dtype == mx.float32


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_lowers_a_quadratic_and_keeps_the_dtype(name: str) -> None:
    optimizer = OptimizerArgs(optimizer=name, weight_decay=0.0).build()
    weights = {"w": mx.array([[1.0, -1.0], [2.0, 0.5]], dtype=mx.bfloat16)}
    optimizer.init(weights)
    for _ in range(30):
        optimizer.learning_rate = 0.02
        weights = optimizer.apply_gradients(weights, weights)
    assert weights["w"].dtype == mx.bfloat16
    assert mx.square(weights["w"].astype(mx.float32)).sum().item() < 6.25


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: OptimizerArgs(optimizer="adamx"), "not one of adamw"),
        (lambda: OptimizerArgs(weight_decay=-1, beta1=2.0), "weight_decay.*; beta1"),
        (lambda: OptimizerArgs(eps=0.0), "eps must be positive"),
        (lambda: ScheduleArgs(lr_schedule="step"), "not one of cosine"),
        (lambda: ScheduleArgs(learning_rate=-1.0), "learning_rate must be positive"),
        (lambda: ScheduleArgs(iters=0, warmup_steps=-1), "iters.*; warmup_steps"),
        (lambda: ScheduleArgs(learning_rate=0.1, min_learning_rate=0.2), "between 0 and"),
    ],
)
def test_bad_settings_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()

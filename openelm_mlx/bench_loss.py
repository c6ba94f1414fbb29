"""Cases of ``openelm bench`` for the output head with its cross-entropy: memory and speed.

Beside ``losses.fused_cross_entropy`` stand what mlx_lm's trainer does (all logits at once) and,
where the package ``unsloth_zoo`` is installed, its chunked cross-entropy for MLX ("mlx-cce"; on a
CPU by its fallback, on Metal by its kernels). N tokens, D model_dim, V vocabulary.
"""

import gc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from openelm_mlx.bench_shared import OURS, STOCK, Bench, Case, Contender, speed_or_memory
from openelm_mlx.losses import fused_cross_entropy

CCE = "mlx-cce"
_ROWS, _LENGTH = 4, 512
_EQUAL = 1e-4  # of the largest gradient

# (N, D) hidden states, (V, D) matrix, (N,) targets -> the summed loss
Loss = Callable[[mx.array, mx.array, mx.array], mx.array]


def loss_cases() -> dict[str, Case]:
    """The cases by name; in ``full`` ones the head's matrix trains, too."""
    return {
        "loss-memory": _case(trains=False, memory=True),
        "loss-speed": _case(trains=False, memory=False),
        "loss-full-memory": _case(trains=True, memory=True),
        "loss-full-speed": _case(trains=True, memory=False),
    }


def _case(*, trains: bool, memory: bool) -> Case:
    def prepare(bench: Bench) -> dict[str, Contender]:
        losses = {OURS: _ours(trains)}
        if bench.against:
            losses |= {STOCK: _all_logits, **_chunked(trains)}
        inputs, found = _inputs(bench), list[mx.array]()
        return {
            who: _contender(who, loss, inputs, found, trains=trains, memory=memory)
            for who, loss in losses.items()
        }

    what = "head and cross-entropy" + (", the head trains" if trains else "")
    return Case(
        title=f"{what}, {_ROWS} x {_LENGTH}, {'peak memory' if memory else 'speed'}",
        unit="GB" if memory else "tokens/s",
        prepare=prepare,
        higher_is_better=not memory,
        exact=memory,
    )


def _contender(
    who: str, loss: Loss, inputs: Sequence[mx.array], found: list[mx.array], **what: bool
) -> Contender:
    """Measures loss and gradients; ours, which come first, are kept in ``found``."""
    both = mx.value_and_grad(loss, argnums=(0, 1) if what["trains"] else (0,))
    made: list[mx.array] = []

    def step() -> None:
        made[:] = both(*inputs)[1]
        mx.eval(made)

    def measure() -> float:
        made.clear()
        gc.collect()
        mx.clear_cache()
        tokens, before = _ROWS * _LENGTH, mx.get_active_memory()
        number = speed_or_memory(step, tokens, memory=what["memory"], beside=before)
        if not found:
            found.extend(made)
        elif who != OURS:
            _require_equal(who, made, found)
        made.clear()
        return number

    return measure


def _inputs(bench: Bench) -> tuple[mx.array, mx.array, mx.array]:
    args = bench.model.args
    keys = mx.random.split(mx.random.key(0), 3)
    hidden = mx.random.normal((_ROWS * _LENGTH, args.model_dim), key=keys[0])
    matrix = mx.random.normal((args.vocab_size, args.model_dim), scale=0.02, key=keys[1])
    targets = mx.random.randint(0, args.vocab_size, (_ROWS * _LENGTH,), key=keys[2])
    mx.eval(hidden, matrix, targets)
    return hidden, matrix, targets


def _ours(trains: bool) -> Loss:
    def loss(hidden: mx.array, matrix: mx.array, targets: mx.array) -> mx.array:
        head = nn.Embedding(1, 1)
        head.weight = matrix
        return fused_cross_entropy(
            hidden, head, targets, mx.ones(targets.shape), head_trains=trains
        )

    return loss


def _all_logits(hidden: mx.array, matrix: mx.array, targets: mx.array) -> mx.array:
    """As ``mlx_lm.tuner.trainer.default_loss``."""
    return nn.losses.cross_entropy(hidden @ matrix.T, targets).astype(mx.float32).sum()


def _chunked(trains: bool) -> dict[str, Loss]:
    """unsloth_zoo's loss, read past the package's own imports, which want PyTorch; or none."""
    package = importlib.util.find_spec("unsloth_zoo")
    if package is None or package.origin is None:
        return {}
    folder = Path(package.origin).parent / "mlx" / "cce"
    name = "openelm_bench_mlx_cce"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None or not folder.is_dir():
            return {}
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    made: Any = sys.modules[name].make_chunked_cross_entropy_loss(weight_is_frozen=not trains)
    function = made[0]

    def loss(hidden: mx.array, matrix: mx.array, targets: mx.array) -> mx.array:
        summed: mx.array = function(hidden, matrix, targets).sum()
        return summed

    return {CCE: loss}


def _require_equal(who: str, theirs: Sequence[mx.array], ours: Sequence[mx.array]) -> None:
    """Both sides' gradients are the same up to rounding, or one is wrong."""
    for a, b in zip(ours, theirs, strict=True):
        apart: Any = (mx.abs(a - b).max() / mx.abs(a).max()).item()
        if apart > _EQUAL:
            raise ValueError(f"gradients of {who} differ from ours by {apart:.1e} of the largest")

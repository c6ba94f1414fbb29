"""Training cases of ``openelm bench``: peak memory and speed of one step, ours and mlx_lm's.

Both sides train the same random tokens with rank-8 LoRA on the four matrices of every layer, or all
weights with AdamW.
"""

import gc
import logging
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as mlx_optim

from openelm_mlx.batches import Batch
from openelm_mlx.bench_shared import STOCK, Bench, Case, Contender, fill_like, speed_or_memory
from openelm_mlx.bench_work import training_work, weight_bytes
from openelm_mlx.distributed import world
from openelm_mlx.fitting import quantization_of
from openelm_mlx.lora import AdapterArgs, add_adapters
from openelm_mlx.model import Model
from openelm_mlx.objectives import language_model_loss
from openelm_mlx.optim import OptimizerArgs
from openelm_mlx.training_step import TrainStep, set_grad_checkpoint

logger = logging.getLogger(__name__)

_MODULES = ("qkv_proj", "out_proj", "proj_1", "proj_2")
_RANK = 8
Step = Callable[[], None]


def training_cases() -> dict[str, Case]:
    """The cases by name."""
    return {
        "lora-memory": _case("LoRA", "GB", adapters=True, memory=True),
        "lora-speed": _case("LoRA", "tokens/s", adapters=True, memory=False),
        "full-memory": _case("full AdamW", "GB", adapters=False, memory=True),
        "full-speed": _case("full AdamW", "tokens/s", adapters=False, memory=False),
    }


def _case(what: str, unit: str, *, adapters: bool, memory: bool) -> Case:
    rows, length = (4, 512) if memory else (2, 256)

    def prepare(bench: Bench) -> dict[str, Contender]:
        if not adapters and quantization_of(bench.model.args):
            logger.warning("%s step left out: quantised weights cannot train", what)
            return {}

        def contender(make: Callable[[], tuple[Step, Step]]) -> Contender:
            def measure() -> float:
                step, end = make()
                try:
                    # updated weights share nothing with the bench's, which nobody else would keep
                    beside = 0 if adapters else weight_bytes(bench.model)
                    return _measure(step, rows * length, memory, beside)
                finally:
                    end()

            return measure

        contenders = {
            f"openelm, {mode}": contender(partial(_ours, bench, rows, length, adapters, mode))
            for mode in ("none", "scores", "attention", "layer")
        }
        if bench.against:
            contenders[STOCK] = contender(lambda: _stock(bench, rows, length, adapters, False))
            contenders[f"{STOCK} --grad-checkpoint"] = contender(
                lambda: _stock(bench, rows, length, adapters, True)
            )
        return contenders

    return Case(
        title=f"{what} step, {rows} x {length}, {'peak memory' if memory else 'speed'}",
        unit=unit,
        prepare=prepare,
        higher_is_better=not memory,
        exact=memory,
        work=None
        if memory
        else lambda bench: training_work(bench.model, length=length, adapters=adapters),
    )


def _measure(step: Step, tokens: int, memory: bool, beside: int) -> float:
    """Peak memory of the second step in GB less some bytes, or its tokens a second.

    The second, since optimizers make their state in the first.
    """
    gc.collect()  # the contender before: its model is part of a cycle
    mx.clear_cache()
    step()
    return speed_or_memory(step, tokens, memory=memory, beside=beside)


def _ours(
    bench: Bench, rows: int, length: int, adapters: bool, checkpoint: str
) -> tuple[Step, Step]:
    model = fill_like(Model(bench.model.args), bench.model)
    if adapters:
        add_adapters(model, AdapterArgs(rank=_RANK, scale=1.0, target_modules=_MODULES))
    model.train()
    set_grad_checkpoint(model, checkpoint)
    tokens, targets = _data(bench, rows, length)
    batch = Batch(tokens=tokens, targets=targets, mask=mx.ones((rows, length)))
    step = TrainStep(
        model,
        OptimizerArgs().build(),
        language_model_loss(),
        max_grad_norm=1.0,
        group=world(),
    )
    return lambda: _discard(step([batch], 1e-5)), lambda: None


def _stock(
    bench: Bench, rows: int, length: int, adapters: bool, checkpoint: bool
) -> tuple[Step, Step]:
    from mlx_lm.models import openelm
    from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
    from mlx_lm.tuner.utils import linear_to_lora_layers

    args = openelm.ModelArgs.from_dict(bench.model.args.to_dict())
    model = fill_like(openelm.Model(args), bench.model)
    block = type(model.layers[0])
    original = block.__call__
    if adapters:
        model.freeze()
        keys = ["attn.qkv_proj", "attn.out_proj", "ffn.proj_1", "ffn.proj_2"]
        config = {"rank": _RANK, "scale": 1.0, "dropout": 0.0, "keys": keys}
        linear_to_lora_layers(model, len(model.layers), config)
    if checkpoint:
        grad_checkpoint(model.layers[0])  # patches the class: undone at the end
    model.train()
    tokens, targets = _data(bench, rows, length)
    batch = mx.concatenate([tokens, targets[:, -1:]], axis=1)
    lengths = mx.array([[0, length]] * rows)
    optimizer = mlx_optim.AdamW(1e-5)
    gradients = nn.value_and_grad(model, default_loss)

    def step() -> None:
        (_, _), grads = gradients(model, batch, lengths)
        optimizer.update(model, grads)
        mx.eval(model.trainable_parameters(), optimizer.state)

    def end() -> None:
        block.__call__ = original

    return step, end


def _data(bench: Bench, rows: int, length: int) -> tuple[mx.array, mx.array]:
    ids = mx.array(bench.prompt(rows * (length + 1)), dtype=mx.int32).reshape(rows, length + 1)
    mx.eval(ids)
    return ids[:, :-1], ids[:, 1:]


def _discard(_: object) -> None:
    """A step's result is not wanted here."""

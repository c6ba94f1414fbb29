"""What the cases of ``openelm bench`` share: the model, its stock twin, and how a case looks."""

import random
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from openelm_mlx.bench_work import Work
from openelm_mlx.cpu_weights import helps_here, prepare_for_generation
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import Tokenizer

Contender = Callable[[], float]
OURS, COMPILED, STOCK = "openelm", "openelm compiled", "mlx_lm"


@dataclass(kw_only=True)
class Bench:
    """What the cases share.

    Attributes:
        model: ours, in eval mode.
        name: of the model, for the report.
        against: whether mlx_lm is measured too.
        prompt_tokens: of the decoding cases.
        new_tokens: generated a run.
        trials: runs that count.
        tokenizer: of the model, where it has one.
        folder: room for files of the cases; see :meth:`make_folder`.
    """

    model: Model
    name: str
    against: bool
    prompt_tokens: int = 128
    new_tokens: int = 32
    trials: int = 3
    tokenizer: Tokenizer | None = None
    folder: Path | None = None
    _stock: Any = field(default=None, repr=False)

    @property
    def stock(self) -> Any:
        """mlx_lm's model with the same weights (shared, not copied)."""
        if self._stock is None:
            from mlx_lm.models import openelm

            stock = openelm.Model(openelm.ModelArgs.from_dict(self.model.args.to_dict()))
            self._stock = fill_like(stock, self.model)
            self._stock.eval()
        return self._stock

    def arranged(self) -> Model:
        """Our model as ``openelm generate`` prepares it; a copy of the weights on a CPU."""
        if not helps_here():
            return self.model
        twin: Model = fill_like(Model(self.model.args), self.model)
        twin.eval()
        prepare_for_generation(twin, tokens=self.prompt_tokens + self.new_tokens)
        return twin

    def make_folder(self) -> Path:
        """Make ``folder``, a temporary one that goes with this object."""
        self.folder = Path(tempfile.mkdtemp(prefix="openelm-bench-"))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        return self.folder

    def prompt(self, tokens: int, seed: int = 0) -> list[int]:
        """Random ids that no special token is among."""
        rng = random.Random(seed)
        return [rng.randrange(3, self.model.args.vocab_size) for _ in range(tokens)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One thing to measure.

    Attributes:
        title: for the table; may use ``{prompt}`` and ``{new}``.
        unit: of the numbers.
        prepare: Bench -> contenders by name.
        higher_is_better: False for times and counts.
        exact: a count, not a time: once is enough.
        reference: the contender that ratios are taken against.
        work: what one of the unit's tokens costs, where the numbers are tokens/s.
    """

    title: str
    unit: str
    prepare: Callable[[Bench], dict[str, Contender]]
    higher_is_better: bool = True
    exact: bool = False
    reference: str = STOCK
    work: Callable[[Bench], Work] | None = None

    def label(self, bench: Bench) -> str:
        """The title with this run's numbers."""
        return self.title.format(prompt=bench.prompt_tokens, new=bench.new_tokens)


def fill_like(empty: Any, model: Model) -> Any:
    """Give a fresh model of the same names the weights of another (shared), quantised as they are.

    Args:
        empty: ours or mlx_lm's, of the same architecture.
        model: where the weights are.

    Returns:
        ``empty``, filled.
    """
    settings = {
        path: {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        for path, module in model.named_modules()
        if hasattr(module, "bits")
    }
    if settings:
        nn.quantize(empty, class_predicate=lambda path, _: settings.get(path, False))
    weights: Any = tree_flatten(model.parameters())
    empty.load_weights(weights)
    return empty


def speed_or_memory(step: Callable[[], Any], tokens: int, *, memory: bool, beside: int) -> float:
    """Tokens a second of one step, or its peak memory in GB less some bytes that it finds there."""
    mx.reset_peak_memory()
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    return (mx.get_peak_memory() - beside) / 1e9 if memory else tokens / seconds


def beside(bench: Bench, ours: dict[str, Contender], stock: Contender) -> dict[str, Contender]:
    """Our contenders, and mlx_lm's where it is measured too."""
    return {**ours, STOCK: stock} if bench.against else ours

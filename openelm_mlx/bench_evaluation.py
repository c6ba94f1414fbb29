"""Cases of ``openelm bench`` that score multiple-choice items, as lm-eval's tasks ask for them.

Beside ``scoring`` stands mlx_lm's adapter ``MLXLM`` (needs lm-eval), which also computes a context
once for all its answers. Items are random token ids, so that no tokenizer plays a part.
"""

import contextlib
import io
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import mlx.core as mx

from openelm_mlx.bench_shared import OURS, STOCK, Bench, Case, Contender, beside
from openelm_mlx.scoring import log_likelihoods

logger = logging.getLogger(__name__)

ITEMS = 8  # more would share a prefix among more, in our favour


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How items look, in tokens.

    Attributes:
        shared: that all contexts begin with (few-shot examples).
        own: of each context after that.
        answers: of an item.
        answer: of an answer.
    """

    shared: int
    own: int
    answers: int = 4
    answer: int


SHAPES = {
    "evaluate-fewshot": Shape(shared=350, own=50, answer=6),
    "evaluate-letters": Shape(shared=350, own=50, answer=1),
    "evaluate-contexts": Shape(shared=0, own=400, answer=6),
    "evaluate-one-token": Shape(shared=0, own=60, answer=1),
}


def evaluation_cases() -> dict[str, Case]:
    """The cases by name."""
    return {name: _case(shape) for name, shape in SHAPES.items()}


def _case(shape: Shape) -> Case:
    shared = f"{shape.shared} shared + " if shape.shared else ""
    title = f"items, {shared}{shape.own} tokens, {shape.answers} x {shape.answer}"
    return Case(title=title, unit="items/s", prepare=_prepare(shape))


class IdTokenizer:
    """Texts are ids with spaces between them: what both sides score is the same."""

    bos_id, eos_id, source, chat_template = 1, 2, "ids", None

    def encode(self, text: str, *, bos: bool = True, add_special_tokens: bool = True) -> list[int]:
        """The ids, after BOS."""
        return [*([self.bos_id] if bos and add_special_tokens else ()), *map(int, text.split())]


@dataclass(frozen=True, slots=True)
class Request:
    """What lm-eval hands an adapter: a context and a continuation."""

    args: tuple[str, str]


def make_requests(shape: Shape, vocab_size: int, items: int = ITEMS) -> list[Request]:
    """Requests of random ids, the answers of an item one after the other."""
    rng = random.Random(0)

    def ids(count: int) -> str:
        return " ".join(str(rng.randrange(3, vocab_size)) for _ in range(count))

    start, requests = ids(shape.shared), []
    for _ in range(items):
        context = f"{start} {ids(shape.own)}".strip()
        requests += [Request((context, f" {ids(shape.answer)}")) for _ in range(shape.answers)]
    return requests


def stock_harness(model: Any, tokenizer: Any) -> Any:
    """mlx_lm's ``MLXLM`` on a model in memory, plain text without a chat template."""
    from lm_eval.api.model import LM
    from mlx_lm.evaluate import MLXLM

    base: Any = MLXLM

    class Stock(base):  # type: ignore[misc]  # lm-eval may not be there to be read
        def __init__(self) -> None:
            LM.__init__(self)
            self._model, self.tokenizer = model, tokenizer
            self._max_tokens, self._batch_size, self.use_chat_template = None, 8, False

    return Stock()


def _prepare(shape: Shape) -> Callable[[Bench], dict[str, Contender]]:
    def prepare(bench: Bench) -> dict[str, Contender]:
        requests = make_requests(shape, bench.model.args.vocab_size)
        encode = IdTokenizer().encode
        found: dict[str, list[float]] = {}

        def run(who: str, score: Callable[[], list[float]]) -> float:
            start = time.perf_counter()
            scores = score()
            seconds = time.perf_counter() - start
            if who not in found:
                found[who] = scores
                _tell_difference(list(found.values()), bench)
            return ITEMS / seconds

        def ours() -> list[float]:
            pairs = [(encode(c), encode(a, bos=False)) for c, a in (r.args for r in requests)]
            return [score.logprob for score in log_likelihoods(bench.model, pairs)]

        def stock() -> list[float]:
            with contextlib.redirect_stderr(io.StringIO()):  # its bar
                answers = stock_harness(bench.stock, IdTokenizer()).loglikelihood(requests)
            return [score for score, _ in answers]

        contenders: dict[str, Contender] = {OURS: lambda: run(OURS, ours)}
        if bench.against and find_spec("lm_eval") is None:
            logger.warning('mlx_lm evaluates with lm-eval only: pip install "openelm-mlx[eval]"')
            return contenders
        return beside(bench, contenders, lambda: run(STOCK, stock))

    return prepare


def _tell_difference(scores: Sequence[list[float]], bench: Bench) -> None:
    """Say how far the two sides are apart; in float32 more than rounding is a mistake."""
    if len(scores) < 2:
        return
    largest = max(abs(a - b) for a, b in zip(*scores, strict=True))
    logger.info("largest difference of %d scores: %.1e nats", len(scores[0]), largest)
    dtype = bench.model.transformer.norm.weight.dtype
    if dtype == mx.float32 and largest > 1e-4:
        raise ValueError(f"the two sides' scores differ by {largest:.1e} nats; one is wrong")

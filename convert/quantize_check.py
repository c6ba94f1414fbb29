"""What quantising did to a model: logits and perplexity before and after, on the same text.

Knows text and logits, not files of weights. A document is BOS and its tokens; every token after
BOS is scored once.
"""

import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from openelm_mlx.adapter_layers import dense_weight, is_embedding
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import Tokenizer

MAX_TOKENS = 16_384  # scored of a file: enough to see a loss, and minutes even on a CPU
_COMPARED = 512  # positions whose logits are kept for the comparison
_RANDOM_IDS = 64  # stand in for text where there is no tokenizer
BUILT_IN_TEXT = """\
The lighthouse keeper climbed the stairs every evening just before the sun went down. There were \
one hundred and twelve of them, and he had counted so often that his feet knew the number without \
his help. At the top he lit the lamp, wiped the glass, and wrote a line in the log: wind from the \
west, sea calm, two ships passing. Then he sat down with his tea and waited for the dark.

Bread needs only flour, water, salt and time. Mix the flour with most of the water and let it rest \
for half an hour before the salt goes in, because salt tightens the dough and the flour has to \
drink first. Fold it a few times, leave it in a warm place until it has doubled, shape it gently, \
and bake it in a very hot oven. When the loaf sounds hollow underneath, it is done.

A river is longer than any map of it. If you measure its bends with a ruler of one kilometre you \
get one answer, and with a ruler of ten metres you get a larger one, because the shorter ruler \
follows every small curve. Scientists who compare rivers therefore say not only how long each one \
is, but also how finely it was measured.

In 1905 a young clerk in a patent office published four papers that changed physics. One explained \
why light knocks electrons out of metal, one why pollen grains jitter in water, and the other two \
why time and length depend on how fast you move. None of his colleagues at the office noticed that \
anything unusual had happened.

"Did you lock the door?" she asked. He thought about it for a moment, then turned the car around. \
They had done this so many times that neither of them said another word until the house came into \
view. The door was locked, of course. It always was.
"""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Token ids to judge a model by.

    Attributes:
        documents: ids, BOS first, at most :data:`MAX_TOKENS` scored ones in all.
        name: what they are, for the report.
        is_text: false for random ids, whose perplexity would mean nothing.
    """

    documents: list[list[int]]
    name: str
    is_text: bool


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A model on a sample: logits of the first positions (L, V) and the mean loss in nats."""

    logits: mx.array
    nll: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Quality:
    """Two measurements compared; differences are absolute, of float32 logits."""

    text: str
    tokens: int
    mean_logit_error: float
    max_logit_error: float
    same_first_choice: float  # share of positions whose likeliest token is the same
    perplexity_before: float | None
    perplexity_after: float | None


def make_sample(data: str | Path | None, tokenizer: Tokenizer | None, vocab_size: int) -> Sample:
    """Token ids of a file, of the built-in text, or random ones where there is no tokenizer.

    Args:
        data: a ``.txt`` file, one document, or ``.jsonl`` with a ``text`` on each line.
        tokenizer: of the model.
        vocab_size: of the model.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file holds no text, or there is no tokenizer to read it with.
    """
    if tokenizer is None:
        if data is not None:
            raise ValueError("--data needs a tokenizer, and the folder has none")
        generator = random.Random(0)
        drawn = [generator.randrange(vocab_size) for _ in range(_RANDOM_IDS)]
        return Sample(documents=[drawn], name="random tokens", is_text=False)
    texts = [BUILT_IN_TEXT] if data is None else read_documents(Path(data).expanduser())
    documents: list[list[int]] = []
    left = MAX_TOKENS
    for text in texts:
        ids = tokenizer.encode(text)[: left + 1]
        if len(ids) > 1:
            documents.append(ids)
            left -= len(ids) - 1
        if left <= 0:
            break
    if not documents:
        raise ValueError(f"{data} holds no text to measure by")
    name = "the built-in text" if data is None else Path(data).name
    return Sample(documents=documents, name=name, is_text=True)


def read_documents(file: Path) -> Iterator[str]:
    """The texts of a ``.txt`` or ``.jsonl`` file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if a line is damaged; with its number.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist; give a .txt or .jsonl file")
    if file.suffix != ".jsonl":
        yield file.read_text(encoding="utf-8", errors="replace")
        return
    with file.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _text_of(line, f"{file}, line {number}")


def _text_of(line: str, place: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: not valid JSON: {error}") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'{place}: expected an object with a string under "text"')
    return text


class _Float32(nn.Module):
    """A matrix layer whose weight is unpacked to float32 at each use and not kept."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer = [layer]  # a list hides it from the parameters

    def __call__(self, x: mx.array) -> mx.array:
        """A lookup's rows or a projection, float32."""
        layer = self._layer[0]
        return dense_weight(layer)[x] if is_embedding(layer) else self.as_linear(x)

    def as_linear(self, x: mx.array) -> mx.array:
        """(..., I) -> (..., O)."""
        return x @ dense_weight(self._layer[0]).T


def in_float32(model: Model) -> Model:
    """The same model with its arithmetic in float32 and the weights it has.

    So rounding of 16-bit activations does not blur what quantising does; and on a CPU packed and
    16-bit products are 10 to 100 times slower. One matrix at a time is unpacked.
    """
    modules: Any = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    view = Model(model.args)
    for path, module in modules:
        if isinstance(module, nn.RMSNorm):
            norm = nn.RMSNorm(module.weight.size, eps=module.eps)
            norm.weight = module.weight.astype(mx.float32)
            view.update_modules(tree_unflatten([(path, norm)]))
        else:
            view.update_modules(tree_unflatten([(path, _Float32(module))]))
    view.eval()
    return view


def measure(model: Model, sample: Sample) -> Measurement:
    """Score every document, in windows of the model's context and in float32."""
    model = in_float32(model)
    window = model.args.max_context_length
    nll, tokens, kept = mx.array(0.0), 0, None
    for ids in sample.documents:
        for start in range(0, len(ids) - 1, window):
            piece = mx.array([ids[start : start + window + 1]])  # overlaps the next by one id
            logits = model(piece[:, :-1])  # (1, L, V)
            nll = nll + nn.losses.cross_entropy(logits, piece[:, 1:], reduction="sum")
            tokens += piece.shape[1] - 1
            if kept is None:
                kept = mx.contiguous(logits[0, :_COMPARED])
                mx.eval(kept)
            mx.eval(nll)
    assert kept is not None
    return Measurement(logits=kept, nll=float(nll) / tokens, tokens=tokens)


def compare(sample: Sample, before: Measurement, after: Measurement) -> Quality:
    """Hold the measurements of one sample against each other."""
    error = mx.abs(before.logits - after.logits)
    same = mx.argmax(before.logits, axis=-1) == mx.argmax(after.logits, axis=-1)
    numbers: Sequence[float] = mx.stack([error.mean(), error.max(), same.mean()]).tolist()  # type: ignore[assignment]
    return Quality(
        text=sample.name,
        tokens=before.tokens,
        mean_logit_error=numbers[0],
        max_logit_error=numbers[1],
        same_first_choice=numbers[2],
        perplexity_before=_perplexity(before.nll) if sample.is_text else None,
        perplexity_after=_perplexity(after.nll) if sample.is_text else None,
    )


def _perplexity(nll: float) -> float:
    return math.exp(nll) if nll < 700 else math.inf

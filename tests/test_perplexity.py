"""Perplexity of documents, against a NumPy forward pass of one document at a time."""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import golden_set
import numpy as np
import pytest
import reference
import tiny_tokenizer as tiny
from folder_makers import small_config, small_model
from slow_params import slow

from openelm_mlx.checkpoint import load
from openelm_mlx.model import Model
from openelm_mlx.perplexity import TextScore, pieces_of, score_pieces, windows_of
from openelm_mlx.stepwise_scoring import StepwiseScorer
from openelm_mlx.text_files import Document
from openelm_mlx.token_scoring import ModelScorer, TokenScores, Window
from openelm_mlx.tokenizer import Tokenizer

TRAINED = Path(__file__).parents[2] / "shared" / "data" / "tiny_openelm"
STORIES = Path(__file__).parents[2] / "shared" / "data" / "corpus" / "stories_valid.jsonl"


@pytest.fixture(scope="module")
def model() -> Model:
    return small_model()


@pytest.fixture(scope="module")
def docs() -> list[Document]:
    """37 documents of 1 to 9 sentences, one without text."""
    texts = tiny.sentences(200, seed=3)
    joined = [" ".join(texts[i * 5 : i * 5 + 1 + i % 9]) for i in range(36)]
    joined.insert(7, "")
    return [Document(text=text, source="x", number=i) for i, text in enumerate(joined)]


def numpy_logprobs(model: Model, ids: Sequence[int]) -> np.ndarray:
    """Of ``ids[1:]``, one forward pass over all, float64."""
    config: Any = small_config()
    logits = reference.forward(config, golden_set.numpy_weights(model), np.array([ids[:-1]]))[0]
    logits = logits.astype(np.float64)
    log_z = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return logits[np.arange(len(ids) - 1), ids[1:]] - log_z


def measured(
    model: Model,
    docs: list[Document],
    tokenizer: Tokenizer,
    *,
    batch_size: int = 4,
    length: int = 64,
    stride: int = 32,
) -> dict[str, Any]:
    scorer = ModelScorer(model)
    pieces = pieces_of(
        docs, tokenizer.encode, length=length, stride=stride, vocab_size=scorer.vocab_size
    )
    return score_pieces(scorer, pieces, TextScore(), batch_size=batch_size).result()


def test_perplexity_equals_a_direct_computation_in_numpy(
    model: Model, docs: list[Document], tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    tokenizer = tiny_tokenizer.tokenizer
    found = measured(model, docs, tokenizer, length=2048, stride=1024)
    rows = [tokenizer.encode(doc.text) for doc in docs]
    assert all(ids[0] == tokenizer.bos_id and ids[-1] != tokenizer.eos_id for ids in rows)
    nll = -sum(numpy_logprobs(model, ids).sum() for ids in rows if len(ids) > 1)
    tokens = sum(len(ids) - 1 for ids in rows)
    size = sum(len(doc.text.encode()) for doc in docs)
    assert (found["tokens"], found["documents"], found["bytes"]) == (tokens, 37, size)
    assert found["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nll / math.log(2) / size, rel=1e-5)


def test_sliding_windows_equal_a_direct_computation_window_by_window(
    model: Model, docs: list[Document], tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    tokenizer, length, stride = tiny_tokenizer.tokenizer, 40, 15
    found = measured(model, docs[2:5], tokenizer, length=length, stride=stride)
    nll, begins = 0.0, set()
    for ids in (tokenizer.encode(doc.text) for doc in docs[2:5]):
        direct: dict[int, np.ndarray] = {}
        for target in range(1, len(ids)):  # the first window whose inputs reach that far
            begin = 0 if target <= length else -(-(target - length) // stride) * stride
            if begin not in direct:
                direct[begin] = numpy_logprobs(model, ids[begin : begin + length + 1])
            nll -= float(direct[begin][target - begin - 1])
        begins |= set(direct)
    assert len(begins) > 2
    assert found["nll"] == pytest.approx(nll, rel=1e-5)


@pytest.mark.parametrize("batch_size", [3, *slow(1, 64)])
@pytest.mark.slow
def test_batch_size_and_padding_do_not_change_the_result(
    model: Model, docs: list[Document], tiny_tokenizer: tiny.TinyTokenizer, batch_size: int
) -> None:
    first = measured(model, docs, tiny_tokenizer.tokenizer)
    other = measured(model, docs, tiny_tokenizer.tokenizer, batch_size=batch_size)
    for key in ("perplexity", "bits_per_byte"):
        assert other[key] == pytest.approx(first[key], rel=1e-5)
    for key in ("tokens", "token_accuracy", "bytes", "documents", "windows"):
        assert other[key] == first[key]


@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3), (8, 1), (100, 50), (1, 1)])
def test_windows_score_every_token_once_with_enough_context(length: int, stride: int) -> None:
    for count in range(1, 40):
        ids = list(range(count))
        scored = []
        for window in windows_of(ids, length=length, stride=stride):
            assert len(window.ids) - 1 <= length
            targets = window.ids[window.first + 1 :]
            scored += targets
            if window.ids[0] != 0:
                assert window.first >= length - stride
            assert window.scored == len(targets) > 0
        assert scored == ids[1:]


def test_token_accuracy_counts_first_choices(
    model: Model, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    scorer = ModelScorer(model)
    ids = scorer.greedy([1, 17, 260], 20)
    own = scorer.score([Window(ids=[1, 17, 260, *ids], first=2)])[0]
    assert own.right == [True] * 20  # the model's own continuation
    other = [(i + 1) % 320 for i in ids]
    assert scorer.score([Window(ids=[1, 17, 260, other[0]], first=2)])[0].right == [False]


class _Feeder:
    """Fed by whole forward passes of the model, without a cache."""

    def __init__(self, model: Model) -> None:
        self.model, self.ids = model, list[int]()

    def reset(self) -> None:
        self.ids = []

    def feed(self, ids: Sequence[int]) -> np.ndarray:
        return self.feed_all(ids)[-1]

    def feed_all(self, ids: Sequence[int]) -> np.ndarray:
        self.ids += ids
        config: Any = small_config()
        logits = reference.forward(
            config, golden_set.numpy_weights(self.model), np.array([self.ids])
        )
        return logits[0, -len(ids) :]


@pytest.mark.parametrize("every_row", [True, *slow(False)])
def test_a_model_that_is_fed_step_by_step_gets_the_same_scores(
    model: Model, every_row: bool
) -> None:
    windows = [
        Window(ids=[1, 17, 260, 3, 300, 45], first=2),
        Window(ids=[1, *range(10, 90)]),
        Window(ids=[5, 6]),
    ]
    stepwise = StepwiseScorer(_Feeder(model), context=100, every_row=every_row)
    assert stepwise.vocab_size == 320
    for mine, theirs in zip(
        ModelScorer(model).score(windows), stepwise.score(windows), strict=True
    ):
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
        assert mine.right == theirs.right
    assert stepwise.greedy([1, 17, 260], 12) == ModelScorer(model).greedy([1, 17, 260], 12)
    assert len(stepwise.greedy([1] * 98, 12)) == 3  # the context is full


class _Interrupted(Exception):
    pass


@pytest.mark.parametrize("stop_after", [16, *slow(3, 17)])  # a chunk is 16 batches
def test_an_interrupted_scoring_ends_bit_equal(
    model: Model, docs: list[Document], tiny_tokenizer: tiny.TinyTokenizer, stop_after: int
) -> None:
    scorer = ModelScorer(model)

    def pieces() -> Any:
        encode = tiny_tokenizer.tokenizer.encode
        return pieces_of(docs[2:8], encode, length=24, stride=20, vocab_size=scorer.vocab_size)

    whole = score_pieces(scorer, pieces(), TextScore(), batch_size=2).result()
    score, batches = TextScore(), []

    def after_batch(size: int) -> None:
        batches.append(size)
        if len(batches) == stop_after:
            raise _Interrupted

    with pytest.raises(_Interrupted):
        score_pieces(scorer, pieces(), score, batch_size=2, after_batch=after_batch)
    kept = TextScore(**score.state_dict())
    calls = _Counted(scorer)
    resumed = score_pieces(calls, pieces(), kept, batch_size=2).result()
    clock = {"seconds", "tokens_per_second"}
    assert {k: v for k, v in resumed.items() if k not in clock} == {
        k: v for k, v in whole.items() if k not in clock
    }
    assert 2 * stop_after < whole["windows"]
    assert calls.windows == whole["windows"] - 2 * stop_after  # nothing scored twice


class _Counted:
    def __init__(self, scorer: ModelScorer) -> None:
        self._scorer, self.windows = scorer, 0
        self.context, self.vocab_size = scorer.context, scorer.vocab_size

    def score(self, windows: Sequence[Window]) -> list[TokenScores]:
        self.windows += len(windows)
        return self._scorer.score(windows)

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        return self._scorer.greedy(prompt, max_tokens)

    def close(self) -> None:
        self._scorer.close()


class _Uniform:
    """Every token as likely as any other of 320; remembers the shapes it was asked for."""

    context, vocab_size = 2048, 320

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []

    def score(self, windows: Sequence[Window]) -> list[TokenScores]:
        self.shapes.append((len(windows), max(len(window.ids) for window in windows)))
        nats = -math.log(320)
        return [TokenScores(logprobs=[nats] * w.scored, right=[False] * w.scored) for w in windows]

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        raise NotImplementedError

    def close(self) -> None:
        pass


def test_long_windows_are_scored_few_at_a_time_and_short_ones_together() -> None:
    texts = [Document(text="x", source="x", number=i) for i in range(90)]
    lengths = iter([1500, 30, 2500] * 30)
    scorer = _Uniform()

    def encode(_: str) -> list[int]:
        return [1] * next(lengths)

    pieces = pieces_of(texts, encode, length=2048, stride=2048, vocab_size=320)
    found = score_pieces(scorer, pieces, TextScore(), batch_size=8).result()
    assert found["perplexity"] == pytest.approx(320)
    assert found["tokens"] == 30 * (1499 + 29 + 2499)
    assert max(rows * length for rows, length in scorer.shapes) <= 8192
    assert (8, 30) in scorer.shapes


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_log_probability_that_is_not_finite_stops_the_scoring(value: float) -> None:
    class Broken(_Uniform):
        def score(self, windows: Sequence[Window]) -> list[TokenScores]:
            return [TokenScores(logprobs=[value], right=[False]) for _ in windows]

    docs = [Document(text="x", source="x", number=1)]
    pieces = pieces_of(docs, lambda _: [1, 5], length=8, stride=8, vocab_size=320)
    with pytest.raises(ValueError, match=r"not finite.*--float32"):
        score_pieces(Broken(), pieces, TextScore(), batch_size=8)


def test_text_without_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="no token to score"):
        TextScore(documents=3).result()


def test_a_tokenizer_of_another_model_is_refused(docs: list[Document]) -> None:
    pieces = pieces_of(docs, lambda _: [1, 500], length=8, stride=8, vocab_size=320)
    with pytest.raises(ValueError, match=r"x:0: token 500 is none of the model's 320"):
        next(iter(pieces))


@pytest.fixture(scope="module")
def trained() -> tuple[Model, Tokenizer]:
    if not TRAINED.is_dir():
        pytest.skip("the trained tiny model lies beside the repository only")
    model, tokenizer = load(TRAINED, need_tokenizer=True)
    assert tokenizer is not None
    return model, tokenizer


@pytest.mark.slow
def test_a_trained_model_beats_chance_and_equals_a_direct_computation(
    trained: tuple[Model, Tokenizer],
) -> None:
    model, tokenizer = trained
    text = STORIES.read_text()[: 1 << 16]
    docs = [
        Document(text=line[40:700], source="stories", number=i)
        for i, line in enumerate(text.splitlines()[:6])
    ]
    found = measured(model, docs, tokenizer, length=2048, stride=2048)
    config = golden_set.read_json(TRAINED / "config.json")
    weights = golden_set.numpy_weights(model)
    nll, tokens = 0.0, 0
    for ids in (tokenizer.encode(doc.text) for doc in docs):
        logits = reference.forward(config, weights, np.array([ids[:-1]]))[0].astype(np.float64)
        log_z = np.log(np.exp(logits).sum(-1))
        nll += float((log_z - logits[np.arange(len(ids) - 1), ids[1:]]).sum())
        tokens += len(ids) - 1
    assert found["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert found["perplexity"] < 2048 / 4  # chance is the vocabulary
    assert found["token_accuracy"] > 0.05


@pytest.mark.slow
def test_a_trained_model_finds_the_true_next_word_more_often_than_chance(
    trained: tuple[Model, Tokenizer],
) -> None:
    """Four endings an item: the text's own next word, and the next words of three other items."""
    model, tokenizer = trained
    words = STORIES.read_text()[:60000].split()
    spots = range(200, 5000, 90)
    scorer = ModelScorer(model)
    contexts = [" ".join(words[i - 24 : i]) for i in spots]
    endings = [words[i] for i in spots]
    right = 0
    for n, context in enumerate(contexts):
        choices = [endings[(n + shift) % len(endings)] for shift in (0, 17, 31, 53)]
        ids = [tokenizer.encode(f"{context} {choice}") for choice in choices]
        shared = len(tokenizer.encode(context))
        scores = scorer.score([Window(ids=row, first=shared - 1) for row in ids])
        means = [sum(s.logprobs) / len(s.logprobs) for s in scores]
        right += means.index(max(means)) == 0
    share = right / len(contexts)
    assert share > 0.25 + 3 * math.sqrt(0.25 * 0.75 / len(contexts)), share


def test_pieces_share_the_bytes_of_a_document(tiny_tokenizer: tiny.TinyTokenizer) -> None:
    text = "wölf " * 50
    doc = Document(text=text, source="x", number=1)
    pieces = list(
        pieces_of([doc], tiny_tokenizer.tokenizer.encode, length=16, stride=7, vocab_size=320)
    )
    assert len(pieces) > 5
    assert sum(piece.bytes for piece in pieces) == len(text.encode())
    assert [piece.documents for piece in pieces] == [1, *[0] * (len(pieces) - 1)]
    starts = [piece.window.ids[0] for piece in pieces if piece.window]
    assert all(a != b or a != 1 for a, b in pairwise(starts))  # BOS begins the first one only

"""The lm-eval adapter: one BOS, lm-eval's boundaries, rolling windows, generation."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
import tiny_tokenizer as tiny

from openelm_mlx.checkpoint import load
from openelm_mlx.commonsense import encode_pair
from openelm_mlx.generate import generate
from openelm_mlx.lm_harness import harness_class
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import Tokenizer

pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")


class Ask(NamedTuple):
    """As lm-eval's ``Instance``: what is asked of the adapter."""

    args: tuple[Any, ...]


@pytest.fixture(scope="module")
def model(complete_dir: Path) -> Model:
    return load(complete_dir)[0]


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: tiny.TinyTokenizer) -> Tokenizer:
    return tiny_tokenizer.tokenizer


@pytest.fixture(scope="module")
def harness(model: Model, tokenizer: Tokenizer) -> Any:
    return harness_class()(model, tokenizer, batch_size=4)


def logprobs(model: Model, ids: list[int]) -> list[float]:
    """Of each id after the first, by a plain forward pass."""
    if len(ids) < 2:
        return []
    logits = np.array(model(mx.array([ids[:-1]]))[0].astype(mx.float32), np.float64)
    log_z = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    picked: list[float] = (logits[np.arange(len(ids) - 1), ids[1:]] - log_z).tolist()
    return picked


def test_it_is_a_template_of_lm_evals(harness: Any) -> None:
    from lm_eval.api.model import TemplateLM

    assert isinstance(harness, TemplateLM)


@pytest.mark.parametrize("text", ["the king", "<s>the king", "<s> the king", " the king", ""])
def test_exactly_one_bos_stands_before_every_text(
    harness: Any, tokenizer: Tokenizer, text: str
) -> None:
    ids = harness.tok_encode(text)
    assert ids[0] == tokenizer.bos_id
    assert ids.count(tokenizer.bos_id) == 1
    assert tokenizer.bos_id not in harness.tok_encode("the king", add_special_tokens=False)
    assert harness.prefix_token_id == tokenizer.bos_id
    assert harness.eot_token_id == tokenizer.eos_id


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("the king", " was old"),
        ("the king ", "was old"),  # the space goes to the continuation
        ("the king\n\n  ", "was old"),
        ("the king:", "was old"),
        ("the ki", "ng was"),  # a word is cut: the context's own length decides
        ("what is", "."),
        ("   ", "the king"),
        ("ü", "é €"),
    ],
)
def test_context_and_continuation_are_cut_as_by_lm_eval(
    harness: Any, tokenizer: Tokenizer, model: Model, context: str, continuation: str
) -> None:
    head, tail = harness._encode_pair(context, continuation)
    assert (head, tail) == encode_pair(tokenizer, context, continuation)
    moved = context[len(context.rstrip()) :] + continuation
    assert head == tokenizer.encode(context.rstrip())
    whole = tokenizer.encode(context.rstrip() + moved)
    assert tail == whole[len(head) :]
    ((score, _),) = harness.loglikelihood([Ask((context, continuation))])
    expected = math.fsum(logprobs(model, [*head, *tail])[len(head) - 1 :])
    assert score == pytest.approx(expected, abs=1e-5)


def test_without_a_context_bos_is_the_context(
    harness: Any, model: Model, tokenizer: Tokenizer
) -> None:
    ((score, _),) = harness.loglikelihood([Ask(("", "the king was old"))])
    expected = math.fsum(logprobs(model, tokenizer.encode("the king was old")))
    assert score == pytest.approx(expected, abs=1e-5)


def test_scores_come_in_the_order_of_the_requests_and_greedy_is_told(
    harness: Any, model: Model, tokenizer: Tokenizer
) -> None:
    contexts = tiny.sentences(5, seed=3)
    asks = [Ask((context, ending)) for ending in (" the", " old") for context in contexts]
    found = harness.loglikelihood(asks)
    for ask, (score, _) in zip(asks, found, strict=True):
        assert score == pytest.approx(harness.loglikelihood([ask])[0][0], abs=1e-5)
    context = contexts[0]
    ids = tokenizer.encode(context)
    best = int(mx.argmax(model(mx.array([ids]))[0, -1]).item())
    ((_, greedy),) = harness._loglikelihood_tokens([((context, "x"), ids, [best])])
    ((_, other),) = harness._loglikelihood_tokens([((context, "x"), ids, [(best + 1) % 320])])
    assert (greedy, other) == (True, False)


def test_rolling_scores_every_token_once_after_one_bos(
    harness: Any, model: Model, tokenizer: Tokenizer
) -> None:
    texts = [*tiny.sentences(3, seed=5), "", " ".join(tiny.sentences(6, seed=6))]
    found = harness.loglikelihood_rolling([Ask((text,)) for text in texts])
    for text, score in zip(texts, found, strict=True):
        assert score == pytest.approx(math.fsum(logprobs(model, tokenizer.encode(text))), abs=5e-5)


def test_rolling_windows_are_lm_evals(model: Model, tokenizer: Tokenizer) -> None:
    """Windows of the context's length; the last one overlaps so that its context is full."""
    text = " ".join(tiny.sentences(6, seed=7))
    ids = tokenizer.encode(text, bos=False)
    size = 24
    assert len(ids) > 3 * size
    assert len(ids) % size
    bos = tokenizer.bos_id
    assert bos is not None
    expected = logprobs(model, [bos, *ids[:size]])
    done = size
    while done < len(ids):
        end = min(done + size, len(ids))
        window = ids[end - size - 1 : end]
        expected += logprobs(model, window)[size - (end - done) :]
        done = end
    short = harness_class()(model, tokenizer, max_length=size)
    (score,) = short.loglikelihood_rolling([Ask((text,))])
    assert len(expected) == len(ids)
    assert score == pytest.approx(math.fsum(expected), abs=1e-4)


@pytest.mark.slow  # batches are decoded by mlx_lm, which takes 2 s to import
def test_generation_stops_at_the_first_text_and_equals_generate(
    harness: Any, model: Model, tokenizer: Tokenizer
) -> None:
    contexts = tiny.sentences(3, seed=8)
    plain = [generate(model, tokenizer, context, max_tokens=12) for context in contexts]
    stop = plain[0][3:5]
    asks = [Ask((c, {"until": [stop, ""], "max_gen_toks": 12})) for c in contexts]
    asks.append(Ask((contexts[1], {"until": None, "max_gen_toks": 5, "do_sample": False})))
    found = harness.generate_until(asks)
    assert found[:3] == [text.split(stop)[0] for text in plain]
    assert found[3] == generate(model, tokenizer, contexts[1], max_tokens=5)


@pytest.mark.slow
def test_a_long_context_of_a_generation_keeps_bos_and_its_end(
    model: Model, tokenizer: Tokenizer
) -> None:
    short = harness_class()(model, tokenizer, max_length=40)
    text = " ".join(tiny.sentences(6, seed=9))
    (found,) = short.generate_until([Ask((text, {"until": ".", "max_gen_toks": 10}))])
    ids = [tokenizer.bos_id, *tokenizer.encode(text, bos=False)[-29:]]
    assert found == generate(model, tokenizer, ids, max_tokens=10, stop=["."])

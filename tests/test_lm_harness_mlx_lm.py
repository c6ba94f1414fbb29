"""Scores beside those of stock mlx_lm's evaluation, and a trained model on next words."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_tokenizer as tiny

from openelm_mlx.checkpoint import load
from openelm_mlx.lm_harness import harness_class
from openelm_mlx.scoring import log_likelihoods

pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")

DATA = Path(__file__).parent.parent.parent / "shared" / "data"


class Ask(NamedTuple):
    args: tuple[str, str]


def asks() -> Iterator[Ask]:
    """Sentences cut between words, after a space, at punctuation, within words; odd characters."""
    for number, sentence in enumerate(tiny.sentences(24, seed=12)):
        words = sentence.split()
        for cut in range(1, min(len(words), 4)):
            start, rest = " ".join(words[:cut]), " ".join(words[cut:])
            for ending in (rest, "the king.", "a"):
                yield Ask((start, " " + ending))
            if number % 4 == 0:
                yield Ask((start + " ", rest))  # the space stays in the context there
        yield Ask((sentence[:-3], sentence[-3:]))
        yield Ask((f"Question: {sentence}\nAnswer:", " ü é"))
    yield Ask(("the </s> king", " was old"))  # Transformers reads the end of text in it


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of lm-eval's and Transformers' imports
def test_scores_are_mlx_lms_where_the_ids_are_and_the_others_are_explained(
    complete_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlx_lm.evaluate import MLXLM

    stock = MLXLM(str(complete_dir), use_chat_template=False)
    model, tokenizer = load(complete_dir)
    ours: Any = harness_class()(model, tokenizer)
    requests = list(asks())
    theirs = stock.loglikelihood(requests)
    reasons: Counter[str] = Counter()
    for request, mine, other in zip(requests, ours.loglikelihood(requests), theirs, strict=True):
        context, continuation = request.args
        start = list(stock.tokenizer.encode(context))
        whole = list(stock.tokenizer.encode(context + continuation))
        if ours._encode_pair(context, continuation) == (start, whole[len(start) :]):
            assert mine[0] == pytest.approx(other[0], abs=1e-4)
            assert mine[1] == other[1]
            reasons["equal ids"] += 1
        elif context != context.rstrip():
            reasons["white space ends the context"] += 1
        elif "</s>" in context:
            reasons["a special token's text"] += 1
        else:
            reasons[f"unexplained: {request}"] += 1
    trailing = sum(context != context.rstrip() for context, _ in (r.args for r in requests))
    assert reasons == {
        "equal ids": len(requests) - trailing - 1,
        "white space ends the context": trailing,
        "a special token's text": 1,
    }


@pytest.mark.skipif(not (DATA / "tiny_openelm").is_dir(), reason="no trained model at hand")
def test_a_trained_model_beats_chance_on_next_words() -> None:
    """Which of four words comes next in unseen stories; the other three are from elsewhere."""
    model, tokenizer = load(DATA / "tiny_openelm")
    assert tokenizer is not None
    stories = (DATA / "corpus" / "stories_valid.jsonl").read_text(encoding="utf-8").splitlines()
    rng, requests = random.Random(0), []
    words = [json.loads(line)["text"].split() for line in stories]
    for number in range(100):
        text = words[number % len(words)]
        at = rng.randrange(20, len(text))
        context = tokenizer.encode(" ".join(text[at - 16 : at]))
        others = [rng.choice(words[rng.randrange(len(words))]) for _ in range(3)]
        for word in (text[at], *others):
            requests.append((context, tokenizer.encode(word, bos=False)))
    scores = [score.logprob for score in log_likelihoods(model, requests, batch_size=25)]
    right = sum(scores[i] >= max(scores[i : i + 4]) for i in range(0, len(scores), 4))
    assert right > 25 + 3 * 4.33  # chance, and three of its standard errors

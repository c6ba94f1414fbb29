"""Streamed text: equal to decoding all at once, append-only, stopped at the right place."""

import itertools
import random
from collections.abc import Sequence

import pytest
import tiny_tokenizer as tiny
from sentencepiece import SentencePieceProcessor

from openelm_mlx.detokenizer import WindowDetokenizer
from openelm_mlx.tokenizer import StopMatcher, Tokenizer

TEXTS = [
    "The king went home.",
    "   three spaces, and  two ",
    "😀😀 and 👩‍👩‍👧‍👦",
    "e\u0301x\u0301\u0302 combining",
    "日本語とЖ",
    "\n\n\ttabs\n",
    "a\ufffdb\ufffd",
    "",
]
BYTE = 3  # the tiny tokenizer's piece <0x00>


@pytest.fixture(scope="module")
def kinds(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: tiny.TinyTokenizer
) -> dict[str, Tokenizer]:
    """SentencePiece, the same model as a tokenizer.json, and a byte-level one."""
    folder = tmp_path_factory.mktemp("kinds")
    tiny_tokenizer.tokenizer.save(folder / "fast")
    return {
        "sentencepiece": tiny_tokenizer.tokenizer,
        "byte fallback": Tokenizer.from_path(folder / "fast" / "tokenizer.json"),
        "byte level": Tokenizer.from_path(tiny.train_byte_level(folder / "bytes")),
    }


@pytest.fixture(params=["sentencepiece", "byte fallback", "byte level"])
def tokenizer(request: pytest.FixtureRequest, kinds: dict[str, Tokenizer]) -> Tokenizer:
    return kinds[request.param]


def stream(tokenizer: Tokenizer, ids: Sequence[int], context: Sequence[int] = ()) -> str:
    detokenizer = tokenizer.detokenizer(context)
    pieces = [*map(detokenizer.add_token, ids), detokenizer.finish()]
    assert detokenizer.text == "".join(pieces)
    return detokenizer.text


@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_text(text: str, tokenizer: Tokenizer) -> None:
    assert stream(tokenizer, tokenizer.encode(text, eos=True)) == text


@pytest.mark.parametrize("text", TEXTS)
def test_a_sequence_cut_anywhere_streams_as_it_decodes(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text, bos=False)
    for start, end in itertools.combinations(range(len(ids) + 1), 2):
        assert stream(tokenizer, ids[start:end]) == tokenizer.decode(ids[start:end])


def test_any_ids_stream_as_they_decode(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    space = tokenizer.encode(" ", bos=False)[0]
    for _ in range(150):
        some = [space, 0, 1, 2, *rng.sample(range(tokenizer.vocab_size + 3), 6)]
        ids = rng.choices(some, k=rng.randint(1, 90))
        assert stream(tokenizer, ids) == tokenizer.decode(ids)


def test_sentencepiece_judges_the_decoding_of_any_ids(tiny_tokenizer: tiny.TinyTokenizer) -> None:
    judge = SentencePieceProcessor(model_file=str(tiny_tokenizer.path))
    rng = random.Random(2)
    for _ in range(2000):
        high = rng.choice([12, BYTE + 256, tiny.VOCAB_SIZE])
        ids = [rng.choice([rng.randrange(high), 0xF0 + BYTE, 0x9F + BYTE]) for _ in range(8)]
        assert stream(tiny_tokenizer.tokenizer, ids) == judge.decode(ids)


def test_bytes_are_held_until_they_are_a_character(tokenizer: Tokenizer) -> None:
    # mlx-vlm#1771, vllm-mlx#109: emoji cut over byte tokens came out as U+FFFD
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.add_token(i) for i in tokenizer.encode("a😀", bos=False)]
    assert [piece for piece in pieces if piece] == ["a", "😀"]
    assert pieces[-1] == "😀"


def test_bytes_cut_off_at_the_end_are_replaced(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀", bos=False)[:-1]
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.add_token, ids)) == "a"
    assert set(detokenizer.finish()) == {"\ufffd"}
    assert detokenizer.finish() == ""


def test_bytes_that_never_fit_do_not_pile_up(tokenizer: Tokenizer) -> None:
    last = tokenizer.encode("😀", bos=False)[-1]  # a byte that may not start a character
    detokenizer = tokenizer.detokenizer()
    shown = "".join(detokenizer.add_token(last) for _ in range(300))
    assert len(shown) >= 290
    assert shown + detokenizer.finish() == tokenizer.decode([last] * 300)


def test_the_first_space_is_dropped_once_and_kept_after_a_context(
    kinds: dict[str, Tokenizer],
) -> None:
    # mlx-lm#1754: the stream doubled or lost SentencePiece's leading space
    for kind in ("sentencepiece", "byte fallback"):
        tokenizer = kinds[kind]
        prompt, answer = tokenizer.encode("once upon"), tokenizer.encode("a time", bos=False)
        assert stream(tokenizer, answer) == "a time"
        assert stream(tokenizer, answer, context=prompt) == " a time"
        assert stream(tokenizer, answer, context=prompt[:1]) == "a time"  # only BOS went before


def test_a_window_decodes_few_tokens_however_long_the_text(kinds: dict[str, Tokenizer]) -> None:
    tokenizer, longest = kinds["byte level"], 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return tokenizer.decode(ids)

    detokenizer = WindowDetokenizer(decode)
    text = "The king went to the forest. " * 40
    for index in tokenizer.encode(text):
        detokenizer.add_token(index)
    assert detokenizer.text == text
    assert longest < 12


def test_a_negative_id_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="start at 0, got -1"):
        tokenizer.detokenizer().add_token(-1)


def stopped(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool]:
    """The text shown of a stream, and whether it was stopped."""
    matcher, shown = StopMatcher(stops), ""
    for piece in pieces:
        text, stop = matcher.feed(piece)
        shown += text
        if stop:
            return shown, True
    return shown + matcher.flush(), False


def first_completed(stops: Sequence[str], text: str) -> tuple[str, bool]:
    """The judge: read a character at a time until some stop string has just been completed."""
    for end in range(len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


def test_a_stop_string_is_found_across_token_borders() -> None:
    assert stopped(["DEF"], ["ABC", "D", "EFG"]) == ("ABC", True)  # mlx-examples#524
    assert stopped(["DEF"], ["ABC", "D", "E"]) == ("ABCDE", False)


def test_the_start_of_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.feed("yes\nUs") == ("yes", False)
    assert matcher.feed("ual") == ("\nUsual", False)
    assert matcher.feed(" \nUser: no") == (" ", True)
    assert matcher.stopped
    assert matcher.feed("more") == ("", True)
    assert matcher.flush() == ""


def test_the_way_text_is_cut_does_not_change_where_it_stops() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        text = "".join(rng.choices("abc", k=rng.randint(0, 12)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=3))
        pieces = [text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)])]
        assert stopped(stops, pieces) == first_completed(stops, text)


def test_one_stop_string_may_be_given_bare_but_not_empty() -> None:
    assert stopped(("###",), ["a###b"]) == ("a", True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopMatcher(["x", ""])


def test_a_stop_string_that_is_no_piece_never_becomes_the_unknown_id(
    tiny_tokenizer: tiny.TinyTokenizer,
) -> None:
    tokenizer = tiny_tokenizer.tokenizer
    detokenizer, matcher, shown = tokenizer.detokenizer(), StopMatcher(["king saw"]), ""
    for index in [*tokenizer.encode("the old"), 0, *tokenizer.encode("king saw you", bos=False)]:
        text, stop = matcher.feed(detokenizer.add_token(index))
        shown += text
        if stop:
            break
    assert shown == "the old \u2047  "  # id 0 passed, the text stopped it
    assert matcher.stopped

"""Perplexity, bits per byte and token accuracy of documents, by windows that slide over each.

Each document is BOS and its tokens; the end of text is not scored, every token after BOS is scored
once. Sums are taken in the order of the text in float64, so that neither batches nor an
interruption change them. Knows scorers, not what runs behind them.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any

from openelm_mlx.text_files import Document
from openelm_mlx.token_scoring import TokenScorer, TokenScores, Window

_BATCH_TOKENS = 8192  # of a forward pass at most: a CPU holds all attention scores at once
_BATCHES = 16  # a chunk: so many batches are sorted by length, so that little is padded


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One window of a document, or None for a document without tokens.

    Attributes:
        window: to be scored.
        documents: 1 for the first piece of a document, else 0.
        bytes: this piece's share of the document's UTF-8 bytes.
    """

    window: Window | None
    documents: int
    bytes: int


@dataclass(kw_only=True)
class TextScore:
    """Sums over the text scored so far.

    Attributes:
        nll: nats.
        tokens: scored.
        right: of them, how many were the model's first choice.
        bytes: UTF-8 bytes of the text.
        documents: begun.
        windows: scored.
        seconds: that the model took.
        chunks: chunks that are whole.
        pending: of the chunk under way, first piece of a batch -> nll, tokens, right of each.
    """

    nll: float = 0.0
    tokens: int = 0
    right: int = 0
    bytes: int = 0
    documents: int = 0
    windows: int = 0
    seconds: float = 0.0
    chunks: int = 0
    pending: dict[str, list[list[float]]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready; ``TextScore(**state)`` continues."""
        return asdict(self)

    def result(self) -> dict[str, Any]:
        """What the sums say.

        Raises:
            ValueError: if no token was scored.
        """
        if not self.tokens:
            raise ValueError("the text holds no token to score; give files with text")
        mean = self.nll / self.tokens
        return {
            "perplexity": math.exp(min(mean, 700.0)),
            "bits_per_byte": self.nll / math.log(2) / self.bytes,
            "token_accuracy": self.right / self.tokens,
            "nll": self.nll,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "documents": self.documents,
            "windows": self.windows,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds if self.seconds else 0.0,
        }


def windows_of(ids: Sequence[int], *, length: int, stride: int) -> Iterator[Window]:
    """Windows that score each token after the first one once.

    Args:
        ids: of one document, BOS first.
        length: inputs of a window at most.
        stride: how far a window moves on, at most ``length``; every token but those of the first
            window has at least ``length - stride`` tokens of context.
    """
    predictions, scored = len(ids) - 1, 0
    for begin in range(0, predictions, stride):
        end = min(begin + length, predictions)
        yield Window(ids=ids[begin : end + 1], first=scored - begin)
        scored = end
        if end == predictions:
            return


def pieces_of(
    documents: Iterable[Document],
    encode: Callable[[str], list[int]],
    *,
    length: int,
    stride: int,
    vocab_size: int,
) -> Iterator[Piece]:
    """Documents as pieces, in order.

    Args:
        documents: each scored on its own.
        encode: text -> ids with BOS.
        length: inputs of a window.
        stride: see :func:`windows_of`.
        vocab_size: of the model.

    Raises:
        ValueError: naming the document, if a token is none of the model's.
    """
    for document in documents:
        ids = encode(document.text)
        if max(ids, default=0) >= vocab_size:
            raise ValueError(
                f"{document.name}: token {max(ids)} is none of the model's {vocab_size}; this "
                "tokenizer belongs to another model, give --tokenizer"
            )
        size = len(document.text.encode())
        windows: list[Window | None] = list(windows_of(ids, length=length, stride=stride)) or [None]
        for i, window in enumerate(windows):
            share = size * (i + 1) // len(windows) - size * i // len(windows)
            yield Piece(window=window, documents=int(i == 0), bytes=share)


def score_pieces(
    scorer: TokenScorer,
    pieces: Iterable[Piece],
    score: TextScore,
    *,
    batch_size: int,
    after_batch: Callable[[int], None] = lambda _: None,
) -> TextScore:
    """Score text, or what is left of it.

    Args:
        scorer: of the model.
        pieces: from the beginning of the text, also when continuing.
        score: where to begin: new, or of an interrupted call with the same pieces and batch size,
            which then ends bit-equal to an uninterrupted one; added to in place.
        batch_size: windows a forward pass, fewer where they are long.
        after_batch: called after every batch with its bytes; ``score`` may be saved there.

    Returns:
        ``score``.

    Raises:
        ValueError: if a log-probability is not finite.
    """
    size = _BATCHES * batch_size
    rest = iter(pieces)
    for _ in islice(rest, score.chunks * size):
        pass
    while chunk := list(islice(rest, size)):
        _score_chunk(scorer, chunk, score, batch_size, after_batch)
    return score


def _score_chunk(
    scorer: TokenScorer,
    chunk: list[Piece],
    score: TextScore,
    batch_size: int,
    after_batch: Callable[[int], None],
) -> None:
    found: dict[int, list[float]] = {}
    for rows in _batches(chunk, batch_size):
        name = str(rows[0])
        if name not in score.pending:
            began = perf_counter()
            sums = _sums(scorer, [chunk[i].window for i in rows])
            score.seconds += perf_counter() - began
            _require_finite(sums)
            score.pending[name] = sums
            after_batch(sum(chunk[i].bytes for i in rows))
        found.update(zip(rows, score.pending[name], strict=True))
    for i, piece in enumerate(chunk):
        nll, tokens, right = found[i]
        score.nll += nll
        score.tokens += int(tokens)
        score.right += int(right)
        score.windows += piece.window is not None
        score.documents += piece.documents
        score.bytes += piece.bytes
    score.chunks, score.pending = score.chunks + 1, {}


def _batches(chunk: list[Piece], batch_size: int) -> Iterator[list[int]]:
    """Numbers of pieces that are scored together: alike in length, not too many tokens."""
    order = sorted(range(len(chunk)), key=lambda i: -_length(chunk[i]))
    while order:
        count = max(1, min(batch_size, _BATCH_TOKENS // max(1, _length(chunk[order[0]]))))
        yield order[:count]
        order = order[count:]


def _length(piece: Piece) -> int:
    return 0 if piece.window is None else len(piece.window.ids)


def _sums(scorer: TokenScorer, windows: Sequence[Window | None]) -> list[list[float]]:
    """Of each window: negative log-likelihood, tokens, and how many of them were right."""
    present = [window for window in windows if window is not None]
    scores = iter(scorer.score(present) if present else [])
    return [[0.0, 0, 0] if window is None else _sum(next(scores)) for window in windows]


def _require_finite(sums: Sequence[Sequence[float]]) -> None:
    if not all(math.isfinite(nll) for nll, _, _ in sums):
        raise ValueError(
            "the model gives log-probabilities that are not finite; if its weights are float16, "
            "try --float32 (the 3B needs more range than float16 has), else they are damaged"
        )


def _sum(score: TokenScores) -> list[float]:
    return [-math.fsum(score.logprobs), len(score.logprobs), sum(score.right)]

"""Texts -> token ids with BOS and EOS, filtered; checks that batches of every source share."""

from collections.abc import Iterator
from typing import Protocol

from openelm_mlx.text_filters import TextFilters


class TextTokenizer(Protocol):
    """What is needed of :class:`openelm_mlx.tokenizer.Tokenizer`."""

    bos_id: int | None
    eos_id: int | None
    pad_id: int

    def encode(self, text: str, *, bos: bool = True, eos: bool = False) -> list[int]:
        """Ids of a text."""


class Encoder:
    """Documents -> ids of their pieces, as CoreNet: literal "<s>" in a text stays text.

    Args:
        tokenizer: its BOS and EOS are added where it has them.
        filters: pieces that they drop are left out.
        bos: whether BOS comes first.
        eos: whether EOS comes last.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        filters: TextFilters,
        *,
        bos: bool = True,
        eos: bool = True,
    ) -> None:
        self.filters = filters
        self._tokenizer = tokenizer
        self._before = [tokenizer.bos_id] if bos and tokenizer.bos_id is not None else []
        self._after = [tokenizer.eos_id] if eos and tokenizer.eos_id is not None else []

    def encode(self, text: str) -> Iterator[list[int]]:
        """Ids of each piece that is kept; never empty."""
        for piece in self.filters.pieces(text):
            body = self._tokenizer.encode(piece, bos=False, eos=False)
            ids = [*self._before, *body, *self._after]
            if ids and len(ids) >= self.filters.min_tokens:
                yield ids


def check_rows(batch_size: int, max_seq_length: int, rank: int, world_size: int) -> None:
    """Check the sizes of a source of batches.

    Raises:
        ValueError: if one is impossible, or ranks cannot share a batch evenly.
    """
    if batch_size < 1 or max_seq_length < 1:
        raise ValueError(
            f"batch_size and max_seq_length must be 1 or more, got {batch_size} and "
            f"{max_seq_length}"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to {world_size - 1}, got {rank}")
    if batch_size % world_size:
        raise ValueError(
            f"batch_size {batch_size} counts rows over all ranks and must be a multiple of "
            f"their number, {world_size}"
        )


def nothing_left(filters: TextFilters) -> ValueError:
    """The error for data of which no document passes the filters."""
    return ValueError(
        f"no document passed the filters in a whole epoch: {filters}; lower min_characters or "
        "min_tokens, or give other data"
    )

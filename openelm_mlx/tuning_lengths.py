"""Samples that are longer than a row: cut, split, or left out where nothing to learn would be left.

Counts what it does, for one summary in place of a warning a sample.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Row = tuple[NDArray[np.int32], NDArray[np.bool_]]  # token ids, and which of them are learned


@dataclass(kw_only=True)
class Fitter:
    """Makes rows of at most ``max_seq_length`` + 1 tokens: as many inputs, and the last target.

    Attributes:
        max_seq_length: tokens that the model reads.
        bos_id: put before the pieces of a sample; None puts nothing there.
        split_long: cut long samples into pieces, so that each token is learned once.
        cut_left: take from the left of the prompt first, so that the answer stays.
    """

    max_seq_length: int
    bos_id: int | None
    split_long: bool = False
    cut_left: bool = False
    _cut: int = 0
    _cut_tokens: int = 0
    _prompts: int = 0
    _prompt_tokens: int = 0
    _split: int = 0
    _pieces: int = 0
    _skipped: int = 0

    def fit(self, tokens: NDArray[np.int32], mask: NDArray[np.bool_]) -> list[Row]:
        """The rows of one sample, each with something to learn.

        Args:
            tokens: (n,) ids, BOS first.
            mask: (n,), whether a token is learned.
        """
        if len(tokens) <= self.max_seq_length + 1:
            rows = [(tokens, mask)]
        elif self.split_long:
            rows = self._pieces_of(tokens, mask)
        else:
            rows = [self._shortened(tokens, mask)]
        kept = [row for row in rows if row[1].any()]
        self._skipped += not kept
        return kept

    def notes(self) -> list[str]:
        """What was done, one note a kind, none for what did not happen."""
        limit = f"max_seq_length {self.max_seq_length}"
        notes = []
        if self._cut:
            notes.append(
                f"{self._cut} samples are longer than {limit}: {self._cut_tokens} tokens cut off "
                "(--split-long keeps them)"
            )
        if self._prompts:
            notes.append(
                f"{self._prompts} prompts cut on the left, {self._prompt_tokens} tokens lost"
            )
        if self._split:
            notes.append(
                f"{self._split} samples longer than {limit} split into {self._pieces} pieces"
            )
        if self._skipped:
            notes.append(
                f"{self._skipped} samples left out: nothing to learn within {limit} "
                "(--long-prompts cut shortens prompts)"
            )
        return notes

    def _shortened(self, tokens: NDArray[np.int32], mask: NDArray[np.bool_]) -> Row:
        over = len(tokens) - (self.max_seq_length + 1)
        if self.cut_left and mask.any() and (prompt := int(np.argmax(mask)) - 1) > 0:
            gone = min(over, prompt)  # behind the first token, which is BOS
            kept = np.r_[0, 1 + gone : len(tokens)]
            tokens, mask = tokens[kept], mask[kept]
            self._prompts += 1
            self._prompt_tokens += gone
            over -= gone
        if over:
            tokens, mask = tokens[:-over], mask[:-over]
            if mask.any():
                self._cut += 1
                self._cut_tokens += over
        return tokens, mask

    def _pieces_of(self, tokens: NDArray[np.int32], mask: NDArray[np.bool_]) -> list[Row]:
        """Rows that overlap by one token, or begin with BOS in its place."""
        size = self.max_seq_length
        rows = []
        for start in range(0, len(tokens) - 1, size):
            piece, learned = tokens[start : start + size + 1], mask[start : start + size + 1]
            if start:
                piece, learned = piece.copy(), learned.copy()
                piece[0] = piece[0] if self.bos_id is None else self.bos_id
                learned[0] = False
            rows.append((piece, learned))
        self._split += 1
        self._pieces += sum(bool(learned.any()) for _, learned in rows)
        return rows

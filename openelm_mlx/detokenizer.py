"""Text as it streams: token ids to append-only text, and stop strings matched in that text.

Knows nothing of models. What is emitted is never taken back: bytes that are not yet a character
and text that may be the start of a stop string are held until they are decided.
"""

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

_SPACE = "\u2581"  # SentencePiece writes a space as this block
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4  # bytes
_LONGEST_WINDOW = 64  # tokens; bounds the work where bytes never become characters
_CONTEXT_TOKENS = 8  # of the text before, enough to settle a leading space


class Detokenizer(ABC):
    """Turns one token id after another into text; the pieces joined equal ``decode(all ids)``."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        """All text emitted so far."""
        return "".join(self._parts)

    def add_token(self, token_id: int) -> str:
        """Take one id and return the new text, "" while a character is incomplete.

        Raises:
            ValueError: if ``token_id`` is negative.
        """
        if token_id < 0:
            raise ValueError(f"token ids start at 0, got {token_id}")
        return self._emit(self._push(token_id))

    def finish(self) -> str:
        """Return what was held back; bytes that never became a character turn into U+FFFD."""
        return self._emit(self._flush())

    def _emit(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text

    @abstractmethod
    def _push(self, token_id: int) -> str: ...

    @abstractmethod
    def _flush(self) -> str: ...


class PieceDetokenizer(Detokenizer):
    """SentencePiece's decoding, a piece at a time: constant work a token.

    Args:
        processor: the loaded SentencePiece model.
        strip_leading_space: whether the model puts a space before the text (``add_dummy_prefix``).
        skip_special: whether control pieces give no text.
        context: ids already shown; the text goes on after them, so its first space is kept.
    """

    def __init__(
        self,
        processor: "SentencePieceProcessor",
        *,
        strip_leading_space: bool = True,
        skip_special: bool = True,
        context: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self._processor = processor
        self._size = processor.get_piece_size()
        self._strip = strip_leading_space
        self._skip_special = skip_special
        self._at_start = True
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors=_ERRORS)
        for token_id in context:
            self._push(token_id)

    def _push(self, token_id: int) -> str:
        if token_id >= self._size:  # a padding row of the embedding, which has no piece
            return ""
        piece = self._processor.id_to_piece(token_id)
        if self._processor.is_byte(token_id):
            self._at_start = False
            return self._bytes.decode(bytes([int(piece[3:5], 16)]))
        return self._flush() + self._plain(token_id, piece)

    def _plain(self, token_id: int, piece: str) -> str:
        if self._processor.is_control(token_id):
            if self._skip_special:
                return ""
            self._at_start = True  # the text after it was encoded by itself
            return piece
        if self._processor.is_unknown(token_id):
            text = self._processor.decode([token_id])
        else:
            text = piece.replace(_SPACE, " ")
            if self._at_start and self._strip:
                text = text.removeprefix(" ")
        self._at_start = False
        return text

    def _flush(self) -> str:
        return self._bytes.decode(b"", final=True)


class WindowDetokenizer(Detokenizer):
    """Decoding by any whole-text decoder, each time of a window: what is new, after what was shown.

    Args:
        decode: ids -> text; undecodable bytes as U+FFFD.
        context: ids already shown; the text goes on after them, so its first space is kept.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], *, context: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self._decode = decode
        self._shown = list(context[-_CONTEXT_TOKENS:])  # gives the new tokens their surroundings
        self._new: list[int] = []  # tokens whose text is not settled
        self._sent = 0  # characters of their text that are out already

    def _push(self, token_id: int) -> str:
        self._new.append(token_id)
        text = self._new_text()
        settled = text
        for _ in range(_LONGEST_CHARACTER - 1):  # these may yet become one character
            settled = settled.removesuffix(_REPLACEMENT)
        if (text and settled == text) or len(self._new) >= _LONGEST_WINDOW:
            return self._settle(text)
        fresh = settled[self._sent :]
        self._sent += len(fresh)
        return fresh

    def _flush(self) -> str:
        return self._settle(self._new_text()) if self._new else ""

    def _new_text(self) -> str:
        before, after = self._decode(self._shown), self._decode([*self._shown, *self._new])
        # Byte fallback spoils the bytes before when a bad one follows: then the new stand alone.
        return after[len(before) :] if after.startswith(before) else self._decode(self._new)

    def _settle(self, text: str) -> str:
        fresh = text[self._sent :]
        self._shown, self._new, self._sent = self._new, [], 0
        return fresh


class StopMatcher:
    """Cuts streamed text at the first stop string, wherever token borders fall.

    Of several stop strings the one completed first counts, the longest of those that end together;
    so the result does not depend on how the text was cut into pieces.

    Args:
        stops: the stop strings; none of them is ever looked up as a token.

    Raises:
        ValueError: if a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str):
            stops = [stops]
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty; give text that is to end the answer")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Take new text; return what is safe to show and whether a stop string has been met."""
        if self.stopped:
            return "", True
        held = self._held + text
        ends = [(held.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in held]
        if ends:
            end, minus_length = min(ends)
            self._held, self.stopped = "", True
            return held[: end + minus_length], True
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """Return the text held back, which turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that a stop string may begin with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)


def _replace_one_byte(error: UnicodeError) -> tuple[str, int]:
    """One U+FFFD for each bad byte, as SentencePiece does (Python replaces runs of them)."""
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return _REPLACEMENT, error.start + 1


_ERRORS = "openelm-replace-one-byte"
codecs.register_error(_ERRORS, _replace_one_byte)

"""What CoreNet does to a text before it is tokenised: cut, drop what is short, mend characters.

The rules of apple/corenet ``base_lm.py`` and ``general_lm.py`` at 1aa3acd. Knows no tokenizer.
"""

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SPACES = re.compile(r"\s+")


@dataclass(frozen=True, kw_only=True)
class TextFilters:
    """Which texts are trained on, and how they are cleaned; by default all, as they are."""

    min_characters: int = 0  # of the text without punctuation and with single spaces
    min_tokens: int = 0  # BOS and EOS included
    split_words: int | None = None  # cut documents at every so many space-separated words
    fix_text: bool = False  # ftfy: quotes, entities, mojibake, ligatures, line ends

    def __post_init__(self) -> None:
        for name in ("min_characters", "min_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.split_words is not None and self.split_words < 1:
            raise ValueError(f"split_words must be 1 or more, got {self.split_words}")

    def pieces(self, document: str) -> Iterator[str]:
        """Cut a document, drop pieces of too few characters and clean the others.

        Args:
            document: any text.

        Yields:
            The texts to tokenise, each on its own; of an empty document the empty text, unless
            ``min_characters`` drops it.

        Raises:
            ImportError: if ``fix_text`` is set and ftfy is not installed.
        """
        for piece in split_document(document, self.split_words):
            if self.min_characters and characters(piece) < self.min_characters:
                continue
            yield fix_text(piece) if self.fix_text else piece


CORENET_FILTERS = TextFilters(min_characters=200, min_tokens=256, split_words=2048, fix_text=True)


def split_document(document: str, words: int | None) -> Iterator[str]:
    """Cut a text at every ``words`` words; only single spaces part words, line ends do not."""
    if words is None:
        yield document
        return
    parts = document.split(" ")
    for start in range(0, len(parts), words):
        yield " ".join(parts[start : start + words])


def characters(text: str) -> int:
    """Length in lower case, without ASCII punctuation and with white space made single."""
    bare = text.lower().translate(_PUNCTUATION)
    return len(_SPACES.sub(" ", bare.strip()))


def fix_text(text: str) -> str:
    """The clean-up that CoreNet calls NFC normalisation: ``ftfy.fix_text`` with its defaults.

    Raises:
        ImportError: if ftfy is not installed.
    """
    try:
        import ftfy
    except ImportError as error:
        raise ImportError(
            'cleaning text needs ftfy: pip install "openelm-mlx[data]", or set fix_text: false',
            name="ftfy",
        ) from error
    fixed: str = ftfy.fix_text(text)
    return fixed

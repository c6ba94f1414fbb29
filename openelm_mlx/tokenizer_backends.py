"""The two kinds of tokenizer behind one face: SentencePiece, and the ``tokenizers`` library.

Neither adds BOS or EOS here; :class:`openelm_mlx.tokenizer.Tokenizer` does, in one place.
"""

import json
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from openelm_mlx.detokenizer import Detokenizer, PieceDetokenizer, WindowDetokenizer
from openelm_mlx.sentencepiece_json import bos_template, read_spec, tokenizer_json
from openelm_mlx.tokenizer_files import JSON_FILE, MODEL_FILE, SPECIAL_ROLES, TokenizerSettings

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer as FastTokenizer

_REPLACEMENT = "\ufffd"
_SPACE = "\u2581"
# Looked for in this order where no file beside a tokenizer.json says what the token is.
_COMMON_NAMES = {
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>", "<|endoftext|>"),
    "eos_token": ("</s>", "<|end_of_text|>", "<eos>", "<|endoftext|>"),
    "unk_token": ("<unk>",),
}


class Backend(ABC):
    """How text becomes ids and ids text, without BOS and EOS."""

    kind: str
    vocab_size: int  # one more than the highest id
    controls: Mapping[str, int]  # special tokens that a chat template may write

    @abstractmethod
    def special_ids(self, settings: TokenizerSettings) -> dict[str, int | None]:
        """The id of each special role, None where there is no such token."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""

    @abstractmethod
    def encode_rendered(self, text: str, guard: str | None = None) -> list[int]:
        """Ids of a rendered chat: control strings become their ids, ``guard`` is taken out."""

    @abstractmethod
    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Text of ids, equal to a :class:`Detokenizer`'s; ids past the vocabulary give none."""

    @abstractmethod
    def piece(self, token_id: int) -> str | None:
        """The vocabulary's string for an id."""

    @abstractmethod
    def id_of(self, piece: str) -> int | None:
        """The id of a string that is in the vocabulary."""

    @abstractmethod
    def detokenizer(self, context: Sequence[int]) -> Detokenizer:
        """A new incremental decoder."""

    @abstractmethod
    def files(self, bos: str | None) -> tuple[dict[str, bytes], str]:
        """The files to save, by name, and the class transformers is to load them with."""

    def _split(self, text: str) -> list[str]:
        """Cut text at control strings, which stay as parts of their own."""
        if not self.controls:
            return [text]
        longest_first = sorted(self.controls, key=len, reverse=True)
        return re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)


class SentencePieceBackend(Backend):
    """SentencePiece's own code, as CoreNet uses it.

    Args:
        path: a ``tokenizer.model``.

    Raises:
        ValueError: if it is not a SentencePiece model.
    """

    kind = "sentencepiece"

    def __init__(self, path: Path) -> None:
        self._processor = _load_sentencepiece(path)
        self.vocab_size = self._processor.get_piece_size()
        ids = list(range(self.vocab_size))
        control = zip(ids, self._processor.is_control(ids), strict=True)
        self.controls = {
            self._processor.id_to_piece(i): i for i, is_control in control if is_control
        }
        # A model with a dummy prefix drops it when it decodes.
        self._strips = self._processor.decode([_SPACE]) == ""

    def special_ids(self, settings: TokenizerSettings) -> dict[str, int | None]:
        """The model's own ids; what it lacks may be named by the settings."""
        sp = self._processor
        own = zip(SPECIAL_ROLES, (sp.bos_id(), sp.eos_id(), sp.unk_id(), sp.pad_id()), strict=True)
        return {
            role: index if index >= 0 else _id_stated(self, settings.special.get(role))
            for role, index in own
        }

    def encode(self, text: str) -> list[int]:
        """Control strings in text stay text; a space goes before it if the model says so."""
        ids: list[int] = self._processor.encode(text)
        return ids

    def encode_rendered(self, text: str, guard: str | None = None) -> list[int]:
        """Each stretch between control strings is encoded as a text of its own."""
        ids: list[int] = []
        for part in self._split(text):
            if part in self.controls:
                ids.append(self.controls[part])
            elif part:
                ids.extend(self.encode(part.replace(guard, "") if guard else part))
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """SentencePiece's own decoding where control pieces give no text."""
        if skip_special:
            text: str = self._processor.decode([i for i in ids if i < self.vocab_size])
            return text
        return _decode_all(
            PieceDetokenizer(
                self._processor, strip_leading_space=self._strips, skip_special=skip_special
            ),
            ids,
        )

    def piece(self, token_id: int) -> str | None:
        """SentencePiece writes a space as U+2581."""
        return self._processor.id_to_piece(token_id) if token_id < self.vocab_size else None

    def id_of(self, piece: str) -> int | None:
        """None where SentencePiece would answer with its unknown piece."""
        index: int = self._processor.piece_to_id(piece)
        return index if self._processor.id_to_piece(index) == piece else None

    def detokenizer(self, context: Sequence[int]) -> Detokenizer:
        """Piece by piece: constant work a token."""
        return PieceDetokenizer(self._processor, strip_leading_space=self._strips, context=context)

    def files(self, bos: str | None) -> tuple[dict[str, bytes], str]:
        """The model itself and a ``tokenizer.json`` made from it."""
        proto: bytes = self._processor.serialized_model_proto()
        spec = read_spec(proto)
        text = json.dumps(tokenizer_json(spec, bos=bos), ensure_ascii=False, indent=1)
        loader = "LlamaTokenizer" if spec.like_llama else "PreTrainedTokenizerFast"
        return {MODEL_FILE: proto, JSON_FILE: text.encode("utf-8")}, loader


class TokenizersBackend(Backend):
    """Any ``tokenizer.json``, through the ``tokenizers`` library.

    Args:
        path: a ``tokenizer.json``. Its truncation, padding and added BOS are not used.

    Raises:
        ValueError: if it is not one.
    """

    kind = "tokenizers"

    def __init__(self, path: Path) -> None:
        self._fast = _load_fast(path)
        self._fast.no_truncation()
        self._fast.no_padding()
        self._lock = threading.Lock()  # the switch for literal text is shared by all callers
        added = self._fast.get_added_tokens_decoder()
        ids = self._fast.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        self.controls = {token.content: i for i, token in added.items() if token.special}

    def special_ids(self, settings: TokenizerSettings) -> dict[str, int | None]:
        """What the settings name; what they do not mention, by the common names."""
        found: dict[str, int | None] = {}
        for role in SPECIAL_ROLES:
            if role in settings.special:  # stated, be it as "none"
                found[role] = _id_stated(self, settings.special[role])
            else:
                ids = map(self.id_of, _COMMON_NAMES.get(role, ()))
                found[role] = next((index for index in ids if index is not None), None)
        return found

    def encode(self, text: str) -> list[int]:
        """Control strings in text become control ids, as the library has it."""
        return self._encode(text, literal=False)

    def encode_rendered(self, text: str, guard: str | None = None) -> list[int]:
        """Cut at control strings only where a guard is in the text."""
        if guard is None or guard not in text:
            return self._encode(text, literal=False)
        ids: list[int] = []
        for part in self._split(text):
            if part in self.controls:
                ids.append(self.controls[part])
            elif part:
                ids.extend(self._encode(part.replace(guard, ""), literal=True))
        return ids

    def _encode(self, text: str, *, literal: bool) -> list[int]:
        with self._lock:
            self._fast.encode_special_tokens = literal
            ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
            return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """The library's decoding; the detokenizer's where bytes make no character."""
        text: str = self._fast.decode(ids, skip_special_tokens=skip_special)
        if _REPLACEMENT not in text or not skip_special:
            return text
        return _decode_all(self.detokenizer(()), ids)  # one rule for bytes that make no character

    def piece(self, token_id: int) -> str | None:
        """As written in the vocabulary, added tokens included."""
        piece: str | None = self._fast.id_to_token(token_id)
        return piece

    def id_of(self, piece: str) -> int | None:
        """Added tokens included."""
        index: int | None = self._fast.token_to_id(piece)
        return index

    def detokenizer(self, context: Sequence[int]) -> Detokenizer:
        """By windows of the library's decoding."""
        return WindowDetokenizer(self._fast.decode, context=context)

    def files(self, bos: str | None) -> tuple[dict[str, bytes], str]:
        """The ``tokenizer.json``, made to add one BOS and nothing else."""
        contents = json.loads(self._fast.to_str())
        bos_id = None if bos is None else self.id_of(bos)
        contents["post_processor"] = (
            bos_template(bos, bos_id) if bos and bos_id is not None else None
        )
        text = json.dumps(contents, ensure_ascii=False, indent=1)
        return {JSON_FILE: text.encode("utf-8")}, "PreTrainedTokenizerFast"


def _id_stated(backend: Backend, piece: str | None) -> int | None:
    return None if piece is None else backend.id_of(piece)


def _decode_all(detokenizer: Detokenizer, ids: Sequence[int]) -> str:
    for token_id in ids:
        detokenizer.add_token(token_id)
    detokenizer.finish()
    return detokenizer.text


def _load_sentencepiece(path: Path) -> "SentencePieceProcessor":
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_file=str(path))
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{path} is not a SentencePiece model{_hint(path)}") from error


def _load_fast(path: Path) -> "FastTokenizer":
    from tokenizers import Tokenizer as FastTokenizer

    try:
        return FastTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{path} is not a tokenizer of the tokenizers library ({reason}){_hint(path)}"
        ) from error


def _hint(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(40)
    if start.startswith(b"version https://git-lfs"):
        return ": it is a Git LFS pointer; fetch the file itself with `git lfs pull`"
    if not start:
        return ": the file is empty"
    return "; give a file that SentencePiece or the tokenizers library wrote"

"""A SentencePiece model as the ``tokenizer.json`` of the ``tokenizers`` library.

Both encode ordinary text to equal ids. Knows the two formats and nothing of folders.
Format of the model: google/sentencepiece, src/sentencepiece_model.proto.
"""

import base64
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

Json = dict[str, object]

_SPACE = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_UNIGRAM, _BPE = 1, 2


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One entry of the vocabulary."""

    text: str
    score: float = 0.0  # BPE: minus the merge's rank; unigram: log-probability
    type: int = NORMAL


@dataclass(frozen=True, kw_only=True)
class SentencePieceSpec:
    """What of a SentencePiece model decides how text is cut."""

    pieces: list[Piece] = field(repr=False)
    model_type: int = _UNIGRAM
    unk_id: int = 0
    byte_fallback: bool = False
    charsmap: bytes = b""  # compiled normalisation rules; empty for "identity"
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True

    @property
    def like_llama(self) -> bool:
        """Whether transformers' LlamaTokenizer class, which has fixed rules, fits this model."""
        plain = not self.charsmap and not self.remove_extra_whitespaces
        return self.model_type == _BPE and self.byte_fallback and self.add_dummy_prefix and plain


def read_spec(proto: bytes) -> SentencePieceSpec:
    """Read a serialised ``ModelProto``.

    Raises:
        ValueError: if its algorithm is neither BPE nor unigram, or its bytes are damaged.
    """
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(proto):
        if number == 1:
            pieces.append(_piece(_message(value)))
        elif number == 2:
            trainer = _message(value)
        elif number == 3:
            normalizer = _message(value)
    model_type = int(trainer.get(3, _UNIGRAM))
    if model_type not in (_UNIGRAM, _BPE):
        raise ValueError(
            "this SentencePiece model cuts text into words or characters; train one with BPE"
        )
    return SentencePieceSpec(
        pieces=pieces,
        model_type=model_type,
        unk_id=next((i for i, piece in enumerate(pieces) if piece.type == UNKNOWN), 0),
        byte_fallback=bool(trainer.get(35, 0)),
        charsmap=cast(bytes, normalizer.get(2, b"")),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
    )


def tokenizer_json(spec: SentencePieceSpec, *, bos: str | None) -> Json:
    """The contents of a ``tokenizer.json`` that adds ``bos`` and encodes as the model does."""
    special = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
    added = [
        {
            "id": index,
            "content": piece.text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": special[piece.type],
        }
        for index, piece in enumerate(spec.pieces)
        if piece.type in special
    ]
    bos_id = next((i for i, piece in enumerate(spec.pieces) if piece.text == bos), None)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": _normalizer(spec),
        "pre_tokenizer": None,
        "post_processor": None if bos is None or bos_id is None else bos_template(bos, bos_id),
        "decoder": _decoder(spec),
        "model": _model(spec),
    }


def bos_template(bos: str, bos_id: int) -> Json:
    """The post-processor that puts exactly one BOS before a text."""
    token = {"SpecialToken": {"id": bos, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [token, first],
        "pair": [token, first, token, second],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def merges(spec: SentencePieceSpec) -> list[str]:
    """All pairs of pieces that make a piece, in the order in which SentencePiece joins them."""
    ids = {piece.text: i for i, piece in enumerate(spec.pieces) if piece.type == NORMAL}
    found = [
        (-spec.pieces[index].score, ids[text[:cut]], ids[text[cut:]])
        for text, index in ids.items()
        for cut in range(1, len(text))
        if text[:cut] in ids and text[cut:] in ids
    ]
    found.sort()
    return [f"{spec.pieces[left].text} {spec.pieces[right].text}" for _, left, right in found]


def _model(spec: SentencePieceSpec) -> Json:
    if spec.model_type == _UNIGRAM:
        return {
            "type": "Unigram",
            "unk_id": spec.unk_id,
            "vocab": [[piece.text, piece.score] for piece in spec.pieces],
            "byte_fallback": spec.byte_fallback,
        }
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": spec.pieces[spec.unk_id].text,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": spec.byte_fallback,
        "vocab": {piece.text: index for index, piece in enumerate(spec.pieces)},
        "merges": merges(spec),
    }


def _normalizer(spec: SentencePieceSpec) -> Json:
    steps: list[Json] = []
    if spec.charsmap:
        coded = base64.b64encode(spec.charsmap).decode("ascii")
        steps.append({"type": "Precompiled", "precompiled_charsmap": coded})
    if spec.remove_extra_whitespaces:
        for pattern, content in ((r"\A +| +\z", ""), (" {2,}", " ")):  # spaces only, no line ends
            steps.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": content})
    if spec.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": _SPACE})
    steps.append({"type": "Replace", "pattern": {"String": " "}, "content": _SPACE})
    return {"type": "Sequence", "normalizers": steps}


def _decoder(spec: SentencePieceSpec) -> Json:
    steps: list[Json] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if spec.add_dummy_prefix or spec.remove_extra_whitespaces:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _piece(fields: dict[int, int | bytes]) -> Piece:
    return Piece(
        text=cast(bytes, fields.get(1, b"")).decode("utf-8"),
        score=struct.unpack("<f", cast(bytes, fields.get(2, bytes(4))))[0],
        type=int(fields.get(3, NORMAL)),
    )


def _message(value: int | bytes) -> dict[int, int | bytes]:
    return dict(_fields(cast(bytes, value)))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The (number, value) pairs of a protocol buffer: integers, or the bytes of anything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"damaged SentencePiece model: wire type {kind} at byte {at}")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("damaged SentencePiece model: it ends inside a number")

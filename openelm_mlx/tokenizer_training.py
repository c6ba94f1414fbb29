"""``openelm tokenizer train``: a SentencePiece tokenizer with LLaMA's settings from files of text.

BPE with byte fallback, digits apart, white space kept, unk 0, bos 1, eos 2, no pad. The same text
gives the same tokenizer, byte for byte, on every machine with the same SentencePiece.
"""

import argparse
import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from openelm_mlx.atomic import atomic_folder, refuse_existing_folder
from openelm_mlx.data_sources import Entry, find_sources
from openelm_mlx.document_stream import Document, DocumentStream, OnDamage
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.weight_files import write_json

# The normaliser and vocabulary of Meta's tokenizer.model, read from it.
_LLAMA: dict[str, Any] = {
    **{"model_type": "bpe", "byte_fallback": True, "split_digits": True},
    **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    **{"add_dummy_prefix": True, "allow_whitespace_only_pieces": True},
    **{"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1},
}
_THREADS = 16  # fixed, since the file names it
_LINE = 4096  # characters; longer lines are cut at spaces
_LINE_BYTES = 4 * _LINE + 4
_LEAST = 3 + 256  # special pieces and bytes
_SAMPLE = 1 << 20  # characters that the tokenizer is measured on


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a tokenizer was trained on and how well it cuts."""

    pieces: int
    documents: int
    characters: int
    skipped: int  # damaged records
    characters_per_token: float  # of the first text that was read

    def describe(self) -> str:
        """One line for a person."""
        skipped = f", {self.skipped} damaged records skipped" if self.skipped else ""
        return (
            f"{self.pieces} pieces from {self.documents} documents with {self.characters} "
            f"characters{skipped}; {self.characters_per_token:.2f} characters a token"
        )


def train_tokenizer(
    data: Entry | Sequence[Entry],
    output: str | Path,
    *,
    vocab_size: int,
    text_key: str = "text",
    character_coverage: float = 0.99995,
    max_lines: int = 10_000_000,
    on_damage: OnDamage = "fail",
    overwrite: bool = False,
) -> Trained:
    """Train a tokenizer and write its folder: ``tokenizer.model``, ``tokenizer.json``, settings.

    Args:
        data: as :func:`openelm_mlx.data_sources.find_sources`.
        output: the folder to write.
        vocab_size: pieces, the 3 special ones and 256 bytes included.
        text_key: of a record's text.
        character_coverage: share of the text's characters that get pieces; bytes stand for others.
        max_lines: lines that are learned from, drawn from all; they are held in memory.
        on_damage: whether a damaged record is skipped or an error.
        overwrite: replace a folder that is there.

    Raises:
        FileNotFoundError: if a path stands for nothing.
        FileExistsError: if ``output`` is there and may not be replaced.
        ValueError: if the text is too little or has too many characters for ``vocab_size``, or is
            damaged.
    """
    refuse_existing_folder(output, overwrite=overwrite)
    if vocab_size <= _LEAST:
        raise ValueError(
            f"vocab_size must be more than {_LEAST} (3 special pieces and 256 bytes), got "
            f"{vocab_size}"
        )
    if max_lines <= 100 or not 0.9 <= character_coverage <= 1:
        raise ValueError(
            "max_lines must be more than 100 and character_coverage from 0.9 to 1, got "
            f"{max_lines} and {character_coverage}"
        )
    stream = DocumentStream(find_sources(data, text_key=text_key), on_damage=on_damage)
    reader = _Reader(stream)
    proto = _train(reader, vocab_size, character_coverage, max_lines)
    with atomic_folder(output, overwrite=overwrite) as folder:
        model = folder / "tokenizer.model"
        model.write_bytes(proto)
        tokenizer = Tokenizer.from_path(model)
        tokenizer.save(folder)
        result = Trained(
            pieces=tokenizer.vocab_size,
            documents=reader.documents,
            characters=reader.characters,
            skipped=stream.skipped,
            characters_per_token=_characters_per_token(tokenizer, reader.sample),
        )
        names = [
            str(entry) for entry in ([data] if isinstance(data, str | Path | Mapping) else data)
        ]
        provenance = {"kind": "tokenizer", "data": names, "documents": reader.documents}
        versions = {name: version(name) for name in ("openelm-mlx", "sentencepiece")}
        write_json(folder / "openelm.json", {**provenance, "versions": versions})
    return result


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``train`` and its flags."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="tokenizer_command")
    text = "train a SentencePiece tokenizer with LLaMA's settings"
    train = commands.add_parser("train", help=text, description=text)
    train.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files, folders, patterns or Hugging Face data sets",
    )
    train.add_argument("--vocab-size", type=int, required=True, help="number of pieces")
    train.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    train.add_argument("--text-key", default="text", help="key of a record's text (text)")
    train.add_argument(
        "--character-coverage",
        type=float,
        default=0.99995,
        help="share of characters that get pieces; bytes stand for the others (0.99995)",
    )
    train.add_argument(
        "--max-lines",
        type=int,
        default=10_000_000,
        help="lines to learn from, drawn from all (10000000); they are held in memory",
    )
    train.add_argument(
        "--on-damage",
        choices=("fail", "skip"),
        default="fail",
        help="what a damaged line or file does (fail)",
    )
    train.add_argument("--overwrite", action="store_true", help="replace a folder that is there")


def run_tokenizer(args: argparse.Namespace) -> int:
    """Run ``openelm tokenizer train``."""
    result = train_tokenizer(
        args.data,
        args.output,
        vocab_size=args.vocab_size,
        text_key=args.text_key,
        character_coverage=args.character_coverage,
        max_lines=args.max_lines,
        on_damage=args.on_damage,
        overwrite=args.overwrite,
    )
    sys.stdout.write(f"{args.output}: {result.describe()}\n")
    return 0


class _Reader:
    """Lines of documents for SentencePiece, counted; it keeps the error that ends them."""

    def __init__(self, documents: Iterator[Document]) -> None:
        self.documents = self.characters = 0
        self.sample: list[str] = []
        self.error: Exception | None = None
        self._stream = documents

    def lines(self) -> Iterator[str]:
        """All lines, long ones cut."""
        from tqdm import tqdm

        try:
            for document in tqdm(
                self._stream, unit="document", disable=not sys.stderr.isatty(), leave=False
            ):
                if self.characters < _SAMPLE:
                    self.sample.append(document.text[:_SAMPLE])
                self.documents += 1
                self.characters += len(document.text)
                for line in document.text.split("\n"):
                    yield from _cut(line)
        except Exception as error:  # SentencePiece makes a RuntimeError of any
            self.error = error
            raise


def _cut(line: str) -> Iterator[str]:
    start = 0
    while start < len(line):
        end = start + _LINE
        if end < len(line) and (space := line.rfind(" ", start + 1, end)) > 0:
            end = space
        yield line[start:end]
        start = end + (line[end : end + 1] == " ")


def _train(reader: _Reader, vocab_size: int, coverage: float, max_lines: int) -> bytes:
    import sentencepiece

    sentencepiece.set_random_generator_seed(0)  # draws the lines
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=reader.lines(),
            model_writer=model,
            vocab_size=vocab_size,
            character_coverage=coverage,
            input_sentence_size=max_lines,
            shuffle_input_sentence=True,
            max_sentence_length=_LINE_BYTES,
            num_threads=_THREADS,
            minloglevel=2,
            **_LLAMA,
        )
    except RuntimeError as error:
        raise (reader.error or _explained(error, vocab_size, reader.characters)) from error
    return model.getvalue()


def _explained(error: RuntimeError, vocab_size: int, characters: int) -> ValueError:
    text = " ".join(str(error).split())
    if most := re.search(r"Vocabulary size too high.*value <= (\d+)", text):
        return ValueError(
            f"a vocabulary of {vocab_size} is too large for this text of {characters} characters, "
            f"which makes at most {most[1]} pieces: give more text, or --vocab-size {most[1]}"
        )
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", text):
        return ValueError(
            f"a vocabulary of {vocab_size} is too small: the special pieces, the bytes and the "
            f"characters of this text are {least[1]}; give more, or a lower --character-coverage"
        )
    if "sentences_.empty()" in text:
        return ValueError("the text is empty: give files with text")
    return ValueError(f"SentencePiece could not train: {text}")


def _characters_per_token(tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    tokens = sum(len(tokenizer.encode(text, bos=False)) for text in texts)
    return sum(map(len, texts)) / max(1, tokens)

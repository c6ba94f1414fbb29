"""A tokenizer: text to token ids and back, chats included, with one BOS on every path.

Knows the two kinds of tokenizer and the files of a folder, not which one a model needs.
"""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from openelm_mlx.chat_template import Message, protect, render
from openelm_mlx.detokenizer import Detokenizer
from openelm_mlx.tokenizer_backends import Backend, SentencePieceBackend, TokenizersBackend
from openelm_mlx.tokenizer_files import (
    JSON_FILE,
    MODEL_FILE,
    SPECIAL_ROLES,
    TokenizerSettings,
    has_tokenizer,
    read_eos_ids,
    read_settings,
    write_files,
)

logger = logging.getLogger(__name__)

_MAX_LENGTH = 2048  # tokens, OpenELM's context


class Tokenizer:
    """A tokenizer of either kind with its special tokens; make one with :meth:`from_path`.

    Attributes:
        vocab_size: one more than the highest id.
        bos_id: put before every text; None where the tokenizer has none.
        eos_id: ends a text; None where the tokenizer has none.
        pad_id: the tokenizer's own, or ``vocab_size`` where it has none, as in CoreNet.
        eos_ids: every id that ends generation.
        kind: "sentencepiece" or "tokenizers".
        chat_template: Jinja source, None where there is none.
        source: where it came from, for messages.
    """

    def __init__(self, backend: Backend, settings: TokenizerSettings, *, source: str) -> None:
        self._backend = backend
        self.kind = backend.kind
        self.vocab_size = backend.vocab_size
        self.source = source
        self.chat_template = settings.chat_template
        ids = backend.special_ids(settings)
        self.bos_id = ids["bos_token"]
        self.eos_id = ids["eos_token"]
        pad = ids["pad_token"]
        self.pad_id = self.vocab_size if pad is None else pad
        # As the chat template and transformers name them.
        self._special = {
            role: self.piece(index) for role, index in ids.items() if index is not None
        }
        self._eos_ids = frozenset(() if self.eos_id is None else (self.eos_id,))
        logger.info(
            "%s: %s, %d pieces, bos %s, eos %s, pad %d%s",
            *(source, self.kind, self.vocab_size, self.bos_id, self.eos_id, self.pad_id),
            " (one past the last piece)" if pad is None else "",
        )

    @classmethod
    def from_path(cls, path: str | Path) -> "Tokenizer":
        """Load a ``tokenizer.model``, a ``tokenizer.json`` or a folder that holds either.

        Of a folder, ``tokenizer.model`` is preferred (SentencePiece is what the models were
        trained with), unless only ``tokenizer.json`` has the tokens that were added to it. The
        settings, end-of-text ids and chat template beside it are read too.

        Raises:
            FileNotFoundError: if there is no such file, or the folder holds neither.
            ValueError: if a file is damaged.
        """
        path = Path(path).expanduser()
        if path.is_dir():
            return cls._from_folder(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} does not exist; give a {MODEL_FILE}, a {JSON_FILE} or a folder with one"
            )
        if path.suffix == ".json":
            return cls(TokenizersBackend(path), read_settings(path.parent), source=str(path))
        return cls(SentencePieceBackend(path), TokenizerSettings(), source=str(path))

    @classmethod
    def _from_folder(cls, folder: Path) -> "Tokenizer":
        if not has_tokenizer(folder):
            raise FileNotFoundError(f"{folder} holds neither {MODEL_FILE} nor {JSON_FILE}")
        settings = read_settings(folder)
        model, fast = folder / MODEL_FILE, folder / JSON_FILE
        backend: Backend = (
            SentencePieceBackend(model) if model.is_file() else TokenizersBackend(fast)
        )
        beyond = [text for i, text in settings.added.items() if i >= backend.vocab_size]
        if model.is_file() and beyond and fast.is_file():
            logger.info("%s: using %s, which has %s", folder, JSON_FILE, ", ".join(beyond))
            backend = TokenizersBackend(fast)
        elif model.is_file() and beyond:
            logger.warning("%s: no %s, so no %s", folder, JSON_FILE, ", ".join(beyond))
        tokenizer = cls(backend, settings, source=str(folder))
        tokenizer.add_eos_ids(read_eos_ids(folder))
        return tokenizer

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends generation: the tokenizer's, the model's and the user's."""
        return self._eos_ids

    def add_eos_ids(self, ids: Iterable[int]) -> None:
        """Let more ids end generation; none is ever taken away.

        Raises:
            ValueError: if an id is negative.
        """
        self._eos_ids |= frozenset(_checked(ids))

    def encode(self, text: str, *, bos: bool = True, eos: bool = False) -> list[int]:
        """Ids of plain text.

        Special-token strings inside text stay text with SentencePiece; a ``tokenizer.json``
        decides for itself. A text that begins with the BOS string has its BOS already.

        Args:
            text: any text; SentencePiece puts its leading space before it.
            bos: whether exactly one BOS comes first (where the tokenizer has one).
            eos: whether EOS comes last (where the tokenizer has one).
        """
        if bos and self.bos_id is not None:
            text = text.removeprefix(self._special["bos_token"])
        body = self._backend.encode(text)
        ids = self.with_bos(body) if bos else body
        if eos and self.eos_id is not None and body[-1:] != [self.eos_id]:
            ids = [*ids, self.eos_id]
        return ids

    def with_bos(self, ids: Sequence[int]) -> list[int]:
        """The ids with exactly one BOS before them, whether or not they begin with some."""
        ids = list(ids)
        if self.bos_id is None:
            return ids
        start = next((i for i, index in enumerate(ids) if index != self.bos_id), len(ids))
        return [self.bos_id, *ids[start:]]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; ids past the last piece (padding rows of a model) give no text.

        Raises:
            ValueError: if an id is negative.
        """
        return self._backend.decode(_checked(ids), skip_special=skip_special)

    def piece(self, id: int) -> str:
        """The vocabulary's string for an id.

        Raises:
            ValueError: if the tokenizer has no such id.
        """
        piece = self._backend.piece(id) if id >= 0 else None
        if piece is None:
            raise ValueError(f"no piece has the id {id}; they run from 0 to {self.vocab_size - 1}")
        return piece

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """An incremental decoder, whose pieces joined equal ``decode(all ids)``.

        Args:
            context: ids whose text was shown already; the text continues it, so that a first
                space is kept.
        """
        return self._backend.detokenizer(context)

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation by the chat template, for showing.

        Raises:
            ValueError: if there is no chat template, or it cannot render these messages.
        """
        if self.chat_template is None:
            raise ValueError(
                f"{self.source} has no chat template: use a model tuned on instructions, "
                "or plain completion"
            )
        return render(
            self.chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            special_tokens={role: self._special.get(role, "") for role in SPECIAL_ROLES},
        )

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation, with exactly one BOS.

        Special-token strings that the template writes become their ids; the same strings inside
        a message stay text, so that a message cannot end its own turn. Marks that are no special
        tokens, such as Apple's ``<|user|>``, cannot be told from text.

        Raises:
            ValueError: as :meth:`render_chat`.
        """
        safe, guard = protect(messages, self._backend.controls)
        text = self.render_chat(safe, add_generation_prompt=add_generation_prompt)
        return self.with_bos(self._backend.encode_rendered(text, guard))

    def encode_rendered(self, text: str, *, bos: bool = True) -> list[int]:
        """Ids of text from :meth:`render_chat`: special-token strings become their ids."""
        ids = self._backend.encode_rendered(text)
        return self.with_bos(ids) if bos else ids

    def save(self, folder: str | Path, *, chat_template: str | None = None) -> None:
        """Write the tokenizer into a model folder so that transformers and mlx_lm load it too.

        From a SentencePiece model ``tokenizer.json`` is made as well, with equal ids on ordinary
        text. The chat template is written only when given.
        """
        files, loader = self._backend.files(self._special.get("bos_token"))
        config: dict[str, object] = {
            "tokenizer_class": loader,
            "add_bos_token": self.bos_id is not None,
            "add_eos_token": False,
            **self._special,
            "clean_up_tokenization_spaces": False,
            "model_max_length": _MAX_LENGTH,
        }
        if loader == "LlamaTokenizer":
            config["legacy"] = True  # each stretch of a chat is encoded with a leading space
        if chat_template is not None:
            config["chat_template"] = chat_template
        write_files(Path(folder), files, config)


def _checked(ids: Iterable[int]) -> list[int]:
    """Ids as Python integers; a list, an array of mlx or NumPy will do."""
    checked = [int(index) for index in ids]
    if checked and min(checked) < 0:
        raise ValueError(f"token ids start at 0, got {min(checked)}")
    return checked

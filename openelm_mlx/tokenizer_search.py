"""Which tokenizer a model gets: the one named, its folder's own, or one from the Hub, checked.

Apple's own repositories ship none. Fetches tokenizer files only, never weights.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, overload

from openelm_mlx.chat_template import APPLE_INSTRUCT_TEMPLATE, is_instruct
from openelm_mlx.hub import TOKENIZER_FILES, download
from openelm_mlx.tokenizer_codec import Tokenizer
from openelm_mlx.tokenizer_files import JSON_FILE, MODEL_FILE, has_tokenizer, read_eos_ids

logger = logging.getLogger(__name__)

GATED = "meta-llama/Llama-2-7b-hf"
# Every OpenELM of Apple's reads LLaMA 1/2's ids; these from coremltools' guide "convert OpenELM".
APPLE_KNOWN_IDS = {"Once upon a time there was": (1, 9038, 2501, 263, 931, 727, 471)}
_LLAMA_ROWS = range(32000, 32129)  # Apple's vocabularies: 32000, or padded to 32128 as in CoreNet


@overload
def load_tokenizer(
    tokenizer: str | Path | None,
    *,
    model_path: str | Path | None = None,
    repo: str | None = None,
    vocab_size: int | None = None,
    known_ids: Mapping[str, Sequence[int]] | None = None,
    required: Literal[True] = True,
) -> Tokenizer: ...


@overload
def load_tokenizer(
    tokenizer: str | Path | None,
    *,
    model_path: str | Path | None = None,
    repo: str | None = None,
    vocab_size: int | None = None,
    known_ids: Mapping[str, Sequence[int]] | None = None,
    required: bool,
) -> Tokenizer | None: ...


def load_tokenizer(
    tokenizer: str | Path | None,
    *,
    model_path: str | Path | None = None,
    repo: str | None = None,
    vocab_size: int | None = None,
    known_ids: Mapping[str, Sequence[int]] | None = None,
    required: bool = True,
) -> Tokenizer | None:
    """Find, load and check the tokenizer of a model.

    The places, in order: ``tokenizer``; the model's folder; for ``apple/OpenELM-*``, which ship
    none, the conversions of mlx-community and then LLaMA's own repository. The one used is said.

    Args:
        tokenizer: a file, a folder or a Hub id; then no other place is tried.
        model_path: the model's folder, whose end-of-text ids count too.
        repo: the Hub id that the model came from.
        vocab_size: rows of the model's embedding; a tokenizer with more pieces is refused.
        known_ids: texts and their ids, to check; None checks Apple's where the model is Apple's.
        required: whether finding none is an error, else a warning and None.

    Raises:
        FileNotFoundError: if there is none and it is required, or ``tokenizer`` does not exist.
        ValueError: if a file is damaged or the tokenizer is not the model's.
    """
    folder = None if model_path is None else Path(model_path)
    if known_ids is None:
        apple = is_apple_openelm(repo) and (vocab_size is None or vocab_size in _LLAMA_ROWS)
        known_ids = APPLE_KNOWN_IDS if apple else {}
    tried: list[str] = []
    if tokenizer is not None:
        found: Tokenizer | None = _load_named(tokenizer)
    elif folder is not None and has_tokenizer(folder):
        found = Tokenizer.from_path(folder)
    else:
        found = _search_hub(hub_places(repo), vocab_size, known_ids, tried)
    if found is None:
        message = _what_is_needed(repo or str(folder or "the model"), tried)
        if required:
            raise FileNotFoundError(message)
        logger.warning(message)
        return None
    check_tokenizer(found, vocab_size, known_ids)
    _settle_for_model(found, folder, repo)
    return found


def check_tokenizer(
    tokenizer: Tokenizer, vocab_size: int | None, known_ids: Mapping[str, Sequence[int]]
) -> None:
    """Check that a tokenizer can be a model's.

    Args:
        tokenizer: the one to check.
        vocab_size: rows of the model's embedding, None where unknown.
        known_ids: texts and the ids, BOS first, that the model was trained to read.

    Raises:
        ValueError: if it has more pieces than the model rows, or gives other ids.
    """
    source, pieces = tokenizer.source, tokenizer.vocab_size
    if vocab_size is not None and pieces > vocab_size:
        raise ValueError(
            f"the tokenizer {source} has {pieces} pieces, but the model's vocabulary has only "
            f"{vocab_size}; give the model's own with --tokenizer"
        )
    for text, ids in known_ids.items():
        if (got := tokenizer.encode(text)) != list(ids):
            raise ValueError(
                f"the tokenizer {source} is not the model's: {text!r} gives the ids {got}, "
                f"expected {list(ids)}; give the model's own with --tokenizer"
            )
    if vocab_size is not None and pieces < vocab_size:
        logger.info(
            "%s has %d pieces, the model %d rows: the rest is padding", source, pieces, vocab_size
        )


def hub_places(repo: str | None) -> list[str]:
    """The repositories to try, in order, for a model whose folder holds no tokenizer."""
    if not is_apple_openelm(repo):
        return []
    name = str(repo).split("/", 1)[1]
    places = [f"mlx-community/{name}{suffix}" for suffix in ("", "-4bit", "-8bit")]
    return list(dict.fromkeys([*places, "mlx-community/OpenELM-450M-Instruct", GATED]))


def is_apple_openelm(repo: str | None) -> bool:
    """Whether a Hub id is one of Apple's OpenELM repositories."""
    return repo is not None and repo.lower().startswith("apple/openelm-")


def _load_named(name: str | Path) -> Tokenizer:
    """The tokenizer of ``--tokenizer``: a path that exists, else a Hub id."""
    path = Path(name).expanduser()
    if path.exists():
        return Tokenizer.from_path(path)
    if str(name).count("/") != 1 or path.suffix in (".model", ".json"):
        raise FileNotFoundError(
            f"the tokenizer {name} is no file, folder or Hub id; give a tokenizer.model, a "
            "tokenizer.json, a folder with one, or owner/name"
        )
    return _from_hub(str(name))


def _from_hub(repo: str) -> Tokenizer:
    folder = download(repo, revision=None, patterns=TOKENIZER_FILES)
    if not has_tokenizer(folder):
        raise FileNotFoundError(f"{repo} holds neither {MODEL_FILE} nor {JSON_FILE}")
    found = Tokenizer.from_path(folder)
    found.source = repo
    return found


def _search_hub(
    places: Sequence[str],
    vocab_size: int | None,
    known_ids: Mapping[str, Sequence[int]],
    tried: list[str],
) -> Tokenizer | None:
    """The first place whose tokenizer fits; why the others did not goes into ``tried``."""
    for place in places:
        try:
            found = _from_hub(place)
            check_tokenizer(found, vocab_size, known_ids)
        except PermissionError:
            tried.append(f"{place}: gated or private")
        except FileNotFoundError:
            tried.append(f"{place}: not there")
        except ConnectionError:
            tried.append(f"{place}: not in the cache, and the Hub cannot be reached")
        except ValueError as error:
            tried.append(f"{place}: {error}")
        else:
            logger.warning("the model comes without a tokenizer: using that of %s", place)
            return found
    return None


def _what_is_needed(model: str, tried: Sequence[str]) -> str:
    looked = f" (tried {'; '.join(tried)})" if tried else ""
    return (
        f"{model} has no tokenizer{looked}: OpenELM needs the LLaMA 1/2 tokenizer (SentencePiece, "
        "32000 pieces); give one with --tokenizer: a tokenizer.model, a tokenizer.json, a folder "
        f"or a Hub id such as {GATED}, which is gated: accept its licence on the Hub, then run "
        "`hf auth login` or set HF_TOKEN"
    )


def _settle_for_model(tokenizer: Tokenizer, folder: Path | None, repo: str | None) -> None:
    """Take end-of-text ids and chat format from the model that the tokenizer is for."""
    if folder is not None and folder.is_dir():
        tokenizer.add_eos_ids(read_eos_ids(folder))
    instruct = is_instruct(repo) or (folder is not None and is_instruct(folder.name))
    if is_apple_openelm(repo):  # a borrowed tokenizer may bring another model's format
        tokenizer.chat_template = None
    if instruct and tokenizer.chat_template is None:
        logger.info("%s: using Apple's instruct chat format", tokenizer.source)
        tokenizer.chat_template = APPLE_INSTRUCT_TEMPLATE

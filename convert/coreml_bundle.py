"""What an app needs beside a Core ML package: tokenizer, settings, a runner in Swift, a card.

``X.mlpackage`` has its bundle in ``X-bundle/``: a plain folder, because a folder named
``X.bundle`` means something else to Xcode, and ``X/`` may be the model that was exported.
Everything said about the package is read from the package.
"""

import logging
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from convert.coreml_card import card
from convert.coreml_describe import PackageDescription, describe
from convert.licence import copy_licence
from convert.source import Source
from openelm_mlx.atomic import atomic_folder, refuse_existing_folder
from openelm_mlx.chat_template import APPLE_INSTRUCT_TEMPLATE, CHAT_DEFAULTS, NEXT_TURN
from openelm_mlx.config import ModelArgs
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tokenizer_files import JSON_FILE
from openelm_mlx.weight_files import write_json

logger = logging.getLogger(__name__)

RUNNER = "OpenELMRunner.swift"
GENERATION = "generation.json"
CHECK = "tokenizer_check.json"
PARITY = "parity.json"  # written by `verify-coreml`

_MLX_ONLY = ("quantization", "quantization_config", "torch_dtype", "dtype")

# Text as people write it: what an app's tokenizer has to cut as the model's own does.
CHECK_TEXTS = (
    "Once upon a time there was",
    "Hello, world!",
    " one leading space",
    "   three leading spaces",
    "one trailing space ",
    "two  spaces inside",
    " ",
    "a line\nand another",
    "\n",
    "\n\nafter two empty lines",
    "a\ttab",
    "don't, won't, it's",
    "3.14159 and 1,000,000",
    "2024-05-01T12:30:00Z",
    "user@example.com https://example.org/a?b=c&d=%20",
    "def f(x):\n    return x ** 2  # squared",
    '{"key": [1, 2.5, null]}',
    "naïve café, Ünïcödé",
    "Привет, мир",
    "你好世界。",
    "こんにちは",
    "مرحبا بالعالم",
    "x² ≠ ∑ β→δ",
    "“quotes”, a dash — and…",
    "😀",
    "emoji 🎉 inside",
    "🚀🌍 at the start",
    "a literal </s> in text",
    "<|user|>\nis plain text",
    "antidisestablishmentarianism",
)


def bundle_folder(package: str | Path) -> Path:
    """Where the bundle of a package lies."""
    package = Path(package)
    return package.with_name(f"{package.name.removesuffix('.mlpackage')}-bundle")


def refuse_existing_bundle(folder: str | Path, *, overwrite: bool) -> None:
    """Check early that :func:`write_bundle` will be allowed to write.

    Raises:
        FileExistsError: if there is a bundle and ``overwrite`` is not set, or something else.
    """
    folder = Path(folder)
    refuse_existing_folder(folder, overwrite=overwrite)
    if folder.is_dir() and any(folder.iterdir()) and not (folder / GENERATION).is_file():
        raise FileExistsError(
            f"{folder} is no bundle (it holds no {GENERATION}), so --overwrite will not delete "
            "it; give another --output"
        )


def write_bundle(
    folder: str | Path,
    *,
    package: str | Path,
    model_dir: str | Path,
    tokenizer: str | Path | None = None,
    instruct: bool = False,
    name: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the files that go with a package, all or none.

    Args:
        folder: to be made, see :func:`bundle_folder`; holds ``parity.json`` once verified.
        package: the saved ``.mlpackage``: its functions, shapes and metadata are read.
        model_dir: the model folder or Hub repository that it was made from.
        tokenizer: file, folder or Hub id in place of the model's own.
        instruct: whether a chat template goes with it; folders that are named Instruct or carry
            one have it anyway.
        name: of the package in the card, where ``package`` is a temporary one.
        overwrite: replace a bundle that is there.

    Returns:
        ``folder``.

    Raises:
        FileExistsError: if the folder is there and may not be replaced.
        FileNotFoundError: if the package or the model folder is missing.
        ValueError: if one of them is damaged, or the tokenizer is not the model's.
    """
    folder = Path(folder)
    refuse_existing_bundle(folder, overwrite=overwrite)
    description = describe(package)
    source = Source.find(model_dir)
    found, template = source.companions(tokenizer, instruct=instruct, output=folder)
    with atomic_folder(folder, overwrite=overwrite) as temporary:
        write_json(temporary / "config.json", _config(source.args))
        if found is None:
            logger.warning("the bundle has no tokenizer; an app needs one: give --tokenizer")
        else:
            chosen = (found.chat_template or APPLE_INSTRUCT_TEMPLATE) if template else None
            found.save(temporary, chat_template=chosen)
            write_json(temporary / CHECK, tokenizer_check(temporary / JSON_FILE, found))
        write_json(temporary / GENERATION, generation(description, source.args, found, template))
        if description.metadata.get("openelm.interface") == "static":
            text = (files("convert") / "swift" / RUNNER).read_text(encoding="utf-8")
            (temporary / RUNNER).write_text(text, encoding="utf-8")
        copied = copy_licence(source.folder, temporary)
        contents = sorted(f.name for f in temporary.iterdir())
        text = card(
            description,
            package=name or Path(package).name,
            model=source.name,
            args=source.args,
            licence=source.licence,
            licence_files=copied,
            files=contents,
        )
        (temporary / "README.md").write_text(text, encoding="utf-8")
    return folder


def generation(
    description: PackageDescription,
    args: ModelArgs,
    tokenizer: Tokenizer | None,
    chat: bool,
) -> dict[str, Any]:
    """The contents of ``generation.json``: how to call the package and when to stop.

    Args:
        description: of the package.
        args: of the model.
        tokenizer: its, for more ids that end a text.
        chat: whether the model is tuned to follow instructions.
    """
    metadata = description.metadata
    stated = args.eos_token_id
    ends = {stated} if isinstance(stated, int) else set(stated or ())
    return {
        "interface": metadata.get("openelm.interface"),
        "context": _number(metadata, "openelm.context"),
        "prefill": _number(metadata, "openelm.prefill"),
        "vocab_size": description.vocab_size or args.vocab_size,
        "bos_token_id": args.bos_token_id if tokenizer is None else tokenizer.bos_id,
        "eos_token_ids": sorted(ends | (tokenizer.eos_ids if tokenizer else frozenset())),
        "chat": chat,
        "stop": list(NEXT_TURN) if chat else [],
        "temperature": CHAT_DEFAULTS["temp"],
        "top_p": CHAT_DEFAULTS["top_p"],
        "repetition_penalty": CHAT_DEFAULTS["repetition_penalty"],
    }


def tokenizer_check(tokenizer_json: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Texts and their ids, BOS included, for an app to hold its own tokenizer against.

    Args:
        tokenizer_json: what the app reads; its ids are given.
        tokenizer: the model's own; where it cuts a text otherwise, its ids are given besides.
    """
    from tokenizers import Tokenizer as FastTokenizer

    fast = FastTokenizer.from_file(str(tokenizer_json))
    texts = []
    for text in CHECK_TEXTS:
        entry = {"text": text, "ids": fast.encode(text).ids}
        own = tokenizer.encode(text)
        if own != entry["ids"]:
            entry["sentencepiece_ids"] = own
        texts.append(entry)
    return {
        "note": "ids by tokenizer.json with its BOS; sentencepiece_ids where the model was trained "
        "to read the text otherwise: keep end-of-text strings out of what users type",
        "texts": texts,
    }


def _config(args: ModelArgs) -> dict[str, Any]:
    """``config.json`` without what speaks of MLX's weights."""
    return {key: value for key, value in args.to_dict().items() if key not in _MLX_ONLY}


def _number(metadata: Mapping[str, str], key: str) -> int | None:
    return int(metadata[key]) if metadata.get(key, "").isdecimal() else None

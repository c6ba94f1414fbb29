"""The files beside a tokenizer: names, special tokens, end ids and chat template.

Knows the files of a model folder, not how text is cut.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from openelm_mlx.atomic import atomic_file

MODEL_FILE = "tokenizer.model"
JSON_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_FILE = "special_tokens_map.json"

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """What the files beside a tokenizer say; nothing is filled in."""

    special: dict[str, str | None] = field(default_factory=dict)  # only the roles that are stated
    added: dict[int, str] = field(default_factory=dict)  # tokens beyond the base vocabulary
    chat_template: str | None = None


def read_settings(folder: Path) -> TokenizerSettings:
    """Read ``tokenizer_config.json``, ``special_tokens_map.json`` and the chat template, if there.

    Raises:
        ValueError: if one of them is not JSON.
    """
    config = _read_json(folder / CONFIG_FILE)
    stated = {**_read_json(folder / SPECIAL_FILE), **config}
    added = config.get("added_tokens_decoder")
    return TokenizerSettings(
        special={role: _text(stated[role]) for role in SPECIAL_ROLES if role in stated},
        added={
            int(key): _text(value) or ""
            for key, value in (added.items() if isinstance(added, dict) else ())
            if str(key).isdecimal()
        },
        chat_template=_chat_template(folder, config),
    )


def read_eos_ids(folder: Path) -> frozenset[int]:
    """End-of-text ids of ``config.json`` and ``generation_config.json``, each a number or a list.

    Raises:
        ValueError: if one of them is not JSON.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        stated = _read_json(folder / name).get("eos_token_id")
        values = stated if isinstance(stated, list) else [stated]
        found.update(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)
    return frozenset(found)


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a file that a tokenizer can be made from."""
    return (folder / MODEL_FILE).is_file() or (folder / JSON_FILE).is_file()


def write_files(folder: Path, files: Mapping[str, bytes], config: Mapping[str, object]) -> None:
    """Write a tokenizer's files and ``tokenizer_config.json`` into a folder, each one whole."""
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    for name, contents in {**files, CONFIG_FILE: text.encode("utf-8")}.items():
        with atomic_file(folder / name) as path:
            path.write_bytes(contents)


def _chat_template(folder: Path, config: Mapping[str, object]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    stated = config.get("chat_template")
    if stated is None:
        stated = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(stated, list):  # several named ones
        named = {item["name"]: item["template"] for item in stated if isinstance(item, dict)}
        stated = named.get("default")
    return stated if isinstance(stated, str) else None


def _text(value: object) -> str | None:
    """A token as a string; the files hold strings or ``{"content": ...}``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _read_json(path: Path) -> dict[str, object]:
    """The mapping in a JSON file, empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # both bad JSON and bad UTF-8
        raise ValueError(f"{path} is not valid JSON ({error}); mend or delete it") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object; mend or delete it")
    return value

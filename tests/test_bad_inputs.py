"""Damaged folders and wrong paths: one line that names the fault, and no code of theirs is run."""

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_set
import pytest
from chain_model import save_talker
from command_line import run_here
from tiny_tokenizer import TinyTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: TinyTokenizer) -> Path:
    """A model folder that continues an empty prompt with TEXT."""
    return save_talker(tmp_path_factory.mktemp("models") / "talker", tiny_tokenizer.tokenizer)


Damage = Callable[[Path], None]


def _replace(name: str, content: bytes | str) -> Damage:
    def damage(folder: Path) -> None:
        data = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(data)

    return damage


def _edit_config(**changes: Any) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return damage


def _cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def _huge_header(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 60) + file.read_bytes()[8:])


class _Hostile:
    """What ``torch.load`` of old would have run."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch hostile-code-ran",)


def _hostile_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": _Hostile()}, protocol=2))
        archive.writestr("archive/version", "3\n")


DAMAGES: dict[str, tuple[Damage, str]] = {
    "empty folder": (_empty, "config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    "config cut short": (_replace("config.json", '{"model_type"'), "config.json"),
    "config a list": (_replace("config.json", "[]"), "config.json"),
    "config not text": (_replace("config.json", b"\xff\xfe\x00"), "config.json"),
    "another model": (_replace("config.json", '{"model_type": "llama"}'), "llama"),
    "wrong width": (_edit_config(model_dim=128), "tensors do not fit the config"),
    "negative layers": (_edit_config(num_transformer_layers=-1), "num_transformer_layers"),
    "a text for a number": (_edit_config(head_dim="wide"), "head_dim"),
    "weights cut short": (_cut_weights, "model.safetensors"),
    "weights empty": (_replace("model.safetensors", b""), "model.safetensors"),
    "weights a page": (_replace("model.safetensors", "<html>not found"), "model.safetensors"),
    "huge header": (_huge_header, "model.safetensors"),
    "hostile pickle": (_hostile_pickle, "pytorch_model.bin"),
    "damaged tokenizer": (_replace("tokenizer.model", "garbage"), "tokenizer.model"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_one_line_that_names_the_fault(
    name: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    damage, named = DAMAGES[name]
    damage(copy)
    outcome = run_here(capsys, "generate", "--model", copy, "--prompt", "a", "--max-tokens", 2)
    assert named in outcome.error
    assert outcome.out == ""
    assert not (tmp_path / "hostile-code-ran").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "--model", "/nowhere/at/all", "--prompt", "a"], "/nowhere/at/all"),
        (["generate", "--model", "MODEL", "--prompts", "/nowhere.jsonl"], "/nowhere.jsonl"),
        (
            ["generate", "--model", "MODEL", "--prompt", "a", "--tokenizer", "/no.model"],
            "/no.model",
        ),
        (["generate", "--model", "MODEL", "--prompt", "a", "--adapter-path", "/no"], "/no"),
        (["generate", "--model", "MODEL", "--prompt", "a", "--draft-model", "/no/d"], "/no/d"),
        (["generate", "--model", "MODEL", "--prompt", "the " * 90], "context is 64"),
        (["serve", "--model", "MODEL", "--port", "70000"], "--port must be 0 to 65535, got 70000"),
        (["serve", "--model", "MODEL", "--max-tokens", "0"], "--max-tokens must be at least 1"),
        (["serve", "--model", "MODEL", "--top-p", "2"], "top_p"),
        (["serve", "--model", "MODEL", "--prompt-cache-gb", "-1"], "--prompt-cache-gb"),
        (["serve", "--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["convert", "corenet", "FILE.pt", "--output", "OUT", "--preset", "9B"], "9B"),
        (["convert", "corenet", "/no.pt", "--output", "OUT", "--preset", "270M"], "/no.pt"),
    ],
)
def test_wrong_paths_and_values_are_named(
    arguments: list[str],
    named: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pt_file = golden_set.CUT / "corenet_pt" / "mqa_untied.pt"
    places = {"MODEL": str(folder), "OUT": str(tmp_path / "out"), "FILE.pt": str(pt_file)}
    outcome = run_here(capsys, *(places.get(a, a) for a in arguments))
    assert named in outcome.error
    assert not (tmp_path / "out").exists()

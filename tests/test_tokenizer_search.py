"""Where a model's tokenizer comes from, and what is said when none fits."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import tiny_tokenizer as tiny
from fake_hub import FakeHub, serve, use_cache, use_endpoint

from openelm_mlx.tokenizer import APPLE_INSTRUCT_TEMPLATE, Tokenizer, load_tokenizer

BASE = "apple/OpenELM-270M"
INSTRUCT = "apple/OpenELM-270M-Instruct"
GATED = "meta-llama/Llama-2-7b-hf"
PLACES = [
    "mlx-community/OpenELM-270M",
    "mlx-community/OpenELM-270M-4bit",
    "mlx-community/OpenELM-270M-8bit",
    "mlx-community/OpenELM-450M-Instruct",
    GATED,
]
Start = Callable[..., FakeHub]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """``start(repos)`` puts a stand-in for the Hub in the place of the real one."""
    use_cache(monkeypatch, tmp_path)
    running = []

    def run(repos: Mapping[str, Mapping[str, bytes]], **settings: frozenset[str]) -> FakeHub:
        server = serve(FakeHub(repos, **settings))  # type: ignore[arg-type]
        running.append(server)
        hub = server.__enter__()
        use_endpoint(monkeypatch, hub.url)
        return hub

    yield run
    for server in running:
        server.__exit__(None, None, None)


@pytest.fixture
def files(tiny_tokenizer: tiny.TinyTokenizer) -> dict[str, bytes]:
    """A conversion's repository: the tokenizer, a foreign chat template, and weights."""
    config = {"chat_template": "foreign", "bos_token": "<s>"}
    return {
        "tokenizer.model": tiny_tokenizer.path.read_bytes(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "model.safetensors": b"weights",
        "config.json": b"{}",
    }


def model_folder(tmp_path: Path, name: str = "snapshot", **config: object) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_places_are_tried_in_order_and_the_one_used_is_said(
    start: Start, files: dict[str, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub = start({PLACES[3]: files})
    folder = model_folder(tmp_path, eos_token_id=7)
    found = load_tokenizer(None, model_path=folder, repo=BASE, vocab_size=tiny.VOCAB_SIZE)
    assert found.source == PLACES[3]
    assert f"without a tokenizer: using that of {PLACES[3]}" in caplog.text
    assert hub.repos_asked() == PLACES[:4]
    assert found.eos_ids == {2, 7}  # the model's own count too


def test_only_tokenizer_files_are_fetched(start: Start, files: dict[str, bytes]) -> None:
    hub = start({PLACES[0]: files})
    load_tokenizer(None, repo=BASE, vocab_size=tiny.VOCAB_SIZE)
    assert hub.files_fetched() == {"tokenizer.model", "tokenizer_config.json"}


def test_a_borrowed_tokenizer_brings_no_foreign_chat_format(
    start: Start, files: dict[str, bytes]
) -> None:
    start({PLACES[0]: files, f"{PLACES[0]}-Instruct": files})
    assert load_tokenizer(None, repo=BASE, vocab_size=320).chat_template is None
    template = load_tokenizer(None, repo=INSTRUCT, vocab_size=320).chat_template
    assert template == APPLE_INSTRUCT_TEMPLATE


def test_a_gated_repository_is_read_with_a_token(
    start: Start, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    start({GATED: files}, gated=frozenset({GATED}))
    with pytest.raises(FileNotFoundError, match=f"{GATED}: gated or private") as caught:
        load_tokenizer(None, repo=BASE, vocab_size=tiny.VOCAB_SIZE)
    message = str(caught.value)
    assert message.startswith(f"{BASE} has no tokenizer (tried {PLACES[0]}: not there; ")
    for part in ("LLaMA 1/2", "32000 pieces", "--tokenizer", "accept its licence", "HF_TOKEN"):
        assert part in message
    assert "\n" not in message
    monkeypatch.setenv("HF_TOKEN", FakeHub.token)
    assert load_tokenizer(None, repo=BASE, vocab_size=tiny.VOCAB_SIZE).source == GATED


def test_a_place_with_another_tokenizer_is_passed_over(
    start: Start, files: dict[str, bytes], tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    known = {"The king": tiny_tokenizer.tokenizer.encode("The king")}
    other = {"tokenizer.json": tiny.train_byte_level(tiny_tokenizer.path.parent / "o").read_bytes()}
    broken = {"tokenizer.model": b"nothing"}
    start({PLACES[0]: other, PLACES[1]: broken, PLACES[2]: {"config.json": b"{}"}, GATED: files})
    found = load_tokenizer(None, repo=BASE, vocab_size=tiny.VOCAB_SIZE, known_ids=known)
    assert found.source == GATED


def test_a_tokenizer_that_is_not_llamas_is_refused_for_apples_models(
    start: Start, files: dict[str, bytes], tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    start({PLACES[0]: files})
    with pytest.raises(FileNotFoundError, match=r"270M: the tokenizer .* is not the model's"):
        load_tokenizer(None, repo=BASE, vocab_size=32000)
    with pytest.raises(ValueError, match=r"expected \[1, 9038, 2501, 263, 931, 727, 471\]"):
        load_tokenizer(tiny_tokenizer.path, repo=BASE, vocab_size=32128)


@pytest.mark.slow
def test_without_a_network_the_cache_is_enough(
    start: Start, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub = start({PLACES[1]: files})
    load_tokenizer(None, repo=BASE, vocab_size=tiny.VOCAB_SIZE)
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_tokenizer(None, repo=BASE, vocab_size=320).source == PLACES[1]
    assert hub.asked == []
    with pytest.raises(FileNotFoundError, match="not in the cache, and the Hub cannot be reached"):
        load_tokenizer(None, repo="apple/OpenELM-3B", vocab_size=320)


def test_a_hub_id_may_be_named(start: Start, files: dict[str, bytes]) -> None:
    hub = start({"me/mine": files})
    assert load_tokenizer("me/mine").source == "me/mine"
    assert hub.repos_asked() == ["me/mine"]
    for name, error in (("me/other", FileNotFoundError), ("missing.json", FileNotFoundError)):
        with pytest.raises(error, match=name):
            load_tokenizer(name)


def test_a_named_repository_without_a_tokenizer_is_an_error(start: Start) -> None:
    start({"me/mine": {"config.json": b"{}"}})
    with pytest.raises(FileNotFoundError, match=r"me/mine holds neither tokenizer\.model nor"):
        load_tokenizer("me/mine")


def test_the_named_one_goes_before_the_folders_own(
    tmp_path: Path, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    folder = model_folder(tmp_path)
    tiny.train_byte_level(folder)
    own = load_tokenizer(None, model_path=folder, repo=BASE, vocab_size=301)
    assert own.source == str(folder)
    named = load_tokenizer(tiny_tokenizer.path, model_path=folder)
    assert named.source == str(tiny_tokenizer.path)


def test_more_pieces_than_rows_are_refused_and_fewer_are_said(
    tiny_tokenizer: tiny.TinyTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="has 320 pieces, but the model's vocabulary has only 319"):
        load_tokenizer(tiny_tokenizer.path, vocab_size=319)
    with caplog.at_level(logging.INFO):
        load_tokenizer(tiny_tokenizer.path, vocab_size=384)
    assert "has 320 pieces, the model 384 rows" in caplog.text


def test_a_model_without_a_tokenizer_is_an_error_or_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = model_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"{folder} has no tokenizer: OpenELM needs"):
        load_tokenizer(None, model_path=folder)
    assert load_tokenizer(None, model_path=folder, required=False) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_an_instruct_folder_without_a_template_gets_apples(
    tmp_path: Path, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    for name, template in (("Tiny-Instruct", APPLE_INSTRUCT_TEMPLATE), ("Tiny", None)):
        folder = model_folder(tmp_path, name)
        tiny_tokenizer.tokenizer.save(folder)
        assert load_tokenizer(None, model_path=folder).chat_template == template


def test_an_instruct_folder_keeps_its_own_template(
    tmp_path: Path, tiny_tokenizer: tiny.TinyTokenizer
) -> None:
    folder = model_folder(tmp_path, "Tiny-Instruct")
    tiny_tokenizer.tokenizer.save(folder, chat_template="own")
    assert load_tokenizer(None, model_path=folder).chat_template == "own"
    assert Tokenizer.from_path(folder).chat_template == "own"


@pytest.mark.slow
def test_the_environment_of_huggingface_hub_is_respected(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    code = (
        "from openelm_mlx.tokenizer import load_tokenizer\n"
        f"print(load_tokenizer(None, repo={BASE!r}, vocab_size=320).source)"
    )
    with serve(FakeHub({GATED: files}, gated=frozenset({GATED}))) as hub:
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": hub.token}
        command = [sys.executable, "-c", code]
        for offline in ("0", "1"):
            environment = {**os.environ, **settings, "HF_HUB_OFFLINE": offline}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert done.stdout == GATED + "\n", done.stderr

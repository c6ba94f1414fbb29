"""Repositories on the Hub: found, downloaded, resumed, kept, and refused in one clear line.

The Hub is a small server on this machine, reached as a mirror is.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fake_hub import COMMIT, FakeHub, commit_of, serve, use_cache, use_endpoint
from folder_makers import (
    assert_same_weights,
    files,
    foreign_folder,
    small_config,
    small_folder,
    small_model,
    weights_of,
)
from tiny_tokenizer import TinyTokenizer

from convert import pt_file
from convert.huggingface import from_hub
from openelm_mlx.checkpoint import load
from openelm_mlx.hub import MODEL_FILES, download, local_or_download
from openelm_mlx.weight_files import read_json, read_weights

REPO = "someone/OpenELM-tiny"
Start = Callable[..., FakeHub]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    """``start(repos, **settings)`` puts a stand-in for the Hub in the place of the real one."""
    use_cache(monkeypatch, tmp_path / "hub")
    running = []

    def run(repos: Mapping[str, Mapping[str, bytes]], **settings: Any) -> FakeHub:
        server = serve(FakeHub(repos, **settings))
        running.append(server)
        hub = server.__enter__()
        use_endpoint(monkeypatch, hub.url)
        return hub

    yield run
    for server in running:
        server.__exit__(None, None, None)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """``offline()`` is what HF_HUB_OFFLINE=1 does."""
    from huggingface_hub import constants

    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries do not wait, and what has come of a small file is kept in small pieces."""
    from huggingface_hub import constants

    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10_000)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def repo_files(tmp_path: Path, tiny_tokenizer: TinyTokenizer) -> dict[str, bytes]:
    """A repository as others upload them, with files that no command needs."""
    folder = foreign_folder(tmp_path / "upload", small_config(), weights_of(small_model()))
    tiny_tokenizer.tokenizer.save(folder)
    card = "---\nlicense: apple-amlr\n---\n"
    unneeded = {"modeling_openelm.py": b"raise SystemExit", "image.png": b"x", "big.gguf": b"y"}
    return {**contents(folder), "README.md": card.encode(), "LICENSE": b"terms", **unneeded}


def test_a_repository_loads_without_running_its_code(
    start: Start, repo_files: dict[str, bytes]
) -> None:
    hub = start({REPO: repo_files})
    model, tokenizer = load(REPO)
    assert_same_weights(weights_of(model), weights_of(small_model()))
    assert tokenizer is not None
    assert hub.files_fetched() == set(repo_files) - {"modeling_openelm.py", "image.png", "big.gguf"}


def test_a_second_load_downloads_nothing_and_works_offline(
    start: Start, repo_files: dict[str, bytes], offline: Callable[[], None], tmp_path: Path
) -> None:
    hub = start({REPO: repo_files})
    first = local_or_download(REPO)
    hub.asked.clear()
    assert local_or_download(REPO) == first
    assert hub.files_fetched() == set()
    hub.asked.clear()
    offline()
    load(REPO)
    ours = from_hub(REPO, tmp_path / "ours")  # needs no file that load did not fetch
    assert hub.asked == []
    assert "LICENSE" in files(ours)


def test_the_cache_serves_when_the_hub_is_away(
    start: Start, repo_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    start({REPO: repo_files})
    first = local_or_download(REPO)
    use_endpoint(monkeypatch, "http://127.0.0.1:9")  # nobody listens there
    assert local_or_download(REPO) == first


def test_a_revision_is_a_branch_a_tag_or_a_commit(
    start: Start, repo_files: dict[str, bytes]
) -> None:
    other = {**repo_files, "config.json": json.dumps(small_config(max_context_length=77)).encode()}
    start({REPO: repo_files, f"{REPO}@v2": other})
    assert load(REPO)[0].args.max_context_length == 2048
    for revision in ("v2", commit_of("v2")):
        assert load(REPO, revision=revision)[0].args.max_context_length == 77


def test_a_conversion_records_repository_commit_and_licence(
    start: Start, repo_files: dict[str, bytes], tmp_path: Path
) -> None:
    start({REPO: repo_files, f"{REPO}@v2": repo_files})
    for revision, commit in ((None, COMMIT), ("v2", commit_of("v2"))):
        ours = from_hub(REPO, tmp_path / str(revision), revision=revision)
        provenance = read_json(ours / "openelm.json")
        assert provenance["source"] == REPO
        assert provenance["revision"] == commit
        assert provenance["licence"] == "apple-amlr"
        assert (ours / "LICENSE").read_bytes() == b"terms"
        assert not (ours / "LICENSE").is_symlink()
        assert_same_weights(read_weights(ours), weights_of(small_model()))


def test_instruct_in_the_name_of_the_repository_brings_the_template(
    start: Start, repo_files: dict[str, bytes], tmp_path: Path
) -> None:
    start({REPO: repo_files, f"{REPO}-Instruct": repo_files})
    for name, expected in ((REPO, False), (f"{REPO}-Instruct", True)):
        ours = from_hub(name, tmp_path / name.rpartition("/")[2])
        settings = read_json(ours / "tokenizer_config.json")
        assert ("chat_template" in settings) == expected


def test_pytorch_files_are_fetched_only_where_there_is_nothing_else(
    start: Start, repo_files: dict[str, bytes], tmp_path: Path
) -> None:
    pt_file.write(tmp_path / "x.bin", weights_of(small_model()))
    torch = {"pytorch_model.bin": (tmp_path / "x.bin").read_bytes()}
    only = {k: v for k, v in repo_files.items() if not k.endswith(".safetensors")} | torch
    hub = start({REPO: {**repo_files, **torch}, "someone/old": only})
    load(REPO)
    assert "pytorch_model.bin" not in hub.files_fetched()
    assert_same_weights(weights_of(load("someone/old")[0]), weights_of(small_model()))


@pytest.mark.usefixtures("impatient")
def test_a_download_that_is_cut_goes_on_where_it_stopped(
    start: Start, repo_files: dict[str, bytes]
) -> None:
    hub = start({REPO: repo_files}, cuts={"model.safetensors": [70_000, 30_000]})
    load(REPO)
    starts = [int(r.rpartition("=")[2].rstrip("-")) for r in hub.ranges]
    assert starts == [70_000, 100_000]


@pytest.mark.usefixtures("impatient")
def test_an_abandoned_download_is_one_line_and_finished_files_are_kept(
    start: Start, repo_files: dict[str, bytes]
) -> None:
    hub = start({REPO: repo_files}, cuts={"model.safetensors": [70_000, *[0] * 20]})
    with pytest.raises(
        ConnectionError, match=f"{REPO} is not a folder here, not complete"
    ) as caught:
        load(REPO)
    assert "\n" not in str(caught.value)
    hub.cuts.clear()
    hub.asked.clear()
    assert_same_weights(weights_of(load(REPO)[0]), weights_of(small_model()))
    assert hub.files_fetched() == {"model.safetensors"}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("repo", "settings", "error", "message"),
    [
        (
            "someone/none",
            {},
            FileNotFoundError,
            "someone/none is neither a folder here nor a repos",
        ),
        (REPO, {"gated": frozenset({REPO})}, PermissionError, f"{REPO} is gated: accept its lice"),
        (REPO, {"status": {REPO: 401}}, PermissionError, r"may not be read \(HTTP 401\)"),
        (REPO, {"status": {REPO: 403}}, PermissionError, r"may not be read \(HTTP 403\)"),
        (REPO, {"status": {REPO: 500}}, ConnectionError, f"{REPO} is not a folder here, not comp"),
        ("a--b..c/d", {}, FileNotFoundError, "is neither a folder here nor a repository id"),
    ],
)
def test_a_refusal_of_the_hub_is_one_line_that_says_what_to_do(
    repo: str,
    settings: dict[str, Any],
    error: type[Exception],
    message: str,
    start: Start,
    repo_files: dict[str, bytes],
) -> None:
    start({REPO: repo_files}, **settings)
    with pytest.raises(error, match=message) as caught:
        local_or_download(repo)
    assert "\n" not in str(caught.value)


def test_a_gated_repository_opens_with_the_token(
    start: Start, repo_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = start({REPO: repo_files}, gated=frozenset({REPO}))
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert load(REPO)[1] is not None


def test_an_unknown_revision_is_named(start: Start, repo_files: dict[str, bytes]) -> None:
    start({REPO: repo_files})
    with pytest.raises(FileNotFoundError, match=f"{REPO} has no revision 'v9' on the Hub"):
        load(REPO, revision="v9")


def test_offline_without_a_cache_is_said(
    start: Start, repo_files: dict[str, bytes], offline: Callable[[], None]
) -> None:
    hub = start({REPO: repo_files})
    offline()
    with pytest.raises(ConnectionError, match="check the network, HF_ENDPOINT and HF_HUB_OFFLINE"):
        local_or_download(REPO)
    assert hub.asked == []


@pytest.mark.parametrize("name", ["./missing", "a/b/c", "~/nowhere/x", "file.txt", "what now"])
def test_what_is_no_folder_and_no_repository_never_reaches_the_hub(
    name: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = start({})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(FileNotFoundError, match="give a folder with config"):
        local_or_download(name)
    assert hub.asked == []


def test_a_folder_wins_over_a_repository_of_that_name(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = start({})
    monkeypatch.chdir(tmp_path)
    (tmp_path / REPO).mkdir(parents=True)
    assert local_or_download(REPO) == Path(REPO)
    assert hub.asked == []


def test_only_the_asked_files_are_fetched(start: Start, repo_files: dict[str, bytes]) -> None:
    hub = start({REPO: repo_files})
    folder = download(REPO, revision=None, patterns=["config.json"])
    assert files(folder) == ["config.json"]
    assert hub.files_fetched() == {"config.json"}
    assert "config.json" not in MODEL_FILES  # "*.json" covers it


@pytest.mark.slow
def test_the_environment_leads_a_new_process_to_the_mirror(
    repo_files: dict[str, bytes], tmp_path: Path
) -> None:
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": ""}
    command = [sys.executable, "-m", "openelm_mlx.cli", "convert", "huggingface", REPO, "--output"]

    def convert(output: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, str(tmp_path / output)],
            env={**environment, **more},
            capture_output=True,
            text=True,
            timeout=120,
        )

    with serve(FakeHub({REPO: repo_files})) as hub:
        done = convert("online", HF_ENDPOINT=hub.url)
        assert done.returncode == 0, done.stderr
        assert "\r" not in done.stderr
        assert all(line.startswith("info: ") for line in done.stderr.splitlines())
        assert done.stdout == f"{tmp_path / 'online'}\nlicence of the weights: apple-amlr\n"
        url = hub.url
    done = convert("offline", HF_ENDPOINT=url, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert_same_weights(read_weights(tmp_path / "offline"), weights_of(small_model()))
    done = convert("away", HF_ENDPOINT=url, HF_HOME=str(tmp_path / "empty"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {REPO} is not a folder here, not complete")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "away").exists()


def test_our_own_folders_load_from_a_repository_too(
    start: Start, tmp_path: Path, tiny_tokenizer: TinyTokenizer
) -> None:
    folder = small_folder(tmp_path / "mine", tiny_tokenizer.tokenizer, instruct=True)
    start({REPO: contents(folder)})
    model, tokenizer = load(REPO)
    assert tokenizer is not None
    assert tokenizer.chat_template is not None
    assert_same_weights(weights_of(model), weights_of(small_model()))

"""The server over loopback: one BOS, stop texts, streams, refusals and bounds."""

import argparse
import json
import signal
import socket
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import mlx.core as mx
import pytest
from chain_model import TEXT, chain, chain_model, ids_of
from command_line import run_here
from tiny_tokenizer import TinyTokenizer

from openelm_mlx.checkpoint import save_model
from openelm_mlx.generate import generate
from openelm_mlx.model import Model
from openelm_mlx.serve import add_arguments
from openelm_mlx.tokenizer import APPLE_INSTRUCT_TEMPLATE, Tokenizer

CONTEXT = 256
CACHE_BYTES = 400_000


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer: TinyTokenizer) -> Tokenizer:
    return Tokenizer.from_path(tiny_tokenizer.path)


@pytest.fixture(scope="module")
def ids(tokenizer: Tokenizer) -> list[int]:
    return ids_of(tokenizer)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer, ids: list[int]) -> Model:
    """Says the pieces after BOS and after a line break, which ends a chat prompt."""
    newline = tokenizer.encode("\n", bos=False)[-1]
    successors = chain([1, *ids, 2], [newline, ids[0]], [5, 5])  # 5 for ever
    return chain_model(successors, vocab_size=tokenizer.vocab_size, context=CONTEXT)


class Client:
    def __init__(self, port: int, server: Any) -> None:
        self.base, self.server = f"http://127.0.0.1:{port}", server

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.base + path, timeout=60) as answer:
            return json.loads(answer.read())

    def post(self, path: str, **body: Any) -> str:
        request = urllib.request.Request(self.base + path, data=json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: str | list[int], **body: Any) -> Any:
        return json.loads(self.post("/v1/completions", prompt=prompt, **body))

    def chat(self, *messages: dict[str, Any], **body: Any) -> Any:
        return json.loads(self.post("/v1/chat/completions", messages=messages, **body))

    def refusal(self, path: str, **body: Any) -> str:
        with pytest.raises(urllib.error.HTTPError) as raised:
            self.post(path, **body)
        assert raised.value.code == 400
        message = json.loads(raised.value.read())["error"]
        raised.value.close()
        return str(message)


@pytest.fixture
def client(model: Model, tokenizer: Tokenizer) -> Iterator[Client]:
    from openelm_mlx.server import Server

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    flags = ["--model", "some/folder", "--port", "0", "--max-tokens", "40"]
    args = parser.parse_args([*flags, "--prompt-cache-gb", str(CACHE_BYTES / 1e9)])
    with Server(args, model, tokenizer) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield Client(server.port, server)
        server.shutdown()
        thread.join()


def choice(answer: Any) -> tuple[str, str]:
    return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]


pytestmark = pytest.mark.slow


def test_a_completion_counts_one_bos_for_text_and_for_ids(
    client: Client, tokenizer: Tokenizer, ids: list[int]
) -> None:
    for prompt in ("", [], [1], [1, 1], "<s>"):
        answer = client.complete(prompt)
        assert choice(answer) == (TEXT, "stop")
        assert answer["usage"]["prompt_tokens"] == 1
        assert answer["usage"]["completion_tokens"] == len(ids) + 1
    answer = client.complete("The king", max_tokens=3)
    assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode("The king"))
    assert choice(answer)[1] in ("length", "stop")


def test_a_completion_equals_generate(client: Client, model: Model, tokenizer: Tokenizer) -> None:
    for prompt in ("The king", "there was a house", "A"):
        wanted = generate(model, tokenizer, prompt, max_tokens=10)
        assert choice(client.complete(prompt, max_tokens=10))[0] == wanted


def test_stop_texts_cut_the_text_wherever_tokens_end(client: Client) -> None:  # REPORTS D8
    for stop in ("house", "ous", "e s", "aid o", "c."):
        for seed in (None, 1):  # with a seed mlx_lm answers one by one, in another loop
            answer = client.complete("", stop=stop, seed=seed)
            assert choice(answer) == (TEXT[: TEXT.index(stop)], "stop")
    assert choice(client.complete("", stop=["zebra", "onc. And"])) == (TEXT, "stop")
    assert choice(client.complete("", stop=["said", "house s"])) == ("the ", "stop")


def events(stream: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line[:5] == "data:"]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_stream_joins_to_the_completion(client: Client) -> None:
    for stop, wanted in (([], TEXT), (["ous"], "the h")):
        parts = events(client.post("/v1/completions", prompt="", stop=stop, stream=True))
        assert "".join(choice(part)[0] for part in parts) == wanted
        assert choice(parts[-1])[1] == "stop"


def test_a_chat_counts_one_bos(client: Client, tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = APPLE_INSTRUCT_TEMPLATE
    try:
        question = {"role": "user", "content": "The king"}
        answer = client.chat(question)
        wanted = tokenizer.encode_chat([question])
        assert wanted.count(1) == 1
        assert answer["usage"]["prompt_tokens"] == len(wanted)
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": TEXT}
        parts = events(client.post("/v1/chat/completions", messages=[question], stream=True))
        said = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
        assert said == TEXT
        parted = {"role": "user", "content": [{"type": "text", "text": "The king"}]}
        assert client.chat(parted)["usage"] == client.chat(question)["usage"]
    finally:
        tokenizer.chat_template = None


def test_a_chat_with_a_base_model_is_refused(client: Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    message = client.refusal("/v1/chat/completions", messages=messages)
    assert message.startswith("this model has no chat template")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": ["a", "b"]}, "one text or one list of token ids"),
        ({"prompt": 3}, "one text or one list of token ids"),
        ({"prompt": [1, 999]}, "token ids run from 0 to 319"),
        ({"prompt": [5] * CONTEXT}, f"has {CONTEXT + 1} tokens and the model's context is"),
        ({"prompt": "a", "model": "gpt-4"}, "no model 'gpt-4', only 'some/folder'"),
        ({"prompt": "a", "adapters": "/tmp"}, "chosen when the server is started"),
        ({"prompt": "a", "draft_model": "x"}, "chosen when the server is started"),
        ({"prompt": "a", "stop": [""]}, "none of them empty"),
        ({"prompt": "a", "temperature": -1}, "temperature must be at least 0"),
        ({}, "did not contain a prompt"),
    ],
)
def test_wrong_requests_are_told_what_is_wrong(
    client: Client, body: dict[str, Any], message: str
) -> None:
    assert message in client.refusal("/v1/completions", **body)
    assert choice(client.complete("")) == (TEXT, "stop")  # and the next is answered


def test_answers_end_with_the_context(client: Client, ids: list[int]) -> None:
    answer = client.complete([5] * (CONTEXT - 4), max_tokens=1000)
    assert answer["usage"]["prompt_tokens"] == CONTEXT - 3
    assert answer["usage"]["completion_tokens"] <= 3


def test_the_one_model_is_listed_under_its_names(client: Client) -> None:
    listed = client.get("/v1/models")["data"]
    assert [model["id"] for model in listed] == ["some/folder"]
    assert client.get("/health") == {"status": "ok"}
    for name in ("default_model", "some/folder", "folder"):
        assert choice(client.complete("", model=name)) == (TEXT, "stop")


def test_seeds_repeat(client: Client) -> None:
    def text(seed: int) -> str:
        return choice(client.complete("A", seed=seed, temperature=60.0, max_tokens=20))[0]

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_a_prompt_that_was_cached_whole_is_answered(client: Client, ids: list[int]) -> None:
    # mlx_lm 0.32.2 hands its batch an empty prompt then, and the generating thread ends.
    first = client.complete([1, *ids[:3]], max_tokens=2)
    assert choice(first)[1] == "length"
    again = client.complete([1, *ids[:5]], max_tokens=2)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 5
    assert choice(again)[0] == "sai"
    assert client.get("/health") == {"status": "ok"}


def test_a_client_that_goes_away_harms_no_other(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps({"prompt": [5], "max_tokens": 200, "stream": True}).encode()
    host, port = client.base.removeprefix("http://").split(":")
    with caplog.at_level("INFO"), socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        connection.recv(20)
        linger = struct.pack("ii", 1, 0)  # close by reset, as a killed program does
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    assert choice(client.complete("")) == (TEXT, "stop")
    assert "Traceback" not in caplog.text


def test_memory_stays_within_the_bounds(client: Client) -> None:  # REPORTS D17
    cache = client.server._generator.prompt_cache

    def ask(n: int) -> None:
        client.complete([6 + n % 300, 6, *[7 + n % 200] * 150], max_tokens=4)

    for n in range(8):
        ask(n)
    used = mx.get_active_memory()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(8, 40)))
    assert 0 < cache.nbytes <= CACHE_BYTES
    assert len(cache) <= 10
    held = sum(a.nbytes for a in _cached_arrays(cache))
    assert held <= CACHE_BYTES  # no views of a batch's larger buffers
    assert mx.get_active_memory() <= used + CACHE_BYTES


def _cached_arrays(cache: Any) -> Iterator[mx.array]:
    for queue in cache._lru._lrus.values():
        for model, tokens in queue:
            for layer in cache._trie.get(model, tokens).prompt_cache:
                yield from (layer.keys, layer.values)


def test_ctrl_c_ends_the_command_cleanly(
    model: Model, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    save_model(model, folder, tokenizer=tokenizer)
    command = [sys.executable, "-m", "openelm_mlx.cli", "serve", "--model", str(folder)]
    process = subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = next(line for line in process.stderr if "serving" in line)
    base = line.split(" at ")[1].strip()
    request = urllib.request.Request(f"{base}/completions", data=b'{"prompt": ""}')
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert choice(json.loads(answer.read())) == (TEXT, "stop")
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 0
    assert process.stderr.read() == "info: stopped\n"
    process.stderr.close()


def test_a_port_in_use_is_one_line(
    client: Client,
    model: Model,
    tokenizer: Tokenizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "model"
    save_model(model, folder, tokenizer=tokenizer)
    port = client.base.rpartition(":")[2]
    outcome = run_here(capsys, "serve", "--model", folder, "--port", port)
    assert f"cannot listen on 127.0.0.1 port {port}" in outcome.error
    assert "choose another --host or --port" in outcome.error
    outcome = run_here(capsys, "serve", "--model", folder, "--host", "no.such.host.invalid")
    assert "cannot listen on no.such.host.invalid port 8080" in outcome.error

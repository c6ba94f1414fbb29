"""The tripwire: a folder of ours runs in stock mlx_lm, as it is, in every command users know."""

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from openelm_mlx.checkpoint import load
from openelm_mlx.generate import generate

pytestmark = pytest.mark.slow


def mlx_lm(*arguments: str, timeout: int = 240) -> str:
    """Run ``python -m mlx_lm …`` offline and return its standard output."""
    done = subprocess.run(
        [sys.executable, "-m", "mlx_lm", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_stock_generate_continues_with_our_tokens(complete_dir: Path) -> None:
    out = mlx_lm(
        "generate",
        *("--model", str(complete_dir), "--prompt", "the cat sat on"),
        *("--max-tokens", "12", "--temp", "0", "--verbose", "False"),
    )
    model, tokenizer = load(complete_dir)
    assert tokenizer is not None
    assert out.strip() == generate(model, tokenizer, "the cat sat on", max_tokens=12).strip()


def test_stock_loader_gives_equal_logits(complete_dir: Path) -> None:
    from mlx_lm import load as stock_load

    stock, stock_tokenizer = stock_load(str(complete_dir))
    model, tokenizer = load(complete_dir)
    assert tokenizer is not None
    ids = tokenizer.encode("the cat sat on the mat")
    assert stock_tokenizer.encode("the cat sat on the mat") == ids
    tokens = mx.array([ids])
    np.testing.assert_allclose(np.array(stock(tokens)), np.array(model(tokens)), atol=1e-5)


def test_stock_lora_trains_and_fuse_writes_a_folder_that_we_read(
    complete_dir: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    lines = [json.dumps({"text": f"the cat sat on the mat number {i}"}) for i in range(8)]
    for split in ("train", "valid"):
        (data / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    adapters, fused = tmp_path / "adapters", tmp_path / "fused"
    mlx_lm(
        "lora",
        *("--model", str(complete_dir), "--train", "--data", str(data), "--iters", "2"),
        *("--batch-size", "2", "--num-layers", "-1", "--adapter-path", str(adapters)),
        *("--val-batches", "1"),
    )
    mlx_lm(
        "fuse",
        *("--model", str(complete_dir), "--adapter-path", str(adapters)),
        *("--save-path", str(fused)),
    )
    adapted, _ = load(complete_dir, adapter_path=adapters)
    model, tokenizer = load(fused)
    assert tokenizer is not None
    tokens = mx.array([tokenizer.encode("the cat sat")])
    np.testing.assert_allclose(np.array(adapted(tokens)), np.array(model(tokens)), atol=1e-4)


def test_stock_server_answers_one_request(complete_dir: Path) -> None:
    port = 18_000 + int(time.time()) % 2000
    flags = ["--model", str(complete_dir), "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, "-m", "mlx_lm", "server", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        answer = _complete(port, {"prompt": "the cat", "max_tokens": 4, "temperature": 0})
        assert answer["usage"]["completion_tokens"] == 4
        _, tokenizer = load(complete_dir)
        assert tokenizer is not None
        assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode("the cat"))
    finally:
        server.terminate()
        server.wait(timeout=30)


def _complete(port: int, body: dict[str, object]) -> dict[str, dict[str, int]]:
    """POST to /v1/completions, waiting for the server to come up."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + 180
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                answer: dict[str, dict[str, int]] = json.load(response)
                return answer
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)

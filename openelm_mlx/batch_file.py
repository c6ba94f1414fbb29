"""A file of prompts in, a line of JSON out for each: ``openelm generate --prompts``.

All lines are read, checked and encoded before any is answered.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openelm_mlx.batch import BatchResult, generate_batch
from openelm_mlx.generation_settings import GenerateArgs, prompt_ids, token_budget
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Request:
    """One line of a prompts file: where it stands and what it asks."""

    source: str  # file:line
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


def read_requests(path: str | Path) -> list[Request]:
    r"""Read a file of JSON lines: ``{"prompt": TEXT}``, ``{"messages": [...]}`` or a string.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming file and line, if a line is something else, or if there is none.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not a file; give one with a JSON object a line")
    lines = enumerate(Path(path).read_bytes().split(b"\n"), start=1)
    requests = [_request(f"{path}:{number}", line) for number, line in lines if line.strip()]
    if not requests:
        raise ValueError(f'{path} holds no prompts; expected a line {{"prompt": TEXT}} for each')
    return requests


def run_file(
    model: Model,
    tokenizer: Tokenizer,
    path: str | Path,
    settings: GenerateArgs,
    *,
    batch_size: int = 16,
) -> int:
    """Read a file of prompts and write a line of JSON for each; see :func:`run_requests`."""
    return run_requests(model, tokenizer, read_requests(path), settings, batch_size=batch_size)


def run_requests(
    model: Model,
    tokenizer: Tokenizer,
    requests: Sequence[Request],
    settings: GenerateArgs,
    *,
    batch_size: int = 16,
) -> int:
    """Answer requests: a JSON object a line on standard output, in order, as early as possible.

    Returns:
        The exit code, 0.

    Raises:
        ValueError: naming file and line, before any work, if a request cannot be encoded.
    """
    from tqdm import tqdm

    prompts = [_encoded(model, tokenizer, request, settings) for request in requests]
    waiting: dict[int, BatchResult] = {}
    written = 0
    with tqdm(total=len(prompts), unit="prompt", disable=not sys.stderr.isatty()) as bar:

        def progress(index: int, result: BatchResult) -> None:
            nonlocal written
            waiting[index] = result
            bar.update()
            while written in waiting:
                sys.stdout.write(_line(requests[written], waiting.pop(written)))
                written += 1
            sys.stdout.flush()

        generate_batch(
            model, tokenizer, prompts, settings, batch_size=batch_size, progress=progress
        )
    return 0


def _request(source: str, line: bytes) -> Request:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source}: not a line of JSON: {error}") from error
    if isinstance(record, str):
        return Request(source=source, prompt=record)
    if isinstance(record, dict) and ("prompt" in record) != ("messages" in record):
        prompt, messages = record.get("prompt"), record.get("messages")
        if isinstance(prompt, str) or (isinstance(messages, list) and messages):
            return Request(source=source, prompt=prompt, messages=messages)
    shown = json.dumps(record, ensure_ascii=False)
    raise ValueError(
        f'{source}: expected {{"prompt": TEXT}}, {{"messages": [...]}} or a string, got '
        f"{shown if len(shown) <= 80 else shown[:77] + '...'}"
    )


def _encoded(
    model: Model, tokenizer: Tokenizer, request: Request, settings: GenerateArgs
) -> list[int]:
    try:
        if request.messages is not None:
            ids = tokenizer.encode_chat(request.messages)
        else:
            ids = prompt_ids(tokenizer, request.prompt or "")
        token_budget(model, settings, len(ids))
    except ValueError as error:
        raise ValueError(f"{request.source}: {error}") from error
    return ids


def _line(request: Request, result: BatchResult) -> str:
    asked = (
        {"prompt": request.prompt} if request.messages is None else {"messages": request.messages}
    )
    answer = {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "generation_tokens": result.generation_tokens,
    }
    return json.dumps({**asked, **answer}, ensure_ascii=False) + "\n"

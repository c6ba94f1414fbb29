"""mlx_lm's server with our model, our tokenizer and bounds.

What differs from ``mlx_lm.server``: one model, loaded before the port opens; exactly one BOS; stop
texts wherever token borders fall; answers end with the context; the prompt cache is bounded in
bytes and holds no graphs; prompts that were cached whole do not end the generating thread; a chat
with a base model, a wrong prompt and an unknown model are said to the client.

Imports mlx_lm, so it is itself imported only when a server is asked for.
"""

import argparse
import json
import logging
import socket
import sys
from dataclasses import replace
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
from mlx_lm.server import (
    APIHandler,
    CompletionRequest,
    get_system_fingerprint,
    process_message_content,
)

from openelm_mlx.generation_settings import prompt_ids
from openelm_mlx.model import Model
from openelm_mlx.server_generation import Generator, OneModel, PromptCache
from openelm_mlx.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_POOL_BYTES = 1 << 30  # freed buffers that MLX keeps for reuse


class Server:
    """A listening server; ``serve_forever`` answers, leaving the ``with`` block frees everything.

    Args:
        args: the flags of ``openelm serve``.
        model: in eval mode.
        tokenizer: of the model.

    Attributes:
        port: that is listened on.

    Raises:
        OSError: if the address cannot be used.
    """

    def __init__(self, args: argparse.Namespace, model: Model, tokenizer: Tokenizer) -> None:
        try:
            family, _, _, _, place = socket.getaddrinfo(
                args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            address: Any = place  # of either family
            self._http = _http_server(family)(address, APIHandler)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(
                f"cannot listen on {args.host} port {args.port}: {reason}; choose another --host "
                "or --port"
            ) from error
        self.port = int(self._http.server_address[1])
        self._old_pool = mx.set_cache_limit(_POOL_BYTES)
        provider = OneModel(args, model, tokenizer)
        cache = PromptCache(args.prompt_cache_size, int(args.prompt_cache_gb * 1e9))
        self._generator = Generator(provider, cache)
        handler: Any = partial(
            Handler,
            *(self._generator, args, model.args.max_context_length, tokenizer),
            system_fingerprint=get_system_fingerprint(),
        )
        self._http.RequestHandlerClass = handler

    def serve_forever(self) -> None:
        """Answer requests until interrupted or shut down."""
        self._http.serve_forever(poll_interval=0.2)

    def shutdown(self) -> None:
        """End ``serve_forever``, from another thread."""
        self._http.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.server_close()
        self._generator.stop_and_join()
        mx.set_cache_limit(self._old_pool)


def _http_server(family: int) -> type[ThreadingHTTPServer]:
    class QuietServer(ThreadingHTTPServer):
        """One line where a request fails, in place of a traceback."""

        address_family = family

        def handle_error(self, request: Any, client_address: Any) -> None:
            error = sys.exception()
            if isinstance(error, ConnectionError):
                logger.info("%s: the client went away", client_address[0])
            else:
                logger.error("%s: %s: %s", client_address[0], type(error).__name__, error)

    return QuietServer


class Handler(APIHandler):
    """Checks and encodes requests before they are queued, so that faults are status 400."""

    def __init__(
        self,
        generator: Generator,
        args: argparse.Namespace,
        context: int,
        tokenizer: Tokenizer,
        *request: Any,
        system_fingerprint: str,
    ) -> None:
        self._args, self._context, self._ours = args, context, tokenizer
        super().__init__(generator, *request, system_fingerprint=system_fingerprint)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests go to the log, not to standard error."""
        logger.debug("%s " + format, self.address_string(), *args)

    def validate_model_parameters(self) -> None:
        """See mlx_lm; also what only a server of one model can refuse."""
        if "repetition_context_size" not in self.body:
            self.repetition_context_size = self._context  # mlx_lm's 20 misses longer loops
        super().validate_model_parameters()
        if self.requested_model not in self._names():
            raise ValueError(
                f"this server has no model {self.requested_model!r}, only {self._args.model!r}"
            )
        if self.adapter is not None or self.body.get("draft_model") is not None:
            raise ValueError("adapters and draft models are chosen when the server is started")
        stops = self.body.get("stop") or []
        if not isinstance(stops, str | list) or not all(isinstance(s, str) and s for s in stops):
            raise ValueError("stop must be a text or a list of texts, none of them empty")

    def handle_text_completions(self) -> CompletionRequest:
        """Encode a prompt, text or ids, with exactly one BOS."""
        request = super().handle_text_completions()
        prompt = request.prompt
        ids = isinstance(prompt, list) and all(type(i) is int for i in prompt)
        if not isinstance(prompt, str) and not ids:
            raise ValueError("prompt must be one text or one list of token ids")
        return self._encoded(request, prompt_ids(self._ours, prompt))

    def handle_chat_completions(self) -> CompletionRequest:
        """Encode a conversation by the chat template, with exactly one BOS."""
        request = super().handle_chat_completions()
        if self._ours.chat_template is None:
            raise ValueError(
                "this model has no chat template: it was not tuned to chat; use /v1/completions, "
                "or serve an Instruct model"
            )
        process_message_content(request.messages)
        return self._encoded(request, self._ours.encode_chat(request.messages))

    def _encoded(self, request: CompletionRequest, ids: list[int]) -> CompletionRequest:
        """The request as ids that fit the context, and room for the answer."""
        if not 0 < len(ids) < self._context:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and the model's context is {self._context}"
            )
        if max(ids) >= self._ours.vocab_size or min(ids) < 0:
            raise ValueError(f"token ids run from 0 to {self._ours.vocab_size - 1}")
        wanted: Any = self.max_tokens  # validated
        self.max_tokens = min(wanted, self._context - len(ids))
        encoded: Any = ids  # ServerTokenizer.encode leaves them as they are
        return replace(request, request_type="text", prompt=encoded, messages=[], tools=None)

    def handle_models_request(self) -> None:
        """List the one model."""
        model = {"id": self._args.model, "object": "model", "created": self.created}
        body = json.dumps({"object": "list", "data": [model]}).encode()
        self._set_completion_headers(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _names(self) -> set[str]:
        path = Path(self._args.model).expanduser()
        return {"default_model", self._args.model, str(path.resolve()), path.resolve().name}

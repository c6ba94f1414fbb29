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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, trim_prompt_cache
from mlx_lm.server import (
    APIHandler,
    CompletionRequest,
    ModelProvider,
    Response,
    ResponseGenerator,
    get_system_fingerprint,
    process_message_content,
)
from mlx_lm.tokenizer_utils import TokenizerWrapper

from openelm_mlx.detokenizer import Detokenizer, StopMatcher
from openelm_mlx.generation_settings import prompt_ids
from openelm_mlx.model import Model
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
        info = socket.getaddrinfo(
            args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        try:
            self._http = _http_server(info[0])(info[4], APIHandler)
        except OSError as error:
            reason = error.strerror or str(error)
            raise OSError(
                f"cannot listen on {args.host} port {args.port}: {reason}; choose another --port"
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
        """One line where a client goes away, in place of a traceback."""

        address_family = family

        def handle_error(self, request: Any, client_address: Any) -> None:
            logger.info("%s: the connection ended early", client_address[0], exc_info=False)

    return QuietServer


class ServerTokenizer(TokenizerWrapper):
    """Our tokenizer with the names that mlx_lm's server asks for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ours = tokenizer
        self._eos_token_ids = set(tokenizer.eos_ids)
        self._think_start = self._tool_call_start = self._tool_parser = None
        self._structural_markers: tuple[str, ...] = ()
        self._response_format: dict[str, Any] = {}

    @property
    def detokenizer(self) -> "ServerDetokenizer":
        """A fresh one for each request."""
        return ServerDetokenizer(self._ours.detokenizer())

    def encode(self, prompt: Any, **_: Any) -> list[int]:
        """Ids as they are; text as it stands, without a BOS."""
        return self._ours.encode(prompt, bos=False) if isinstance(prompt, str) else list(prompt)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """The pieces of ids, for log-probabilities."""
        return [self._ours.piece(i) if i < self._ours.vocab_size else "" for i in ids]


class ServerDetokenizer:
    """Our stream decoder with the names that mlx_lm's server asks for."""

    def __init__(self, ours: Detokenizer) -> None:
        self._ours, self._new = ours, ""

    def add_token(self, token: int) -> None:
        """Take one id."""
        self._new += self._ours.add_token(token)

    def finalize(self) -> None:
        """No more will come."""
        self._new += self._ours.finish()

    @property
    def last_segment(self) -> str:
        """The text since this was last read."""
        new, self._new = self._new, ""
        return new


class OneModel(ModelProvider):
    """Serves the model that it was given, under any of its names."""

    def __init__(self, args: argparse.Namespace, model: Model, tokenizer: Tokenizer) -> None:
        settings = {
            **vars(args),
            "chat_template_args": {},
            "chat_template": "",
            "draft_model": None,
            "num_draft_tokens": 0,
            "kv_bits": None,
            "kv_group_size": 64,
            "quantized_kv_start": 0,
            "pipeline": False,
            "prefill_step_size": 512,
            "prompt_cache_bytes": None,  # PromptCache has the bound
            "trust_remote_code": False,
            "allowed_origins": args.allowed_origins.split(","),
        }
        super().__init__(argparse.Namespace(**settings))
        loaded: Any = self  # mlx_lm's annotations know only the state before loading
        loaded.model, loaded.tokenizer = model, ServerTokenizer(tokenizer)
        loaded.model_key = (args.model, args.adapter_path, None)
        loaded.is_batchable = True

    def load_default(self) -> None:
        """Everything is loaded."""

    def load(self, *_: Any) -> tuple[Any, Any]:
        """The model and its tokenizer; the handler has checked the name."""
        return self.model, self.tokenizer


class PromptCache(LRUPromptCache):
    """Keys and values of earlier prompts, bounded in number and bytes."""

    def insert_cache(self, model: Any, tokens: list[int], prompt_cache: Any, **kind: Any) -> None:
        """Keep a cache; its arrays are computed first, else they would hold the whole batch."""
        mx.eval([layer.state for layer in prompt_cache])
        super().insert_cache(model, tokens, prompt_cache, **kind)

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[Any, list[int]]:
        """The longest cached prefix and the rest, which is never empty: a step needs a token."""
        cache, rest = super().fetch_nearest_cache(model, tokens)
        if cache is not None and not rest:
            trim_prompt_cache(cache, 1)
            rest = tokens[-1:]
        return cache, rest


class Generator(ResponseGenerator):
    """Generates; stop texts are cut from the text, wherever token borders fall."""

    def generate(
        self,
        request: Any,
        generation_args: Any,
        progress_callback: Callable[[int, int], None] | None = None,
    ) -> tuple[Any, Iterator[Response]]:
        """See mlx_lm; the stop words are handled here."""
        stops, generation_args.stop_words = generation_args.stop_words, []
        context, responses = super().generate(request, generation_args, progress_callback)
        return context, _until_stop(responses, StopMatcher(stops))


def _until_stop(responses: Iterator[Response], matcher: StopMatcher) -> Iterator[Response]:
    """Responses up to a stop text.

    The last one has no reason where it is a stop: the handler then says "stop", and keeps the
    text, which it drops where the reason is given.
    """
    for response in responses:
        text, stopped = matcher.feed(response.text)
        ended = response.finish_reason is not None
        if ended and not stopped:
            text += matcher.flush()
        reason = "length" if response.finish_reason == "length" and not stopped else None
        yield replace(response, text=text, finish_reason=reason)
        if stopped or ended:
            return


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

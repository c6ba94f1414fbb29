"""The generating side of ``server``: our tokenizer and one model behind mlx_lm's queue and cache.

Imports mlx_lm, so it is itself imported only when a server is asked for.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, trim_prompt_cache
from mlx_lm.server import ModelProvider, Response, ResponseGenerator
from mlx_lm.tokenizer_utils import TokenizerWrapper

from openelm_mlx.detokenizer import Detokenizer, StopMatcher
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import Tokenizer


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

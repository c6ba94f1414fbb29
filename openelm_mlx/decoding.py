"""The decoding loop: prompt ids in, token ids out. Knows the model and its cache, no text.

L new tokens, S cached tokens, K key-value heads, E head_dim, V vocabulary; one sequence at a time.
"""

from collections.abc import Generator, Sequence
from typing import Any

import mlx.core as mx

from openelm_mlx.cache import KVCache, make_cache
from openelm_mlx.model import Model
from openelm_mlx.sampling import Processor, Sampler, apply_all, greedy

PREFILL_STEP = 512  # prompt tokens a forward pass
_ONE_PASS = 64  # a prompt of so many tokens is not worth a pass for its last one alone
_FIRST_ROOM = 512  # tokens of the smallest fixed-shape cache
_CLEAR_EVERY = 256  # tokens


def prefill(
    model: Model, tokens: mx.array, cache: Sequence[Any], *, step: int = PREFILL_STEP
) -> mx.array:
    """Run the prompt through the model in chunks.

    Args:
        model: in eval mode.
        tokens: (L,) ids, at least one.
        cache: one a layer, filled in place.
        step: tokens a forward pass.

    Returns:
        (1, V) logits after the last token.
    """
    start = 0
    while tokens.size - start > min(step, _ONE_PASS):
        stop = min(start + step, tokens.size - 1)
        model.transformer(tokens[None, start:stop], cache)
        mx.eval([layer.state for layer in cache])  # what the last layer adds is never computed
        start = stop
        mx.clear_cache()
    hidden = model.transformer(tokens[None, start:], cache)
    return model.head(hidden[:, -1])


def decode(
    model: Model,
    prompt: Sequence[int] | mx.array,
    *,
    max_tokens: int,
    sampler: Sampler = greedy,
    processors: Sequence[Processor] = (),
    cache: list[Any] | None = None,
    prefill_step: int = PREFILL_STEP,
    compiled: bool | None = None,
) -> Generator[int, None, None]:
    """Generate token ids, each computed while the one before is being used.

    Args:
        model: in eval mode.
        prompt: at least one token id, not yet in the cache.
        max_tokens: how many to generate at most.
        sampler: (1, V) logits -> (1,) token.
        processors: applied to the logits first; they see prompt and output.
        cache: one a layer (ours or mlx_lm's), possibly holding a prefix; None makes an empty one.
        prefill_step: prompt tokens a forward pass.
        compiled: run the step under ``mx.compile`` over a fixed-shape cache; None decides: on a
            GPU, with our own cache. On a CPU compilation costs seconds and gains little.

    Yields:
        Token ids, end-of-sequence tokens included: stopping is the caller's business.

    Raises:
        ValueError: for an empty prompt.
    """
    tokens = mx.array(prompt if isinstance(prompt, mx.array) else list(prompt), dtype=mx.int32)
    if tokens.size == 0:
        raise ValueError("the prompt is empty; give at least one token")
    cache = make_cache(len(model.layers)) if cache is None else cache
    logits = prefill(model, tokens, cache, step=prefill_step)
    step = make_step(model, cache, compiled)

    history = tokens if processors else None
    try:
        for n in range(max_tokens):
            if history is not None:
                logits = apply_all(processors, history, logits)
            token = sampler(logits)
            if history is not None:
                history = mx.concatenate([history, token.astype(mx.int32)])
            if n + 1 < max_tokens:
                logits = step(token)
                mx.async_eval(token, logits)
            picked: Any = token.tolist()
            yield picked[0]
            if n % _CLEAR_EVERY == _CLEAR_EVERY - 1:
                mx.clear_cache()  # the buffers that the growing cache left behind
    finally:
        step.finish()


def make_step(
    model: Model, cache: list[Any], compiled: bool | None = None
) -> "EagerStep | CompiledStep":
    """The way to run one token; see :func:`decode` for ``compiled``."""
    own = all(type(layer) is KVCache for layer in cache)
    if compiled is None:
        compiled = mx.default_device().type == mx.gpu
    return CompiledStep(model, cache) if compiled and own else EagerStep(model, cache)


class EagerStep:
    """One token through the model, graph built anew each time."""

    def __init__(self, model: Model, cache: Sequence[Any]) -> None:
        self._model, self._cache = model, cache

    def __call__(self, token: mx.array) -> mx.array:
        """(1,) token -> (1, V) logits of the next."""
        return self._model(token[None], self._cache)[:, -1]

    def finish(self) -> None:
        """Nothing is pending."""


class FixedKVCache:
    """One layer's cache of a fixed size, written at a position that is an array.

    With fixed shapes one compiled graph serves every step.
    """

    def __init__(self, keys: mx.array, values: mx.array, position: mx.array) -> None:
        self.keys, self.values, self.offset = keys, values, position

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write (1, K, 1, E) at the position; return the whole (1, K, S, E) buffers."""
        self.keys = mx.slice_update(self.keys, keys, self.offset, axes=[2])
        self.values = mx.slice_update(self.values, values, self.offset, axes=[2])
        return self.keys, self.values

    def make_mask(self, num_tokens: int, **_: Any) -> mx.array:
        """(S,) bool: the positions up to and including the new token."""
        return mx.arange(self.keys.shape[2], dtype=mx.int32) <= self.offset


class CompiledStep:
    """One token through the model as one compiled graph: 2.5x less host time (PERFORMANCE.md).

    The buffers double when they are full, which compiles once more. After ``finish`` the caches
    may be used and trimmed by others; the next call takes them over again.
    """

    def __init__(self, model: Model, cache: list[KVCache]) -> None:
        self._model, self._cache = model, cache
        self._position = 0
        self._buffers: list[mx.array] = []  # keys and values of each layer while in use here
        self._graph = mx.compile(self._forward)

    def __call__(self, token: mx.array) -> mx.array:
        """(1,) token -> (1, V) logits of the next."""
        if not self._buffers:
            self._position = self._cache[0].offset
            self._buffers = [buffer for layer in self._cache for buffer in layer.state]
        self._make_room()
        logits, *self._buffers = self._graph(
            token, mx.array(self._position, dtype=mx.int32), *self._buffers
        )
        self._position += 1
        return logits

    def finish(self) -> None:
        """Hand the buffers back to the caches, so that they can be used on."""
        pairs = zip(self._buffers[::2], self._buffers[1::2], strict=True)
        for layer, state in zip(self._cache, pairs, strict=False):  # no pairs: nothing in use
            layer.state, layer.offset = state, self._position
        self._buffers = []

    def _forward(self, token: mx.array, position: mx.array, *buffers: mx.array) -> list[mx.array]:
        caches = [
            FixedKVCache(keys, values, position)
            for keys, values in zip(buffers[::2], buffers[1::2], strict=True)
        ]
        logits = self._model(token[None], caches)[:, -1]
        return [logits, *(buffer for c in caches for buffer in (c.keys, c.values))]

    def _make_room(self) -> None:
        """Few sizes, all powers of two: each size is one compilation."""
        room, needed = self._buffers[0].shape[2], 1 << self._position.bit_length()
        if room <= self._position or room < _FIRST_ROOM or room & (room - 1):
            size = max(_FIRST_ROOM, needed)
            self._buffers = [_resize(b, self._position, size) for b in self._buffers]


def _resize(buffer: mx.array, used: int, room: int) -> mx.array:
    B, K, _, E = buffer.shape
    return mx.concatenate(
        [buffer[..., :used, :], mx.zeros((B, K, room - used, E), buffer.dtype)], axis=2
    )

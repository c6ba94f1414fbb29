"""How many kernels a GPU would start for one decoded token, counted without a GPU.

The graph of one step is built with RMSNorm, RoPE and attention as one node each (on a CPU MLX
would spell them out) and fused activations; nodes that only re-view memory are left out.
"""

import io
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

# Primitives that start no kernel: they describe memory that is there.
_VIEWS = frozenset(
    {
        *("Broadcast", "BroadcastAxes", "ExpandDims", "Squeeze", "Reshape", "Transpose"),
        *("Slice", "Split", "AsStrided", "Flatten", "Unflatten", "Copy", "StopGradient"),
        *("Depends", "NumberOfElements", "View"),
    }
)
_NODE = re.compile(r'\[label ="([^"]*)", shape=rectangle\]')

Step = Callable[[mx.array], mx.array]


def count_kernels(step: Step, caches: list[Any]) -> dict[str, int]:
    """Kernels of one greedy decoding step, by primitive.

    Args:
        step: (1,) token -> (1, V) logits, updating ``caches``.
        caches: filled by a prompt and evaluated, with room for one more token.

    Returns:
        primitive -> how often it runs; "Compiled" stands for a fused group.
    """
    token = mx.array([7], dtype=mx.int32)
    mx.eval(token)
    with _one_node_each():
        following = mx.argmax(step(token), axis=-1)
        buffers = [array for cache in caches for array in (cache.keys, cache.values)]
        text = io.StringIO()
        mx.export_to_dot(text, following, *buffers)
    counts: dict[str, int] = {}
    for label in _NODE.findall(text.getvalue()):
        name = "Compiled" if label.startswith("Compiled") else label
        if name not in _VIEWS:
            counts[name] = counts.get(name, 0) + 1
    return counts


def host_seconds(step: Step, *, tokens: int = 20) -> float:
    """Median time to build the graph of one step, nothing of it computed, in seconds.

    Args:
        step: (1,) token -> (1, V) logits; its cache needs room for ``tokens`` more.
        tokens: steps to take.
    """
    token = mx.array([7], dtype=mx.int32)
    times = []
    for _ in range(tokens):
        start = time.perf_counter()
        logits = step(token)
        times.append(time.perf_counter() - start)
        mx.eval(logits)
    return sorted(times)[len(times) // 2]


@contextmanager
def _one_node_each() -> Iterator[None]:
    """Let each ``mx.fast`` call stand in the graph as one node of the right shape."""
    fast = mx.fast
    saved = fast.rms_norm, fast.rope, fast.scaled_dot_product_attention
    replacements: Any = (
        lambda x, weight, eps, **_: mx.square(x),
        lambda x, *_, **__: mx.sin(x),
        lambda q, k, v, **_: mx.cos(q),
    )
    fast.rms_norm, fast.rope, fast.scaled_dot_product_attention = replacements
    try:
        yield
    finally:
        fast.rms_norm, fast.rope, fast.scaled_dot_product_attention = saved

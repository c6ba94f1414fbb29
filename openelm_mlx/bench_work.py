"""What a token has to read and compute, and what the device could: shares of its limits on a GPU.

The work is what the model needs, whoever runs it: recomputed layers and copies count for nothing.
H query heads, E head_dim, V vocabulary, D model_dim.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from openelm_mlx.model import Model

# GB/s as the maker states it, of the largest GPU of that name (M3 Max with 30 cores: 300, M4 Max
# with 32 cores: 410). Apple: "Technical Specifications" of the Macs and the announcements of the
# chips, 2020-2026. NVIDIA: data sheets.
BANDWIDTH: dict[str, float] = {
    **{"Apple M1": 68.25, "Apple M1 Pro": 200, "Apple M1 Max": 400, "Apple M1 Ultra": 800},
    **{"Apple M2": 100, "Apple M2 Pro": 200, "Apple M2 Max": 400, "Apple M2 Ultra": 800},
    **{"Apple M3": 100, "Apple M3 Pro": 150, "Apple M3 Max": 400, "Apple M3 Ultra": 819},
    **{"Apple M4": 120, "Apple M4 Pro": 273, "Apple M4 Max": 546},
    **{"Apple M5": 153, "Apple M5 Pro": 307, "Apple M5 Max": 614},
    **{"NVIDIA H200": 4800, "NVIDIA H100 80GB HBM3": 3350, "NVIDIA A100-SXM4-80GB": 2039},
    **{"NVIDIA GeForce RTX 4090": 1008, "NVIDIA GeForce RTX 5090": 1792},
}
_SIZE = 4096  # rows and columns of the matrices whose product is timed


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one token costs.

    Attributes:
        bytes: that have to come from memory, weights and key-value cache; 0 where weights are
            read once for so many tokens that it does not count.
        flops: of the matrix products, a multiplication and an addition as two.
    """

    bytes: float
    flops: float


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a device could do at most.

    Attributes:
        gb_per_s: memory bandwidth as its maker states it; None where it is not in the table.
        tflop_per_s: reached by a large matrix product here, in the model's dtype.
    """

    gb_per_s: float | None
    tflop_per_s: float


def decode_work(model: Model, *, prompt: int, new: int, batch: int = 1) -> Work:
    """A generated token of a batch: all weights once a step, the cache at its mean length."""
    context = prompt + new / 2
    size = model.transformer.norm.weight.itemsize
    cache = context * model.args.kv_bytes_per_token(size)
    return Work(
        bytes=weight_bytes(model) / batch + cache,
        flops=_products(model) + _head(model) + _attention(model, context),
    )


def prefill_work(model: Model, *, tokens: int) -> Work:
    """A prompt token: it sees half the prompt on average; only the last one needs logits."""
    return Work(
        bytes=weight_bytes(model) / tokens,
        flops=_products(model) + _head(model) / tokens + _attention(model, tokens / 2),
    )


def training_work(model: Model, *, length: int, adapters: bool) -> Work:
    """A token of a training step: forward, gradients of activations and, in full, of weights."""
    forward = _products(model) + _head(model) + _attention(model, length / 2)
    return Work(bytes=0, flops=(2 if adapters else 3) * forward)


def weight_bytes(model: Model) -> int:
    """Bytes that one step reads: all weights; of an untied embedding only rows are read."""
    arrays: Any = tree_flatten(model.parameters())
    untied = not model.args.share_input_output_layers
    return sum(
        array.nbytes
        for name, array in arrays
        if not (untied and name.startswith("transformer.token_embeddings"))
    )


def shares(work: Work, tokens_per_s: float, limits: Limits | None) -> dict[str, float | None]:
    """What a speed means: GB/s and TFLOP/s, and their shares of the limits.

    Args:
        work: of one token.
        tokens_per_s: measured.
        limits: None on a CPU, whose limits are not measured.

    Returns:
        ``gb_per_s``, ``tflop_per_s``, ``bandwidth_share``, ``flops_share``; None where unknown.
    """
    gb, tflop = work.bytes * tokens_per_s / 1e9, work.flops * tokens_per_s / 1e12
    bandwidth = limits.gb_per_s if limits and work.bytes else None
    return {
        "gb_per_s": gb or None,
        "tflop_per_s": tflop,
        "bandwidth_share": gb / bandwidth if bandwidth else None,
        "flops_share": tflop / limits.tflop_per_s if limits else None,
    }


def device_limits(dtype: mx.Dtype) -> Limits | None:
    """Limits of the GPU in use; None on a CPU."""
    if mx.default_device().type != mx.gpu:
        return None
    return Limits(gb_per_s=bandwidth_of(mx.device_info()), tflop_per_s=product_speed(dtype))


def bandwidth_of(device_info: Mapping[str, Any]) -> float | None:
    """GB/s of a device by its name; None for one that is not in the table."""
    return BANDWIDTH.get(str(device_info.get("device_name", "")).strip())


def product_speed(dtype: mx.Dtype, *, size: int = _SIZE, trials: int = 5) -> float:
    """TFLOP/s of the best of some products of two square matrices."""
    a, b = (mx.random.normal((size, size)).astype(dtype) for _ in range(2))
    mx.eval(a, b, a @ b)
    best = 0.0
    for _ in range(trials):
        start = time.perf_counter()
        mx.eval(a @ b)
        best = max(best, 2 * size**3 / (time.perf_counter() - start) / 1e12)
    return best


def _products(model: Model) -> float:
    return 2.0 * sum(model.args.layer_parameters)


def _head(model: Model) -> float:
    return 2.0 * model.args.vocab_size * model.args.model_dim


def _attention(model: Model, context: float) -> float:
    """Scores and weighted values: two products of E numbers a head and position."""
    return 4.0 * sum(model.args.num_query_heads) * model.args.head_dim * context

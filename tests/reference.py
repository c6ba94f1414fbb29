"""OpenELM forward pass in NumPy: the independent judge of the tests.

Written from the paper (Mehta et al. 2024, arXiv 2404.14619, section 2) and from what was measured
on apple/corenet@1aa3acd, never from the code under test. Slow and plain on purpose.

B batch, L tokens, D model_dim, H / K query / key-value heads, E head_dim, V vocabulary.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Weights = Mapping[str, np.ndarray]

DEFAULTS: dict[str, Any] = {  # Apple's configuration_openelm.py
    "vocab_size": 32000,
    "num_transformer_layers": 12,
    "model_dim": 2048,
    "head_dim": 128,
    "qkv_multipliers": 1.0,
    "num_gqa_groups": 1,
    "ffn_multipliers": 4.0,
    "ffn_with_glu": True,
    "ffn_dim_divisor": 256,
    "activation_fn_name": "swish",
    "normalize_qk_projections": False,
    "share_input_output_layers": False,
    "rope_freq_constant": 10000,
}


class LayerSize(NamedTuple):
    query_heads: int
    kv_heads: int
    ffn_dim: int


def make_divisible(value: float, divisor: int) -> int:
    """Nearest multiple, half up, at least one; a multiple more where over a tenth would be lost."""
    nearest = max(divisor, divisor * math.floor((value + divisor / 2) / divisor))
    return nearest if nearest >= 0.9 * value else nearest + divisor


def ramp(multipliers: float | Sequence[float], num_layers: int) -> list[float]:
    """One multiplier a layer: a number repeats, a pair is a rounded line, a full list stands."""
    if isinstance(multipliers, int | float):
        return [float(multipliers)] * num_layers
    if len(multipliers) == 2:
        line = np.linspace(multipliers[0], multipliers[1], num_layers, dtype=np.float64)
        return np.round(line, 2).tolist()
    assert len(multipliers) == num_layers
    return [float(m) for m in multipliers]


def layer_sizes(config: Mapping[str, Any]) -> list[LayerSize]:
    """Widths of every layer; per-layer head lists, where given, win over the multipliers."""
    c = {**DEFAULTS, **config}
    n, d, e, groups = (
        c[k] for k in ("num_transformer_layers", "model_dim", "head_dim", "num_gqa_groups")
    )
    scaled = [make_divisible(d * m, e * groups) // e for m in ramp(c["qkv_multipliers"], n)]
    query = config.get("num_query_heads") or scaled
    kv = config.get("num_kv_heads") or [q // groups for q in query]
    ffn = [make_divisible(d * m, c["ffn_dim_divisor"]) for m in ramp(c["ffn_multipliers"], n)]
    return [LayerSize(*sizes) for sizes in zip(query, kv, ffn, strict=True)]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019)."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope(x: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    """Rotary embedding, halves rotated against each other (Su et al. 2021, "rotate half").

    Args:
        x: (..., L, E).
        positions: (L,) or whatever broadcasts against the leading axes of x.
        base: the frequency of pair i is base^(-2i / E).
    """
    half = x.shape[-1] // 2
    frequency = np.array([base ** (-2 * i / x.shape[-1]) for i in range(half)])
    angle = np.asarray(positions, np.float64)[..., None] * frequency
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _swish(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _relu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, 0.0)


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "swish": _swish,
    "gelu": _gelu,
    "relu": _relu,
}


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def attention(
    c: Mapping[str, Any], w: Weights, size: LayerSize, x: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(B, L, D) -> (B, L, D); also the keys before RoPE and the values, (B, K, L, E)."""
    (batch, length, _), e = x.shape, c["head_dim"]
    h, k, _ = size
    rows = np.split(x @ w["attn.qkv_proj.weight"].T, [h * e, (h + k) * e], axis=-1)
    q, keys, values = (r.reshape(batch, length, -1, e).swapaxes(1, 2) for r in rows)
    if c["normalize_qk_projections"]:
        q = rms_norm(q, w["attn.q_norm.weight"])
        keys = rms_norm(keys, w["attn.k_norm.weight"])
    base = c["rope_freq_constant"]
    q, rotated = rope(q, positions, base), rope(keys, positions, base)
    every = np.arange(h) // (h // k)  # which key-value head serves each query head
    scores = q @ rotated[:, every].swapaxes(-1, -2) / math.sqrt(e)
    hidden_future = np.triu(np.ones((length, length), bool), 1)
    mixed = softmax(np.where(hidden_future, -np.inf, scores)) @ values[:, every]
    out = mixed.swapaxes(1, 2).reshape(batch, length, h * e) @ w["attn.out_proj.weight"].T
    return out, keys, values


def feed_forward(c: Mapping[str, Any], w: Weights, size: LayerSize, x: np.ndarray) -> np.ndarray:
    """act(gate) * up (Shazeer 2020), or act(up) without GLU; (B, L, D) -> (B, L, D)."""
    activate = ACTIVATIONS[c["activation_fn_name"]]
    inner = x @ w["ffn.proj_1.weight"].T
    if c["ffn_with_glu"]:
        inner = activate(inner[..., : size.ffn_dim]) * inner[..., size.ffn_dim :]
    else:
        inner = activate(inner)
    return inner @ w["ffn.proj_2.weight"].T


def _under(weights: Weights, prefix: str) -> dict[str, np.ndarray]:
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def trace(
    config: Mapping[str, Any],
    weights: Weights,
    tokens: np.ndarray,
    *,
    first_position: int = 0,
    dtype: type[np.floating[Any]] = np.float64,
) -> dict[str, np.ndarray]:
    """Run the model and keep everything on the way.

    Args:
        config: keys of ``config.json``; absent ones take Apple's defaults.
        weights: Hugging Face or CoreNet names (the prefix ``transformer.`` or none).
        tokens: (B, L) ids.
        first_position: position of the first token.
        dtype: to compute in.

    Returns:
        ``embeddings``, ``layer_i``, ``layer_i.attn_out``, ``final_norm`` (B, L, D); ``keys.i``
        before RoPE and ``values.i`` (B, K, L, E); ``logits`` (B, L, V).
    """
    c = {**DEFAULTS, **config}
    w = {k.removeprefix("transformer."): v.astype(dtype) for k, v in weights.items()}
    positions = first_position + np.arange(np.shape(tokens)[-1])
    x = w["token_embeddings.weight"][np.asarray(tokens)]
    out = {"embeddings": x}
    for i, size in enumerate(layer_sizes(config)):
        layer = _under(w, f"layers.{i}.")
        normed = rms_norm(x, layer["attn_norm.weight"])
        attn, out[f"keys.{i}"], out[f"values.{i}"] = attention(c, layer, size, normed, positions)
        x = x + attn
        x = x + feed_forward(c, layer, size, rms_norm(x, layer["ffn_norm.weight"]))
        out[f"layer_{i}.attn_out"], out[f"layer_{i}"] = attn, x
    out["final_norm"] = rms_norm(x, w["norm.weight"])
    table = "token_embeddings.weight"
    if not c["share_input_output_layers"]:
        table = "lm_head.weight" if "lm_head.weight" in w else "classifier.weight"
    out["logits"] = out["final_norm"] @ w[table].T
    return out


def forward(config: Mapping[str, Any], weights: Weights, tokens: np.ndarray) -> np.ndarray:
    """Logits (B, L, V) in float64; see ``trace``."""
    return trace(config, weights, tokens)["logits"]

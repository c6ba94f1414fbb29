"""OpenELM decoder: layer-wise scaling, grouped queries, QK-norm, RoPE, no biases.

B batch, L new tokens, S cached + new, D model_dim, H / K query / key-value heads, E head_dim,
F feed-forward width, V vocabulary.  H, K and F differ from layer to layer.

Parameter names are those of Apple's Hugging Face checkpoints and of ``mlx_lm.models.openelm``.
Knows nothing about files or tokens' text. Source: apple/corenet@1aa3acd ``general_gpt.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from openelm_mlx import cpu_attention
from openelm_mlx.activations import ACTIVATIONS, gated
from openelm_mlx.attention_gradient import attention_without_scores
from openelm_mlx.cache import Cache
from openelm_mlx.config import ModelArgs as ModelArgs
from openelm_mlx.recompute import Mask as Mask
from openelm_mlx.recompute import recomputed


def _project_and_add(residual: mx.array, x: mx.array, linear: nn.Module) -> mx.array:
    """``residual + linear(x)``, in one kernel where the layer is a plain matrix."""
    if type(linear) is not nn.Linear:
        return residual + linear(x)
    if x.shape[0] == 1:
        return mx.addmm(residual, x, linear.weight.T)
    # addmm would read the matrix once for each sequence of a batch
    rows = mx.addmm(residual.flatten(0, 1), x.flatten(0, 1), linear.weight.T)
    return rows.reshape(residual.shape)


@dataclass(slots=True, eq=False)
class _NormRows:
    """Norm weights by head, and what they were made of; no array, so not a part of the model."""

    q: mx.array  # (E,)
    k: mx.array  # (E,)
    rows: mx.array  # (H + K, 1, E)


class Attention(nn.Module):
    """Grouped-query attention with the head counts of one layer."""

    def __init__(self, args: ModelArgs, layer_index: int) -> None:
        super().__init__()
        self.num_heads = H = args.num_query_heads[layer_index]
        self.num_kv_heads = K = args.num_kv_heads[layer_index]
        self.head_dim = E = args.head_dim
        self.rope_base = float(args.rope_freq_constant)
        self.eps = args.rms_norm_eps
        self.qkv_proj = nn.Linear(args.model_dim, (H + 2 * K) * E, bias=False)
        self.out_proj = nn.Linear(H * E, args.model_dim, bias=False)
        if args.normalize_qk_projections:
            self.q_norm = nn.RMSNorm(E, eps=args.rms_norm_eps)
            self.k_norm = nn.RMSNorm(E, eps=args.rms_norm_eps)
        self._kept: _NormRows | None = None
        self.keep_scores = True  # for the backward pass; else they are computed again

    def __call__(
        self, x: mx.array, mask: Mask = None, cache: Cache | None = None, *, residual: mx.array
    ) -> mx.array:
        """Attend over the new and the cached tokens.

        Args:
            x: (B, L, D), normalised.
            mask: ``"causal"``, an array that broadcasts to (B, H, L, S), or None for one token.
            cache: this layer's cache, updated in place.
            residual: (B, L, D), added to the projected output.

        Returns:
            (B, L, D).
        """
        B, L, _ = x.shape
        H, K, E = self.num_heads, self.num_kv_heads, self.head_dim
        qkv = _by_head(self.qkv_proj(x), H + 2 * K)
        qk, values = mx.split(qkv, [H + K], axis=1)  # (B, H + K, L, E), (B, K, L, E)
        if "q_norm" in self:
            qk = mx.fast.rms_norm(qk, None, self.eps) * self._qk_weight()
        offset = 0 if cache is None else cache.offset
        qk = self.rotate(qk, offset)
        queries, keys = mx.split(qk, [H], axis=1)
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        drop_scores = not self.keep_scores and self.training and cache is None
        out = _attend(queries, keys, values, mask, cache, drop_scores)  # (B, H, L, E)
        out = (out if L == 1 else out.transpose(0, 2, 1, 3)).reshape(B, L, H * E)
        return _project_and_add(residual, out, self.out_proj)

    def rotate(self, x: mx.array, offset: Any) -> mx.array:
        """RoPE of (B, heads, L, E) at the positions from ``offset`` on (Su et al. 2021)."""
        return mx.fast.rope(
            x, self.head_dim, traditional=False, base=self.rope_base, scale=1.0, offset=offset
        )

    def _qk_weight(self) -> mx.array:
        """The norm weights as (H + K, 1, E), so that queries and keys share one norm and one RoPE.

        Kept between calls outside training, since building it costs a kernel a layer and token;
        made anew after a call in training, or when either weight is another array. Writing into a
        weight in place (``w *= 2``) outside training goes unseen: assign a new array instead.
        """
        q, k, kept = self.q_norm.weight, self.k_norm.weight, self._kept
        if not self.training and kept is not None and kept.q is q and kept.k is k:
            return kept.rows
        rows = mx.concatenate(
            [
                mx.broadcast_to(q, (self.num_heads, 1, self.head_dim)),
                mx.broadcast_to(k, (self.num_kv_heads, 1, self.head_dim)),
            ]
        )
        if self.training:
            self._kept = None
            return rows
        try:
            mx.eval(rows)
        except ValueError:  # inside mx.compile or vmap: nothing may be kept
            return rows
        self._kept = _NormRows(q, k, rows)
        return rows


def _by_head(x: mx.array, heads: int) -> mx.array:
    """(B, L, heads E) -> (B, heads, L, E); of one token they lie alike, which saves a step."""
    B, L, width = x.shape
    if L == 1:
        return x.reshape(B, heads, 1, width // heads)
    return x.reshape(B, L, heads, width // heads).transpose(0, 2, 1, 3)


def _attend(
    queries: mx.array, keys: Any, values: Any, mask: Any, cache: Any, drop_scores: bool
) -> mx.array:
    """Scaled dot-product attention, (B, H, L, E); keys and values are (B, K, S, E)."""
    scale = queries.shape[-1] ** -0.5
    if hasattr(cache, "bits"):  # mlx_lm's quantised cache hands out packed keys and values
        from mlx_lm.models.base import scaled_dot_product_attention

        return scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=scale, mask=mask
        )
    if cpu_attention.pays(queries, mask):
        return cpu_attention.attention(queries, keys, values, scale=scale, mask=mask)
    if drop_scores:
        return attention_without_scores(queries, keys, values, scale=scale, mask=mask)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


class MLP(nn.Module):
    """Feed-forward network of one layer, gated (``proj_1`` = [gate; value] rows) or not."""

    def __init__(self, args: ModelArgs, layer_index: int) -> None:
        super().__init__()
        F = args.ffn_dims[layer_index]
        name = args.activation_fn_name
        plain = ACTIVATIONS[name]
        self._activation, self._fused = gated(name) if args.ffn_with_glu else (plain, plain)
        self.proj_1 = nn.Linear(args.model_dim, 2 * F if args.ffn_with_glu else F, bias=False)
        self.proj_2 = nn.Linear(F, args.model_dim, bias=False)

    def __call__(self, x: mx.array, *, residual: mx.array) -> mx.array:
        """``residual`` + network(``x``); all (B, L, D)."""
        activation = self._activation if self.training else self._fused
        return _project_and_add(residual, activation(self.proj_1(x)), self.proj_2)


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward of one layer."""

    def __init__(self, args: ModelArgs, layer_index: int) -> None:
        super().__init__()
        self.attn = Attention(args, layer_index)
        self.ffn = MLP(args, layer_index)
        self.ffn_norm = nn.RMSNorm(args.model_dim, eps=args.rms_norm_eps)
        self.attn_norm = nn.RMSNorm(args.model_dim, eps=args.rms_norm_eps)
        self.grad_checkpoint = "none"  # "scores", "attention", "layer": recomputed going backward

    def __call__(self, x: mx.array, mask: Mask = None, cache: Cache | None = None) -> mx.array:
        """(B, L, D) -> (B, L, D)."""
        if cache is None and self.grad_checkpoint == "layer":
            return recomputed(self._both, x, mask, [self])
        if cache is None and self.grad_checkpoint == "attention":
            return self._feed(recomputed(self._attend, x, mask, [self.attn, self.attn_norm]))
        return self._feed(self._attend(x, mask, cache))

    def _both(self, x: mx.array, mask: Mask) -> mx.array:
        return self._feed(self._attend(x, mask))

    def _attend(self, x: mx.array, mask: Mask, cache: Cache | None = None) -> mx.array:
        return self.attn(self.attn_norm(x), mask, cache, residual=x)

    def _feed(self, x: mx.array) -> mx.array:
        return self.ffn(self.ffn_norm(x), residual=x)


class OpenELMModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.token_embeddings = nn.Embedding(args.vocab_size, args.model_dim)
        self.layers = [TransformerBlock(args, i) for i in range(args.num_transformer_layers)]
        self.norm = nn.RMSNorm(args.model_dim, eps=args.rms_norm_eps)

    def __call__(
        self,
        inputs: mx.array,
        cache: Sequence[Any] | None = None,
        mask: Mask = None,
    ) -> mx.array:
        """(B, L) token ids -> (B, L, D) normalised hidden states.

        Args:
            inputs: (B, L) integer token ids.
            cache: one cache a layer, updated in place.
            mask: (B, 1, L, S) bool, True where a token may look; None is causal.
        """
        h = self.token_embeddings(inputs)
        if mask is None:
            mask = attention_mask(inputs.shape[1], None if cache is None else cache[0])
        for i, layer in enumerate(self.layers):
            h = layer(h, mask, None if cache is None else cache[i])
        return self.norm(h)


class Model(nn.Module):
    """OpenELM language model.

    Args:
        args: the architecture. Weights are drawn as CoreNet draws them: standard deviation
            in_features^-0.5, for ``out_proj`` and ``proj_2`` D^-0.5 (2N)^-0.5, norms 1; MLX's
            lazy arrays cost nothing when a checkpoint replaces them.
    """

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.transformer = OpenELMModel(args)
        if not args.share_input_output_layers:
            self.lm_head = nn.Linear(args.model_dim, args.vocab_size, bias=False)
        self._initialise()

    def __call__(self, inputs: mx.array, cache: Sequence[Any] | None = None) -> mx.array:
        """Logits of every position.

        Args:
            inputs: (B, L) integer token ids.
            cache: one cache a layer, ours or mlx_lm's, updated in place; None to attend only
                within ``inputs``.

        Returns:
            (B, L, V) in the weights' dtype; position t scores the token after input t.
        """
        return self.head(self.transformer(inputs, cache))

    def head(self, hidden: mx.array) -> mx.array:
        """(..., D) normalised hidden states -> (..., V) logits."""
        if "lm_head" in self:
            return self.lm_head(hidden)
        return self.transformer.token_embeddings.as_linear(hidden)

    @property
    def layers(self) -> list[TransformerBlock]:
        """The transformer layers, where mlx_lm looks for them."""
        return self.transformer.layers

    def _initialise(self) -> None:
        """Redraw all weights as apple/corenet ``general_gpt.py`` ``reset_parameters`` does."""
        args = self.args
        residual_std = args.model_dim**-0.5 * (2 * args.num_transformer_layers) ** -0.5

        def draw(path: str, weight: mx.array) -> mx.array:
            if weight.ndim == 1:
                return weight
            writes_residual = path.endswith(("out_proj.weight", "proj_2.weight"))
            std = residual_std if writes_residual else weight.shape[1] ** -0.5
            return mx.random.normal(weight.shape, scale=std)

        self.update(tree_map_with_path(draw, self.parameters()))

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Drop or rename what Hugging Face checkpoints hold twice (BEHAVIOURS 15).

        Args:
            weights: parameter name -> array, as read from a file.

        Returns:
            The same with one ``lm_head.weight`` for an untied model and none for a tied one.

        Raises:
            ValueError: if two copies of one matrix differ.
        """
        out = dict(weights)
        classifier = out.pop("transformer.classifier.weight", None)
        table = out.get("transformer.token_embeddings.weight")
        if self.args.share_input_output_layers:
            for name, copy in (
                ("lm_head.weight", out.pop("lm_head.weight", None)),
                ("transformer.classifier.weight", classifier),
            ):
                _require_equal(name, copy, "transformer.token_embeddings.weight", table)
        elif classifier is not None:
            head = out.setdefault("lm_head.weight", classifier)
            _require_equal("transformer.classifier.weight", classifier, "lm_head.weight", head)
        return out


def attention_mask(num_tokens: int, cache: Any = None) -> Mask:
    """The mask for ``num_tokens`` new tokens: the cache's own, ``"causal"``, or None for one."""
    if hasattr(cache, "make_mask"):  # mlx_lm's rotating, quantised and batch caches
        mask: Mask = cache.make_mask(num_tokens, return_array=False, window_size=None)
        return mask
    return None if num_tokens == 1 else "causal"


def num_parameters(module: nn.Module) -> int:
    """Number of array elements among a module's parameters (packed elements if quantised)."""
    leaves: Any = tree_flatten(module.parameters())
    return sum(array.size for _, array in leaves)


def _require_equal(name: str, copy: mx.array | None, of: str, original: mx.array | None) -> None:
    if copy is None or original is None:
        return
    if not mx.array_equal(copy, original).item():
        raise ValueError(
            f"checkpoint: {name} differs from {of}, but the config says they are one matrix; "
            "set share_input_output_layers to false in config.json, or remove the wrong one"
        )

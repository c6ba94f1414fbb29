"""The layers of OpenELM as MIL operations: norm, rotation, attention, feed-forward.

Typed by hand in fp16; nothing is rounded by a later pass.  q new tokens, C context, D model_dim,
H / K query / key-value heads, G = H / K, E head_dim, F feed-forward width; the batch is 1.
All functions are called while a MIL function is being built.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from convert.coreml_settings import NormForm
from convert.coreml_stored import StoredWeight
from convert.mil_tools import coremltools
from openelm_mlx.config import ModelArgs

Var = Any  # a coremltools MIL variable; coremltools has no types to import
F16 = np.float16


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Everything a graph takes from a model.

    Attributes:
        matrices: name such as ``layers_3_attn_qkv_proj`` -> stored matrix (out, in).
        vectors: the norms' weights, name -> (D,) or (E,) fp16.
        unfolded: matrices whose rows could not take the 2^-k of the residual stream exactly; the
            graph multiplies their input instead.
    """

    matrices: Mapping[str, StoredWeight]
    vectors: Mapping[str, np.ndarray]
    unfolded: frozenset[str] = frozenset()

    def parts(self, name: str) -> list[str]:
        """Names of a matrix's parts, which follow each other in rows; itself where it is whole."""
        if name in self.matrices:
            return [name]
        return [part for part in self.matrices if part.startswith(f"{name}_part_")]


class Cache(Protocol):
    """Where one function keeps keys and values."""

    def update(self, index: int, keys: Var, values: Var) -> tuple[Var, Var]:
        """Write (1, K, q, E) of layer ``index``; return its whole (1, K, S, E) of both."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What every layer of one function uses.

    Attributes:
        cos: (1, 1, q, E) of the new positions.
        sin: (1, 1, q, E), its first half negated.
        mask: (1, 1, G q, S) to add to scores; G times the (1, 1, q, S) rows.
        cache: of keys and values.
        fused: use the fused attention operation.
    """

    cos: Var
    sin: Var
    mask: Var
    cache: Cache
    fused: bool


class Layers:
    """Builds the parts of one function.

    Args:
        args: the architecture.
        parameters: its weights.
        exponent: k of the residual stream's 2^-k.
        norm: the form of RMSNorm.
    """

    def __init__(
        self, args: ModelArgs, parameters: Parameters, *, exponent: int, norm: NormForm
    ) -> None:
        self._mb = coremltools("converters.mil").Builder
        self._args, self._parameters = args, parameters
        self._exponent, self._norm_form = exponent, norm
        self._emitted: dict[str, Var] = {}

    def layer(self, index: int, x: Var, shared: Shared) -> Var:
        """(1, q, D) -> (1, q, D)."""
        mb, name = self._mb, f"layers_{index}"
        attended = self._attention(index, self.norm(x, f"{name}_attn_norm"), shared)
        x = mb.add(x=x, y=attended, name=f"{name}_attn_residual")
        fed = self._feed_forward(index, self.norm(x, f"{name}_ffn_norm"))
        return mb.add(x=x, y=fed, name=f"{name}_ffn_residual")

    def matrix(self, name: str) -> Var:
        """The variable of a stored matrix, emitted once a function."""
        if name not in self._emitted:
            self._emitted[name] = self._parameters.matrices[name].emit(name)
        return self._emitted[name]

    def embed(self, ids: Var, table: str) -> Var:
        """(1, q) token ids -> (1, q, D), scaled to the residual stream."""
        parts = self._parameters.parts(table)
        if len(parts) == 1:
            x = self._gather(table, ids, "embedding")
        else:
            x = self._embed_by_parts(ids, parts)
        return self.to_residual(x, "embedding_scaled")

    def _gather(self, part: str, ids: Var, name: str) -> Var:
        return self._mb.gather(
            x=self.matrix(part), indices=ids, axis=0, validate_indices=False, name=name
        )

    def _embed_by_parts(self, ids: Var, parts: list[str]) -> Var:
        """Look up in each part of the table, ids clamped into it, and keep what was meant."""
        mb, first, found = self._mb, 0, []
        for part in parts:
            rows = self._parameters.matrices[part].shape[0]
            inner = mb.sub(x=ids, y=np.int32(first), name=f"{part}_ids")
            kept = mb.minimum(x=inner, y=np.int32(rows - 1), name=f"{part}_at_most")
            kept = mb.maximum(x=kept, y=np.int32(0), name=f"{part}_clamped")
            meant = mb.cast(
                x=mb.equal(x=kept, y=inner, name=f"{part}_is_meant"),
                dtype="fp16",
                name=f"{part}_meant",
            )
            meant = mb.expand_dims(x=meant, axes=[-1], name=f"{part}_share")
            rows_found = self._gather(part, kept, f"{part}_rows")
            found.append(mb.mul(x=rows_found, y=meant, name=f"{part}_embedding"))
            first += rows
        x = found[0]
        for number, other in enumerate(found[1:], 1):
            x = mb.add(x=x, y=other, name=f"embedding_{number}_parts")
        return x

    def head(self, x: Var, matrix: str) -> Var:
        """(1, rows, D) -> ``logits`` (1, rows, V), part by part where the matrix is split."""
        mb, parts = self._mb, self._parameters.parts(matrix)
        if len(parts) == 1:
            return mb.linear(x=x, weight=self.matrix(matrix), name="logits")
        logits = [mb.linear(x=x, weight=self.matrix(p), name=f"{p}_logits") for p in parts]
        return mb.concat(values=logits, axis=-1, name="logits")

    def to_residual(self, x: Var, name: str) -> Var:
        """``x`` times 2^-k, exact but for underflow."""
        if not self._exponent:
            return x
        return self._mb.mul(x=x, y=F16(2.0**-self._exponent), name=name)

    def norm(self, x: Var, name: str) -> Var:
        """RMSNorm of the last axis of the (scaled) residual stream, times its weight."""
        eps = self._args.rms_norm_eps * 4.0**-self._exponent
        normalised = self._rms(x, eps, name)
        weight = self._parameters.vectors[name]
        return self._mb.mul(x=normalised, y=weight, name=name)

    def _rms(self, x: Var, eps: float, name: str) -> Var:
        """``x`` over the root of its mean square; Zhang & Sennrich 2019, eq. 4."""
        mb = self._mb
        if self._norm_form == "layer_norm":  # of (x, -x): mean 0, variance the mean square
            width = x.shape[-1]
            negative = mb.mul(x=x, y=F16(-1), name=f"{name}_negative")
            both = mb.concat(values=[x, negative], axis=-1, name=f"{name}_both")
            out = mb.layer_norm(
                x=both, axes=[-1], epsilon=F16(max(eps, 1e-7)), name=f"{name}_layer_norm"
            )
            begin, end = [0] * len(x.shape), [0] * len(x.shape)
            end[-1] = width
            masks = [True] * (len(x.shape) - 1) + [False]
            return mb.slice_by_index(
                x=out, begin=begin, end=end, begin_mask=masks, end_mask=masks, name=f"{name}_half"
            )
        if self._norm_form == "max":  # squares stay below 1, whatever the row holds
            sizes = mb.abs(x=x, name=f"{name}_sizes")
            most = mb.reduce_max(x=sizes, axes=[-1], keep_dims=True, name=f"{name}_max")
            most = mb.maximum(x=most, y=F16(2.0**-14), name=f"{name}_most")
            small = mb.real_div(x=x, y=most, name=f"{name}_scaled")
            root = mb.real_div(x=F16(max(eps**0.5, 2.0**-24)), y=most, name=f"{name}_root_eps")
            square = self._mean_square(small, name)
            tiny = mb.mul(x=root, y=root, name=f"{name}_eps")
            square = mb.add(x=square, y=tiny, name=f"{name}_with_eps")
            inverse = mb.rsqrt(x=square, epsilon=F16(0), name=f"{name}_inverse")
            return mb.mul(x=small, y=inverse, name=f"{name}_unit")
        wide = mb.cast(x=x, dtype="fp32", name=f"{name}_fp32")
        square = mb.add(x=self._mean_square(wide, name), y=np.float32(eps), name=f"{name}_with_eps")
        inverse = mb.rsqrt(x=square, epsilon=np.float32(0), name=f"{name}_inverse")
        unit = mb.mul(x=wide, y=inverse, name=f"{name}_unit_fp32")
        return mb.cast(x=unit, dtype="fp16", name=f"{name}_unit")

    def _mean_square(self, x: Var, name: str) -> Var:
        squares = self._mb.mul(x=x, y=x, name=f"{name}_squares")
        return self._mb.reduce_mean(
            x=squares, axes=[-1], keep_dims=True, name=f"{name}_mean_square"
        )

    def _attention(self, index: int, x: Var, shared: Shared) -> Var:
        """(1, q, D) normalised -> (1, q, D), scaled to the residual stream."""
        mb, args, name = self._mb, self._args, f"layers_{index}_attn"
        H, K, E = args.num_query_heads[index], args.num_kv_heads[index], args.head_dim
        qkv = mb.linear(x=x, weight=self.matrix(f"{name}_qkv_proj"), name=f"{name}_qkv")
        qkv = mb.reshape(x=qkv, shape=[1, -1, H + 2 * K, E], name=f"{name}_heads")
        qkv = mb.transpose(x=qkv, perm=[0, 2, 1, 3], name=f"{name}_by_head")  # (1, H + 2K, q, E)
        qk, values = mb.split(x=qkv, split_sizes=[H + K, K], axis=1, name=f"{name}_split")
        if args.normalize_qk_projections:
            unit = self._unscaled_rms(qk, f"{name}_qk_norm")
            qk = mb.mul(x=unit, y=self._qk_weight(name, H, K), name=f"{name}_qk_norm")
        qk = self._rotate(qk, shared, name)
        queries, keys = mb.split(x=qk, split_sizes=[H, K], axis=1, name=f"{name}_qk")
        keys, values = shared.cache.update(index, keys, values)  # (1, K, S, E)
        queries = mb.reshape(x=queries, shape=[1, K, -1, E], name=f"{name}_groups")  # (1, K, Gq, E)
        out = self._attend(queries, keys, values, shared, name)
        out = mb.reshape(x=out, shape=[1, H, -1, E], name=f"{name}_ungrouped")
        out = mb.transpose(x=out, perm=[0, 2, 1, 3], name=f"{name}_by_token")
        out = mb.reshape(x=out, shape=[1, -1, H * E], name=f"{name}_joined")
        return self._into_residual(out, f"{name}_out_proj")

    def _unscaled_rms(self, x: Var, name: str) -> Var:
        """The norm of queries and keys, which do not carry 2^-k."""
        return self._rms(x, self._args.rms_norm_eps, name)

    def _qk_weight(self, name: str, H: int, K: int) -> np.ndarray:
        vectors = self._parameters.vectors
        rows = [vectors[f"{name}_q_norm"]] * H + [vectors[f"{name}_k_norm"]] * K
        return np.stack(rows)[None, :, None, :]  # (1, H + K, 1, E)

    def _rotate(self, x: Var, shared: Shared, name: str) -> Var:
        """RoPE over halves (Su et al. 2021); ``sin`` carries the sign of the first half."""
        mb, half = self._mb, self._args.head_dim // 2
        first, second = mb.split(x=x, split_sizes=[half, half], axis=-1, name=f"{name}_halves")
        swapped = mb.concat(values=[second, first], axis=-1, name=f"{name}_swapped")
        return mb.add(
            x=mb.mul(x=x, y=shared.cos, name=f"{name}_cos"),
            y=mb.mul(x=swapped, y=shared.sin, name=f"{name}_sin"),
            name=f"{name}_rope",
        )

    def _attend(self, queries: Var, keys: Var, values: Var, shared: Shared, name: str) -> Var:
        """(1, K, G q, E): the group's queries as rows, so that no key or value is copied."""
        mb = self._mb
        if shared.fused:  # on the GPU only: elsewhere it drops masks or crashes (stablehlo #89)
            return mb.scaled_dot_product_attention(
                query=queries, key=keys, value=values, attn_mask=shared.mask, name=f"{name}_sdpa"
            )
        scaled = mb.mul(x=queries, y=F16(self._args.head_dim**-0.5), name=f"{name}_scaled")
        scores = mb.matmul(x=scaled, y=keys, transpose_y=True, name=f"{name}_scores")
        scores = mb.add(x=scores, y=shared.mask, name=f"{name}_masked")
        shares = mb.softmax(x=scores, axis=-1, name=f"{name}_shares")
        return mb.matmul(x=shares, y=values, name=f"{name}_attended")

    def _into_residual(self, x: Var, name: str) -> Var:
        """Project, with 2^-k in the matrix or, where that would not be exact, in its input."""
        if name in self._parameters.unfolded:
            x = self.to_residual(x, f"{name}_input_scaled")
        return self._mb.linear(x=x, weight=self.matrix(name), name=f"{name}_output")

    def _feed_forward(self, index: int, x: Var) -> Var:
        mb, args, name = self._mb, self._args, f"layers_{index}_ffn"
        hidden = mb.linear(x=x, weight=self.matrix(f"{name}_proj_1"), name=f"{name}_hidden")
        if not args.ffn_with_glu:
            active = self._activation(hidden, f"{name}_active")
            return self._into_residual(active, f"{name}_proj_2")
        F = args.ffn_dims[index]
        gate, value = mb.split(x=hidden, split_sizes=[F, F], axis=-1, name=f"{name}_gate_value")
        if f"{name}_proj_1" in self._parameters.unfolded:
            value = self.to_residual(value, f"{name}_value_scaled")
        gate = self._activation(gate, f"{name}_active")
        product = mb.mul(x=gate, y=value, name=f"{name}_product")
        return mb.linear(x=product, weight=self.matrix(f"{name}_proj_2"), name=f"{name}_output")

    def _activation(self, x: Var, name: str) -> Var:
        mb, kind = self._mb, self._args.activation_fn_name
        if kind == "gelu":
            return mb.gelu(x=x, mode="EXACT", name=name)
        return (mb.relu if kind == "relu" else mb.silu)(x=x, name=name)

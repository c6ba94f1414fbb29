"""OpenELM as a Core AI graph: batch 1, the key-value cache as state, any number of new tokens.

T new tokens, S cached + new, R room in the cache, D model_dim, E head_dim, V vocabulary.
Of one layer: H / K query / key-value heads, G = H / K, F feed-forward width.

The cache of all layers is one pair of buffers (1, 1, sum of K, R, E), so layers with unequal heads
need no padding. The place of new tokens follows from the inputs' shapes alone, since a place that
is a tensor crashes on Apple's GPUs (apple/coreai-models#5). Norms, RoPE, softmax and the residual
stream are float32 whatever the weights are. Knows nothing of files.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from convert.coreai_api import DYNAMIC, Program, Tensor, Value
from convert.coreai_ops import Ops
from convert.coreai_span import Memory, Span, rotary_table
from convert.coreai_weights import KINDS, Matrix, matrix, numpy_view
from openelm_mlx.model import MLP, Attention, Model

FUNCTION = "main"
INPUTS = ("input_ids", "position_ids")  # the names that Apple's Swift package knows
STATES = ("keyCache", "valueCache")
OUTPUT = "logits"

Results = dict[str, Value]


def build(model: Model, weights: str) -> Program:
    """The program of a model that :func:`convert.coreai_weights.settle` prepared.

    ``main`` takes ``input_ids`` (1, T) int32 and ``position_ids`` (1, S) int32, which are 0 to
    S - 1, and returns ``logits`` (1, T, V) in the type of ``weights``.
    """
    args, dtype = model.args, np.float16 if KINDS[weights] == mx.float16 else np.float32
    ids = Tensor(shape=(1, DYNAMIC), dtype=np.int32)
    room = (1, 1, sum(args.num_kv_heads), DYNAMIC, args.head_dim)
    program = Program()
    with program:
        decoder = _Decoder(Ops(program, dtype), model)
        inputs, states = dict.fromkeys(INPUTS, ids), dict.fromkeys(STATES, Tensor(room, dtype))
        program.graph(FUNCTION, inputs, states, decoder.forward)
    return program


class _Decoder:
    """Emits the operations of one forward pass."""

    def __init__(self, ops: Ops, model: Model) -> None:
        self._ops, self._model, self._args = ops, model, model.args

    def forward(
        self, ids: Value, positions: Value, keys: Value, values: Value
    ) -> tuple[Results, Results]:
        """All layers: the outputs and the new states."""
        ops, args, stack = self._ops, self._args, self._model.transformer
        angles = rotary_table(args.max_context_length, args.head_dim, args.rope_freq_constant)
        span = Span(ops, ids, positions, ops.program.constant(angles, "rope"))
        table = self._matrix(stack.token_embeddings, "token_embeddings")
        memory = Memory(ops, span, (keys, values))
        h = ops.wide(table.rows(ids))  # (1, T, D)
        for i, layer in enumerate(stack.layers):
            name = f"layers.{i}"
            x = ops.narrow(self._norm(h, layer.attn_norm, f"{name}.attn_norm"))
            h = ops.add(h, ops.wide(self._attention(layer.attn, x, span, memory, f"{name}.attn")))
            x = ops.narrow(self._norm(h, layer.ffn_norm, f"{name}.ffn_norm"))
            h = ops.add(h, ops.wide(self._feed_forward(layer.ffn, x, f"{name}.ffn")))
        head = self._matrix(self._model.lm_head, "lm_head") if "lm_head" in self._model else table
        logits = head.multiply(ops.narrow(self._norm(h, stack.norm, "norm")))
        return {OUTPUT: logits}, dict(zip(STATES, memory.written(), strict=True))

    def _attention(self, attn: Attention, x: Value, span: Span, memory: Memory, name: str) -> Value:
        """(1, T, D) -> (1, T, D); what is new goes into ``memory``."""
        ops, H, K, E = self._ops, attn.num_heads, attn.num_kv_heads, attn.head_dim
        qkv = self._matrix(attn.qkv_proj, f"{name}.qkv_proj").multiply(x)
        qkv = ops.transpose(ops.reshape(qkv, 1, -1, H + 2 * K, E), 0, 2, 1, 3)
        q, k = (ops.wide(ops.part(qkv, 1, a, b, 4)) for a, b in ((0, H), (H, H + K)))
        v = ops.part(qkv, 1, H + K, H + 2 * K, 4)  # (1, K, T, E)
        if "q_norm" in attn:
            q = self._norm(q, attn.q_norm, f"{name}.q_norm")
            k = self._norm(k, attn.k_norm, f"{name}.k_norm")
        q = ops.narrow(ops.mul(span.rotate(q), np.float32(E**-0.5)))
        keys, values = memory.extend(ops.narrow(span.rotate(k)), v)
        q = ops.reshape(q, 1, K, H // K, -1, E)  # (1, K, G, T, E)
        scores = ops.wide(ops.matmul(q, ops.transpose(keys, 0, 1, 2, 4, 3)))  # (1, K, G, T, S)
        shares = ops.narrow(ops.softmax(ops.add(scores, span.mask)))
        out = ops.reshape(ops.matmul(shares, values), 1, H, -1, E)
        out = ops.reshape(ops.transpose(out, 0, 2, 1, 3), 1, -1, H * E)
        return self._matrix(attn.out_proj, f"{name}.out_proj").multiply(out)

    def _feed_forward(self, ffn: MLP, x: Value, name: str) -> Value:
        """(1, T, D) -> (1, T, D)."""
        ops = self._ops
        x = self._matrix(ffn.proj_1, f"{name}.proj_1").multiply(x)  # (1, T, F or 2F)
        if self._args.ffn_with_glu:
            width = x.type.shape[2]
            gate, value = (
                ops.part(x, 2, a, b, 3) for a, b in ((0, width // 2), (width // 2, width))
            )
            x = ops.mul(self._activation(gate), value)
        else:
            x = self._activation(x)
        return self._matrix(ffn.proj_2, f"{name}.proj_2").multiply(x)

    def _activation(self, x: Value) -> Value:
        face = self._ops.face
        functions = {"swish": face.silu, "gelu": face.gelu, "relu": face.relu}
        return functions[self._args.activation_fn_name](x)

    def _norm(self, x: Value, norm: nn.RMSNorm, name: str) -> Value:
        weight: Any = numpy_view(norm.weight.astype(mx.float32))
        return self._ops.rms_norm(x, weight, self._args.rms_norm_eps, name)

    def _matrix(self, layer: nn.Module, name: str) -> Matrix:
        return matrix(self._ops, layer, name)

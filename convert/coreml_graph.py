"""The MIL program of an OpenELM model, built directly: no tracing, no torch, no later passes.

One function a call form: ``prefill`` and ``decode``, or ``main``.  Matrices that two functions
share are stored once.  Knows nothing of files.  q new tokens, C context, E head_dim, V vocabulary.
"""

import re
from collections import Counter
from typing import Any

import numpy as np

from convert.coreml_caches import HostWrittenCache, PackedCache, ints
from convert.coreml_layers import F16, Layers, Parameters, Shared, Var
from convert.coreml_rotation import rotation_table
from convert.coreml_settings import MASKED, ExportSettings, Numerics
from convert.mil_tools import coremltools
from openelm_mlx.config import ModelArgs

Program = Any
Function = Any

_SHARED_BYTES = 64  # constants smaller than this stay in the program's text anyway


def build_program(
    args: ModelArgs, parameters: Parameters, settings: ExportSettings, numerics: Numerics
) -> Program:
    """All functions of a package.

    Args:
        args: the architecture.
        parameters: its weights, as they are to be stored.
        settings: the package's form.
        numerics: how it stays inside fp16's range.

    Returns:
        A coremltools MIL ``Program`` ready to be written.
    """
    mil = coremltools("converters.mil.mil")
    program = mil.Program()
    lengths = _lengths(settings)
    for name, tokens in lengths.items():
        build = _FunctionBuilder(args, parameters, settings, numerics, tokens)
        program.add_function(name, build.function())
    program.default_function_name = next(iter(lengths))
    program.export_as_multifunction = len(lengths) > 1
    program.skip_all_passes = True  # read_state would be merged (coremltools #2786), types changed
    _share_constants(program)
    return program


def _lengths(settings: ExportSettings) -> dict[str, int | None]:
    """Tokens of a call by function, None for any number; the first is the default."""
    if settings.interface == "flexible":
        return {"main": None}
    if settings.interface == "ane":
        return {"main": settings.prefill}
    return {"decode": 1, "prefill": settings.prefill}


def _share_constants(program: Program) -> None:
    """Store constants that two functions have in common once, under one weight id.

    coremltools numbers the constants of a process; here they are named after what uses them, so
    that functions agree on names, and two exports on every byte.
    """
    first: dict[str, np.ndarray] = {}
    for function in program.functions.values():
        taken: Counter[str] = Counter()
        for op in function.operations:
            if op.op_type != "const":
                continue
            name = re.sub(r"_\d+$", "", op.name)
            taken[name] += 1
            op.name = f"{name}_{taken[name]}"
            op.outputs[0].name = op.name
            value = op.outputs[0].val
            if isinstance(value, np.ndarray) and value.nbytes >= _SHARED_BYTES:
                known = first.setdefault(op.name, value)
                if known is value or (known.dtype == value.dtype and np.array_equal(known, value)):
                    op.weight_id = op.name


class _FunctionBuilder:
    """Builds one function.

    Args:
        args: the architecture.
        parameters: its weights.
        settings: the package's form.
        numerics: norm form and residual scale.
        tokens: q, or None for any number.
    """

    def __init__(
        self,
        args: ModelArgs,
        parameters: Parameters,
        settings: ExportSettings,
        numerics: Numerics,
        tokens: int | None,
    ) -> None:
        self._args, self._parameters, self._settings = args, parameters, settings
        self._numerics, self._tokens = numerics, tokens
        self._mb = coremltools("converters.mil").Builder
        self._types = coremltools("converters.mil.mil").types
        self._layers = Layers(
            args, parameters, exponent=numerics.residual_exponent, norm=numerics.norm
        )

    def function(self) -> Function:
        """The finished MIL function."""
        inputs, flexible = self._inputs()
        ct, mil = coremltools(), coremltools("converters.mil.mil")
        with mil.Function(inputs, opset_version=ct.target.iOS18) as function:
            function.set_outputs(self._body(function.inputs))
        function.set_input_types(tuple(flexible))
        return function

    def _inputs(self) -> tuple[dict[str, Any], list[Any]]:
        """Placeholders by name, and the ranges of those whose shape is not fixed."""
        mb, types, C = self._mb, self._types, self._settings.context
        ids, half = types.int32, types.fp16
        heads = sum(self._args.num_kv_heads)
        cache = (1, heads, C, self._args.head_dim)
        states = {n: mb.state_tensor_placeholder(cache, half) for n in ("keyCache", "valueCache")}
        if self._tokens is None:
            return self._ranged_inputs(states)
        if self._settings.interface == "stateless":
            states = {n: mb.placeholder(cache, half) for n in states}
        q = self._tokens
        fixed = {"inputIds": mb.placeholder((1, q), ids)}
        if self._settings.interface == "ane":
            fixed["attn_mask"] = mb.placeholder((1, 1, q, C), half)
            fixed["update_mask"] = mb.placeholder((1, 1, C, q), half)
        else:
            fixed["position"] = mb.placeholder((1,), ids)
        return {**fixed, **states}, []

    def _ranged_inputs(self, states: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
        mb, types, C = self._mb, self._types, self._settings.context
        ct = coremltools()
        new, total = (ct.RangeDim(1, C, default=1) for _ in range(2))
        ranges = [
            ct.TensorType(name="inputIds", shape=(1, new), dtype=np.int32),
            ct.TensorType(name="fullAttentionMask", shape=(1, 1, new, total), dtype=F16),
        ]
        return {
            "inputIds": mb.placeholder((1, new.symbol), types.int32),
            "fullAttentionMask": mb.placeholder((1, 1, new.symbol, total.symbol), types.fp16),
            **states,
        }, ranges

    def _body(self, inputs: dict[str, Var]) -> list[Var]:
        """Embedding, layers and head; the outputs."""
        table = "token_embeddings"
        cos, sin, rows, cache = self._positions(inputs)
        shared = Shared(
            cos=cos,
            sin=sin,
            mask=self._group_rows(rows),
            cache=cache,
            fused=self._settings.target == "gpu",
        )
        x = self._layers.embed(inputs["inputIds"], table)
        for index in range(self._args.num_transformer_layers):
            x = self._layers.layer(index, x, shared)
        return [self._logits(x, table), *cache.outputs()]

    def _positions(self, inputs: dict[str, Var]) -> tuple[Var, Var, Var, Any]:
        """Rotation tables at the new positions, mask rows (1, 1, q, S), and the cache."""
        kv_heads = self._args.num_kv_heads
        match self._settings.interface:
            case "ane":
                update = inputs["update_mask"]
                cos, sin = (self._rows_by_one_hot(t, update) for t in ("cos", "sin"))
                held = HostWrittenCache(inputs, kv_heads, update)
                return cos, sin, self._clamped(inputs["attn_mask"]), held
            case "flexible":
                start, end = self._bounds_of_mask(inputs["fullAttentionMask"])
                cache = PackedCache(inputs, kv_heads, start, end, ranged=True)
                rows = self._clamped(inputs["fullAttentionMask"])
                return *self._rows(start, end), rows, cache
        start = inputs["position"]
        end = self._mb.add(x=start, y=ints(self._tokens or 1), name="end")
        stateful = self._settings.interface == "static"
        cache = PackedCache(inputs, kv_heads, start, end, stateful=stateful)
        return *self._rows(start, end), self._causal_rows(start), cache

    def _clamped(self, mask: Var) -> Var:
        """A caller's mask, where -65504 plus a score would become -inf."""
        return self._mb.maximum(x=mask, y=F16(MASKED), name="mask")

    def _bounds_of_mask(self, mask: Var) -> tuple[Var, Var]:
        """First new position and total length, both (1,), from a mask (1, 1, q, total)."""
        mb = self._mb
        shape = mb.shape(x=mask, name="mask_shape")
        new = mb.slice_by_index(x=shape, begin=[2], end=[3], name="new_tokens")
        total = mb.slice_by_index(x=shape, begin=[3], end=[4], name="total")
        return mb.sub(x=total, y=new, name="start"), total

    def _tables(self, which: str) -> np.ndarray:
        """(C, E) of one rotation table."""
        args, context = self._args, self._settings.context
        return rotation_table(which, args.head_dim, args.rope_freq_constant, context)

    def _rows(self, start: Var, end: Var) -> tuple[Var, Var]:
        """Rows [start, end) of both tables as (1, 1, q, E)."""
        mb, E = self._mb, self._args.head_dim
        tables = []
        begin = mb.concat(values=[start, ints(0)], axis=0, name="rows_begin")
        stop = mb.concat(values=[end, ints(E)], axis=0, name="rows_end")
        for which in ("cos", "sin"):
            table = mb.const(val=self._tables(which), name=f"rope_{which}")
            rows = mb.slice_by_index(
                x=table, begin=begin, end=stop, end_mask=[False, True], name=f"{which}_sliced"
            )
            shape = [1, 1, self._tokens or -1, E]
            tables.append(mb.reshape(x=rows, shape=shape, name=f"{which}_rows"))
        return tables[0], tables[1]

    def _rows_by_one_hot(self, which: str, update: Var) -> Var:
        """The same, picked by the caller's one-hot columns (1, 1, C, q): exact, and static."""
        mb = self._mb
        table = mb.const(val=self._tables(which)[None, None], name=f"rope_{which}")
        return mb.matmul(x=update, y=table, transpose_x=True, name=f"{which}_rows")

    def _causal_rows(self, start: Var) -> Var:
        """(1, 1, q, C): 0 where column <= start + row, else a large negative number."""
        mb, q, C = self._mb, self._tokens, self._settings.context
        columns = np.arange(C, dtype=np.int32)[None, None, None]
        steps = np.arange(q or 1, dtype=np.int32)[None, None, :, None]
        rows = mb.add(x=steps, y=start, name="row_positions")  # (1, 1, q, 1)
        hidden = mb.greater(x=columns, y=rows, name="later")
        return mb.mul(x=mb.cast(x=hidden, dtype="fp16", name="hidden"), y=F16(MASKED), name="mask")

    def _group_rows(self, rows: Var) -> Var:
        """The mask once for each query head of a group, (1, 1, G q, S); one row needs no copy."""
        groups = self._args.num_gqa_groups
        if self._tokens == 1 or groups == 1:
            return rows
        return self._mb.concat(values=[rows] * groups, axis=2, name="group_mask")

    def _logits(self, x: Var, table: str) -> Var:
        """(1, q, V), or (1, 1, V) of the last token."""
        mb = self._mb
        everything = self._settings.all_logits or self._settings.interface in ("flexible", "ane")
        q, D = self._tokens or 1, self._args.model_dim
        if not everything and q != 1:
            x = mb.slice_by_index(x=x, begin=[0, q - 1, 0], end=[1, q, D], name="last_token")
        x = self._layers.norm(x, "norm")
        head = table if self._args.share_input_output_layers else "lm_head"
        return self._layers.head(x, head)

"""An MLX model's parameters in the forms that a Core ML package stores, 2^-k folded in.

Matrices are taken one at a time, so that few copies live at once. Knows nothing of graphs.
"""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from convert.coreml_layers import Parameters
from convert.coreml_settings import WeightKind
from convert.coreml_stored import StoredWeight
from convert.coreml_weights import from_mlx, store
from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Model

_TABLES = ("token_embeddings", "lm_head")


def graph_name(path: str) -> str:
    """``transformer.layers.3.attn.qkv_proj`` -> ``layers_3_attn_qkv_proj``."""
    return path.removeprefix("transformer.").replace(".", "_")


def stored_parameters(
    model: Model, kind: WeightKind, *, exponent: int = 0, most_rows: int | None = None
) -> Parameters:
    """All parameters of a model as a package stores them.

    Args:
        model: of any dtype, quantised with MLX's affine codes or not.
        kind: how to store matrices; ``mlx`` carries codes over, and takes what is not quantised
            as float16.
        exponent: k; what writes the residual stream is multiplied by 2^-k, exactly, in the matrix
            or, where its stored numbers would lose bits, in the graph.
        most_rows: of a table: larger ones are stored in equal parts.

    Raises:
        ValueError: if a matrix holds a value that float16 does not, if the model is quantised and
            ``kind`` is another than ``mlx`` or ``fp16``, or not quantised and ``kind`` is ``mlx``.
    """
    _check_kind(model, kind)
    matrices: dict[str, StoredWeight] = {}
    unfolded = []
    for path, module in matrices_of(model):
        parts = _parts(path, module, most_rows)
        if len(parts) > 1:
            matrices |= {
                f"{graph_name(path)}_part_{number}": _stored(path, module, kind, rows)
                for number, rows in enumerate(parts)
            }
            continue
        stored = _stored(path, module, kind)
        if exponent:
            rows = folded_rows(path, model, stored.shape[0])
            folded = stored if rows is None else stored.scaled(rows, exponent)
            if folded is None:
                unfolded.append(graph_name(path))
            stored = folded or stored
        matrices[graph_name(path)] = stored
    return Parameters(
        matrices=matrices, vectors=dict(_vectors(model)), unfolded=frozenset(unfolded)
    )


def expected_bytes(args: ModelArgs, parameters: Parameters, context: int) -> int:
    """Bytes of a package's constants: matrices, norms, rotation tables, zero biases."""
    E = args.head_dim
    heads = sum(args.num_query_heads) + sum(args.num_kv_heads)
    matrices = sum(m.nbytes + 2 * m.shape[0] for m in parameters.matrices.values())
    vectors = sum(vector.nbytes for vector in parameters.vectors.values())
    return matrices + vectors + 2 * E * heads + 2 * 2 * E * context + 4 * context


def matrices_of(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of each matrix: embedding, linear layers, untied head."""
    for path, module in model.named_modules():
        if "weight" in module and module.weight.ndim == 2:
            yield path, module


def _vectors(model: Model) -> Iterator[tuple[str, np.ndarray]]:
    for path, module in model.named_modules():
        if "weight" in module and module.weight.ndim == 1:
            yield graph_name(path), half(path, module.weight)


def half(path: str, weight: mx.array) -> np.ndarray:
    """A weight as NumPy float16.

    Raises:
        ValueError: if a value is not finite, or beyond float16.
    """
    array = np.array(weight.astype(mx.float32), copy=False)
    with np.errstate(over="ignore"):
        result: np.ndarray = array.astype(np.float16)
    if not np.isfinite(result).all():
        raise ValueError(
            f"{path}.weight holds {np.abs(array).max():g}, which float16 does not (65504 at most); "
            "the checkpoint may be damaged: compare it with `openelm info`"
        )
    return result


def plain_weight(module: Any) -> mx.array:
    """A matrix, dequantised where it is quantised, in float32."""
    if "scales" not in module:
        weight: mx.array = module.weight.astype(mx.float32)
        return weight
    biases = module.get("biases")
    return mx.dequantize(
        module.weight,
        module.scales.astype(mx.float32) if biases is not None else module.scales,
        None if biases is None else biases.astype(mx.float32),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    ).astype(mx.float32)


def _parts(path: str, module: Any, most_rows: int | None) -> list[slice]:
    """Rows by part: one for all but a table that is too large."""
    rows = module.weight.shape[0]
    if most_rows is None or rows <= most_rows or not path.endswith(_TABLES):
        return [slice(0, rows)]
    size = -(-rows // -(-rows // most_rows))
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


def _stored(path: str, module: Any, kind: WeightKind, rows: slice = slice(None)) -> StoredWeight:
    if "scales" not in module:
        return store(half(path, module.weight[rows]), "fp16" if kind == "mlx" else kind)
    if kind == "fp16":
        return store(half(path, plain_weight(module)[rows]), "fp16")
    arrays = (module.weight[rows], module.scales[rows], module.biases[rows])
    return from_mlx(*arrays, bits=module.bits, group_size=module.group_size)


def _check_kind(model: Model, kind: WeightKind) -> None:
    modes = {m.mode for _, m in matrices_of(model) if "scales" in m}
    if kind == "mlx" and not modes:
        raise ValueError(
            "--weights mlx carries MLX's codes over, but this folder is not quantised; run "
            "`openelm convert quantize` first, or choose --weights int8"
        )
    if modes and kind not in ("mlx", "fp16"):
        raise ValueError(
            f"the folder is quantised, and --weights {kind} would quantise it a second time; use "
            "--weights mlx to carry its codes over, or export the folder it was made from"
        )
    if kind == "mlx" and modes != {"affine"}:
        raise ValueError(
            f"the folder's codes are {', '.join(sorted(modes))}, and Core ML has affine ones only; "
            "make a plain copy with `openelm fuse --dequantize`, or quantise with --mode affine"
        )


def folded_rows(path: str, model: Model, rows: int) -> slice | None:
    """Rows that write the residual stream; of a gated ``proj_1`` the value half.

    The gate's partner is scaled rather than ``proj_2``, so that their product stays small too.
    """
    if path.endswith("out_proj"):
        return slice(0, rows)
    if model.args.ffn_with_glu:
        return slice(rows // 2, rows) if path.endswith("ffn.proj_1") else None
    return slice(0, rows) if path.endswith("ffn.proj_2") else None

"""The operations of MIL that can be evaluated: name -> NumPy function of the named parameters."""

import inspect
from collections.abc import Callable

from convert.mil_ops_compressed import COMPRESSED
from convert.mil_ops_elementwise import ELEMENTWISE
from convert.mil_ops_index import INDEXING
from convert.mil_ops_matrix import MATRICES
from convert.mil_ops_reduce import REDUCTIONS
from convert.mil_ops_shapes import SHAPES
from convert.mil_types import Array

Operation = Callable[..., Array | list[Array]]

OPS: dict[str, Operation] = {**ELEMENTWISE, **SHAPES, **INDEXING, **REDUCTIONS, **MATRICES}

# Done by the plan of a function: they compute nothing.
STRUCTURAL = ("const", "read_state", "write_state")
VARIADIC = "values"  # the one parameter that takes several tensors
# They only move values about, so their results need no second look for overflow.
_MOVES = """identity read_state write_state reshape transpose expand_dims squeeze concat stack
    split tile slice_by_index slice_by_size slice_update gather gather_along_axis gather_nd select
    reverse"""
MOVES = frozenset(_MOVES.split())
# They can overwrite their first operand where nothing else needs it.
REUSES = {"slice_update": "x"}
_OWN_PARAMETERS = ("rounded", "reuse")


def parameters(op: str) -> frozenset[str]:
    """The parameters that an evaluated operation knows."""
    function = OPS.get(op) or COMPRESSED[op]
    return frozenset(inspect.signature(function).parameters) - set(_OWN_PARAMETERS)


# Parameters of one operation that MIL wants to be of one element type; others take theirs freely.
_ALIKE = {
    "select": ("a", "b"),
    "scaled_dot_product_attention": ("query", "key", "value"),
    "layer_norm": ("x", "gamma", "beta"),
}


def alike(op: str) -> tuple[str, ...]:
    """Parameters that MIL wants to be of one element type."""
    return _ALIKE.get(op, ("x", "y", "weight", "bias", "data", "update", "updates", VARIADIC))

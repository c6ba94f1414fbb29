"""Fully sharded training: each rank keeps a piece of every layer's weights and optimizer state.

MLX's ``FullyShardedModule`` (``mlx.nn.layers.distributed``) cuts each parameter of a layer along
axis 0, gathers the layer for each pass and hands back each piece's gradient, averaged over the
ranks. Embedding and final norm stay whole on all ranks, as the loss reads the embedding's matrix.
"""

import re
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as mlx_optim
from mlx.nn.layers.distributed import FullyShardedModule
from mlx.utils import tree_flatten, tree_unflatten

from openelm_mlx.distributed import array_of_rank_0, sum_gradients, sum_scalars
from openelm_mlx.model import Model

REDUCE_SCATTER = ("nccl", "jaccl")  # the backends that have it; MLX 0.32.4
_WHOLE_MATRIX = (mlx_optim.Adafactor, mlx_optim.Muon)
_PIECE = re.compile(r"(^|\.)layers\.\d+\.module\.")


class _ShardedLayer(FullyShardedModule):
    """A layer in pieces that can be gathered anew, and recomputed, in the backward pass.

    Recomputing must go on around the gathering: inside, it would leave whole weights in the layer.
    """

    def __init__(self, layer: nn.Module, group: mx.distributed.Group) -> None:
        super().__init__(layer, group=group)
        self.recompute = layer.grad_checkpoint == "layer"
        layer.grad_checkpoint = "none"

    def __call__(self, *args: Any) -> mx.array:
        """The layer's own."""
        call = super().__call__
        return nn.utils.checkpoint(self, call)(*args) if self.recompute else call(*args)


def check_fully_shard(
    model: Model, optimizer: mlx_optim.Optimizer, backend: str, ranks: int, *, checkpoint: str
) -> None:
    """Refuse, before any collective, what would hang or train something else.

    Args:
        model: to be trained.
        optimizer: of it.
        backend: that joins the ranks.
        ranks: their number.
        checkpoint: what is recomputed in the backward pass.

    Raises:
        ValueError: with all that is in the way.
    """
    problems = []
    if ranks == 1:
        problems.append("this run has one rank; start several, or leave the setting out")
    elif backend not in REDUCE_SCATTER:
        problems.append(
            f"the {backend} backend has no reduce-scatter in MLX; use "
            f"{' or '.join(REDUCE_SCATTER)}, or leave the setting out to train data-parallel"
        )
    if isinstance(optimizer, _WHOLE_MATRIX):
        name = type(optimizer).__name__.lstrip("_").lower()
        problems.append(f"{name} needs whole matrices; use adamw, adam, adamax, lion or sgd")
    if checkpoint == "attention":
        problems.append("grad_checkpoint attention would gather nothing anew; use layer or scores")
    problems += _unfit(model, ranks)
    if problems:
        raise ValueError("fully_shard: " + "; ".join(problems))


def shard_layers(model: Model, group: mx.distributed.Group) -> None:
    """Keep this rank's piece of every layer; before ``optimizer.init``."""
    layers: Any = model.layers
    for i, layer in enumerate(layers):
        layers[i] = _ShardedLayer(layer, group)


def join_layers(model: Model, group: mx.distributed.Group) -> None:
    """Undo :func:`shard_layers`: every rank has the whole model again."""
    layers: Any = model.layers
    for i, layer in enumerate(layers):
        if not isinstance(layer, FullyShardedModule):
            continue
        inner: Any = layer.module
        pieces: Any = tree_flatten(inner.parameters())
        whole = [(name, mx.distributed.all_gather(a, group=group)) for name, a in pieces]
        inner.update(tree_unflatten(whole))
        mx.eval(inner.parameters())
        layers[i] = inner


def add_gradients(gradients: Any, group: mx.distributed.Group) -> Any:
    """Gradients as sums over the ranks, those of pieces included, which are means as they come."""
    if group.size() == 1:
        return gradients
    leaves: Any = tree_flatten(gradients)
    pieces = [(name, g * group.size()) for name, g in leaves if _PIECE.search(name)]
    if not pieces:
        return sum_gradients(gradients, group)
    rest: Any = tree_unflatten([(name, g) for name, g in leaves if not _PIECE.search(name)])
    added: Any = tree_flatten(sum_gradients(rest, group))
    return tree_unflatten([*added, *pieces])


def global_norm(gradients: Any, group: mx.distributed.Group) -> mx.array:
    """L2 norm of the whole gradient, float32, the same on all ranks."""
    whole, pieces = mx.array(0.0), mx.array(0.0)
    leaves: Any = tree_flatten(gradients)
    cut = False
    for name, gradient in leaves:
        square = mx.square(gradient.astype(mx.float32)).sum()
        if _PIECE.search(name):
            pieces, cut = pieces + square, True
        else:
            whole = whole + square
    return mx.sqrt(whole + sum_scalars(pieces, group) if cut else whole)


def is_sharded(model: Model) -> bool:
    """Whether each pass of this model is a collective."""
    return any(isinstance(layer, FullyShardedModule) for layer in model.layers)


def gather(arrays: Mapping[str, mx.array], group: mx.distributed.Group) -> dict[str, mx.array]:
    """Whole arrays under their plain names, on rank 0; nothing on other ranks if any is cut.

    Args:
        arrays: name -> array, of parameters or of their optimizer state, on all ranks alike.
        group: all of which have to call this.
    """
    whole = {}
    for name, array in arrays.items():
        if _is_piece(name, array):
            array = mx.distributed.all_gather(array, group=group)
            mx.eval(array)
            if group.rank() != 0:
                continue
        whole[plain_name(name)] = array
    return whole


def scatter(
    arrays: Mapping[str, mx.array], like: Mapping[str, mx.array], group: mx.distributed.Group
) -> dict[str, mx.array]:
    """Rank 0's whole arrays, each rank's piece where it keeps pieces; the inverse of ``gather``.

    Args:
        arrays: plain name -> whole array; read on rank 0 only.
        like: name -> this rank's present array, which gives shapes and dtypes.
        group: all of which have to call this.
    """
    out = {}
    for name, mine in like.items():
        cut, shape = _is_piece(name, mine), whole_shape(name, mine, group)
        array = arrays[plain_name(name)] if group.rank() == 0 else mx.zeros(shape)
        array = array_of_rank_0(array.astype(mine.dtype), group)
        if cut:
            array = mx.contiguous(mx.split(array, group.size())[group.rank()])
        mx.eval(array)
        out[name] = array
    return out


def plain_name(name: str) -> str:
    """The name of a parameter in the model as it is without ``fully_shard``."""
    return _PIECE.sub(lambda match: match[0].removesuffix("module."), name)


def whole_shape(name: str, array: mx.array, group: mx.distributed.Group) -> tuple[int, ...]:
    """Shape of the whole of which ``array`` may be this rank's piece."""
    if _is_piece(name, array):
        return (array.shape[0] * group.size(), *array.shape[1:])
    return array.shape


def _is_piece(name: str, array: mx.array) -> bool:
    return array.ndim > 0 and bool(_PIECE.search(name))


def _unfit(model: Model, ranks: int) -> list[str]:
    """What in the layers cannot be cut."""
    problems = []
    all_: Any = tree_flatten([layer.parameters() for layer in model.layers])
    trained: Any = tree_flatten([layer.trainable_parameters() for layer in model.layers])
    if len(all_) != len(trained):
        problems.append("it trains all weights; with adapters or frozen layers leave it out")
    if len({array.dtype for _, array in all_}) > 1:
        problems.append("the layers mix dtypes")
    uneven = [(name, array.shape) for name, array in all_ if array.shape[0] % ranks]
    if uneven:
        name, shape = uneven[0]
        problems.append(
            f"layers.{name} with shape {shape} does not divide by {ranks} ranks"
            + (f", and {len(uneven) - 1} more do not" if uneven[1:] else "")
        )
    return problems

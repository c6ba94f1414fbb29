"""Whether all ranks begin alike: the same model, settings and weights."""

import logging
import zlib
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from openelm_mlx.distributed import array_of_rank_0, max_over_ranks
from openelm_mlx.model import Model

logger = logging.getLogger(__name__)


def check_equal_runs(model: Model, settings: Any, group: mx.distributed.Group) -> None:
    """Give all ranks rank 0's weights where they differ, after a look at what cannot be mended.

    Args:
        model: of this rank.
        settings: whose ``repr`` has to be the same on all ranks.
        group: all of which have to call this.

    Raises:
        ValueError: on all ranks, if models or settings differ.
    """
    if group.size() == 1:
        return
    leaves: Any = tree_flatten(model.parameters())
    shapes = [(name, array.shape, str(array.dtype)) for name, array in leaves]
    trained: Any = tree_flatten(model.trainable_parameters())
    facts = [(shapes, [name for name, _ in trained]), settings]
    problems = [
        what
        for what, differs in zip(
            ("models (shapes, dtypes or what trains)", "settings"),
            _differ([zlib.crc32(repr(fact).encode()) for fact in facts], group),
            strict=True,
        )
        if differs
    ]
    if problems:
        raise ValueError(
            f"the ranks have different {' and '.join(problems)}; give all of them the same "
            "command, recipe and model"
        )
    _equal_weights(model, leaves, group)


def _equal_weights(
    model: Model, leaves: Sequence[tuple[str, mx.array]], group: mx.distributed.Group
) -> None:
    sums: Any = mx.stack([_bit_sum(array) for _, array in leaves]).tolist()
    differing = [
        leaf for leaf, differs in zip(leaves, _differ(sums, group), strict=True) if differs
    ]
    if not differing:
        return
    if group.rank() == 0:
        logger.warning(
            "%d of %d arrays differ between the ranks (%s): all take those of rank 0",
            *(len(differing), len(leaves), differing[0][0]),
        )
    taken = [(name, array_of_rank_0(array, group)) for name, array in differing]
    model.update(tree_unflatten(taken))
    mx.eval(model.parameters())


def _bit_sum(array: mx.array) -> mx.array:
    """Sum of an array's bits as integers, uint32: in any order of adding the same."""
    kinds = {1: mx.uint8, 2: mx.uint16}
    total = array.reshape(-1).view(kinds.get(array.dtype.size, mx.uint32)).sum()
    return total.astype(mx.uint32)


def _differ(values: Sequence[int], group: mx.distributed.Group) -> list[bool]:
    """Which of some uint32 differ between the ranks."""
    signed = [value - 2**31 for value in values]
    largest = max_over_ranks([*signed, *(~value for value in signed)], group)
    half = len(signed)
    return [high != ~low for high, low in zip(largest[:half], largest[half:], strict=True)]

"""Parts of a model that are computed again in the backward pass, a few rows after the others.

B rows of a batch, L tokens, D width. Only the input is kept (Chen et al. 2016, arXiv 1604.06174).
``nn.utils.checkpoint`` recomputes the whole batch at once, so all its intermediate values are alive
together, and it draws other numbers for dropout the second time. Knows nothing of the model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

GROUP = 512  # tokens whose intermediate values are alive at a time; at least one row

Mask = mx.array | Literal["causal"] | None
Part = Callable[[mx.array, Any], mx.array]  # ((b, L, D), mask of these rows) -> (b, L, D)


def recomputed(
    part: Part, x: mx.array, mask: Any, modules: Sequence[nn.Module], *, group: int = GROUP
) -> mx.array:
    """``part(x, mask)``, its intermediate values recomputed in the backward pass.

    Args:
        part: row by row independent of the other rows.
        x: (B, L, D).
        mask: handed to ``part``; an array with B rows is cut as ``x`` is.
        modules: whose trainable parameters ``part`` uses; their gradients are summed in float32.
        group: tokens computed at a time.

    Returns:
        (B, L, D), differentiable once with respect to ``x`` and the parameters.
    """
    flat: Any = tree_flatten([module.trainable_parameters() for module in modules])
    names = [name for name, _ in flat]
    groups = row_groups(x.shape[0], x.shape[1], group)
    keys = _keys(modules, len(groups))

    def piece(index: int, x: mx.array, *params: mx.array) -> mx.array:
        with _parameters(modules, names, params), _dropping(keys[index]):
            return part(x, rows_of(mask, groups[index]))

    @mx.custom_function
    def forward(x: mx.array, *params: mx.array) -> mx.array:
        done: list[mx.array] = []
        for index, rows in enumerate(groups):
            own = mx.depends(x[rows], done[-1:]) if done else x[rows]
            done.append(piece(index, own, *params))
        return mx.concatenate(done)

    @forward.vjp
    def backward(primals: Any, cotangent: mx.array, _: Any) -> tuple[mx.array, ...]:
        x, *params = primals
        done: list[mx.array] = []
        sums: list[mx.array] = []
        for index, rows in enumerate(groups):
            # not before the gradient is there, nor while another group is under way
            after = [done[-1], *sums] if done else [cotangent]
            own, wanted = mx.depends([x[rows], cotangent[rows]], after)
            _, found = mx.vjp(
                lambda *primals, index=index: piece(index, *primals), [own, *params], [wanted]
            )
            first, *own_sums = found
            done.append(first)
            if len(groups) > 1:
                own_sums = [gradient.astype(mx.float32) for gradient in own_sums]
            sums = [a + b for a, b in zip(sums, own_sums, strict=True)] if sums else own_sums
        grads = [total.astype(p.dtype) for total, p in zip(sums, params, strict=True)]
        return (mx.concatenate(done), *grads)

    output: Any = forward(x, *(array for _, array in flat))
    return output


def row_groups(count: int, length: int, tokens: int = GROUP) -> list[slice]:
    """``count`` rows of ``length`` tokens cut into groups of ``tokens``, at least a row each."""
    rows = max(1, tokens // length)
    return [slice(start, start + rows) for start in range(0, count, rows)]


def rows_of(mask: Mask, rows: slice) -> Mask:
    """The mask of these rows: a part of one that has a row for each, (B, 1, L, S), or all of it."""
    if isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[0] > 1:
        return mask[rows]
    return mask


@contextmanager
def _parameters(
    modules: Sequence[nn.Module], names: Sequence[str], params: Sequence[mx.array]
) -> Iterator[None]:
    """With these trainable parameters in place of the modules' own."""
    kept = [module.trainable_parameters() for module in modules]
    if names:
        trees: Any = tree_unflatten(list(zip(names, params, strict=True)))
        for module, tree in zip(modules, _by_position(trees, len(modules)), strict=True):
            module.update(tree)
    try:
        yield
    finally:
        for module, tree in zip(modules, kept, strict=True):
            module.update(tree)


def _by_position(trees: Any, count: int) -> list[Any]:
    """A list with an empty tree for each module at the end that trains nothing."""
    return [*trees, *({} for _ in range(count - len(trees)))]


def _keys(modules: Sequence[nn.Module], count: int) -> Sequence[mx.array | None]:
    """A random key for each group, drawn as any other number is; None where nothing is dropped."""
    found = [m for module in modules for m in module.modules() if isinstance(m, Dropout)]
    if not any(m.training and m._p_1 < 1 for m in found):
        return [None] * count
    key = mx.random.randint(0, 1 << 31, (2,), dtype=mx.uint32)
    return list(mx.random.split(key, count))


@contextmanager
def _dropping(key: mx.array | None) -> Iterator[None]:
    """With the dropout that this key gives, the same at each call."""
    _KEYS.append(key)
    try:
        yield
    finally:
        _KEYS.pop()


_KEYS: list[mx.array | None] = []  # of the parts under way, the innermost last


class Dropout(nn.Dropout):
    """``nn.Dropout`` that drops the same values when it is computed again."""

    def __call__(self, x: mx.array) -> mx.array:
        """The same shape and type."""
        if not self.training or self._p_1 == 1:
            return x
        key = _KEYS[-1] if _KEYS else None
        if key is not None:
            _KEYS[-1], key = mx.random.split(key)
        return mx.random.bernoulli(self._p_1, x.shape, key) * x * (1 / self._p_1)

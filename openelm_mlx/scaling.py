"""The arithmetic of layer-wise scaling: multipliers to widths, rounded as Apple's code rounds.

Sources: apple/corenet@1aa3acd ``general_gpt.py`` and ``corenet/utils/math_utils.py``; paper, eq. 1.
"""

from collections.abc import Sequence

MULTIPLIER = float | Sequence[float]


def make_divisible(value: float, divisor: int) -> int:
    """Nearest multiple of ``divisor`` (half up), at least one, never below 0.9 of ``value``.

    Source: apple/corenet@1aa3acd ``corenet/utils/math_utils.py``.
    """
    rounded = max(divisor, int(value + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * value else rounded


def per_layer(
    name: str, value: MULTIPLIER, num_layers: int, *, expanded: bool = False
) -> list[float]:
    """One multiplier a layer, from a number, a pair, or (``expanded``) one number a layer.

    Args:
        name: of the setting, for the message.
        value: a number repeats unrounded; a pair (lo, hi) gives lo + (hi - lo) i / (N - 1), rounded
            to two decimals as NumPy rounds, which is not what ``round(x, 2)`` does.
        num_layers: N.
        expanded: whether a full list is allowed; it is taken as it is.

    Raises:
        ValueError: for a list of another length.
    """
    if not isinstance(value, Sequence):
        return [value] * num_layers
    if len(value) == 2 and not (expanded and num_layers == 2 and value[0] == value[1]):
        low, high = value
        step = (high - low) / (num_layers - 1) if num_layers > 1 else 0.0
        ramp = [low + i * step for i in range(num_layers - 1)] + [high if num_layers > 1 else low]
        return [round(x * 100) / 100 for x in ramp]
    if expanded and len(value) == num_layers:
        return list(value)
    wanted = f"a number, a pair or {num_layers} values" if expanded else "a number or a pair"
    raise ValueError(
        f"config: {name} has {len(value)} entries for {num_layers} layers; expected {wanted}"
    )

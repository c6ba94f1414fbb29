"""RoPE's tables as a Core ML package stores them. C positions, E head_dim."""

import numpy as np


def rotation_table(which: str, head_dim: int, base: float, length: int) -> np.ndarray:
    """Cosines, or sines whose first half is negated; Su et al. 2021, eq. 15.

    Args:
        which: "cos" or "sin".
        head_dim: E, even.
        base: of the frequencies.
        length: C.

    Returns:
        (C, E) float16.
    """
    speeds = base ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(length, dtype=np.float64)[:, None] * speeds  # (C, E / 2)
    if which == "cos":
        return np.concatenate([np.cos(angles)] * 2, axis=1).astype(np.float16)
    return np.concatenate([-np.sin(angles), np.sin(angles)], axis=1).astype(np.float16)

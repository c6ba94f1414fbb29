"""Operations of MIL as the builder makes them, each with what NumPy or MLX says it should give.

x, y (2, 3, 4) float32, p (2, 3, 4) positive, i (2, 3) int32 in 0..2, m (3, 3) float32,
image (1, 4, 6, 5), q (1, 2, 3, 8), k (1, 2, 5, 8) float32.
"""

import numpy as np
from mil_cases_elementwise import ELEMENTWISE_CASES, Cases
from mil_cases_tensors import TENSOR_CASES

SHAPES = {
    "x": ((2, 3, 4), "fp32"),
    "y": ((2, 3, 4), "fp32"),
    "p": ((2, 3, 4), "fp32"),
    "i": ((2, 3), "int32"),
    "m": ((3, 3), "fp32"),
    "image": ((1, 4, 6, 5), "fp32"),
    "q": ((1, 2, 3, 8), "fp32"),
    "k": ((1, 2, 5, 8), "fp32"),
}


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(6)
    made = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, (shape, _) in SHAPES.items()
        if name != "i"
    }
    made["p"] = np.abs(made["p"]) + np.float32(0.1)
    made["i"] = rng.integers(0, 3, (2, 3)).astype(np.int32)
    return made


CASES: Cases = {**ELEMENTWISE_CASES, **TENSOR_CASES}

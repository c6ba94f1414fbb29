"""Dequantises MLX's codes by Apple's runtime and prints, as JSON, in how many values it differs.

A process of its own, as everything that loads the runtime.
"""

import asyncio
import json
import sys
from pathlib import Path

import openelm_mlx  # noqa: F401  (brings OpenBLAS, which has to come before mlx.core)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np

from convert.coreai_api import DYNAMIC, Program, Tensor, Value, authoring
from convert.coreai_ops import Ops
from convert.coreai_weights import matrix

ROWS, WIDTH = 96, 256
CASES = [
    (bits, group, dtype)
    for bits, group in ((4, 32), (4, 64), (4, 128), (8, 64))
    for dtype in ("float32", "float16")
]


def layer_of(bits: int, group: int, dtype: str) -> nn.Module:
    layer = nn.Embedding(ROWS, WIDTH)
    layer.weight = mx.random.normal((ROWS, WIDTH), key=mx.random.key(bits + group))
    layer.set_dtype(getattr(mx, dtype))
    return layer.to_quantized(group_size=group, bits=bits)


def main(asset: Path) -> None:
    """One graph: every row of every case by lookup, and by the product with the unit matrix."""
    face, program = authoring(), Program()
    from coreai.authoring.constant import constant

    layers = {
        f"{bits} {group} {dtype}": layer_of(bits, group, dtype) for bits, group, dtype in CASES
    }

    def body(ids: Value) -> tuple[dict[str, Value], dict[str, Value]]:
        outputs = {}
        for name, layer in layers.items():
            dtype = np.float32 if "float32" in name else np.float16
            weight = matrix(Ops(program, dtype), layer, name)
            unit = program.constant(np.eye(WIDTH, dtype=dtype)[None], f"{name} unit")
            outputs[f"{name} rows"] = weight.rows(ids)
            outputs[f"{name} product"] = weight.multiply(unit)
        trap = np.arange(32, dtype=np.uint8).reshape(2, 16) % 16
        outputs["trap"] = face.cast(constant(trap, dtype=face.uint4), np.float32)
        return outputs, {}

    with program:
        program.graph("main", {"ids": Tensor((1, DYNAMIC), np.int32)}, {}, body)
    program.save(asset, {})
    found = asyncio.run(run(asset))
    report = {}
    for name, layer in layers.items():
        expected = mx.dequantize(
            layer.weight, layer.scales, layer.biases, group_size=layer.group_size, bits=layer.bits
        )
        report[f"{name} rows"] = differing(found[f"{name} rows"][0], expected)
        report[f"{name} product"] = differing(found[f"{name} product"][0].T, expected)
    report["trap"] = differing(found["trap"], mx.arange(32).reshape(2, 16) % 16)
    sys.stdout.write(json.dumps(report))


def differing(found: np.ndarray, expected: mx.array) -> int:
    wanted = np.array(expected)
    assert found.shape == wanted.shape
    return int((found != wanted).sum())


async def run(asset: Path) -> dict[str, np.ndarray]:
    from coreai.runtime import NDArray

    async with authoring().AIModelAsset.load(asset).executable() as model:
        ids = NDArray(np.arange(ROWS, dtype=np.int32)[None])
        outputs = await model.load_function("main")(inputs={"ids": ids})
        return {name: np.array(value.numpy()) for name, value in outputs.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""The MLX model that a Core ML package is held against: its stored numbers, in float32."""

from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np

from convert.coreml_layers import Parameters
from convert.coreml_parameters import folded_rows, graph_name
from convert.coreml_rotation import rotation_table
from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Attention, Model


@lru_cache(maxsize=4)
def _tables(head_dim: int, base: float, length: int) -> tuple[mx.array, mx.array]:
    cos, sin = (rotation_table(which, head_dim, base, length) for which in ("cos", "sin"))
    return mx.array(cos.astype(np.float32)), mx.array(sin.astype(np.float32))


class _StoredRotation(Attention):
    """Attention that rotates by a package's float16 tables."""

    def rotate(self, x: mx.array, offset: Any) -> mx.array:
        """See ``Attention.rotate``."""
        end = int(offset) + x.shape[2]
        cos, sin = (t[int(offset) : end] for t in _tables(self.head_dim, self.rope_base, _up(end)))
        first, second = mx.split(x, 2, axis=-1)
        return x * cos + mx.concatenate([second, first], axis=-1) * sin


def _up(length: int) -> int:
    """A length that few tables serve."""
    return 1 << max(6, (length - 1).bit_length())


def reference_model(args: ModelArgs, parameters: Parameters, *, exponent: int) -> Model:
    """An MLX model in float32 with the numbers that a package holds, 2^-k taken out again.

    Rotation tables too are those of the package: float16 moves them by 2^-12, and logits of
    Apple's tiny models by up to 1.2e-3 of the largest; nothing else of the graph moves them.

    Args:
        args: the architecture.
        parameters: as stored.
        exponent: the k they were made with.
    """
    model = Model(args)
    for index, layer in enumerate(model.layers):
        layer.attn = _StoredRotation(args, index)
    loaded: list[tuple[str, mx.array]] = []
    for path, module in model.named_modules():
        if "weight" not in module:
            continue
        name = graph_name(path)
        if name in parameters.vectors:
            values = parameters.vectors[name].astype(np.float32)
        else:
            parts = [parameters.matrices[part].decompressed() for part in parameters.parts(name)]
            values = parts[0] if len(parts) == 1 else np.concatenate(parts)
            rows = folded_rows(path, model, values.shape[0])
            if exponent and rows is not None and name not in parameters.unfolded:
                values[rows] = np.ldexp(values[rows], exponent)
        loaded.append((f"{path}.weight", mx.array(values)))
    model.load_weights(loaded, strict=True)
    model.eval()
    return model

"""Where Apple's numbers lie: the whole golden set beside the repository, or the committed cut."""

import json
import os
from pathlib import Path
from typing import Any

import openelm_mlx  # noqa: F401  (brings OpenBLAS, which has to come before mlx.core)

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

_TESTS = Path(__file__).parent
CUT = _TESTS / "golden"
WHOLE = _TESTS.parent.parent / "shared" / "golden"


def find(name: str) -> Path | None:
    """Path of a file or folder of the golden set; None where only the cut is there, without it.

    ``OPENELM_MLX_GOLDEN=cut`` in the environment hides the whole set.
    """
    places = [CUT] if os.environ.get("OPENELM_MLX_GOLDEN") == "cut" else [WHOLE, CUT]
    return next((place / name for place in places if (place / name).exists()), None)


def models() -> list[str]:
    """The tiny models whose Hugging Face folders are at hand."""
    names = json.loads((CUT / "models.json").read_text())
    return [name for name in names if find(f"hf/{name}/model.safetensors")]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_numpy(path: Path) -> dict[str, np.ndarray]:
    """Tensors of a safetensors file; 16-bit floats become float32."""
    arrays: Any = mx.load(str(path))
    halves = (mx.bfloat16, mx.float16)
    return {
        k: np.array(v.astype(mx.float32) if v.dtype in halves else v) for k, v in arrays.items()
    }


def flat(module: nn.Module) -> list[tuple[str, mx.array]]:
    """Names and arrays of a module's parameters."""
    pairs: Any = tree_flatten(module.parameters())
    return pairs


def numpy_weights(module: nn.Module) -> dict[str, np.ndarray]:
    """A module's parameters for ``reference.forward``."""
    return {name: np.array(weight.astype(mx.float32)) for name, weight in flat(module)}

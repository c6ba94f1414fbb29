"""A package of two functions over one cache: the smallest thing that behaves as a decoder."""

from pathlib import Path
from typing import Any

import mil_programs
import numpy as np

V, D, C = 10, 4, 6  # vocabulary, width, context
TABLE = np.random.default_rng(2).standard_normal((V, D)).astype(np.float16)
CACHE = {"keyCache": ((1, C, D), "state:fp16")}


def step(mb: Any, inputIds: Any, position: Any, keyCache: Any) -> Any:
    """Write the embeddings into the cache at ``position`` and sum all rows of the cache."""
    table = mb.const(val=TABLE, name="shared_table")
    rows = mb.gather(x=table, indices=inputIds, axis=0, name="embedding")
    start = mb.concat(values=[np.int32([0]), position, np.int32([0])], axis=0)
    stop = mb.add(x=start, y=np.int32([1, rows.shape[1], D]))
    cache = mb.read_state(input=keyCache)
    written = mb.slice_update(x=cache, update=rows, begin=start, end=stop, name="write_key")
    cache = mb.coreml_update_state(state=keyCache, value=written)
    return mb.reduce_sum(x=cache, axes=[1], name="logits")


def specs(tokens: int) -> mil_programs.Specs:
    return {"inputIds": ((1, tokens), "int32"), "position": ((1,), "int32"), **CACHE}


def save(path: Path) -> Path:
    """Functions ``decode`` (1 token, the default) and ``prefill`` (3)."""
    return mil_programs.save_functions(
        path, {"decode": (specs(1), step), "prefill": (specs(3), step)}
    )


def call(ids: list[int], position: int) -> dict[str, np.ndarray]:
    """Inputs of a function."""
    return {"inputIds": np.array([ids], np.int32), "position": np.array([position], np.int32)}

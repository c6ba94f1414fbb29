"""CoreNet checkpoints for tests: random small models under CoreNet's names, in ``.pt`` files."""

import json
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import folder_makers  # imports openelm_mlx, so that OpenBLAS comes before mlx.core
import golden_set
import mlx.core as mx

from convert.pt_file import write

# What ``folder_makers.small_config`` describes, as CoreNet's GPTConfig takes it.
GENERAL_GPT = {
    **{"num_transformer_layers": 2, "model_dim": 64, "head_dim": 16, "num_gqa_groups": 2},
    **{"qkv_multipliers": [0.5, 1.0], "ffn_multipliers": [0.5, 1.0], "ffn_dim_divisor": 32},
    **{"normalize_qk_projections": True, "share_input_output_layers": True},
    **{"max_context_length": 2048, "vocab_size": 40},
}


def general_gpt(**changes: Any) -> dict[str, Any]:
    """The mapping, with ``changes``; a value of None removes its key."""
    return {k: v for k, v in (GENERAL_GPT | changes).items() if v is not None}


def write_config(path: Path, **changes: Any) -> Path:
    """:func:`general_gpt` as a JSON file."""
    path.write_text(json.dumps(general_gpt(**changes)))
    return path


def corenet_state(
    rows: int = 40, *, tied: bool = True, dtype: mx.Dtype = mx.float32
) -> OrderedDict[str, mx.array]:
    """A random model's weights under CoreNet's names."""
    model = folder_makers.small_model(dtype, vocab_size=rows, share_input_output_layers=tied)
    return OrderedDict(
        (name.replace("transformer.", "").replace("lm_head", "classifier"), array)
        for name, array in golden_set.flat(model)
    )


def write_state(path: Path, state: dict[str, mx.array] | None = None) -> Path:
    write(path, corenet_state() if state is None else state)
    return path


@contextmanager
def full_disk(limit: int = 4096) -> Iterator[None]:
    """No file can grow past ``limit`` bytes: what a full disk looks like to a writer."""
    resource = __import__("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # Python ignores SIGXFSZ
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

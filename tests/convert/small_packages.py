"""Core ML packages of small models, straight from the graph builder: no guard, no verify."""

from pathlib import Path
from typing import Any

import golden_set  # noqa: F401  # imports openelm_mlx, so that OpenBLAS comes before mlx.core

from convert.coreml_graph import build_program
from convert.coreml_package import write_package
from convert.coreml_parameters import stored_parameters
from convert.coreml_settings import ExportSettings, Numerics
from openelm_mlx.model import Model


def small_package(path: Path, model: Model, **settings: Any) -> Path:
    """``model`` as an ``.mlpackage`` with context 64, prefill 8 and float16 weights."""
    asked = ExportSettings(**{"context": 64, "prefill": 8, "weights": "fp16", **settings})
    metadata = {
        "openelm.interface": asked.interface,
        "openelm.context": str(asked.context),
        "openelm.prefill": str(asked.prefill),
        "openelm.weights": asked.weights,
        "openelm.target": asked.target,
        "openelm.all_logits": str(asked.all_logits).lower(),
    }
    program = build_program(model.args, stored_parameters(model, asked.weights), asked, Numerics())
    write_package(program, path, metadata=metadata, about="for tests")
    return path

"""Matrices in a saved package, and what coremltools itself reads back: an independent judge."""

import gc
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from convert.coreml_stored import StoredWeight
from convert.mil_tools import coremltools


@contextmanager
def temporary_folders_of_coremltools() -> Iterator[None]:
    """coremltools leaves its temporary folders to the garbage collector, which warns of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()


@temporary_folders_of_coremltools()
def save(matrices: Mapping[str, StoredWeight], path: Path) -> None:
    """A package that looks up a row of each matrix and multiplies it by the same matrix."""
    ct = coremltools()
    builder = coremltools("converters.mil").Builder
    types = coremltools("converters.mil.mil").types

    @builder.program(
        input_specs=[builder.TensorSpec((1, 1), dtype=types.int32)],
        opset_version=ct.target.iOS18,
    )
    def program(ids: Any) -> Any:
        results = []
        for name, matrix in matrices.items():
            table = matrix.emit(name)
            row = builder.gather(x=table, indices=ids, axis=0)
            results.append(builder.linear(x=row, weight=table, name=f"{name}_logits"))
        return tuple(results)

    ct.convert(
        program,
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
    ).save(str(path))


@temporary_folders_of_coremltools()
def decompressed(path: Path) -> dict[str, np.ndarray]:
    """Name -> float16 matrix, after coremltools' own ``decompress_weights``."""
    model = coremltools().models.MLModel(str(path), skip_model_load=True)
    plain = coremltools("optimize.coreml").decompress_weights(model)
    found = {}
    for op in plain._mil_program.functions["main"].operations:
        if op.op_type == "linear":
            found[op.outputs[0].name.removesuffix("_logits")] = op.weight.val
    return found


@temporary_folders_of_coremltools()
def constants(path: Path) -> dict[str, tuple[np.ndarray, str]]:
    """Name -> codes or indices of each compressed matrix and their type, as coremltools reads."""
    model = coremltools().models.MLModel(str(path), skip_model_load=True)
    spec = model.get_spec()
    program = coremltools("converters.mil.frontend.milproto").load.load(
        spec, specification_version=spec.specificationVersion, file_weights_dir=model.weights_dir
    )
    types = coremltools("converters.mil.mil").types
    found = {}
    for op in program.functions["main"].operations:
        if op.op_type.startswith("constexpr_"):
            data = op.inputs.get("data") or op.inputs["indices"]
            found[op.name] = (data.val, types.builtin_to_string(data.dtype))
    return found


@temporary_folders_of_coremltools()
def compressions(path: Path) -> int:
    """How many compression operations the saved program has."""
    spec = coremltools().models.MLModel(str(path), skip_model_load=True).get_spec()
    block = next(iter(spec.mlProgram.functions["main"].block_specializations.values()))
    return sum(op.type.startswith("constexpr_") for op in block.operations)

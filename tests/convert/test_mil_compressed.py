"""Compressed constants, expanded bit for bit as coremltools expands them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import coreml_matrices
import mil_programs
import numpy as np
import pytest

from convert.mil_eval import Package
from convert.mil_ops import parameters
from convert.mil_ops_compressed import COMPRESSED
from convert.mil_tools import coremltools

pytestmark = pytest.mark.slow  # importing coremltools takes seconds

ROWS, COLUMNS = 12, 16
X = np.eye(COLUMNS, dtype=np.float32)  # a linear layer of the identity gives its own weights


def _codes(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    types = coremltools("converters.mil.mil").types
    bits = int(kind.lstrip("uint"))
    low = 0 if kind.startswith("u") else -(2 ** (bits - 1))
    numbers = rng.integers(low, low + 2**bits, shape)
    return numbers.astype(types.nptype_from_builtin(types.string_to_builtin(kind)))


def _scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return (rng.random(shape) + 0.01).astype(np.float16)


def _blocks(
    kind: str, rows: int, columns: int, offset: str | None = None
) -> Callable[[Any, np.random.Generator], Any]:
    def emit(mb: Any, rng: np.random.Generator) -> Any:
        settings: dict[str, Any] = {
            "data": _codes(rng, kind, (ROWS, COLUMNS)),
            "scale": _scales(rng, rows, columns),
        }
        if offset == "fp16":
            settings["offset"] = (rng.random((rows, columns)) * 15).astype(np.float16)
        elif offset:
            settings["offset"] = _codes(rng, offset, (rows, columns))
        return mb.constexpr_blockwise_shift_scale(**settings)

    return emit


def _palette(
    bits: int, rows: int, columns: int, vector: int = 1, axis: int = 0
) -> Callable[[Any, np.random.Generator], Any]:
    def emit(mb: Any, rng: np.random.Generator) -> Any:
        shape = [ROWS, COLUMNS]
        shape[axis] //= vector
        lut = rng.standard_normal((rows, columns, 2**bits, vector)).astype(np.float16)
        more = {"vector_axis": np.int32(axis)} if vector > 1 else {}
        indices = _codes(rng, f"uint{bits}", tuple(shape))
        return mb.constexpr_lut_to_dense(indices=indices, lut=lut, **more)

    return emit


def _scaled_palette(mb: Any, rng: np.random.Generator) -> Any:
    codes = mb.constexpr_lut_to_dense(
        indices=_codes(rng, "uint4", (ROWS, COLUMNS)),
        lut=rng.integers(-128, 128, (1, 1, 16, 1)).astype(np.int8),
    )
    return mb.constexpr_blockwise_shift_scale(data=codes, scale=_scales(rng, ROWS, 1))


def _sparse(mb: Any, rng: np.random.Generator) -> Any:
    mask = _codes(rng, "uint1", (ROWS, COLUMNS))
    kept = rng.standard_normal(int(mask.sum())).astype(np.float16)
    return mb.constexpr_sparse_to_dense(nonzero_data=kept, mask=mask)


KINDS: dict[str, Callable[[Any, np.random.Generator], Any]] = {
    "int8 a row": _blocks("int8", ROWS, 1),
    "uint8 a row with offsets": _blocks("uint8", ROWS, 1, "uint8"),
    "int8 with fp16 offsets": _blocks("int8", ROWS, 1, "fp16"),
    "int4 in blocks": _blocks("int4", ROWS, 4),
    "int4 in blocks of rows": _blocks("int4", 3, 2, "int4"),
    "uint4 with offsets": _blocks("uint4", ROWS, 2, "uint4"),
    "uint4 with fp16 offsets": _blocks("uint4", ROWS, 2, "fp16"),
    **{f"palette of {bits} bits": _palette(bits, 1, 1) for bits in (1, 2, 3, 4, 6, 8)},
    "palettes of rows": _palette(4, 3, 1),
    "palettes of columns": _palette(2, 1, 4),
    "vectors down": _palette(4, 1, 1, vector=2, axis=0),
    "vectors along, in groups": _palette(3, 2, 1, vector=4, axis=1),
    "palette of int8, scaled": _scaled_palette,
    "sparse": _sparse,
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A linear layer a kind of compression, each fed the identity."""

    def body(mb: Any, x: Any) -> Any:
        rng = np.random.default_rng(3)
        weights = [emit(mb, rng) for emit in KINDS.values()]
        return tuple(
            mb.linear(x=x, weight=weight, name=f"w{place}_logits")
            for place, weight in enumerate(weights)
        )

    path = tmp_path_factory.mktemp("compressed") / "weights.mlpackage"
    return mil_programs.save(path, {"x": ((COLUMNS, COLUMNS), "fp16")}, body)


@pytest.fixture(scope="module")
def expected(package: Path) -> dict[str, np.ndarray]:
    return coreml_matrices.decompressed(package)


@pytest.mark.parametrize("precision", ["float32", "native"])
def test_weights_are_bit_equal_to_what_coremltools_decompresses(
    package: Path, expected: dict[str, np.ndarray], precision: str
) -> None:
    found = Package(package, precision=precision).predict({"x": X.astype(np.float16)})
    assert len(found) == len(KINDS)
    for place, kind in enumerate(KINDS):
        got = found[f"w{place}_logits"].T
        np.testing.assert_array_equal(got, expected[f"w{place}"], err_msg=kind)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        ("OpLinearQuantizerConfig", {"dtype": "int4", "granularity": "per_block", "block_size": 8}),
        ("OpLinearQuantizerConfig", {"dtype": "uint8", "mode": "linear"}),
        ("OpPalettizerConfig", {"mode": "uniform", "nbits": 3}),
        ("OpMagnitudePrunerConfig", {"target_sparsity": 0.6}),
    ],
)
def test_a_model_compressed_by_coremltools_evaluates_as_its_decompressed_self(
    make: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    rng = np.random.default_rng(4)
    weight = rng.standard_normal((64, 64)).astype(np.float16)
    body = lambda mb, x: mb.linear(x=x, weight=weight, name="w_logits")  # noqa: E731
    path = mil_programs.save(tmp_path / "plain.mlpackage", {"x": ((64, 64), "fp16")}, body)
    optimize = coremltools("optimize.coreml")
    method = {
        "OpLinearQuantizerConfig": optimize.linear_quantize_weights,
        "OpPalettizerConfig": optimize.palettize_weights,
        "OpMagnitudePrunerConfig": optimize.prune_weights,
    }[make]
    config = optimize.OptimizationConfig(
        global_config=getattr(optimize, make)(weight_threshold=0, **settings)
    )
    small = tmp_path / "small.mlpackage"
    with coreml_matrices.temporary_folders_of_coremltools():
        model = coremltools().models.MLModel(str(path), skip_model_load=True)
        method(model, config).save(str(small))
        del model
    plain = coreml_matrices.decompressed(small)["w"]
    assert np.any(plain != weight)
    found = Package(small).predict({"x": np.eye(64, dtype=np.float16)})
    np.testing.assert_array_equal(found["w_logits"].T, plain)


def test_formulas_of_older_packages() -> None:
    """iOS 16's affine codes and casts, which newer builders do not write any more."""
    codes = np.array([[1, 2], [250, 4]], np.uint8)
    scale, zero = np.array([0.5, 2.0], np.float32), np.array([1, 3], np.uint8)
    found = COMPRESSED["constexpr_affine_dequantize"](np.asarray, codes, zero, scale, np.int32(1))
    np.testing.assert_array_equal(found, [[0, -2], [124.5, 2]])
    cast = COMPRESSED["constexpr_cast"](np.asarray, np.array([1.5], np.float16), "fp32")
    assert cast.dtype == np.float32
    np.testing.assert_array_equal(cast, [1.5])


@pytest.mark.parametrize("op", COMPRESSED)
def test_parameters_are_those_of_coremltools(op: str) -> None:
    registry = coremltools("converters.mil.mil.ops.registry").SSAOpRegistry
    newest = list(registry.core_ops[op].values())[-1]
    assert parameters(op) == set(newest.input_spec.input_types)


def test_codes_that_do_not_fit_their_scales_or_palette_are_refused() -> None:
    codes, scale = np.zeros((4, 6), np.int8), np.ones((4, 4), np.float16)
    with pytest.raises(ValueError, match=r"data of \[4, 6\] for scales of \[4, 4\]"):
        COMPRESSED["constexpr_blockwise_shift_scale"](np.asarray, codes, scale)
    indices, lut = np.full((4, 6), 3, np.uint8), np.ones((1, 1, 2, 1), np.float16)
    with pytest.raises(ValueError, match="index 3 in a palette of 2"):
        COMPRESSED["constexpr_lut_to_dense"](np.asarray, indices, lut)
    with pytest.raises(ValueError, match=r"indices of \[4, 6\] for palettes of \[3, 1, 2, 1\]"):
        COMPRESSED["constexpr_lut_to_dense"](np.asarray, indices, np.ones((3, 1, 2, 1)))

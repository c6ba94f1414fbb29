"""Stored matrices: what a package holds, judged by coremltools, MLX and plain arithmetic."""

from collections.abc import Callable
from pathlib import Path

import coreml_matrices
import mlx.core as mx
import numpy as np
import pytest

from convert.coreml_stored import Affine, Dense, Palette, StoredWeight
from convert.coreml_weights import KINDS, check_shrunk, from_mlx, store

Matrix = Callable[..., np.ndarray]


def matrix(rows: int = 48, columns: int = 192, seed: int = 0) -> np.ndarray:
    """Normal float32 weights, rows of unequal size."""
    rng = np.random.default_rng(seed)
    sizes = 0.02 * np.exp(0.5 * rng.standard_normal((rows, 1)))
    return (sizes * rng.standard_normal((rows, columns))).astype(np.float32)


def of_mlx(bits: int, dtype: mx.Dtype = mx.float16, seed: int = 0) -> StoredWeight:
    weight = mx.array(matrix(seed=seed)).astype(dtype)
    return from_mlx(*mx.quantize(weight, group_size=64, bits=bits), bits, 64)


def every_form() -> dict[str, StoredWeight]:
    """One matrix of each kind, and MLX's codes with integer and with float16 offsets."""
    kinds = {f"as_{kind}": store(matrix(), kind) for kind in KINDS}
    whole = {f"mlx{bits}": of_mlx(bits) for bits in (2, 3, 4, 5, 6, 8)}
    fractions = {f"mlx{bits}_bf16": of_mlx(bits, mx.bfloat16) for bits in (3, 4, 6, 8)}
    odd = {
        "odd_int4": store(matrix(24, 54), "int4"),
        "odd_palette": store(matrix(9, 54), "palette4"),
    }
    return kinds | whole | fractions | odd


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with all of `every_form`."""
    path = tmp_path_factory.mktemp("package") / "all.mlpackage"
    coreml_matrices.save(every_form(), path)
    return path


def relative_error(stored: StoredWeight, weight: np.ndarray) -> float:
    return float(np.linalg.norm(stored.decompressed() - weight) / np.linalg.norm(weight))


@pytest.mark.slow
def test_coremltools_reads_back_the_very_bits(package: Path) -> None:
    found = coreml_matrices.decompressed(package)
    expected = every_form()
    assert found.keys() == expected.keys()
    for name, stored in expected.items():
        assert found[name].dtype == np.float16
        bits = stored.decompressed().astype(np.float16).view(np.uint16)
        np.testing.assert_array_equal(found[name].view(np.uint16), bits, err_msg=name)


@pytest.mark.slow
def test_a_tied_matrix_is_stored_once_for_lookup_and_head(package: Path) -> None:
    forms = every_form()
    assert coreml_matrices.compressions(package) == len(forms) - 1  # fp16 needs no operation
    expected = sum(stored.nbytes for stored in forms.values())
    blob = next(package.rglob("weight.bin")).stat().st_size
    entries = 64 + 3 * 128 * len(forms)  # header, and header and alignment of each constant
    vectors = 2 * sum(stored.shape[0] for stored in forms.values())  # a linear's bias of zeros
    assert expected <= blob <= expected + entries + vectors
    check_shrunk(package, expected)


@pytest.mark.slow
def test_codes_in_the_package_are_mlx_own(package: Path) -> None:
    found = coreml_matrices.constants(package)
    for bits, kind in ((2, "uint2"), (3, "int4"), (4, "int4"), (6, "int8"), (8, "int8")):
        weight = mx.array(matrix()).astype(mx.float16)
        packed, scales, _ = mx.quantize(weight, group_size=64, bits=bits)
        ones, zeros = mx.ones_like(scales), mx.zeros_like(scales)
        codes = np.array(mx.dequantize(packed, ones, zeros, group_size=64, bits=bits)).astype(int)
        stored, name = found[f"mlx{bits}"]
        assert name == kind
        if bits > 2:  # shifted by half the range, mirrored where MLX's scale is negative
            negative = np.repeat(np.array(scales) < 0, 64, axis=1)
            codes = np.where(negative, 2**bits - 1 - codes, codes) - 2 ** (bits - 1)
            assert negative.any()
        np.testing.assert_array_equal(stored, codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
def test_carried_codes_mean_what_mlx_means(bits: int, dtype: mx.Dtype) -> None:
    weight = mx.array(matrix(seed=bits)).astype(dtype)
    packed, scales, biases = mx.quantize(weight, group_size=64, bits=bits)
    wide, shift = scales.astype(mx.float32), biases.astype(mx.float32)
    exact = np.array(mx.dequantize(packed, wide, shift, group_size=64, bits=bits))
    stored = from_mlx(packed, scales, biases, bits, 64)
    step = np.repeat(np.abs(np.array(wide)), 64, axis=1)
    largest = np.repeat(np.abs(exact).reshape(-1, 64).max(1), 64).reshape(exact.shape)
    moved = np.abs(stored.decompressed() - exact)
    # A hundredth of a step for the offset; float16's 2^-11 for scale, difference and product.
    assert (moved <= 0.01 * step + 1.6e-3 * largest).all()


def test_offsets_are_integers_where_mlx_has_integers_and_fractions_elsewhere() -> None:
    whole, fractions = of_mlx(4), of_mlx(4, mx.bfloat16)
    assert isinstance(whole, Affine)
    assert isinstance(fractions, Affine)
    assert whole.stored.offset is not None
    assert fractions.stored.offset is not None
    assert (whole.stored.offset.dtype, whole.note) == (np.int8, "")
    assert fractions.stored.offset.dtype == np.float16
    assert "float16" in fractions.note
    assert fractions.nbytes - whole.nbytes == whole.stored.scale.size * 3 // 2


def test_learned_scales_and_biases_are_carried_with_fractional_offsets() -> None:
    rng = np.random.default_rng(5)
    packed = rng.integers(0, 2**32, (16, 16), dtype=np.uint32)
    scales = rng.normal(0, 0.01, (16, 2)).astype(np.float32)
    biases = rng.normal(0, 0.1, (16, 2)).astype(np.float32)
    stored = from_mlx(packed, scales, biases, 4, 64)
    exact = mx.dequantize(*map(mx.array, (packed, scales, biases)), group_size=64, bits=4)
    np.testing.assert_allclose(stored.decompressed(), np.array(exact), rtol=3e-3, atol=2e-4)


def test_a_group_of_one_weight_throughout_keeps_that_weight() -> None:
    weight = matrix(16, 128)
    weight[0], weight[1, :64], weight[2] = 0.5, -0.25, 0.0
    quantised = mx.quantize(mx.array(weight), group_size=64, bits=4)  # scales of 1e-7 there
    assert float(mx.abs(quantised[1][:2, 0]).max()) < 1e-6
    found = from_mlx(*quantised, 4, 64).decompressed()
    np.testing.assert_array_equal(found[0], 0.5)
    np.testing.assert_array_equal(found[1, :64], -0.25)
    np.testing.assert_array_equal(found[2], 0.0)


def test_scales_beyond_float16_are_refused_naming_the_way_out() -> None:
    packed, scales, biases = mx.quantize(mx.array(matrix()), group_size=64, bits=4)
    with pytest.raises(ValueError, match=r"row 0 has scale .* --dequantize"):
        from_mlx(packed, scales * 1e8, biases * 1e8, 4, 64)
    with pytest.raises(ValueError, match=r"offset 1e\+05.*144 such groups.*--dequantize"):
        from_mlx(packed, mx.abs(scales), -1e5 * mx.abs(scales), 4, 64)


def test_scales_below_float16_normal_range_are_noted_and_then_refused() -> None:
    def carried(size: float) -> StoredWeight:
        return from_mlx(*mx.quantize(mx.array(matrix() * size), group_size=64, bits=8), 8, 64)

    assert "half a step" not in carried(1).note
    assert "half a step" in carried(0.07).note
    with pytest.raises(ValueError, match="--dequantize"):
        carried(0.003)


def test_unknown_bits_and_mismatched_shapes_are_refused() -> None:
    packed, scales, biases = mx.quantize(mx.array(matrix()), group_size=64, bits=4)
    with pytest.raises(ValueError, match=r"7 bits .* 2, 3, 4, 5, 6, 8.*--dequantize"):
        from_mlx(packed, scales, biases, 7, 64)
    with pytest.raises(ValueError, match=r"\(48, 24\) of 4 bits in groups of 32 .* \(48, 3\)"):
        from_mlx(packed, scales, biases, 4, 32)


def test_int8_is_within_half_a_step_of_each_channel() -> None:
    weight = matrix()
    weight[3], weight[4] = 0, matrix()[4] * 1e-4  # nothing, and scales that float16 barely holds
    stored = store(weight, "int8")
    assert isinstance(stored, Affine)
    step = np.abs(weight).max(axis=1, keepdims=True) / 127
    rounding = np.abs(weight) * 2.0**-11 + 2.0**-25
    moved = np.abs(stored.decompressed() - weight)
    assert (moved <= 0.5 * step * (1 + 2.0**-7) + rounding + 2.0**-19 * (step < 2e-6)).all()
    np.testing.assert_array_equal(stored.decompressed()[3], 0)


def test_int4_beats_the_plain_full_range_scale() -> None:
    weight = matrix()
    blocks = weight.reshape(48, -1, 32)
    step = np.abs(blocks).max(-1, keepdims=True) / 7
    plain = np.linalg.norm(np.rint(blocks / step) * step - blocks) / np.linalg.norm(blocks)
    assert relative_error(store(weight, "int4"), weight) < 0.93 * plain


@pytest.mark.parametrize(
    ("kind", "shape", "words"),
    [
        ("int4", (24, 54), "int4 blocks of 27 input channels: 32 does not divide 54"),
        ("int4", (24, 53), "int4 blocks of 53 input channels"),
        ("palette4", (24, 54), "palettes for 12 output channels each: 16 does not divide 24"),
        ("palette4", (34, 54), "palettes for 34 output channels each"),
    ],
)
def test_sizes_that_do_not_divide_fall_back_and_say_so(
    kind: str, shape: tuple[int, int], words: str
) -> None:
    stored = store(matrix(*shape), kind)
    assert words in stored.note
    assert relative_error(stored, matrix(*shape)) < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_shrink_as_asked(kind: str) -> None:
    stored = store(matrix(64, 1280), kind)
    bits = {"fp16": 16, "int8": 8, "int4": 4 + 16 / 32, "palette4": 4, "palette6": 6}[kind]
    assert bits <= 8 * stored.nbytes / (64 * 1280) <= bits + 0.06


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_rows_are_exactly_scaled_and_the_others_untouched(kind: str) -> None:
    coarse = np.round(matrix(48, 64) * 16) + 1  # integers: they survive any shift
    stored = store(coarse, kind)
    part = slice(16, 32)
    scaled = stored.scaled(part, 3)
    assert scaled is not None
    expected = stored.decompressed()
    expected[part] /= 8
    np.testing.assert_array_equal(scaled.decompressed(), expected)
    assert scaled.nbytes == stored.nbytes
    assert np.array_equal(stored.decompressed(), store(coarse, kind).decompressed())


@pytest.mark.parametrize("kind", KINDS)
def test_scaling_that_loses_bits_is_not_done(kind: str) -> None:
    stored = store(matrix(48, 64), kind)
    assert stored.scaled(slice(0, 48), 12) is None  # subnormal
    assert stored.scaled(slice(0, 48), -30) is None  # beyond 65504


def test_products_that_become_subnormal_count_as_lost() -> None:
    scales = np.full((4, 1), 2.0**-10, np.float32)  # exact at any shift
    biases = -scales * np.float32(8.03)  # code 8 stands for a weight next to nothing
    packed = np.full((4, 8), 0x12345678, np.uint32)
    assert from_mlx(packed, scales, biases, 4, 64).scaled(slice(0, 4), 3) is None
    without = np.full((4, 8), 0x12345671, np.uint32)
    assert from_mlx(without, scales, biases, 4, 64).scaled(slice(0, 4), 3) is not None


def test_rows_that_share_a_palette_with_others_are_not_scaled() -> None:
    stored = store(np.round(matrix(48, 64) * 16) + 1, "palette4")
    assert stored.scaled(slice(0, 20), 1) is None
    assert stored.scaled(slice(0, 32), 1) is not None


def test_kinds_and_weights_that_cannot_be_stored_are_refused() -> None:
    with pytest.raises(ValueError, match=r"fp16, int8, int4, palette4, palette6, not 'int2'"):
        store(matrix(), "int2")
    with pytest.raises(ValueError, match=r"float16 or float32 matrix, got float64 of shape \(4,\)"):
        store(np.zeros(4), "fp16")
    with pytest.raises(ValueError, match=r"1e\+05 does not fit float16"):
        store(matrix() * 0 + 1e5, "int8")


def test_a_package_that_did_not_shrink_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.mlpackage").mkdir()
    with pytest.raises(FileNotFoundError, match="no weight file"):
        check_shrunk(tmp_path / "p.mlpackage", 1)
    (tmp_path / "p.mlpackage" / "weight.bin").write_bytes(bytes(300_000))
    check_shrunk(tmp_path / "p.mlpackage", 290_000)
    with pytest.raises(ValueError, match=r"take 0\.3 MB where 0\.1 MB were asked"):
        check_shrunk(tmp_path / "p.mlpackage", 150_000)
    with pytest.raises(ValueError, match=r"take 2\.0 MB where 1\.0 MB"):
        check_shrunk(2_000_000, 1_000_000)


def test_forms_are_what_their_kind_says() -> None:
    forms = [type(store(matrix(), kind)) for kind in KINDS]
    assert forms == [Dense, Affine, Affine, Palette, Palette]

"""Changes of type are what NumPy makes of them, and what they lose is counted and said."""

import logging

import folder_makers  # noqa: F401  (brings OpenBLAS, which has to come before mlx.core)
import mlx.core as mx
import numpy as np
import pytest

from convert.dtypes import CastReport, cast, dtype_name, parse_dtype, warn_float16

VALUES = np.array([1.0, -2.5, 1e-8, 65504.0, 65519.0, 65520.0, -7e4, np.inf], np.float32)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_float16_values_are_numpys_and_overflows_are_counted() -> None:
    report = CastReport()
    out = cast("w", mx.array(VALUES), mx.float16, report)
    np.testing.assert_array_equal(np.array(out), VALUES.astype(np.float16))
    assert report.overflows == {"w": 2}  # 65520 and -7e4; the infinity was one before
    assert report.values == len(VALUES)


def test_bfloat16_to_float16_counts_too() -> None:
    report = CastReport()
    cast("a", mx.array([1e5, 1.0]).astype(mx.bfloat16), mx.float16, report)
    cast("b", mx.array([1.0]).astype(mx.bfloat16), mx.float16, report)
    assert report.overflows == {"a": 1}
    assert report.sources == {"bfloat16"}


def test_what_overflows_is_named_with_its_count(caplog: pytest.LogCaptureFixture) -> None:
    report = CastReport()
    for i, bad in enumerate([1, 0, 3, 2, 4]):
        cast(f"t{i}", mx.array([1e6] * bad + [0.0] * (4 - bad)), mx.float16, report)
    report.log(mx.float16)
    warning = next(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert "10 of 20 values in 4 tensors overflow float16" in warning
    assert "t4 (4), t2 (3), t3 (2) and 1 more" in warning
    assert "use bfloat16" in warning


def test_a_change_is_said_and_no_change_is_not(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    report = CastReport()
    cast("w", mx.ones(3), mx.float32, report)
    report.log(mx.float32)
    assert not caplog.records
    cast("w", mx.ones(3), mx.bfloat16, report)
    report.log(mx.bfloat16)
    assert "from float32 to bfloat16" in caplog.text


def test_integers_and_wanted_types_are_the_arrays_themselves() -> None:
    report = CastReport()
    for array in (mx.array([1, 2]), mx.ones(2, dtype=mx.float16)):
        assert cast("w", array, mx.float16, report) is array
    floats = mx.ones(2)
    assert cast("w", floats, None, report) is floats
    assert not report.sources


def test_float64_is_cast_where_mlx_can() -> None:
    with mx.stream(mx.cpu):
        wide = mx.array([1 / 3], dtype=mx.float64)
    out = cast("w", wide, mx.float32, CastReport())
    assert np.array(out)[0] == np.float32(1 / 3)


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    assert parse_dtype(None) is None
    assert parse_dtype("bfloat16") == mx.bfloat16
    assert dtype_name(mx.bfloat16) == "bfloat16"
    with pytest.raises(ValueError, match="'int4' is not one of float32, float16, bfloat16"):
        parse_dtype("int4")


@pytest.mark.parametrize(
    ("size", "dtype", "warned"),
    [
        ((36, 3072), mx.float16, True),
        ((36, 3072), mx.bfloat16, False),
        ((36, 3072), None, False),
        ((16, 1280), mx.float16, False),
    ],
)
def test_3b_in_float16_is_warned_of(
    size: tuple[int, int], dtype: mx.Dtype | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_float16(*size, dtype)
    assert ("OpenELM-3B" in caplog.text) == warned

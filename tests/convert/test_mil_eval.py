"""The evaluator on small packages: functions, states, precisions, findings, and refusals."""

import shutil
from pathlib import Path
from typing import Any

import mil_programs
import mil_tiny
import numpy as np
import pytest
from mil_tiny import CACHE, TABLE, C, D, call

from convert.mil_eval import Package
from convert.mil_tools import coremltools

pytestmark = pytest.mark.slow  # importing coremltools takes seconds


@pytest.fixture(scope="module")
def two_functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mil_tiny.save(tmp_path_factory.mktemp("package") / "two.mlpackage")


def test_a_package_tells_its_functions_and_metadata(two_functions: Path) -> None:
    package = Package(two_functions)
    assert package.functions == ("decode", "prefill")
    assert package.metadata["openelm.note"] == "made by a test"


def test_one_state_goes_through_both_functions_and_is_changed_in_place(
    two_functions: Path,
) -> None:
    package = Package(two_functions)
    state = package.make_state()
    cache = state["keyCache"]
    first = package.predict(call([1, 2, 3], 0), state, "prefill")["logits"]
    second = package.predict(call([4], 3), state, function="decode")["logits"]
    assert state["keyCache"] is cache
    expected = np.zeros((1, C, D), np.float32)
    expected[0, :4] = TABLE[[1, 2, 3, 4]]
    np.testing.assert_array_equal(cache, expected)
    np.testing.assert_allclose(first[0], expected[0, :3].sum(0), rtol=1e-6)
    np.testing.assert_allclose(second[0], expected[0].sum(0), rtol=1e-6)


def test_the_default_function_runs_where_none_is_named(two_functions: Path) -> None:
    package = Package(two_functions)
    found = package.predict(call([4], 0), package.make_state())["logits"]
    np.testing.assert_array_equal(found[0], TABLE[4])
    with pytest.raises(ValueError, match="no function main; it has decode, prefill"):
        package.predict(call([4], 0), package.make_state(), "main")


def test_a_failing_call_leaves_the_state_as_it_was(two_functions: Path) -> None:
    package = Package(two_functions)
    state = package.make_state()
    package.predict(call([1], 0), state)
    before = state["keyCache"].copy()
    with pytest.raises(ValueError, match=r"decode: slice_update write_key: slice 6:7 is outside"):
        package.predict(call([2], C), state)
    np.testing.assert_array_equal(state["keyCache"], before)


def test_a_state_read_before_an_update_keeps_its_old_rows(tmp_path: Path) -> None:
    """The fault of coremltools #2786: a second read that was merged with the first."""

    def body(mb: Any, x: Any, keyCache: Any) -> Any:
        old = mb.read_state(input=keyCache)
        new = mb.slice_update(x=old, update=x, begin=[0, 0, 0], end=[1, 1, D])
        mb.coreml_update_state(state=keyCache, value=new)
        again = mb.read_state(input=keyCache)
        twice = mb.slice_update(x=again, update=x, begin=[0, 1, 0], end=[1, 2, D])
        kept = mb.coreml_update_state(state=keyCache, value=twice)
        merged = mb.slice_update(x=old, update=x, begin=[0, 2, 0], end=[1, 3, D])
        return kept, mb.identity(x=old, name="old"), mb.identity(x=merged, name="merged")

    specs = {"x": ((1, 1, D), "fp16"), **CACHE}
    path = mil_programs.save(tmp_path / "p.mlpackage", specs, body)
    package = Package(path)
    state = package.make_state()
    found = package.predict({"x": np.ones((1, 1, D), np.float16)}, state)
    rows = np.zeros((1, C, D), np.float32)
    np.testing.assert_array_equal(found["old"], rows)
    rows[:, 2] = 1
    np.testing.assert_array_equal(found["merged"], rows)
    rows[:, 2], rows[:, :2] = 0, 1
    np.testing.assert_array_equal(state["keyCache"], rows)


def test_native_rounds_each_result_and_float32_none(tmp_path: Path) -> None:
    def body(mb: Any, x: Any) -> Any:
        return mb.sub(x=mb.add(x=x, y=np.float16(2048)), y=np.float16(2048), name="out")

    path = mil_programs.save(tmp_path / "p.mlpackage", {"x": ((2,), "fp16")}, body)
    x = np.array([0.3, 1.7], np.float16)
    exact = Package(path).predict({"x": x})["out"]
    assert exact.dtype == np.float32
    np.testing.assert_array_equal(exact, (x.astype(np.float32) + 2048) - np.float32(2048))
    rounded = Package(path, precision="native").predict({"x": x})["out"]
    assert rounded.dtype == np.float16
    np.testing.assert_array_equal(rounded, [0, 2])  # float16 has steps of 2 above 2048
    with pytest.raises(ValueError, match="'float32' or 'native'"):
        Package(path, precision="half")


def test_overflow_and_the_first_value_that_is_not_finite_are_found(tmp_path: Path) -> None:
    def body(mb: Any, x: Any) -> Any:
        large = mb.mul(x=x, y=np.float16(300), name="layers_3_ffn_mul")
        wide = mb.mul(x=mb.cast(x=large, dtype="fp32"), y=np.float32(1e36), name="wide")
        lost = mb.sub(x=wide, y=wide, name="lost")
        return mb.add(x=lost, y=1.0, name="out"), mb.identity(x=large, name="same")

    path = mil_programs.save(tmp_path / "p.mlpackage", {"x": ((2,), "fp16")}, body)
    package = Package(path)
    assert package.findings == []
    package.predict({"x": np.array([1, -300], np.float16)})
    found = [(f.kind, f.op, f.name, f.dtype, f.value) for f in package.findings]
    assert found[0] == ("overflow", "mul", "layers_3_ffn_mul", "FLOAT16", 90000.0)
    assert ("non-finite", "mul", "wide", "FLOAT32", np.inf) in found
    assert [f.name for f in package.findings if f.kind == "non-finite"] == ["wide"]
    assert str(package.findings[0]) == "main: mul layers_3_ffn_mul (float16): beyond 65504, 90000"
    package.clear_findings()
    package.predict({"x": np.array([0, 400], np.float16)})
    assert package.findings[0].value == 120000.0

    native = Package(path, precision="native")
    native.predict({"x": np.array([1, -300], np.float16)})
    found_first = ("non-finite", "layers_3_ffn_mul")
    assert [(f.kind, f.name) for f in native.findings if f.op != "const"] == [found_first]


def test_an_infinite_constant_is_found(tmp_path: Path) -> None:
    mask = np.array([0, -np.inf], np.float16)
    body = lambda mb, x: mb.add(x=x, y=mb.const(val=mask, name="mask"), name="out")  # noqa: E731
    path = mil_programs.save(tmp_path / "p.mlpackage", {"x": ((2,), "fp16")}, body)
    package = Package(path)
    package.predict({"x": np.zeros(2, np.float16)})
    assert [(f.op, f.name) for f in package.findings] == [("const", "mask")]


def test_ranged_and_enumerated_shapes_are_held(tmp_path: Path) -> None:
    ct = coremltools()
    for shape, good, bad, allowed in [
        (ct.Shape((1, ct.RangeDim(1, 4, default=1))), (1, 3), (1, 5), r"\[1, 1..4\]"),
        (ct.EnumeratedShapes([[1, 1], [1, 4]]), (1, 4), (1, 3), r"\[1, 1\] or \[1, 4\]"),
    ]:
        size = mil_programs.symbol()
        path = mil_programs.save(
            tmp_path / "p.mlpackage",
            {"ids": ((1, size), "int32")},
            lambda mb, ids: mb.add(x=ids, y=1, name="out"),
            ids=shape,
        )
        package = Package(path)
        found = package.predict({"ids": np.zeros(good, np.int32)})["out"]
        assert found.shape == good
        with pytest.raises(ValueError, match=f"expected {allowed}"):
            package.predict({"ids": np.zeros(bad, np.int32)})
        shutil.rmtree(path)


def test_inputs_are_not_written_to(tmp_path: Path) -> None:
    body = lambda mb, x: mb.slice_update(  # noqa: E731
        x=x, update=np.float16([9]), begin=[0], end=[1], name="out"
    )
    path = mil_programs.save(tmp_path / "p.mlpackage", {"x": ((2,), "fp16")}, body)
    x = np.zeros(2, np.float32)
    found = Package(path).predict({"x": x})["out"]
    np.testing.assert_array_equal(found, [9, 0])
    np.testing.assert_array_equal(x, 0)


def test_weights_that_functions_share_are_decoded_once(two_functions: Path) -> None:
    package = Package(two_functions)
    package.predict(call([1, 2, 3], 0), package.make_state(), "prefill")
    kept = package.kept_bytes
    package.predict(call([4], 3), package.make_state(), "decode")
    assert package.kept_bytes == kept == 4 * TABLE.size
    without = Package(two_functions, cache_weights=False)
    state = without.make_state()
    found = without.predict(call([4], 0), state)["logits"]
    np.testing.assert_array_equal(found[0], TABLE[4])
    assert without.kept_bytes == 0

"""The evaluator on small packages: functions, states, precisions, findings, and refusals."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mil_programs
import numpy as np
import pytest

from convert.mil_eval import Package
from convert.mil_tools import coremltools

V, D, C = 10, 4, 6  # vocabulary, width, context
TABLE = np.random.default_rng(2).standard_normal((V, D)).astype(np.float16)
CACHE = {"keyCache": ((1, C, D), "state:fp16")}


def _step(mb: Any, inputIds: Any, position: Any, keyCache: Any) -> Any:
    """Write the embeddings into the cache at ``position`` and sum all rows of the cache."""
    table = mb.const(val=TABLE, name="shared_table")
    rows = mb.gather(x=table, indices=inputIds, axis=0, name="embedding")
    start = mb.concat(values=[np.int32([0]), position, np.int32([0])], axis=0)
    stop = mb.add(x=start, y=np.int32([1, rows.shape[1], D]))
    cache = mb.read_state(input=keyCache)
    written = mb.slice_update(x=cache, update=rows, begin=start, end=stop, name="write_key")
    cache = mb.coreml_update_state(state=keyCache, value=written)
    return mb.reduce_sum(x=cache, axes=[1], name="logits")


def _specs(tokens: int) -> mil_programs.Specs:
    return {"inputIds": ((1, tokens), "int32"), "position": ((1,), "int32"), **CACHE}


@pytest.fixture(scope="module")
def two_functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("package") / "two.mlpackage"
    return mil_programs.save_functions(
        path, {"decode": (_specs(1), _step), "prefill": (_specs(3), _step)}
    )


def _call(ids: list[int], position: int) -> dict[str, np.ndarray]:
    return {"inputIds": np.array([ids], np.int32), "position": np.array([position], np.int32)}


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
    first = package.predict(_call([1, 2, 3], 0), state, "prefill")["logits"]
    second = package.predict(_call([4], 3), state, function="decode")["logits"]
    assert state["keyCache"] is cache
    expected = np.zeros((1, C, D), np.float32)
    expected[0, :4] = TABLE[[1, 2, 3, 4]]
    np.testing.assert_array_equal(cache, expected)
    np.testing.assert_allclose(first[0], expected[0, :3].sum(0), rtol=1e-6)
    np.testing.assert_allclose(second[0], expected[0].sum(0), rtol=1e-6)


def test_the_default_function_runs_where_none_is_named(two_functions: Path) -> None:
    package = Package(two_functions)
    found = package.predict(_call([4], 0), package.make_state())["logits"]
    np.testing.assert_array_equal(found[0], TABLE[4])
    with pytest.raises(ValueError, match="no function main; it has decode, prefill"):
        package.predict(_call([4], 0), package.make_state(), "main")


def test_a_failing_call_leaves_the_state_as_it_was(two_functions: Path) -> None:
    package = Package(two_functions)
    state = package.make_state()
    package.predict(_call([1], 0), state)
    before = state["keyCache"].copy()
    with pytest.raises(ValueError, match=r"decode: slice_update write_key: slice 6:7 is outside"):
        package.predict(_call([2], C), state)
    np.testing.assert_array_equal(state["keyCache"], before)


@pytest.mark.parametrize("bad", [-1, V])
def test_an_id_out_of_range_is_refused(bad: int, tmp_path: Path) -> None:
    body = lambda mb, ids: mb.gather(x=TABLE, indices=ids, axis=0, name="embedding")  # noqa: E731
    path = mil_programs.save(tmp_path / "p.mlpackage", {"ids": ((2,), "int32")}, body)
    # the builder lets a negative id count from the end, once
    lowest = -V - 1 if bad < 0 else bad
    with pytest.raises(ValueError, match=r"main: gather embedding: index -?\d+ is outside 0..9"):
        Package(path).predict({"ids": np.array([0, lowest], np.int32)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputIds": np.zeros((1, 2), np.int32)}, r"inputIds has shape \[1, 2\], expected \[1, 1"),
        ({"inputIds": np.zeros((1, 1), np.int64)}, "inputIds is int64, expected int32"),
        ({"tokens": np.zeros((1, 1), np.int32)}, "inputs unknown tokens; expected inputIds"),
        ({"position": None}, "inputs missing position; expected inputIds, position"),
    ],
)
def test_wrong_inputs_are_refused(
    change: dict[str, np.ndarray | None], message: str, two_functions: Path
) -> None:
    package = Package(two_functions)
    given = {k: v for k, v in (_call([1], 0) | change).items() if v is not None}
    with pytest.raises(ValueError, match=f"decode: .*{message}"):
        package.predict(given, package.make_state())


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, r"states \[\], expected \['keyCache'\]; Package.make_state"),
        ({"valueCache": np.zeros(1)}, r"states \['valueCache'\], expected \['keyCache'\]"),
        ({"keyCache": np.zeros((1, C, D), np.float16)}, "keyCache is float16 .* expected float32"),
        ({"keyCache": np.zeros((C, D), np.float32)}, r"\[6, 4\], expected float32 \[1, 6, 4\]"),
    ],
)
def test_wrong_states_are_refused(
    state: dict[str, np.ndarray] | None, message: str, two_functions: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        Package(two_functions).predict(_call([1], 0), state)


def test_a_state_that_cannot_be_written_is_refused(two_functions: Path) -> None:
    package = Package(two_functions)
    state = package.make_state()
    state["keyCache"].flags.writeable = False
    with pytest.raises(ValueError, match="state keyCache cannot be written to; pass a copy"):
        package.predict(_call([1], 0), state)


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
    package.predict(_call([1, 2, 3], 0), package.make_state(), "prefill")
    kept = package.kept_bytes
    package.predict(_call([4], 3), package.make_state(), "decode")
    assert package.kept_bytes == kept == 4 * TABLE.size
    without = Package(two_functions, cache_weights=False)
    state = without.make_state()
    found = without.predict(_call([4], 0), state)["logits"]
    np.testing.assert_array_equal(found[0], TABLE[4])
    assert without.kept_bytes == 0


def _copy(package: Path, to: Path) -> Path:
    return Path(shutil.copytree(package, to / "copy.mlpackage"))


def test_unknown_operations_are_listed_at_once(two_functions: Path, tmp_path: Path) -> None:
    def change(model: Any) -> None:
        for function in model.mlProgram.functions.values():
            operations = function.block_specializations[function.opset].operations
            next(op for op in operations if op.type == "gather").type = "lstm"
            total = next(op for op in operations if op.type == "reduce_sum")
            total.inputs["wings"].CopyFrom(total.inputs["x"])

    path = mil_programs.edit(_copy(two_functions, tmp_path), change)
    with pytest.raises(ValueError, match="cannot be evaluated here") as caught:
        Package(path)
    for told in (
        "lstm (1 in decode)",
        "lstm (1 in prefill)",
        "reduce_sum(wings=) (1 in decode)",
    ):
        assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def _operation(model: Any, function: str, op: str) -> Any:
    chosen = model.mlProgram.functions[function]
    operations = chosen.block_specializations[chosen.opset].operations
    return next(item for item in operations if item.type == op)


def _resize(model: Any) -> None:
    output = _operation(model, "decode", "gather").outputs[0]
    output.type.tensorType.dimensions[2].constant.size = 5


def test_a_result_of_another_shape_than_declared_is_refused(
    two_functions: Path, tmp_path: Path
) -> None:
    path = mil_programs.edit(_copy(two_functions, tmp_path), _resize)
    package = Package(path)
    message = r"gather embedding: gives float32 \[1, 1, 4\], the program declares float16 \[1, 1, 5"
    with pytest.raises(ValueError, match=message):
        package.predict(_call([1], 0), package.make_state())


def _rename(model: Any) -> None:
    _operation(model, "decode", "write_state").inputs["input"].arguments[0].name = "position"


def _mix(model: Any) -> None:
    update = _operation(model, "decode", "slice_update").inputs["update"]
    update.arguments[0].name = "inputIds"


def _dangle(model: Any) -> None:
    _operation(model, "decode", "slice_update").inputs["x"].arguments[0].name = "nowhere"


def _lose(model: Any) -> None:
    model.description.functions[0].output[0].name = "scores"


def _outside(model: Any) -> None:
    for function in model.mlProgram.functions.values():
        for op in function.block_specializations[function.opset].operations:
            if op.type == "const" and op.attributes["val"].HasField("blobFileValue"):
                op.attributes["val"].blobFileValue.fileName = "@model_path/../../weight.bin"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_rename, "decode: write_state .*: position is no state of this function"),
        (_mix, "slice_update write_key: operands of different types: float16, int32"),
        (_dangle, "slice_update write_key: x is nowhere, which nothing before it computes"),
        (_lose, "decode: the description is not that of the program: output logits is only in"),
        (_outside, "weights in @model_path/../../weight.bin, expected a file under @model_path/"),
        (lambda model: model.mlProgram.Clear(), "holds no function"),
        (lambda model: model.ClearField("mlProgram"), "holds a None, expected an ML program"),
    ],
)
def test_a_program_that_contradicts_itself_is_refused(
    change: Any, message: str, two_functions: Path, tmp_path: Path
) -> None:
    path = mil_programs.edit(_copy(two_functions, tmp_path), change)
    with pytest.raises(ValueError, match=message):
        Package(path)


def test_a_torn_weight_file_is_refused_at_once(two_functions: Path, tmp_path: Path) -> None:
    path = _copy(two_functions, tmp_path)
    weights = mil_programs.weights_of(path)
    weights.write_bytes(weights.read_bytes()[:-70])
    with pytest.raises(ValueError, match="cut short; export or copy it again"):
        Package(path)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="weights are missing"):
        Package(path)


def test_what_is_no_package_is_refused(two_functions: Path, tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"no Manifest\.json; expected a \.mlpackage folder"
    ):
        Package(tmp_path)
    path = _copy(two_functions, tmp_path)
    places = SimpleNamespace(manifest=path / "Manifest.json")
    places.model = path / "Data/com.apple.CoreML/model.mlmodel"
    places.model.write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="not a Core ML model"):
        Package(path)
    places.model.unlink()
    with pytest.raises(FileNotFoundError, match="program is missing"):
        Package(path)
    text = places.manifest.read_text()
    places.manifest.write_text(text.replace("com.apple.CoreML/model.mlmodel", "../../../x"))
    with pytest.raises(ValueError, match="outside the package"):
        Package(path)
    places.manifest.write_text("{")
    with pytest.raises(ValueError, match="not a package's manifest"):
        Package(path)

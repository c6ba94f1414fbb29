"""The evaluator refuses wrong calls, and packages that are damaged or contradict themselves."""

import shutil
from pathlib import Path
from typing import Any

import mil_programs
import mil_tiny
import numpy as np
import pytest
from mil_tiny import TABLE, C, D, V, call

from convert.mil_eval import Package

pytestmark = pytest.mark.slow  # importing coremltools takes seconds


@pytest.fixture(scope="module")
def two_functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mil_tiny.save(tmp_path_factory.mktemp("package") / "two.mlpackage")


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
    given = {k: v for k, v in (call([1], 0) | change).items() if v is not None}
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
        Package(two_functions).predict(call([1], 0), state)


def test_a_state_that_cannot_be_written_is_refused(two_functions: Path) -> None:
    package = Package(two_functions)
    state = package.make_state()
    state["keyCache"].flags.writeable = False
    with pytest.raises(ValueError, match="state keyCache cannot be written to; pass a copy"):
        package.predict(call([1], 0), state)


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
        package.predict(call([1], 0), package.make_state())


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
    manifest, model = path / "Manifest.json", path / "Data/com.apple.CoreML/model.mlmodel"
    model.write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="not a Core ML model"):
        Package(path)
    model.unlink()
    with pytest.raises(FileNotFoundError, match="program is missing"):
        Package(path)
    text = manifest.read_text()
    manifest.write_text(text.replace("com.apple.CoreML/model.mlmodel", "../../../x"))
    with pytest.raises(ValueError, match="outside the package"):
        Package(path)
    manifest.write_text("{")
    with pytest.raises(ValueError, match="not a package's manifest"):
        Package(path)

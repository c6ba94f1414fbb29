"""Small Core ML packages made with coremltools' own MIL builder, to be evaluated in tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from convert.coreml_package import write_package
from convert.mil_tools import coremltools

Specs = dict[str, tuple[tuple[Any, ...], str]]  # name -> (shape, "fp16"), "state:fp16" for states
Body = Callable[..., Any]  # (builder, **variables) -> variable or tuple of them


def save(path: Path, specs: Specs, body: Body, **ranges: Any) -> Path:
    """A package of one function, ``main``."""
    return save_functions(path, {"main": (specs, body)}, **ranges)


def save_functions(path: Path, functions: dict[str, tuple[Specs, Body]], **ranges: Any) -> Path:
    """A package of functions ``body(builder, **inputs)``, the first the default, no pass run.

    Args:
        path: of the package.
        functions: inputs and body of each.
        ranges: coremltools' shape objects of inputs whose shape is not fixed.

    Constants whose names begin with ``shared_`` are stored once for all functions.
    """
    mil = coremltools("converters.mil.mil")
    program = mil.Program()
    for name, (specs, body) in functions.items():
        program.add_function(name, _function(specs, body, ranges))
    for function in program.functions.values():
        for op in function.find_ops(op_type="const"):
            if op.name.startswith("shared_"):
                op.weight_id = op.name
    program.default_function_name = next(iter(functions))
    program.export_as_multifunction = len(functions) > 1
    program.skip_all_passes = True
    write_package(program, path, metadata={"openelm.note": "made by a test"}, about="a test")
    return path


def _function(specs: Specs, body: Body, ranges: Any) -> Any:
    builder, ct = coremltools("converters.mil").Builder, coremltools()
    mil = coremltools("converters.mil.mil")
    inputs = {}
    for name, (shape, kind) in specs.items():
        make = builder.state_tensor_placeholder if "state:" in kind else builder.placeholder
        inputs[name] = make(shape, mil.types.string_to_builtin(kind.removeprefix("state:")))
    with mil.Function(inputs, opset_version=ct.target.iOS18) as function:
        results = body(builder, **function.inputs)
        function.set_outputs(list(results) if isinstance(results, tuple) else [results])
    function.set_input_types(
        tuple(ct.TensorType(name=name, shape=shape) for name, shape in ranges.items())
    )
    return function


def edit(package: Path, change: Callable[[Any], None]) -> Path:
    """Change the saved specification in place."""
    file = package / "Data/com.apple.CoreML/model.mlmodel"
    model = coremltools("proto.Model_pb2").Model()
    model.ParseFromString(file.read_bytes())
    change(model)
    file.write_bytes(model.SerializeToString())
    return package


def weights_of(package: Path) -> Path:
    """The weight file of a package."""
    return package / "Data/com.apple.CoreML/weights/weight.bin"


def symbol() -> Any:
    """A dimension of an input's shape that is not fixed."""
    return coremltools("converters.mil.mil").get_new_symbol()

"""Inputs, states and outputs of a package's functions, checked as its description declares them."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from convert.mil_package import Message
from convert.mil_types import FLOATS, NUMPY, Array, TensorType

# `ArrayFeatureType.ArrayDataType` of a description.
_NAMES = {65552: "FLOAT16", 65568: "FLOAT32", 65600: "FLOAT64", 131104: "INT32", 131080: "INT8"}


def check_description(
    description: Message,
    inputs: Mapping[str, TensorType],
    states: Mapping[str, TensorType],
    outputs: Mapping[str, TensorType],
) -> None:
    """Whether a function's description tells of it what its program says.

    Raises:
        ValueError: one line with every name, element type or shape that differs.
    """
    faults = [
        *_differences("input", description.input, inputs),
        *_differences("state", description.state, states),
        *_differences("output", description.output, outputs),
    ]
    if faults:
        raise ValueError(f"the description is not that of the program: {'; '.join(faults)}")


def _differences(
    kind: str, features: Iterable[Message], declared: Mapping[str, TensorType]
) -> Iterator[str]:
    described = {item.name: _feature_type(item) for item in features}
    for name in sorted(described.keys() | declared.keys()):
        told, own = described.get(name), declared.get(name)
        if told is None or own is None:
            yield f"{kind} {name} is only in the {'program' if told is None else 'description'}"
            continue
        # a description may leave an output's shape out; its default is one of those allowed
        if told.dtype != own.dtype or (told.shape and not own.fits(told.static_shape())):
            yield f"{kind} {name} is described as {told}, in the program {own}"


def _feature_type(feature: Message) -> TensorType:
    kind = feature.type.WhichOneof("Type")
    if kind == "stateType":
        return _array_type(feature.type.stateType.arrayType)
    if kind == "multiArrayType":
        return _array_type(feature.type.multiArrayType)
    raise ValueError(f"{feature.name} is a {kind}; only arrays are evaluated here")


def _array_type(array: Message) -> TensorType:
    if array.dataType not in _NAMES:
        raise ValueError(f"a feature of element type {array.dataType}")
    return TensorType(_NAMES[array.dataType], tuple(int(size) for size in array.shape))


def check_inputs(
    description: Message, inputs: Mapping[str, Array], *, native: bool
) -> dict[str, Array]:
    """Inputs as the evaluation wants them: own copies, floats as float32.

    Args:
        description: feature descriptions of the function.
        inputs: by name. A float16 input may be given as float32 unless ``native``.
        native: whether element types must be just the declared ones.

    Raises:
        ValueError: for a missing or unknown name, another element type, rank or size.
    """
    features = {item.name: item for item in description.input}
    missing = sorted(set(features) - set(inputs))
    unknown = sorted(set(inputs) - set(features))
    if missing or unknown:
        told = [f"missing {', '.join(missing)}"] * bool(missing)
        told += [f"unknown {', '.join(unknown)}"] * bool(unknown)
        raise ValueError(f"inputs {' and '.join(told)}; expected {', '.join(features)}")
    return {name: _checked(features[name], inputs[name], native) for name in features}


def _checked(feature: Message, given: Array, native: bool) -> Array:
    array = feature.type.multiArrayType
    values = np.asarray(given)
    dtype = _array_type(array).dtype
    allowed = [np.dtype(NUMPY[dtype])]
    if dtype in FLOATS and not native:
        allowed.append(np.dtype(np.float32))
    if values.dtype not in allowed:
        raise ValueError(f"input {feature.name} is {values.dtype}, expected {allowed[0]}")
    expected = _shape_fault(array, values.shape)
    if expected:
        raise ValueError(
            f"input {feature.name} has shape {list(values.shape)}, expected {expected}"
        )
    return np.array(values, np.float32) if dtype in FLOATS else np.array(values)


def _shape_fault(array: Message, shape: tuple[int, ...]) -> str:
    """What the description allows, where ``shape`` is not of it; else nothing."""
    kind = array.WhichOneof("ShapeFlexibility")
    if kind == "enumeratedShapes":
        shapes = [tuple(int(n) for n in one.shape) for one in array.enumeratedShapes.shapes]
        listed = " or ".join(str(list(one)) for one in shapes)
        return "" if shape in shapes else listed
    if kind == "shapeRange":
        ranges = [(int(r.lowerBound), int(r.upperBound)) for r in array.shapeRange.sizeRanges]
        listed = "[" + ", ".join(_range(*pair) for pair in ranges) + "]"
        inside = len(shape) == len(ranges) and all(
            low <= size and (high < 0 or size <= high)
            for size, (low, high) in zip(shape, ranges, strict=True)
        )
        return "" if inside else listed
    fixed = tuple(int(size) for size in array.shape)
    return "" if shape == fixed else str(list(fixed))


def _range(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}..{'' if high < 0 else high}"


def check_state(
    types: Mapping[str, TensorType],
    state: Mapping[str, Array] | None,
    dtypes: Mapping[str, np.dtype],
) -> None:
    """Whether ``state`` holds just the declared states, in the element types of ``dtypes``.

    Raises:
        ValueError: for a missing or unknown state, another element type or shape.
    """
    given = state or {}
    if set(given) != set(types):
        raise ValueError(
            f"states {sorted(given)}, expected {sorted(types)}; Package.make_state() makes them"
        )
    for name, values in given.items():
        if values.dtype != dtypes[name] or not types[name].fits(values.shape):
            raise ValueError(
                f"state {name} is {values.dtype} {list(values.shape)}, expected {dtypes[name]} "
                f"{list(types[name].shape)}; Package.make_state() makes it"
            )
        if not values.flags.writeable:
            raise ValueError(f"state {name} cannot be written to; pass a copy")

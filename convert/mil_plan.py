"""A function of a saved program as a list of steps: what to compute, from what, what to forget.

States become values of versions: a read gives the current one, a write makes the next.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from convert.mil_constants import Expanded, Source, constant
from convert.mil_ops import OPS, STRUCTURAL, alike, parameters
from convert.mil_ops_compressed import COMPRESSED
from convert.mil_package import Message, SavedProgram, argument_values, is_state, tensor_type
from convert.mil_types import TensorType


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation that is computed at each call."""

    op: str
    name: str
    inputs: Mapping[str, tuple[str, ...]]  # parameter -> names of values
    outputs: tuple[tuple[str, TensorType], ...]
    frees: tuple[str, ...] = ()  # values that nothing needs afterwards


@dataclass(kw_only=True)
class Plan:
    """All steps of a function and where their values come from."""

    function: str
    inputs: dict[str, TensorType] = field(default_factory=dict)
    states: dict[str, TensorType] = field(default_factory=dict)
    constants: dict[str, Source] = field(default_factory=dict)
    types: dict[str, TensorType] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    outputs: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)  # state -> name of its last value


def check_known(package: SavedProgram) -> None:
    """Refuse a program with operations that cannot be evaluated, naming them all.

    Raises:
        ValueError: one line with each unknown operation or parameter, and how often where.
    """
    unknown: Counter[tuple[str, str]] = Counter()
    for function in package.functions:
        for operation in package.block(function).operations:
            unknown.update((what, function) for what in _unknown(operation))
    if unknown:
        listed = ", ".join(f"{what} ({count} in {f})" for (what, f), count in unknown.items())
        raise ValueError(
            f"{package.path}: operations that cannot be evaluated here: {listed}; "
            "convert/mil_ops*.py holds those that can"
        )


def _unknown(operation: Message) -> Iterator[str]:
    op = operation.type
    if op in STRUCTURAL:
        return
    if (op not in OPS and op not in COMPRESSED) or operation.blocks:
        yield op
        return
    yield from (f"{op}({name}=)" for name in _arguments(operation) if name not in parameters(op))


def _arguments(operation: Message) -> dict[str, list[tuple[str | None, Message | None]]]:
    """Parameters of an operation; older packages keep those of `constexpr_` as attributes."""
    found = {name: list(argument_values(value)) for name, value in operation.inputs.items()}
    for name, value in operation.attributes.items():
        if name != "name":
            found[name] = [(None, value)]
    return found


def make_plan(package: SavedProgram, function: str) -> Plan:
    """Read a function's block into a plan.

    Raises:
        ValueError: if a value is used before it is made, or operands differ in element type.
    """
    plan = Plan(function=function)
    for item in package.functions[function].inputs:
        kept = plan.states if is_state(item.type) else plan.inputs
        kept[item.name] = tensor_type(item.type)
        if kept is plan.states:
            plan.versions[item.name] = item.name
        plan.types[item.name] = kept[item.name]
    block = package.block(function)
    for operation in block.operations:
        try:
            _add(package, plan, operation)
        except ValueError as error:
            raise ValueError(f"{_where(plan, operation)}: {error}") from error
    plan.outputs = tuple(block.outputs)
    missing = [name for name in plan.outputs if name not in plan.types]
    if missing:
        raise ValueError(f"{function}: nothing computes the output {', '.join(missing)}")
    _free_when_done(plan)
    return plan


def _where(plan: Plan, operation: Message) -> str:
    return f"{plan.function}: {operation.type} {operation_name(operation)}"


def operation_name(operation: Message) -> str:
    """The name given to an operation, or that of its result."""
    if "name" in operation.attributes:
        named = operation.attributes["name"].immediateValue.tensor.strings.values
        if named:
            return named[0]
    return operation.outputs[0].name if operation.outputs else operation.type


def _add(package: SavedProgram, plan: Plan, operation: Message) -> None:
    outputs = tuple((item.name, tensor_type(item.type)) for item in operation.outputs)
    if operation.type == "const":
        plan.types[outputs[0][0]] = outputs[0][1]
        plan.constants[outputs[0][0]] = constant(package, operation.attributes["val"])
        return
    inputs = {
        name: tuple(_bind(package, plan, operation, name, *pair) for pair in pairs)
        for name, pairs in _arguments(operation).items()
    }
    plan.types.update(outputs)
    if operation.type in COMPRESSED:
        parts = tuple((name, plan.constants[names[0]]) for name, names in sorted(inputs.items()))
        plan.constants[outputs[0][0]] = Expanded(operation.type, parts, outputs[0][1])
        return
    step = Step(op=operation.type, name=operation_name(operation), inputs=inputs, outputs=outputs)
    if operation.type in ("read_state", "write_state"):
        step = _state_step(plan, step)
    else:
        _check_types(plan, step)
    plan.steps.append(step)


def _bind(
    package: SavedProgram,
    plan: Plan,
    operation: Message,
    parameter: str,
    name: str | None,
    value: Message | None,
) -> str:
    if name is None:
        name = f"{operation_name(operation)}.{parameter}"
        plan.constants[name] = constant(package, value)
        plan.types[name] = tensor_type(value.type) if value is not None else TensorType("", ())
    elif name not in plan.types:
        raise ValueError(f"{parameter} is {name}, which nothing before it computes")
    return name


def _state_step(plan: Plan, step: Step) -> Step:
    state = step.inputs["input"][0]
    declared = plan.states.get(state)
    if declared is None:
        raise ValueError(f"{state} is no state of this function")
    current = plan.versions[state]
    if step.op == "read_state":
        if step.outputs[0][1] != declared:
            raise ValueError(f"reads {step.outputs[0][1]} from {state}, a state of {declared}")
        return replace(step, inputs={"x": (current,)})
    data = step.inputs["data"]
    if plan.types[data[0]] != declared:
        raise ValueError(f"writes {plan.types[data[0]]} to {state}, a state of {declared}")
    plan.versions[state] = f"{state}@{len(plan.steps)}"
    plan.types[plan.versions[state]] = declared
    return replace(step, inputs={"x": data}, outputs=((plan.versions[state], declared),))


def _check_types(plan: Plan, step: Step) -> None:
    names = [n for p in alike(step.op) for n in step.inputs.get(p, ())]
    found = sorted({plan.types[name].dtype for name in names})
    if len(found) > 1:
        raise ValueError(f"operands of different types: {', '.join(found).lower()}")


def _free_when_done(plan: Plan) -> None:
    needed = {*plan.outputs, *plan.versions.values(), *plan.constants}
    for place in reversed(range(len(plan.steps))):
        step = plan.steps[place]
        touched = {name for names in step.inputs.values() for name in names}
        touched |= {name for name, _ in step.outputs}
        plan.steps[place] = replace(step, frees=tuple(sorted(touched - needed)))
        needed |= touched

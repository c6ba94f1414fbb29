"""Patterns in a saved package that are known to fail on devices, or to lose cache writes anywhere.

Reads the program as it is saved. A fault makes verification fail; a warning is for a person.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.coreml_client import Contract
from convert.coreml_describe import PackageDescription, describe
from convert.coreml_settings import ANE_MULTIPLE
from convert.mil_package import SavedProgram

_GIGABYTE = 10**9
_MOST_STATES = 2
_SDPA = "scaled_dot_product_attention"
_CACHES = ("keyCache", "valueCache")


@dataclass(frozen=True, kw_only=True)
class Lint:
    """One finding.

    Attributes:
        fault: whether the package must not be used; else it is a warning.
        text: what, where, and the report that it is known from.
    """

    fault: bool
    text: str


def lint(path: Path) -> list[Lint]:
    """All findings of a package.

    Raises:
        FileNotFoundError: if a part of it is missing.
        ValueError: if it is no Core ML program, or its metadata does not say how to call it.
    """
    saved, description = SavedProgram(path), describe(path)
    contract = Contract.from_metadata(description.metadata)
    target = description.metadata.get("openelm.target", "all")
    return [
        *_interface(description, contract),
        *(found for name in saved.functions for found in _state_order(saved, name)),
        *_attention(saved, target),
        *_cache_shape(description, contract),
        *(found for name in description.functions for found in _ranges(description, name)),
        *_size(description, target),
    ]


def _interface(description: PackageDescription, contract: Contract) -> Iterator[Lint]:
    """Names of functions, inputs and outputs are what the contract promises."""
    inputs, states, outputs = {
        "static": ({"inputIds", "position"}, set(_CACHES), {"logits"}),
        "flexible": ({"inputIds", "fullAttentionMask"}, set(_CACHES), {"logits"}),
        "ane": ({"inputIds", "attn_mask", "update_mask"}, set(_CACHES), {"logits"}),
        "stateless": (
            {"inputIds", "position", *_CACHES},
            set(),
            {"logits", "newKeyCache", "newValueCache"},
        ),
    }[contract.interface]
    expected = {"static": {"prefill", "decode"}, "stateless": {"prefill", "decode"}}
    functions = expected.get(contract.interface, {"main"})
    if set(description.functions) != functions:
        yield _fault(f"functions are {_list(description.functions)}, not {_list(functions)}")
    for name, function in description.functions.items():
        for what, found, wanted in (
            ("inputs", set(function.inputs), inputs),
            ("states", set(function.states), states),
            ("outputs", set(function.outputs), outputs),
        ):
            if found != wanted:
                yield _fault(f"{name}: {what} are {_list(found)}, not {_list(wanted)}")


def _state_order(saved: SavedProgram, function: str) -> Iterator[Lint]:
    """Between two reads of a state there must be a write, or the second sees old values."""
    fresh: Counter[str] = Counter()  # reads of a state since its last write
    states: set[str] = set()
    for operation in saved.block(function).operations:
        if operation.type not in ("read_state", "write_state"):
            continue
        name = _state_of(operation)
        states.add(name)
        fresh[name] = 0 if operation.type == "write_state" else fresh[name] + 1
        if fresh[name] > 1:
            yield _fault(
                f"{function}: state {name} is read twice without a write between, so that writes "
                "are lost (coremltools #2786)"
            )
            return
    if len(states) > _MOST_STATES:
        yield _warning(
            f"{function}: {len(states)} states; 3 or more fail at prediction on an iPhone's "
            "Neural Engine (CoreML-LLM, docs/MLSTATE_PATTERN.md)"
        )


def _state_of(operation: Any) -> str:
    return str(operation.inputs["input"].arguments[0].name)


def _attention(saved: SavedProgram, target: str) -> Iterator[Lint]:
    fused = sum(
        operation.type == _SDPA
        for function in saved.functions
        for operation in saved.block(function).operations
    )
    if fused and target != "gpu":
        yield _fault(
            f"{fused} fused attention operations in a package for {target}: off the GPU they drop "
            "masks or crash (stablehlo-coreml #89); export with --target gpu"
        )


def _cache_shape(description: PackageDescription, contract: Contract) -> Iterator[Lint]:
    cache = description.cache()
    if cache is None or len(cache.shape) != 4:
        yield _fault("no keyCache of rank 4 (1, heads, context, head_dim)")
        return
    if cache.shape[2] != contract.context:
        yield _fault(f"keyCache holds {cache.shape[2]} tokens, metadata say {contract.context}")
    if any(isinstance(n, int) and n % ANE_MULTIPLE for n in cache.shape[2:]):
        yield _warning(
            f"cache sizes {list(cache.shape[2:])} are not all multiples of {ANE_MULTIPLE}: not for "
            "the Neural Engine (coremltools #2631)"
        )


def _ranges(description: PackageDescription, name: str) -> Iterator[Lint]:
    """A function with states takes ranged inputs or fixed ones, not both."""
    function = description.functions[name]
    ranged = {
        feature.name
        for feature in function.inputs.values()
        if any(isinstance(axis, tuple) for axis in feature.shape)
    }
    if function.states and ranged and len(ranged) < len(function.inputs):
        yield _fault(
            f"{name}: ranged inputs ({_list(ranged)}) beside fixed ones and states raise at "
            "prediction (coremltools #2548)"
        )


def _size(description: PackageDescription, target: str) -> Iterator[Lint]:
    size = description.bytes / _GIGABYTE
    if size > 1:
        where = "will not run on the Neural Engine" if target == "ane" else "runs on the GPU"
        yield _warning(
            f"{size:.1f} GB: on an iPhone a package over about 1 GB {where} without a word "
            "(CoreML-LLM, docs/DECODE_STATE_LAYOUTS.md); choose smaller --weights"
        )


def _fault(text: str) -> Lint:
    return Lint(fault=True, text=text)


def _warning(text: str) -> Lint:
    return Lint(fault=False, text=text)


def _list(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"

"""A verification in words: what the command prints, and the one page kept beside the package."""

import json
from pathlib import Path

from convert.coreml_verification import Verification, as_dict
from openelm_mlx.atomic import atomic_file

_LEVELS = {
    "none": "nothing was established",
    "L0": "structure was read",
    "L1": "numbers were computed by this project's evaluator, not by Core ML",
    "L2": "Core ML's compiler took it",
    "L3": "Core ML predicted with it on this Mac",
}


def write_report(result: Verification, path: Path) -> None:
    """``path`` as JSON and, beside it, the same in Markdown; both replaced where they are."""
    with atomic_file(path, overwrite=True) as temporary:
        temporary.write_text(json.dumps(as_dict(result), indent=2) + "\n", encoding="utf-8")
    with atomic_file(path.with_suffix(".md"), overwrite=True) as temporary:
        temporary.write_text(markdown(result), encoding="utf-8")


def summary(result: Verification) -> str:
    """A few lines for the terminal."""
    verdict = "holds" if result.holds else "DOES NOT HOLD"
    lines = [f"{result.package} against {result.model}: {verdict} ({_level(result)})"]
    lines += [f"  fault    {fault}" for fault in result.faults]
    lines += [f"  warning  {warning}" for warning in result.warnings]
    lines += [f"  {label:<9}{text}" for label, text in _facts(result)]
    return "\n".join(lines) + "\n"


def _level(result: Verification) -> str:
    return f"{result.level}: {_LEVELS[result.level]}"


def _facts(result: Verification) -> list[tuple[str, str]]:
    facts = []
    for label, parity in (("graph", result.float32), ("fp16", result.native)):
        if parity is not None:
            facts.append(
                (
                    label,
                    f"max {parity.max_error:.2g}, mean {parity.mean_error:.2g} on logits up to "
                    f"{parity.scale:.3g}; same first choice {parity.same_first_choice:.1%} of "
                    f"{parity.calls} calls",
                )
            )
    if result.mlx_error is not None and result.native_error is not None:
        facts.append(
            (
                "noise",
                f"root mean square {result.native_error:.2g}, MLX's own in fp16 "
                f"{result.mlx_error:.2g}",
            )
        )
    if result.rounding is not None:
        r = result.rounding
        facts.append(
            (
                "weights",
                f"{result.weights}: up to {r.worst:.2%} of a matrix; logits max {r.max_error:.2g}, "
                f"mean {r.mean_error:.2g}, same first choice {r.same_first_choice:.1%}",
            )
        )
    facts += [("core ml", str(unit)) for unit in result.units]
    return facts


def markdown(result: Verification) -> str:
    """One page."""
    verdict = "It holds." if result.holds else "**It does not hold.**"
    parts = [
        f"# {result.package} against {result.model}",
        f"{verdict} Level reached: {_level(result)}. Prompts were made of {result.text}; "
        f"interface {result.interface}, weights {result.weights}.",
    ]
    for title, found in (("Faults", result.faults), ("Warnings", result.warnings)):
        if found:
            parts.append(f"## {title}\n" + "\n".join(f"- {text}" for text in found))
    rows = "\n".join(f"| {label} | {text} |" for label, text in _facts(result))
    parts.append(f"## Numbers\n| | |\n|---|---|\n{rows}")
    parts.append(
        "`graph` is the program in float32 against MLX in float32 with the weights as they are "
        "stored; `fp16` the same rounded after each operation; `noise` root mean square errors of "
        "single steps in fp16; `weights` what storing them cost against the original model."
    )
    for title, parity in (("float32", result.float32), ("fp16", result.native)):
        if parity is not None:
            rows = "\n".join(
                f"| {p.tokens} | {p.calls} | {p.max_error:.3g} | {p.sum_error / p.calls:.3g} | "
                f"{p.same_first_choice}/{p.calls} |"
                for p in parity.prompts
            )
            head = "| prompt tokens | calls | max error | mean error | same first choice |"
            parts.append(f"## Prompts, {title}\n{head}\n|---|---|---|---|---|\n{rows}")
    if result.expected_text:
        parts.append(
            f"## Greedy text\nMLX: {result.expected_text!r}\n\npackage: {result.found_text!r}"
        )
    parts.append(
        "Not shown by this page: how a device's own arithmetic behaves, and on which unit an app "
        "will run it (L4 is for a person with the device)."
    )
    return "\n\n".join(parts) + "\n"

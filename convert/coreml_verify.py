"""``.mlpackage`` against the MLX model it was made from: in NumPy anywhere, by Core ML on macOS.

Levels: L0 structure, L1 numbers by the evaluator, L2 compiled by coremlcompiler, L3 predicted by
Core ML on each compute unit, L4 seen on a device (only a person can say so).
"""

import argparse
import hashlib
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np

from convert.coreml_bundle import PARITY, bundle_folder
from convert.coreml_describe import describe
from convert.coreml_layers import Parameters
from convert.coreml_lints import lint
from convert.coreml_parameters import (
    graph_name,
    matrices_of,
    plain_weight,
    stored_parameters,
)
from convert.coreml_parity import measure_parity, prompt_lengths, step_errors
from convert.coreml_predictor import client_of, on_macos
from convert.coreml_reference import reference_model
from convert.coreml_report import summary, write_report
from convert.coreml_settings import WEIGHT_KINDS, WeightKind, most_rows
from convert.coreml_verification import Rounding, Verification
from convert.quantize_check import Sample, in_float32, make_sample
from convert.source import Source
from openelm_mlx.adapter_fuse import fuse_model
from openelm_mlx.checkpoint import load
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import Tokenizer

TOLERANCE = 1e-3  # of the largest logit: the fp32 graph against MLX in float32
_NOISE = 2.0  # the fp16 graph against MLX's own fp16 error
_NATIVE = 3e-2  # of the largest logit: any call in fp16
_YARDSTICK = 8  # tokens for MLX's float16, which is slow on a CPU
_YARDSTICK_MOST = 600_000_000  # parameters beyond which that is not run on a CPU
_FLOOR = 5e-4  # of the largest logit: below this an fp16 error is no matter
# Root mean square difference of a matrix from the original, relative to its own.
ROUNDING = {
    "fp16": 1e-3,
    "mlx": 1e-2,
    "int8": 3e-2,
    "palette6": 6e-2,
    "int4": 0.16,
    "palette4": 0.16,
}


def verify(
    package: str | Path,
    model: str | Path,
    *,
    adapter_path: str | Path | None = None,
    tolerance: float | None = None,
    data: str | Path | None = None,
    parameters: Parameters | None = None,
) -> Verification:
    """Hold a package against the model folder it was made from.

    Args:
        package: the ``.mlpackage``.
        model: the model folder or Hub id.
        adapter_path: adapters that were fused into it.
        tolerance: of the graph in float32, relative to the largest logit; default 1e-3.
        data: ``.txt`` or ``.jsonl`` text for the prompts; None takes a built-in one.
        parameters: the weights as they were stored, where the caller has them; made anew else.

    Returns:
        What was seen; ``holds`` tells whether it is right.

    Raises:
        FileNotFoundError: if the package or the folder is missing.
        ValueError: if one of them is damaged, or the package is not one of this project.
    """
    package = Path(package)
    metadata = describe(package).metadata
    source = Source.find(model)
    loaded, tokenizer = load_fused(source.folder, adapter_path)
    sample = make_sample(data, tokenizer, loaded.args.vocab_size)
    result = Verification(
        package=package.name,
        model=source.name,
        weights=metadata.get("openelm.weights", ""),
        interface=metadata.get("openelm.interface", ""),
        text=sample.name,
    )
    for found in lint(package):
        (result.faults if found.fault else result.warnings).append(found.text)
    if metadata.get("openelm.source_sha256") not in (None, source_hash(source)):
        result.faults.append(f"the package was made from other weights than those of {source.name}")
    result.level = "L0"
    exponent = int(metadata.get("openelm.residual_exponent", "0"))
    stored = parameters or stored_parameters(
        loaded,
        _kind(metadata),
        exponent=exponent,
        most_rows=most_rows(metadata.get("openelm.target", "all")),
    )
    reference = reference_model(loaded.args, stored, exponent=exponent)
    result.rounding = _rounding(result, loaded, reference, sample)
    del loaded
    _numbers(result, package, reference, sample, tolerance or TOLERANCE)
    if tokenizer is not None and result.float32 is not None:
        result.expected_text = tokenizer.decode(result.float32.expected)
        result.found_text = tokenizer.decode(result.float32.found)
    if on_macos():
        _on_mac(result, package, reference, sample)
    return result


def load_fused(folder: Path, adapter_path: str | Path | None) -> tuple[Model, Tokenizer | None]:
    """A model and its tokenizer, adapters merged into the matrices."""
    model, tokenizer = load(str(folder), adapter_path=adapter_path)
    if adapter_path is not None:
        fuse_model(model)
    return model, tokenizer


def source_hash(source: Source) -> str:
    """Of a folder's weight files: SHA-256, or that of all shards' joined."""
    hashes = source.provenance("model folder")["sha256"]
    if isinstance(hashes, str):
        return hashes
    return hashlib.sha256("".join(hashes[name] for name in sorted(hashes)).encode()).hexdigest()


def _kind(metadata: dict[str, str]) -> WeightKind:
    kind = metadata.get("openelm.weights")
    for known in WEIGHT_KINDS:
        if kind == known:
            return known
    raise ValueError(
        f"the package's metadata name its weights {kind!r}, expected one of "
        f"{', '.join(WEIGHT_KINDS)}; export it with `openelm convert coreml`"
    )


def _numbers(
    result: Verification, package: Path, reference: Model, sample: Sample, tolerance: float
) -> None:
    """Level 1: the evaluator, in float32 and in float16."""
    from convert.mil_eval import Package

    description = describe(package)
    ids = sample.documents[0]
    evaluator = Package(package)
    client = client_of(evaluator, description)
    lengths = prompt_lengths(client.contract)
    result.float32 = measure_parity(client, reference, ids, lengths)
    if not result.float32.relative <= tolerance:
        result.faults.append(
            f"the graph differs from MLX: {result.float32.max_error:.3g} on logits up to "
            f"{result.float32.scale:.3g}, more than {tolerance:g} of it"
        )
    elif result.float32.expected != result.float32.found:
        result.faults.append("the graph in float32 continues a text otherwise than MLX does")
    for finding in evaluator.findings:
        if finding.dtype == "FLOAT16":
            result.faults.append(f"overflow of float16: {finding}")
    del evaluator, client
    _native(result, package, reference, ids, lengths)
    result.level = "L1"


def _native(
    result: Verification, package: Path, reference: Model, ids: list[int], lengths: list[int]
) -> None:
    from convert.mil_eval import Package

    evaluator = Package(package, precision="native")
    client = client_of(evaluator, describe(package))
    result.native = measure_parity(client, reference, ids, lengths, text_tokens=0)
    gpu = mx.default_device() == mx.gpu
    if gpu or reference.args.num_parameters <= _YARDSTICK_MOST:
        tokens = ids[: min(_YARDSTICK, client.contract.context)]
        result.native_error, result.mlx_error = step_errors(client, reference, tokens)
        floor = _FLOOR * result.native.scale
        if not np.isfinite(result.mlx_error):  # unlike the package, MLX folds no scale
            result.warnings.append("MLX itself overflows in float16, so gives no measure of noise")
        elif not result.native_error <= max(_NOISE * result.mlx_error, floor):
            result.faults.append(
                f"in float16 the package errs by {result.native_error:.3g} (root mean square), "
                f"more than twice MLX's own {result.mlx_error:.3g}"
            )
    if not result.native.relative <= _NATIVE:
        result.faults.append(
            f"in float16 a logit errs by {result.native.max_error:.3g} of {result.native.scale:.3g}"
        )
    result.faults += [f"in float16: {found}" for found in evaluator.findings]


def _rounding(
    result: Verification, model: Model, reference: Model, sample: Sample
) -> Rounding | None:
    """What storing cost: matrix by matrix, and in the logits of the first tokens."""
    stored = dict(matrices_of(reference))
    worst, name = 0.0, ""
    for path, module in matrices_of(model):
        original = plain_weight(module)
        change = float(mx.sqrt(mx.mean((stored[path].weight - original) ** 2)))
        size = float(mx.sqrt(mx.mean(original**2)))
        if not change / max(size, 1e-12) <= worst:
            worst, name = change / max(size, 1e-12), graph_name(path)
    allowed = ROUNDING.get(result.weights, 0.0)
    if not worst <= allowed:
        result.faults.append(
            f"{name} moved by {worst:.1%} when it was stored as {result.weights}; up to "
            f"{allowed:.1%} is usual"
        )
    ids = mx.array([sample.documents[0][:64]])
    before, after = np.array(in_float32(model)(ids)[0]), np.array(reference(ids)[0])
    return Rounding(
        worst_matrix=name,
        worst=worst,
        max_error=float(np.abs(before - after).max()),
        mean_error=float(np.abs(before - after).mean()),
        same_first_choice=float((before.argmax(-1) == after.argmax(-1)).mean()),
    )


def _on_mac(result: Verification, package: Path, reference: Model, sample: Sample) -> None:
    """Levels 2 and 3."""
    from convert.coreml_on_mac import compile_package, predict_on_units

    fault = compile_package(package)
    if fault:
        result.faults.append(fault)
        return
    result.level = "L2"
    result.units = predict_on_units(package, reference, sample.documents[0])
    wrong = [unit for unit in result.units if unit.fault]
    result.faults += [unit.fault for unit in wrong if unit.expected]
    result.warnings += [unit.fault for unit in wrong if not unit.expected]
    if not any(unit.fault for unit in result.units if unit.expected):
        result.level = "L3"


def add_verify_coreml_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``openelm convert verify-coreml``."""
    parser.add_argument("package", metavar="FILE.mlpackage")
    parser.add_argument("--model", required=True, metavar="DIR", help="folder it was made from")
    parser.add_argument("--adapter-path", metavar="A", help="adapters fused into it")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest error of the fp32 graph, as a share of the largest logit (default 1e-3)",
    )
    parser.add_argument("--data", metavar="FILE", help=".txt or .jsonl text for the prompts")
    parser.add_argument(
        "--report",
        metavar="FILE.json",
        help="where to write it, with FILE.md beside; default: parity.json in the bundle",
    )


def run_verify_coreml(args: argparse.Namespace) -> int:
    """``openelm convert verify-coreml``: exit code 0 where the package holds, else 1."""
    if args.tolerance is not None and not args.tolerance > 0:
        raise ValueError(f"--tolerance must be positive, got {args.tolerance:g}")
    result = verify(
        args.package,
        args.model,
        adapter_path=args.adapter_path,
        tolerance=args.tolerance,
        data=args.data,
    )
    bundle = bundle_folder(args.package)
    report = args.report or (bundle / PARITY if bundle.is_dir() else None)
    if report is not None:
        write_report(result, Path(report))
    sys.stdout.write(summary(result))
    return 0 if result.holds else 1

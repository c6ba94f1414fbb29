"""Model folder -> Core ML package and its bundle: settings, order of work, what is refused.

Values are measured first, so that the graph stays inside float16; then the program is built and
written beside its final place, verified there, and only then moved to it.
"""

import json
import logging
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from convert.coreml_bundle import (
    PARITY,
    bundle_folder,
    refuse_existing_bundle,
    write_bundle,
)
from convert.coreml_graph import build_program
from convert.coreml_guard import Ranges, choose_numerics, measure_ranges
from convert.coreml_layers import Parameters
from convert.coreml_package import package_bytes, weight_bytes, write_package
from convert.coreml_parameters import expected_bytes, stored_parameters
from convert.coreml_report import write_report
from convert.coreml_settings import (
    ExportSettings,
    Numerics,
    Target,
    WeightKind,
    recommend,
    refuse_unsuited,
)
from convert.coreml_verification import Verification
from convert.coreml_verify import load_fused, source_hash, verify
from convert.coreml_weights import check_shrunk
from convert.quantize_check import make_sample
from convert.source import Source
from openelm_mlx.atomic import atomic_folder, refuse_existing_folder
from openelm_mlx.config import ModelArgs
from openelm_mlx.fitting import quantization_of
from openelm_mlx.memory import machine_memory

logger = logging.getLogger(__name__)

_OTHER_BYTES = 600_000_000  # Python, coremltools and the program's text
_EXPORTER = "openelm-mlx"  # swift-transformers looks at this key of the metadata


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was made.

    Attributes:
        package: the ``.mlpackage``.
        bundle: the folder with what an app needs beside it.
        settings: its form.
        numerics: how it stays inside float16.
        bytes: of the package.
        seconds: that loading, building and writing took, verification apart.
        verification: what was seen; None where it was not asked for.
        notes: matrices that are not stored quite as asked, in words.
    """

    package: Path
    bundle: Path
    settings: ExportSettings
    numerics: Numerics
    bytes: int
    seconds: float
    verification: Verification | None
    notes: list[str]


def export(
    model: str | Path,
    output: str | Path,
    *,
    context: int = ExportSettings.context,
    prefill: int | None = None,
    weights: WeightKind | None = None,
    target: Target = "all",
    flexible: bool = False,
    stateless: bool = False,
    all_logits: bool = False,
    adapter_path: str | Path | None = None,
    tokenizer: str | Path | None = None,
    instruct: bool = False,
    data: str | Path | None = None,
    check: bool = True,
    overwrite: bool = False,
) -> Export:
    """Write a Core ML package and its bundle.

    Args:
        model: a model folder or Hub id, quantised with MLX's affine codes or not.
        output: the ``.mlpackage`` to write; its bundle goes beside it.
        context: tokens that the cache holds.
        prefill: tokens of one prefill call; None takes 64, or 1 with ``target="ane"``.
        weights: how matrices are stored; None takes what suits the model's size.
        target: compute units that the graph's form is made for.
        flexible: one function of any length; see :class:`ExportSettings`.
        stateless: caches as inputs and outputs.
        all_logits: logits of every position.
        adapter_path: adapters to fuse first.
        tokenizer: for the bundle, in place of the folder's own.
        instruct: put a chat template into the bundle.
        data: ``.txt`` or ``.jsonl`` text to measure and verify with; None takes a built-in one.
        check: verify before the package appears.
        overwrite: replace a package and a bundle that are there.

    Raises:
        FileExistsError: if there is a package or bundle and ``overwrite`` is not set.
        FileNotFoundError: if the folder is missing.
        ValueError: if a setting is wrong, the model cannot be held in float16, there is not the
            memory, or the package does not hold; nothing is left then.
    """
    output = _package_path(output)
    refuse_existing_folder(output, overwrite=overwrite)
    refuse_existing_bundle(bundle_folder(output), overwrite=overwrite)
    source = Source.find(model)
    settings = ExportSettings(
        context=context,
        prefill=prefill or min(1 if target == "ane" else 64, context),
        weights=weights or _recommended(source.args),
        target=target,
        flexible=flexible,
        stateless=stateless,
        all_logits=all_logits,
    )
    for warning in refuse_unsuited(source.args, settings):
        logger.warning("%s", warning)
    _refuse_too_large(source.args, settings, check=check)
    started = time.perf_counter()
    prepared = _prepared(source, settings, adapter_path, data)
    with atomic_folder(output, overwrite=overwrite) as temporary:
        _write(temporary, prepared, settings, _metadata(source, settings, prepared, adapter_path))
        seconds = time.perf_counter() - started
        result = None
        if check:
            result = verify(
                *(temporary, source.folder),
                adapter_path=adapter_path,
                data=data,
                parameters=prepared.parameters,
            )
            result.package, result.model = output.name, source.name
            _refuse_wrong(result)
        bundle = write_bundle(
            bundle_folder(output),
            package=temporary,
            model_dir=source.folder,
            tokenizer=tokenizer,
            instruct=instruct,
            name=output.name,
            overwrite=overwrite,
        )
        if result is not None:
            write_report(result, bundle / PARITY)
    return Export(
        package=output,
        bundle=bundle,
        settings=settings,
        numerics=prepared.numerics,
        bytes=package_bytes(output),
        seconds=seconds,
        verification=result,
        notes=_notes(prepared.parameters),
    )


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """What the program is made of; the model itself is no longer needed."""

    args: ModelArgs
    ranges: Ranges
    numerics: Numerics
    parameters: Parameters


def _package_path(output: str | Path) -> Path:
    output = Path(output).expanduser()
    if output.suffix != ".mlpackage":
        raise ValueError(f"--output is {output}; its name must end in .mlpackage")
    return output


def _recommended(args: ModelArgs) -> WeightKind:
    chosen = recommend(args, quantised=quantization_of(args) is not None)
    logger.info("--weights %s: %s", chosen.weights, chosen.reason)
    return chosen.weights


def _refuse_too_large(args: ModelArgs, settings: ExportSettings, *, check: bool) -> None:
    """Memory for the model in 32 bits and its stored form; for verifying, two more copies."""
    building = 6 * args.num_parameters + _OTHER_BYTES
    needed = building + (6 * args.num_parameters if check else 0)
    there = machine_memory()
    if needed <= there:
        return
    way = "--no-verify" if check and building <= there else "a machine with more"
    raise ValueError(
        f"exporting {args.num_parameters / 1e9:.1f} billion parameters takes some "
        f"{needed / 1e9:.0f} GB of memory and this machine has {there / 1e9:.0f} GB; use {way}"
    )


def _prepared(
    source: Source,
    settings: ExportSettings,
    adapter_path: str | Path | None,
    data: str | Path | None,
) -> _Prepared:
    """Load the model, measure its values on text, and store its weights as they will be."""
    model, tokenizer = load_fused(source.folder, adapter_path)
    sample = make_sample(data, tokenizer, model.args.vocab_size)
    if not sample.is_text:
        logger.warning("no tokenizer in the folder: measuring with random token ids")
    ranges = measure_ranges(model, sample)
    numerics = choose_numerics(ranges, settings)
    parameters = stored_parameters(
        model,
        settings.weights,
        exponent=numerics.residual_exponent,
        most_rows=settings.most_rows,
    )
    return _Prepared(args=model.args, ranges=ranges, numerics=numerics, parameters=parameters)


def _write(
    folder: Path, prepared: _Prepared, settings: ExportSettings, metadata: dict[str, str]
) -> None:
    """Build the program, write it, and see that its weights shrank as asked."""
    args, parameters = prepared.args, prepared.parameters
    program = build_program(args, parameters, settings, prepared.numerics)
    source = metadata["openelm.source"]
    about = f"{source}, an OpenELM language model of {args.num_parameters:,} parameters"
    write_package(program, folder, metadata=metadata, about=about)
    check_shrunk(weight_bytes(folder), expected_bytes(args, parameters, settings.context))


def _metadata(
    source: Source,
    settings: ExportSettings,
    prepared: _Prepared,
    adapter_path: str | Path | None,
) -> dict[str, str]:
    versions = {name: version(name) for name in ("openelm-mlx", "mlx", "coremltools")}
    entries = {
        "interface": settings.interface,
        "context": str(settings.context),
        "prefill": str(settings.prefill),
        "weights": settings.weights,
        "target": settings.target,
        "all_logits": "true" if settings.all_logits else "false",
        "residual_exponent": str(prepared.numerics.residual_exponent),
        "norm": prepared.numerics.norm,
        "largest_residual": f"{prepared.ranges.largest:.6g}",
        "source": source.name,
        "source_sha256": source_hash(source),
        "adapters": "fused" if adapter_path is not None else "none",
        "versions": json.dumps(versions, sort_keys=True),
    }
    if source.licence:
        entries["licence"] = source.licence
    return {f"openelm.{key}": value for key, value in entries.items()} | {
        "co.huggingface.exporters.name": _EXPORTER
    }


def _refuse_wrong(result: Verification) -> None:
    if result.holds:
        return
    first, more = result.faults[0], len(result.faults) - 1
    others = f" (and {more} more)" if more else ""
    raise ValueError(
        f"the package does not hold and was not kept: {first}{others}; to look into it, export "
        "with --no-verify and run `openelm convert verify-coreml`"
    )


def _notes(parameters: Parameters) -> list[str]:
    notes: dict[str, list[str]] = {}
    for name, stored in parameters.matrices.items():
        if stored.note:
            notes.setdefault(stored.note, []).append(name)
    return [
        f"{len(names)} matrices ({names[0]}{', …' if len(names) > 1 else ''}): {note}"
        for note, names in notes.items()
    ]

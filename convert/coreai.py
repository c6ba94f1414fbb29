"""Model folder -> Core AI bundle, for macOS 27 and iOS 27: order of work and command line.

The graph is written straight from MLX's arrays, and Apple's runtime judges it before it is kept.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from convert.coreai_api import authoring
from convert.coreai_bundle import Contents, write_bundle
from convert.coreai_graph import build
from convert.coreai_verify import Verification, describe, verify, write_report
from convert.coreai_weights import KINDS, load_fused, settle
from convert.source import Source
from openelm_mlx.atomic import atomic_folder, refuse_existing_folder


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was done.

    Attributes:
        folder: the bundle.
        weights: how they are stored.
        bytes: of the bundle.
        verification: None where it was not asked for.
    """

    folder: Path
    weights: str
    bytes: int
    verification: Verification | None


def export(
    folder: str | Path,
    output: str | Path,
    *,
    weights: str | None = None,
    adapter_path: str | Path | None = None,
    tokenizer: str | Path | None = None,
    check: bool = True,
    overwrite: bool = False,
) -> Export:
    """Write a bundle for Apple's Swift package.

    Args:
        folder: a model folder or Hub repository.
        output: the bundle's folder, whose name becomes the bundle's.
        weights: ``fp16`` (default), ``mlx`` (default for a quantised folder: its codes as they are,
            their scales in float16), or ``fp32`` and ``mlx-fp32``, which apps cannot use but which
            Apple's Linux runtime executes exactly and fast.
        adapter_path: adapters to fuse.
        tokenizer: file, folder or Hub id, in place of the folder's own.
        check: verify before anything is kept.
        overwrite: replace a bundle that is there.

    Raises:
        FileExistsError: if ``output`` is there and may not be replaced.
        FileNotFoundError: if the folder is missing.
        ImportError: if the extra ``coreai`` is not installed.
        RuntimeError: if Apple's runtime fails.
        ValueError: if a setting is wrong, there is no tokenizer, or the bundle does not hold.
    """
    output = Path(output)
    if output.suffix == ".aimodel":
        raise ValueError(f"{output}: give the name of a folder; the .aimodel will lie inside it")
    authoring()
    refuse_existing_folder(output, overwrite=overwrite)
    source = Source.find(folder)
    found, chat = source.companions(tokenizer, instruct=False, output=output)
    if found is None:
        raise ValueError(
            f"{source.name} has no tokenizer, and a bundle without tokenizer.json sends the app to "
            "the Hub for one: give --tokenizer"
        )
    model = load_fused(source.folder, adapter_path)
    kind = settle(model, weights)
    contents = Contents(
        name=output.name,
        source=source,
        args=model.args,
        weights=kind,
        tokenizer=found,
        chat=chat,
        adapters=None if adapter_path is None else Path(adapter_path).name,
    )
    with atomic_folder(output, overwrite=overwrite) as temporary:
        bundle = write_bundle(temporary, build(model, kind), contents)
        size = sum(file.stat().st_size for file in temporary.rglob("*") if file.is_file())
        verification = verify(bundle, model) if check else None
        if verification is not None:
            if not verification.holds:
                raise ValueError(
                    f"the bundle was not kept, since it {describe(verification).splitlines()[0]}; "
                    "--no-verify keeps it all the same"
                )
            write_report(verification, temporary / "verification.json")
    return Export(folder=output, weights=kind, bytes=size, verification=verification)


def add_coreai_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``openelm convert coreai``."""
    parser.add_argument("folder", metavar="DIR", help="model folder")
    parser.add_argument("--output", required=True, metavar="BUNDLE_DIR", help="folder to write")
    parser.add_argument(
        "--weights",
        choices=tuple(KINDS),
        help="default: fp16, or mlx for a quantised folder; the fp32 ones are for checks only",
    )
    parser.add_argument("--adapter-path", metavar="A", help="adapters to fuse")
    parser.add_argument("--tokenizer", metavar="T", help="in place of the folder's own")
    parser.add_argument(
        "--no-verify", action="store_true", help="do not run the bundle in Apple's runtime"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output")


def run_coreai(args: argparse.Namespace) -> int:
    """Run ``openelm convert coreai``."""
    done = export(
        args.folder,
        args.output,
        weights=args.weights,
        adapter_path=args.adapter_path,
        tokenizer=args.tokenizer,
        check=not args.no_verify,
        overwrite=args.overwrite,
    )
    lines = [str(done.folder), f"{done.bytes / 1e6:.1f} MB, weights {done.weights}"]
    if done.verification is None:
        lines.append("not verified, and not run on a device")
    else:
        lines.append(describe(done.verification))
    sys.stdout.write("\n".join(lines) + "\n")
    return 0

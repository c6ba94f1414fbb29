"""``openelm convert coreai`` and ``verify-coreai``: the flags; what they start is imported late."""

import argparse
import sys
from pathlib import Path

WEIGHTS = ("fp16", "mlx", "fp32", "mlx-fp32")


def add_coreai_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``openelm convert coreai``."""
    parser.add_argument("folder", metavar="DIR", help="model folder")
    parser.add_argument("--output", required=True, metavar="BUNDLE_DIR", help="folder to write")
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="default: fp16, or mlx for a quantised folder; the fp32 ones are for checks, not apps",
    )
    parser.add_argument("--adapter-path", metavar="A", help="adapters to fuse")
    parser.add_argument("--tokenizer", metavar="T", help="in place of the folder's own")
    parser.add_argument(
        "--no-verify", action="store_true", help="do not run the bundle in Apple's runtime"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the output")


def run_coreai(args: argparse.Namespace) -> int:
    """Run ``openelm convert coreai``."""
    from convert.coreai_export import export
    from convert.coreai_verify import describe

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


def add_verify_coreai_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``openelm convert verify-coreai``."""
    parser.add_argument("bundle", metavar="BUNDLE_DIR", help="what `convert coreai` wrote")
    parser.add_argument("--model", required=True, metavar="DIR", help="the model it was made from")
    parser.add_argument("--adapter-path", metavar="A", help="adapters that were fused into it")
    parser.add_argument("--tokens", type=int, metavar="N", help="to send through; default: 32")
    parser.add_argument("--tolerance", type=float, metavar="X", help="largest error of a logit")
    parser.add_argument("--report", metavar="FILE.json", help="write it, and FILE.md beside it")


def run_verify_coreai(args: argparse.Namespace) -> int:
    """Run ``openelm convert verify-coreai``: 0 where the bundle holds, else 1."""
    from convert.coreai_runner import Bundle
    from convert.coreai_verify import describe, verify, write_report
    from convert.coreai_weights import load_fused
    from convert.source import Source

    bundle = Bundle.open(args.bundle)
    model = load_fused(Source.find(args.model).folder, args.adapter_path)
    verification = verify(bundle, model, tokens=args.tokens, tolerance=args.tolerance)
    if args.report:
        write_report(verification, Path(args.report))
    sys.stdout.write(describe(verification) + "\n")
    return 0 if verification.holds else 1

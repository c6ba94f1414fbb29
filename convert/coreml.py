"""``openelm convert coreml``: the flags and what is said at the end; the work is in the export."""

import argparse
import logging
import sys
from typing import get_args

from convert.coreml_export import Export as Export
from convert.coreml_export import export as export
from convert.coreml_report import summary
from convert.coreml_settings import ExportSettings, Target, WeightKind

logger = logging.getLogger(__name__)


def add_coreml_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``openelm convert coreml``."""
    parser.add_argument("folder", metavar="DIR", help="model folder or Hub id")
    parser.add_argument("--output", required=True, metavar="FILE.mlpackage")
    parser.add_argument(
        "--context", type=int, default=ExportSettings.context, help="tokens of cache (1024)"
    )
    parser.add_argument("--prefill", type=int, help="tokens of a prefill call (64; 1 for ane)")
    parser.add_argument(
        "--weights",
        choices=get_args(WeightKind),
        help="how matrices are stored; default: mlx for a quantised folder, else int8 up to 450M "
        "and int4 beyond",
    )
    parser.add_argument(
        "--target",
        choices=get_args(Target),
        default="all",
        help="all: a form for CPU and GPU (default); gpu: fused attention; ane: Neural Engine",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--flexible", action="store_true", help="one function for swift-transformers")
    form.add_argument("--stateless", action="store_true", help="caches as inputs and outputs")
    parser.add_argument("--all-logits", action="store_true", help="logits of every position")
    parser.add_argument("--adapter-path", metavar="A", help="adapters to fuse first")
    parser.add_argument("--tokenizer", metavar="T", help="for the bundle")
    parser.add_argument("--instruct", action="store_true", help="a chat template in the bundle")
    parser.add_argument("--data", metavar="FILE", help="text to measure and verify with")
    parser.add_argument("--no-verify", action="store_true", help="do not verify")
    parser.add_argument("--overwrite", action="store_true", help="replace the output")


def run_coreml(args: argparse.Namespace) -> int:
    """``openelm convert coreml``."""
    made = export(
        args.folder,
        args.output,
        context=args.context,
        prefill=args.prefill,
        weights=args.weights,
        target=args.target,
        flexible=args.flexible,
        stateless=args.stateless,
        all_logits=args.all_logits,
        adapter_path=args.adapter_path,
        tokenizer=args.tokenizer,
        instruct=args.instruct,
        data=args.data,
        check=not args.no_verify,
        overwrite=args.overwrite,
    )
    for note in made.notes:
        logger.warning("%s", note)
    k, norm = made.numerics.residual_exponent, made.numerics.norm
    where = {"all": "CPU and GPU", "gpu": "GPU", "ane": "Neural Engine, never run on one here"}
    sys.stdout.write(
        f"{made.package}: {made.bytes / 1e6:.1f} MB, weights {made.settings.weights}, context "
        f"{made.settings.context}, form for {where[made.settings.target]}; residual stream times "
        f"2^-{k}, norm {norm}; {made.seconds:.0f} s\n{made.bundle}: tokenizer, settings, runner\n"
    )
    if made.verification is None:
        sys.stdout.write("not verified; run `openelm convert verify-coreml` before it ships\n")
    else:
        sys.stdout.write(summary(made.verification))
    return 0

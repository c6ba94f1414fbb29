"""Stage: ``openelm demo``: the whole road on a small model, offline, in three minutes.

Text that every Python has -> tokenizer -> pretraining -> LoRA -> 4 bits -> Core ML -> a report. The
flags are here, the work is in ``demo_run``, so that help is quick.
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``openelm demo``."""
    parser.epilog = "In a folder that it has begun, the demo goes on where it stopped."
    add = parser.add_argument
    add("--output", default="openelm-demo", metavar="DIR", help="default: openelm-demo")
    add("--overwrite", action="store_true", help="throw away the demo that is in DIR")
    add("--pretrain-seconds", type=float, metavar="S", help="wall time to pretrain (60)")
    add("--finetune-seconds", type=float, metavar="S", help="wall time to tune (25)")
    add("--limit", type=int, metavar="N", help="texts and questions to learn from (default: all)")
    add("--vocab-size", type=int, default=1024, metavar="N", help="pieces of the tokenizer (1024)")


def run(args: argparse.Namespace) -> int:
    """Run ``openelm demo``."""
    from openelm_mlx.demo_room import DemoArgs
    from openelm_mlx.demo_run import demo

    settings = DemoArgs(
        pretrain_seconds=args.pretrain_seconds,
        finetune_seconds=args.finetune_seconds,
        limit=args.limit,
        vocab_size=args.vocab_size,
    )
    return demo(args.output, settings, overwrite=args.overwrite)

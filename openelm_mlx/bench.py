"""Stage: ``openelm bench``: speed and memory, ours and mlx_lm's side by side.

The flags are here, the work is in ``bench_run``, so that help is quick.
"""

import argparse

CASES = (
    *("kernels", "host", "prefill-512", "prefill-2048", "decode", "batch-4", "batch-16", "memory"),
    *("load", "cold", "lookup-copies", "lookup-new"),
    *("lora-memory", "lora-speed", "full-memory", "full-speed"),
    *("loss-memory", "loss-speed", "loss-full-memory", "loss-full-speed"),
    *("evaluate-fewshot", "evaluate-letters", "evaluate-contexts", "evaluate-one-token"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``openelm bench``."""
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", metavar="M", help="model folder or Hub id")
    what.add_argument("--size", metavar="S", help="random weights: 270M, 450M, 1.1B or 3B")
    what.add_argument(
        "--results", nargs="+", metavar="FILE.json", help="measure nothing: saved numbers as tables"
    )
    add("--against", choices=["mlx_lm"], help="measure stock mlx_lm beside it")
    add("--cases", nargs="+", choices=CASES, metavar="CASE", help=f"of {', '.join(CASES)}")
    add("--trials", type=int, default=3, metavar="N", help="rounds a case (default 3)")
    add("--full", action="store_true", help="512 prompt, 1024 generated tokens, 5 trials")
    add("--dtype", choices=["float32", "bfloat16", "float16"], help="default: bf16 on a GPU")
    add("--output", metavar="FILE.json", help="write the numbers")
    add("--plot", metavar="FILE.png", help="draw the numbers (plot extra)")
    add("--overwrite", action="store_true", help="replace FILE.json and FILE.png")


def run(args: argparse.Namespace) -> int:
    """Run ``openelm bench``."""
    from openelm_mlx.bench_run import bench

    return bench(args)

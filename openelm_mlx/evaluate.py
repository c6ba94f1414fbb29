"""Stage: ``openelm evaluate``: perplexity of text, and scores on tasks.

The flags are here, the work is imported when it is run, so that help is quick.
"""

import argparse

from openelm_mlx.atomic import refuse_existing_file
from openelm_mlx.evaluation_args import SUITES, PerplexityArgs, TaskArgs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``openelm evaluate``."""
    add = parser.add_argument
    add("--model", nargs="+", default=[], metavar="M", help="model folder or Hub id")
    add("--adapter-path", metavar="A", help="adapters for the model")
    add("--tokenizer", metavar="T", help="file, folder or Hub id in place of the model's own")
    _add_what(parser)
    _add_how(parser)
    add("--checkpoints", metavar="DIR", help="score every saved step of a run, and its averages")
    add("--average-last", type=int, metavar="N", help="... and the mean of each N states in a row")
    add(
        "--compare",
        nargs="*",
        metavar="M",
        help="models, adapters, quantised folders, .mlpackage and Core AI bundles in one table",
    )
    add("--prompt", action="append", metavar="P", help="of the samples of --compare; repeatable")
    add("--sample-tokens", type=int, default=32, metavar="N", help="of a sample; 0 for none")
    add("--output", metavar="FILE.json", help="write the result; charts and tables go beside it")
    add("--overwrite", action="store_true", help="replace FILE.json")


def _add_what(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is scored")
    add = what.add_argument
    add("--data", nargs="+", metavar="PATH", help=".txt, .jsonl, .json, .parquet, also .gz, .zst")
    add("--text-key", default="text", metavar="KEY", help="of a record's text (default text)")
    add("--suite", choices=SUITES, help="tasks of the paper's tables, or the 8 of LLM-Adapters")
    add("--data-dir", metavar="DIR", help="commonsense: folder with <task>/test.json")
    add("--tasks", nargs="+", metavar="TASK", help="lm-eval tasks by name, or local YAML files")


def _add_how(parser: argparse.ArgumentParser) -> None:
    how = parser.add_argument_group("how")
    add = how.add_argument
    add("--batch-size", type=int, default=8, metavar="N", help="rows a forward pass (default 8)")
    add("--limit", type=int, metavar="N", help="documents, or items a task")
    add("--max-seq-length", type=int, metavar="N", help="tokens of a window (default: the context)")
    add("--stride", type=int, metavar="N", help="tokens a window moves on (default: half of one)")
    add("--num-fewshot", type=int, metavar="N", help="examples, in place of a task's own number")
    add(
        "--float32",
        action=argparse.BooleanOptionalAction,
        help="compute in float32 whatever the weights are (default on a Linux CPU, where 16 bits "
        "are 10 times slower)",
    )


def run(args: argparse.Namespace) -> int:
    """Run ``openelm evaluate``: one model, a run's checkpoints, or several models."""
    if args.float32 is None:
        from openelm_mlx.cpu_weights import helps_here

        args.float32 = helps_here()
    text, tasks = _what(args)
    models = [*args.model, *(args.compare or [])]
    _check(args, models)
    if args.output:
        refuse_existing_file(args.output, overwrite=args.overwrite)
    if args.checkpoints:
        from openelm_mlx.checkpoint_scores import score_checkpoints

        return score_checkpoints(args, text, tasks)
    if len(models) > 1:
        from openelm_mlx.comparison import compare

        return compare(args, models, text, tasks)
    from openelm_mlx.evaluation import evaluate

    return evaluate(args, text, tasks)


def _check(args: argparse.Namespace, models: list[str]) -> None:
    """Refuse what cannot be meant.

    Raises:
        ValueError: saying what contradicts what.
    """
    if args.checkpoints and (args.compare is not None or len(models) > 1):
        raise ValueError("--checkpoints scores one run; leave --compare and further models out")
    if not models and not args.checkpoints:
        raise ValueError("give --model M, --checkpoints DIR or --compare M M")
    if args.adapter_path and (len(models) != 1 or args.checkpoints):
        raise ValueError("--adapter-path goes with one --model; give --compare the adapter folders")
    if args.average_last is not None and (not args.checkpoints or args.average_last < 2):
        raise ValueError("--average-last takes 2 states or more, and goes with --checkpoints")
    if args.compare is not None and len(models) < 2:
        raise ValueError(f"--compare needs two models at least, got {len(models)}")


def _what(args: argparse.Namespace) -> tuple[PerplexityArgs | None, TaskArgs | None]:
    """The settings of what is scored; refuses flags that would have no effect."""
    if not (args.data or args.suite or args.tasks):
        raise ValueError(
            "nothing to score: give --data FILE, --suite commonsense --data-dir DIR, another "
            f"--suite ({', '.join(SUITES[:-1])}), or --tasks"
        )
    for flag, needs in (("stride", "data"), ("num_fewshot", "tasks"), ("data_dir", "suite")):
        if getattr(args, flag) is not None and not getattr(args, needs):
            raise ValueError(
                f"--{flag.replace('_', '-')} has no effect without --{needs}; leave it out"
            )
    shared = {
        "batch_size": args.batch_size,
        "max_seq_length": args.max_seq_length,
        "limit": args.limit,
    }
    text = tasks = None
    if args.data:
        text = PerplexityArgs(
            data=tuple(args.data), text_key=args.text_key, stride=args.stride, **shared
        )
    if args.suite or args.tasks:
        tasks = TaskArgs(
            suite=args.suite,
            tasks=tuple(args.tasks or ()),
            data_dir=args.data_dir,
            num_fewshot=args.num_fewshot,
            **shared,
        )
    return text, tasks

"""One model measured on text and tasks: the work that all forms of ``openelm evaluate`` share."""

import argparse
import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tqdm import tqdm

from openelm_mlx.evaluation_args import PerplexityArgs, TaskArgs
from openelm_mlx.evaluation_record import Partial, record_of, today, write_result
from openelm_mlx.perplexity import TextScore, pieces_of, score_pieces
from openelm_mlx.scored_models import ScoredModel, open_model
from openelm_mlx.text_files import documents

logger = logging.getLogger(__name__)


def evaluate(args: argparse.Namespace, text: PerplexityArgs | None, tasks: TaskArgs | None) -> int:
    """Measure one model, print the result, and write it where ``--output`` says.

    Args:
        args: the flags of ``openelm evaluate``.
        text: what text to score.
        tasks: which tasks to score.

    Returns:
        The exit code.
    """
    (name,) = args.model
    model = open_model(
        name,
        adapter_path=args.adapter_path,
        tokenizer=args.tokenizer,
        float32=args.float32,
    )
    record = record_of(
        text,
        tasks,
        model=model.name,
        adapter_path=args.adapter_path,
        tokenizer=model.tokenizer.source,
        float32=args.float32,
    )
    partial = Partial(args.output, record)
    with closing(model.scorer):
        result = {**measure(model, text, tasks, partial, show=sys.stdout.write), **record}
    result["hashes"] = {"weights": model.hash, **record["hashes"]}
    if args.output:
        write_result(args.output, {**result, "date": today()}, overwrite=args.overwrite)
        partial.remove()
    return 0


def measure(
    model: ScoredModel,
    text: PerplexityArgs | None,
    tasks: TaskArgs | None,
    partial: Partial,
    *,
    name: str = "",
    show: Callable[[str], Any] = lambda _: None,
) -> dict[str, Any]:
    """Score one model.

    Args:
        model: of any kind; tasks need an MLX model.
        text: what text to score.
        tasks: which tasks to score.
        partial: keeps sums in case of an interruption.
        name: prefix of what is kept, where several models are scored.
        show: receives lines for a person.

    Returns:
        ``model`` and the numbers: ``perplexity``, ``bits_per_byte``, … and ``results`` of tasks.
    """
    if tasks is not None and model.mlx is None:
        raise ValueError(f"{model.name} is no MLX model, and tasks need one; give --data")
    result: dict[str, Any] = {"model": model.name}
    if text is not None:
        scored = score_text(model, text, partial, name=f"{name}text")
        result |= scored
        show(describe_text(scored) + "\n")
    if tasks is not None:
        from openelm_mlx.suites import render_tasks, run_tasks

        assert model.mlx is not None
        scored = run_tasks(
            *(model.mlx, model.tokenizer, tasks),
            name=model.name,
            memory=partial.answers(key=model.hash),
        )
        result |= scored
        show(render_tasks(scored))
    return result


def score_text(
    model: ScoredModel, args: PerplexityArgs, partial: Partial, *, name: str = "text"
) -> dict[str, Any]:
    """Perplexity and the rest of text; see :meth:`openelm_mlx.perplexity.TextScore.result`.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a record is damaged, or the tokenizer does not fit the model.
    """
    length, stride = window_sizes(args, model.scorer.context)
    encode = model.tokenizer.encode
    pieces = pieces_of(
        _limited(args),
        encode,
        length=length,
        stride=stride,
        vocab_size=model.scorer.vocab_size,
    )
    score = TextScore(**(partial.load(name, key=model.hash) or {}))
    with tqdm(
        total=_total_bytes(args),
        initial=score.bytes,
        desc=Path(model.name).name,
        unit="B",
        unit_scale=True,
        disable=not sys.stderr.isatty(),
    ) as bar:

        def after_batch(size: int) -> None:
            bar.update(size)
            partial.save(score.state_dict(), name, key=model.hash)

        try:
            score_pieces(
                model.scorer, pieces, score, batch_size=args.batch_size, after_batch=after_batch
            )
        except KeyboardInterrupt:
            partial.save(score.state_dict(), name, key=model.hash, now=True)
            raise
    return {**score.result(), "window": length, "stride": stride}


def window_sizes(args: PerplexityArgs, context: int) -> tuple[int, int]:
    """Inputs of a window and how far it moves on.

    Raises:
        ValueError: if the windows would leave tokens out.
    """
    length = args.max_seq_length or context
    if length > context:
        logger.warning("windows of %d tokens are longer than the context of %d", length, context)
    stride = args.stride or max(1, length // 2)
    if stride > length:
        raise ValueError(f"stride {stride} is more than the window of {length} tokens; lower it")
    return length, stride


def describe_text(result: Mapping[str, Any]) -> str:
    """The numbers of a text in one line."""
    count = "1 document" if result["documents"] == 1 else f"{result['documents']:,} documents"
    return (
        f"perplexity {result['perplexity']:.4f}, {result['bits_per_byte']:.4f} bits a byte, "
        f"{result['token_accuracy']:.2%} of tokens right; {result['tokens']:,} tokens of "
        f"{count} in {result['seconds']:.1f} s "
        f"({result['tokens_per_second']:,.0f} a second)"
    )


def _limited(args: PerplexityArgs) -> Any:
    from itertools import islice

    return islice(documents(args.data, text_key=args.text_key), args.limit)


def _total_bytes(args: PerplexityArgs) -> int | None:
    """Bytes of all text, for the bar; not looked for where nobody sees one."""
    if not sys.stderr.isatty():
        return None
    return sum(len(document.text.encode()) for document in _limited(args))

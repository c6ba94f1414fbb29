"""``openelm evaluate --compare``: models of any kind on the same text, one row each.

What each step of the road to the app costs: tuning, fusing, quantising, exporting.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx

from openelm_mlx.atomic import refuse_existing_file
from openelm_mlx.comparison_report import render_chart, render_markdown, render_table
from openelm_mlx.evaluation import measure
from openelm_mlx.evaluation_args import PerplexityArgs, TaskArgs
from openelm_mlx.evaluation_record import Partial, record_of, today, write_result, write_text
from openelm_mlx.scored_models import ScoredModel, context_of, kind_of, open_model
from openelm_mlx.text_files import documents
from openelm_mlx.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_PROMPTS, _PROMPT_WORDS = 2, 12  # taken from the text, where no --prompt is given


def compare(
    args: argparse.Namespace,
    names: Sequence[str],
    text: PerplexityArgs | None,
    tasks: TaskArgs | None,
) -> int:
    """Score several models and print one table; write it as JSON, Markdown and a chart.

    Args:
        args: the flags of ``openelm evaluate``.
        names: of the models, the first being what the others are held against.
        text: what text to score; all models get windows of one length.
        tasks: which tasks to score; of MLX models only.

    Returns:
        The exit code.

    Raises:
        FileExistsError: if a file would be replaced without ``--overwrite``.
        ValueError: if two models have one name, or a model does not fit the text.
    """
    if len(set(names)) < len(names):
        raise ValueError(f"a model is named twice among {', '.join(names)}; name each once")
    beside = _files_beside(args.output, overwrite=args.overwrite)
    base = next((name for name in names if kind_of(name) == "model"), None)
    if text is not None:
        text = _with_one_length(text, names, base)
    record = record_of(text, tasks, models=list(names), float32=args.float32)
    prompts = _prompts(args, text)
    partial = Partial(args.output, {**record, "prompts": prompts, "tokens": args.sample_tokens})
    rows = _rows(args, names, base, text, tasks, prompts, partial)
    result = {
        "models": {row["model"]: row for row in rows},
        "samples": _samples(rows, prompts),
        "notes": _notes(rows),
        **record,
        "date": today(),
    }
    sys.stdout.write(render_table(result))
    if args.output:
        _write(result, Path(args.output), beside, overwrite=args.overwrite)
        partial.remove()
    return 0


def _rows(
    args: argparse.Namespace,
    names: Sequence[str],
    base: str | None,
    text: PerplexityArgs | None,
    tasks: TaskArgs | None,
    prompts: list[str],
    partial: Partial,
) -> list[dict[str, Any]]:
    """A row a model, each loaded when its turn comes and forgotten afterwards."""
    rows: list[dict[str, Any]] = []
    tokenizer: Tokenizer | None = None
    for i, name in enumerate(names):
        model = open_model(
            name,
            tokenizer=args.tokenizer,
            float32=args.float32,
            default_base=base,
            default_tokenizer=tokenizer,
        )
        tokenizer = tokenizer or model.tokenizer
        with closing(model.scorer):
            row = partial.load(f"{i} row", key=model.hash)
            if row is None:
                row = _row(model, text, tasks, partial, str(i))
                row |= {"samples": _continue(model, prompts, args.sample_tokens)}
                partial.save(row, f"{i} row", key=model.hash, now=True)
        rows.append(row)
        del model
        mx.clear_cache()
    return rows


def _row(
    model: ScoredModel,
    text: PerplexityArgs | None,
    tasks: TaskArgs | None,
    partial: Partial,
    name: str,
) -> dict[str, Any]:
    if tasks is not None and model.mlx is None:
        logger.warning("%s is no MLX model, so it gets no tasks", model.name)
        tasks = None
    measured = measure(model, text, tasks, partial, name=f"{name} ")
    ids = model.tokenizer.encode(next(_documents(text)).text[:1000]) if text else []
    return {
        **measured,
        "kind": model.kind,
        "size": model.bytes,
        "sha256": model.hash,
        "first_tokens": ids[:64],
    }


def _continue(model: ScoredModel, prompts: list[str], max_tokens: int) -> list[str]:
    """The likeliest continuation of each prompt."""
    found = []
    for prompt in prompts if max_tokens else []:
        ids = model.tokenizer.encode(prompt)[: model.scorer.context - 1]
        out = model.scorer.greedy(ids, max_tokens)
        end = next((i for i, token in enumerate(out) if token in model.tokenizer.eos_ids), len(out))
        detokenizer = model.tokenizer.detokenizer(ids)
        pieces = [detokenizer.add_token(token) for token in out[:end]]
        found.append("".join([*pieces, detokenizer.finish()]))
    return found


def _samples(rows: Sequence[dict[str, Any]], prompts: list[str]) -> list[dict[str, Any]]:
    """Prompt by prompt, what each model made of it."""
    continued = {row["model"]: row.pop("samples") for row in rows}
    return [
        {"prompt": prompt, "continuations": {name: own[i] for name, own in continued.items()}}
        for i, prompt in enumerate(prompts)
        if all(len(own) > i for own in continued.values())
    ]


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader must know before comparing the rows."""
    ids = [row.pop("first_tokens") for row in rows]
    others = [row["model"] for row, own in zip(rows, ids, strict=True) if own != ids[0]]
    if not others:
        return []
    note = (
        f"{', '.join(others)} cuts the text into other tokens than {rows[0]['model']}, so compare "
        "bits per byte, not perplexity"
    )
    logger.warning("%s", note)
    return [note]


def _prompts(args: argparse.Namespace, text: PerplexityArgs | None) -> list[str]:
    """The prompts asked for, else how the first documents begin."""
    if args.prompt or text is None:
        return list(args.prompt or [])
    begun = (" ".join(d.text.split()[:_PROMPT_WORDS]) for d in _documents(text))
    return list(islice(filter(None, begun), _PROMPTS))


def _documents(text: PerplexityArgs) -> Any:
    return documents(text.data, text_key=text.text_key)


def _with_one_length(
    text: PerplexityArgs, names: Sequence[str], base: str | None
) -> PerplexityArgs:
    """Windows that every model can hold: no row may have more context than another."""
    contexts = {name: context_of(name, default_base=base) for name in names}
    least = min(contexts, key=lambda name: contexts[name])
    length = min(text.max_seq_length or contexts[least], contexts[least])
    if text.max_seq_length and length < text.max_seq_length:
        logger.warning("%s holds %d tokens only, so all get windows of those", least, length)
    stride = None if text.stride is None else min(text.stride, length)
    return replace(text, max_seq_length=length, stride=stride)


def _files_beside(output: str | None, *, overwrite: bool) -> dict[str, Path]:
    """Names of the table and the chart beside the result."""
    if output is None:
        return {}
    files = {kind: Path(output).with_suffix(f".{kind}") for kind in ("md", "png")}
    if Path(output) in files.values():
        raise ValueError(f"--output {output} is the name of the table or chart; name it .json")
    for file in files.values():
        refuse_existing_file(file, overwrite=overwrite)
    return files


def _write(
    result: dict[str, Any], output: Path, beside: dict[str, Path], *, overwrite: bool
) -> None:
    chart = render_chart(result, beside["png"])
    picture = beside["png"].name if chart else None
    write_text(beside["md"], render_markdown(result, picture), overwrite=overwrite)
    write_result(output, result, overwrite=overwrite)

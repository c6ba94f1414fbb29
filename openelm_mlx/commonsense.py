"""The eight commonsense tasks of LLM-Adapters by log-likelihood, as CoreNet evaluates them.

Prompt, options, order of items and metrics are those of ``corenet-eval-llmadapters`` (apple/corenet
@1aa3acd, ``corenet/cli/main_eval_llmadapters.py``). Needs no lm-eval and no network: items come
from ``<folder>/<task>/test.json``, as LLM-Adapters lays them out.
"""

import json
import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openelm_mlx.model import Model
from openelm_mlx.published import SUITE_TASKS
from openelm_mlx.scoring import Likelihood, Memory, log_likelihoods
from openelm_mlx.scoring_plan import Request
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tuning_formats import commonsense_prompt, text_of

FILE = "test.json"
SEED = 83652  # of the order of the items
_NUMBERED = ("answer", "ending", "option", "solution")


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question.

    Attributes:
        context: the prompt, up to where the answer begins.
        options: what can be answered: "true", "answer2", …
        answer: the right one.
    """

    context: str
    options: tuple[str, ...]
    answer: str

    @property
    def continuations(self) -> list[str]:
        """The sentences that are scored after the context, one an option."""
        return [f"the correct answer is {option}" for option in self.options]


def evaluate_commonsense(
    model: Model,
    tokenizer: Tokenizer,
    folder: str | Path,
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    limit: int | None = None,
    progress: Callable[[int, int], Any] = lambda done, of: None,
    memory: Memory | None = None,
) -> dict[str, dict[str, Any]]:
    """Score every task of a folder.

    Args:
        model: in eval mode.
        tokenizer: of the model; one BOS stands before every prompt.
        folder: with ``<task>/test.json`` for each task.
        batch_size: contexts a forward pass.
        max_length: tokens of prompt and answer; by default the model's context.
        limit: items a task, after the shuffle.
        progress: called with the requests that are done, and all there are.
        memory: of what was answered before an interruption.

    Returns:
        For each task, by the name of its folder: ``acc`` (likeliest option), ``acc_norm``
        (likeliest by character), the standard errors of both, and ``n``.

    Raises:
        FileNotFoundError: if there is no such folder, or no task in it.
        ValueError: if a file is damaged; it names the item.
    """
    tasks = read_tasks(folder, limit)
    requests = [
        encode_pair(tokenizer, item.context, continuation)
        for items in tasks.values()
        for item in items
        for continuation in item.continuations
    ]
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        progress(done, len(requests))

    scores = iter(
        log_likelihoods(
            *(model, requests),
            batch_size=batch_size,
            max_length=max_length,
            progress=count,
            memory=memory,
        )
    )
    results = {}
    for task, items in tasks.items():
        chosen = [choose(item, [next(scores) for _ in item.options]) for item in items]
        rights = [
            (plain == item.answer, normed == item.answer)
            for item, (plain, normed) in zip(items, chosen, strict=True)
        ]
        results[task] = summary(rights)
    return results


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> Request:
    """Token ids of a context and its continuation, cut where lm-eval's ``_encode_pair`` cuts.

    White space that ends the context goes to the continuation, both are encoded together, and the
    context's own length decides where the continuation begins.

    Args:
        tokenizer: puts one BOS before the context.
        context: not empty.
        continuation: what is scored.
    """
    stripped = context.rstrip()
    context_ids = tokenizer.encode(stripped)
    whole = tokenizer.encode(context + continuation)
    return context_ids, whole[len(context_ids) :]


def choose(item: Item, scores: Sequence[Likelihood]) -> tuple[str, str]:
    """The likeliest option, and the likeliest by character of its sentence; the first of equals."""
    plain = [score.logprob for score in scores]
    normed = [
        score / len(sentence) for score, sentence in zip(plain, item.continuations, strict=True)
    ]
    return item.options[plain.index(max(plain))], item.options[normed.index(max(normed))]


def summary(rights: Sequence[tuple[bool, bool]]) -> dict[str, Any]:
    """Accuracies and their standard errors, of whether each item is right by the two measures."""
    n = len(rights)
    found: dict[str, Any] = {}
    for i, name in enumerate(("acc", "acc_norm")):
        mean = sum(right[i] for right in rights) / n
        found[name] = mean
        found[f"{name}_stderr"] = math.sqrt(mean * (1 - mean) / (n - 1)) if n > 1 else None
    return {**found, "n": n}


def read_tasks(folder: str | Path, limit: int | None = None) -> dict[str, list[Item]]:
    """The items of all tasks of a folder, shuffled as CoreNet shuffles them, then cut.

    Raises:
        FileNotFoundError: if there is no such folder, or no task in it.
        ValueError: if a file is damaged.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is no folder; give the data set of LLM-Adapters, with <task>/{FILE}"
        )
    names = {path.parent.name for path in folder.glob(f"*/{FILE}")}
    if not names:
        raise FileNotFoundError(
            f"{folder} holds no <task>/{FILE}; give the data set of LLM-Adapters"
        )
    known = [task.task for task in SUITE_TASKS["commonsense"] if task.task in names]
    order = [*known, *sorted(names - set(known))]
    return {name: read_items(folder / name / FILE, limit) for name in order}


def read_items(path: Path, limit: int | None = None) -> list[Item]:
    """The items of one file, shuffled as CoreNet shuffles them, then cut.

    Raises:
        ValueError: naming the item that is damaged.
    """
    try:
        records = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # bad UTF-8 too
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(records, list) or not records:
        raise ValueError(f"{path} must hold a list of items, with one at least")
    numbered = list(enumerate(records, start=1))
    random.Random(SEED).shuffle(numbered)
    items = []
    for number, record in numbered[:limit]:
        try:
            items.append(_item(record))
        except ValueError as error:
            raise ValueError(f"{path}, item {number}: {error}") from error
    return items


def _item(record: Any) -> Item:
    if not isinstance(record, dict):
        raise ValueError("is no object with instruction, output and answer")
    instruction, answer = text_of(record, "instruction"), text_of(record, "answer")
    # CoreNet leaves the item's "input" out.
    context = commonsense_prompt(instruction, None)
    return Item(context=context, options=_options(instruction), answer=answer)


def _options(instruction: str) -> tuple[str, ...]:
    """The options that the last line names."""
    last = instruction.split("\n")[-1]
    if "Answer format: true/false" in last:
        return "true", "false"
    for word in _NUMBERED:
        found = re.search(rf"Answer format: .*{word}(\d)$", last)
        if found and int(found[1]):
            return tuple(f"{word}{number}" for number in range(1, int(found[1]) + 1))
    raise ValueError(
        f"the instruction's last line names no options: {last[-60:]!r} should end like "
        "'Answer format: answer1/answer2'"
    )

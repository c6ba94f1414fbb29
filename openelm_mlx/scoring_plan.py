"""Contexts and continuations -> batches in which nothing is computed twice.

A request is a context and a continuation, as token ids. Requests with one context form an item;
continuations that differ in their last token alone are one row. Items whose contexts begin alike
(few-shot examples, an instruction) share that prefix. Pure Python: knows no model.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Ids = tuple[int, ...]
Request = tuple[Sequence[int], Sequence[int]]  # context, continuation

PASS_TOKENS = 4096  # of a forward pass, padding included; long rows come fewer at a time
CACHED_TOKENS = 16384  # that the rows of a forward pass may hold in all
MIN_SHARED = 16  # tokens of a prefix that are worth a forward pass of their own


@dataclass(slots=True)
class Row:
    """Tokens that are scored: the last of the context, and a continuation less its last.

    Attributes:
        tokens: inputs; every one of them predicts a token that is asked for.
        uses: number of a request and its targets, from the first input on.
    """

    tokens: Ids
    uses: list[tuple[int, Ids]] = field(default_factory=list)


@dataclass(slots=True)
class Item:
    """One context and what is asked of it.

    Attributes:
        head: the context without its last token.
        rows: to be scored after it.
        shared: how many tokens of ``head`` are the prefix of its group.
    """

    head: Ids
    rows: list[Row]
    shared: int = 0

    @property
    def rest(self) -> Ids:
        """What stands between the prefix and the rows."""
        return self.head[self.shared :]

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(len(row.tokens) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Batch:
    """Items that are computed together.

    Attributes:
        prefixes: distinct ones; empty where the items share nothing.
        items: each with the index of its prefix (0 where there is none).
    """

    prefixes: tuple[Ids, ...]
    items: list[tuple[Item, int]]


def padded(length: int) -> int:
    """A length rounded up to one of few: powers of two to 8, then eight between two powers."""
    if length <= 8:
        return 1 << max(length - 1, 0).bit_length()
    step = max(8, 1 << (length - 1).bit_length() - 4)
    return -(-length // step) * step


def make_items(requests: Sequence[Request], max_length: int, *, share: bool) -> list[Item]:
    """Group requests by context.

    Args:
        requests: contexts and continuations, neither of them empty.
        max_length: inputs of a row; a longer context loses its beginning, as in lm-eval.
        share: whether requests with one context become one item.

    Returns:
        The items, in the order in which their contexts first come.
    """
    by_context: dict[tuple[Ids, int], list[tuple[int, Ids]]] = defaultdict(list)
    for number, (context, continuation) in enumerate(requests):
        room = max(max_length + 1 - len(continuation), 1)
        key = tuple(context[-room:])
        by_context[key, 0 if share else number].append((number, tuple(continuation)))
    return [Item(key[:-1], _rows(key[-1], asked)) for (key, _), asked in by_context.items()]


def _rows(last: int, asked: list[tuple[int, Ids]]) -> list[Row]:
    """Rows that answer all continuations; one that begins another needs no row of its own."""
    rows: list[Row] = []
    for number, targets in sorted(asked, key=lambda use: use[1][:-1], reverse=True):
        tokens = (last, *targets[:-1])
        if not rows or rows[-1].tokens[: len(tokens)] != tokens:
            rows.append(Row(tokens))
        rows[-1].uses.append((number, targets))
    return rows


def make_batches(items: Sequence[Item], batch_size: int, *, share: bool) -> Iterator[Batch]:
    """Cut items into batches of about equal lengths, the longest first.

    Args:
        items: from :func:`make_items`; their ``shared`` is set here.
        batch_size: items of a batch at most.
        share: whether prefixes are shared between items.

    Yields:
        Batches; those with one prefix follow each other.
    """
    groups = _groups(sorted(items, key=lambda item: item.head)) if share else [[i] for i in items]
    large = [group for group in groups if group[0].shared and len(group) >= batch_size]
    small = [group for group in groups if group[0].shared and len(group) < batch_size]
    alone = [item for group in groups if not group[0].shared for item in group]
    for group in large:
        yield from _cut(sorted(group, key=_size, reverse=True), batch_size)
    small.sort(key=lambda group: max(map(_size, group)), reverse=True)
    yield from _cut([item for group in small for item in group], batch_size, many_prefixes=True)
    yield from _cut(sorted(alone, key=_size, reverse=True), batch_size)


def _size(item: Item) -> tuple[int, int]:
    return len(item.rest), item.longest


def _groups(items: Sequence[Item]) -> list[list[Item]]:
    """Runs of neighbours that begin alike; sets what each item shares.

    A run ends where going on would halve what its first two share: pairs that share much stay
    pairs.
    """
    runs: list[list[Item]] = []
    shared = first = 0
    for item in items:
        if runs:
            run = runs[-1]
            common = common_prefix(run[-1].head, item.head)
            if len(run) == 1:
                shared = first = common
            joined = min(shared, common)
            if joined >= MIN_SHARED and 2 * joined >= first:
                run.append(item)
                shared = run[0].shared = joined
                continue
        runs.append([item])
    for run in runs:
        for item in run:
            item.shared = run[0].shared
    return runs


def common_prefix(a: Ids, b: Ids) -> int:
    """How many tokens two sequences begin with alike."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _cut(items: Sequence[Item], batch_size: int, *, many_prefixes: bool = False) -> Iterator[Batch]:
    start = 0
    while start < len(items):
        stop, width, depth = start, 0, 0
        while stop < len(items) and stop - start < batch_size:
            item, rows = items[stop], stop + 1 - start
            width = max(width, padded(max(len(item.rest), item.shared * many_prefixes)))
            depth = max(depth, len(item.head))
            if rows > 1 and (rows * width > PASS_TOKENS or rows * depth > CACHED_TOKENS):
                break
            stop += 1
        yield _batch(items[start:stop])
        start = stop


def _batch(items: Sequence[Item]) -> Batch:
    prefixes: dict[Ids, int] = {}
    numbered = []
    for item in items:
        prefix = item.head[: item.shared]
        index = prefixes.setdefault(prefix, len(prefixes)) if item.shared else 0
        numbered.append((item, index))
    return Batch(tuple(prefixes), numbered)

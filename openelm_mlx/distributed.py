"""Ranks: which backend joins them, sums over them, and failing and waiting together.

MLX's own ``mx.distributed`` (ring, JACCL, MPI, NCCL), started by ``mlx.launch`` or ``mpirun``. On
one machine everything here is a no-op. Knows neither data nor training.
"""

import faulthandler
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn

logger = logging.getLogger(__name__)
T = TypeVar("T")

BACKENDS = ("any", "ring", "mpi", "nccl", "jaccl")
_TEXT_BYTES = 1024  # of a message that ranks exchange
_HINTS = {
    "mpi": "MLX finds no Open MPI library; set MLX_MPI_LIBNAME, for example to libmpi.so.40",
    "nccl": "it needs MLX for CUDA: pip install 'mlx[cuda]'",
    "jaccl": "it needs macOS 26.2 or later and RDMA over Thunderbolt switched on",
}

_active: dict[str, mx.distributed.Group] = {}  # the group of this process, by backend


class RankError(ValueError):
    """Another rank failed or was lost, so that this one cannot go on."""


def launched_backend() -> str:
    """The backend that this process was started for, by the variables of its launcher.

    Returns:
        "ring", "mpi", "nccl" or "jaccl"; "none" where nothing was launched, or on one rank.
    """
    set_ = os.environ.get
    if set_("MLX_IBV_DEVICES") or set_("MLX_JACCL_COORDINATOR"):
        return "jaccl"
    if set_("NCCL_HOST_IP") and int(set_("MLX_WORLD_SIZE", "1")) > 1:
        return "nccl"
    if set_("MLX_HOSTFILE") and set_("MLX_RANK") and _ring_hosts(set_("MLX_HOSTFILE", "")) > 1:
        return "ring"
    return "mpi" if int(set_("OMPI_COMM_WORLD_SIZE", "1")) > 1 else "none"


def world(backend: str = "any", *, patience: int = 600) -> mx.distributed.Group:
    """All ranks of this run; one where nothing was launched.

    Args:
        backend: one of ``BACKENDS``; "any" is what this process was launched for, or what an
            earlier call has joined.
        patience: seconds after which the process ends if other ranks have not come.

    Raises:
        ValueError: if the backend is unknown, or cannot be joined: a rank that went on alone would
            train another model and write over the first one's files.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
    if not _active or (backend != "any" and "none" in _active):
        name = launched_backend() if backend == "any" else backend
        group = _join(name, patience)
        _active.clear()
        _active[name] = group
    ((name, group),) = _active.items()
    if backend not in ("any", name):
        raise ValueError(f"backend {backend} was asked for, but the ranks are joined by {name}")
    return group


def backend_name() -> str:
    """What joins the ranks: "ring", "mpi", "nccl" or "jaccl"; "none" for one rank."""
    world()
    return next(iter(_active))


def describe_world() -> str:
    """``1`` or ``2, joined by ring``: for a plan."""
    name, size = backend_name(), world().size()
    return str(size) if name == "none" else f"{size}, joined by {name}"


def sum_scalars(values: mx.array, group: mx.distributed.Group) -> mx.array:
    """A small array added over the ranks, at once: lazily, ranks could meet in another order."""
    if group.size() == 1:
        return values
    total = mx.distributed.all_sum(values, group=group)
    mx.eval(total)
    return total


def sum_gradients(gradients: Any, group: mx.distributed.Group) -> Any:
    """Gradients added over the ranks, grouped into few messages, the same on all of them.

    Args:
        gradients: tree of arrays, equally shaped on all ranks.
        group: the ranks.
    """
    if group.size() == 1:
        return gradients
    averaged = nn.average_gradients(gradients, group)
    return nn.utils.tree_map(lambda g: g * group.size(), averaged)


def max_over_ranks(values: Sequence[int], group: mx.distributed.Group) -> list[int]:
    """The largest of each value on any rank; int32."""
    if group.size() == 1:
        return [int(value) for value in values]
    largest: Any = mx.distributed.all_max(
        mx.array(list(values), dtype=mx.int32), group=group
    ).tolist()
    return list(largest)


def any_rank(flag: bool, group: mx.distributed.Group) -> bool:
    """Whether the flag is set on any rank, known to all."""
    return bool(max_over_ranks([flag], group)[0])


def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What ``work`` returns, or the error that it ends in, to be told to the other ranks."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def fail_together(error: Exception | None, group: mx.distributed.Group) -> None:
    """End on all ranks, once all know that one of them has failed.

    Args:
        error: this rank's, if it is the one.
        group: the ranks; all of them have to call this.

    Raises:
        Exception: ``error``, as it is.
        RankError: on the other ranks, with its message.
    """
    texts = texts_of_ranks("" if error is None else str(error) or type(error).__name__, group)
    if error is not None:
        raise error
    raise RankError("; ".join(f"rank {i}: {text}" for i, text in enumerate(texts) if text))


def together(work: Callable[[], T], group: mx.distributed.Group) -> T:
    """Do ``work`` on every rank, and fail on all of them where it fails on one.

    A rank that fails alone would leave the others waiting for it in their next sum.

    Args:
        work: without collectives after a point where it may fail.
        group: the ranks; all of them have to call this.

    Raises:
        Exception: what ``work`` raised here.
        RankError: if it failed on another rank.
    """
    if group.size() == 1:
        return work()
    result, error = attempt(work)
    if any_rank(error is not None, group):
        fail_together(error, group)
    done: Any = result
    return done


def in_step(items: Iterable[T], group: mx.distributed.Group) -> Iterator[T | None]:
    """Items one at a time until no rank has any more; None where only others have one.

    Raises:
        Exception: what the source raised here.
        RankError: if another rank's source failed.
    """
    if group.size() == 1:
        yield from items
        return
    source = iter(items)
    while True:
        item, error = attempt(lambda: next(source, None))
        failed, more = max_over_ranks([error is not None, item is not None], group)
        if failed:
            fail_together(error, group)
        if not more:
            return
        yield item


def texts_of_ranks(text: str, group: mx.distributed.Group) -> list[str]:
    """The text of each rank, on all of them; at most 1 kB each."""
    if group.size() == 1:
        return [text]
    data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    every = mx.distributed.all_gather(mx.array(list(data), dtype=mx.uint8), group=group)
    rows: Any = every.reshape(group.size(), _TEXT_BYTES).tolist()
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in rows]


def array_of_rank_0(array: mx.array, group: mx.distributed.Group) -> mx.array:
    """Rank 0's array, bit for bit and at once; the others give one of the same shape and dtype."""
    if group.size() == 1:
        return array
    raw = array.reshape(-1).view(mx.uint8)
    raw = raw if group.rank() == 0 else mx.zeros_like(raw)
    return sum_scalars(raw, group).view(array.dtype).reshape(array.shape)


def json_of_rank_0(value: Any, group: mx.distributed.Group) -> Any:
    """A JSON value of rank 0 on all ranks."""
    if group.size() == 1:
        return value
    data = json.dumps(value).encode() if group.rank() == 0 else b""
    (length,) = max_over_ranks([len(data)], group)
    raw = mx.array(list(data.ljust(length, b"\0")), dtype=mx.uint8)
    shared: Any = array_of_rank_0(raw, group).tolist()
    return json.loads(bytes(shared))


@contextmanager
def own_random_numbers(group: mx.distributed.Group) -> Iterator[None]:
    """Inside, each rank draws other numbers (its dropout); after it all stand at the same key.

    The key after it does not depend on what was drawn, so a state that rank 0 saves serves all.
    """
    if group.size() == 1:
        yield
        return
    state: Any = mx.random.state
    following, inside = mx.random.split(state[0])
    _set_key(mx.random.split(inside, group.size())[group.rank()])
    try:
        yield
    finally:
        _set_key(following)


def _set_key(key: mx.array) -> None:
    words: Any = key.tolist()
    mx.random.seed(words[0] << 32 | words[1])  # the seed that makes this key


def lost_rank(error: BaseException) -> RankError | None:
    """The message for an error of MLX that means a lost rank; None for any other error."""
    if "connection to a peer was lost" not in str(error):  # the ring backend; others hang or end
        return None
    return RankError(
        "another rank has ended, failed or lost its connection (see its own message); start all "
        "again with --resume"
    )


def _join(name: str, patience: int) -> mx.distributed.Group:
    if name == "none":
        os.environ.pop("MLX_HOSTFILE", None)  # `mlx.launch -n 1` leaves one that MLX cannot read
        return mx.distributed.init()
    logger.info("joining the other ranks by %s", name)
    # MLX waits for them with the interpreter locked: no thread of ours and no Ctrl-C could end it
    faulthandler.dump_traceback_later(patience, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        return mx.distributed.init(strict=True, backend=name)
    except RuntimeError as error:
        hint = "" if mx.distributed.is_available(name) else _HINTS.get(name, "")
        raise ValueError(
            f"the ranks cannot be joined by {name}: {hint or error}; start them with mlx.launch or "
            "mpirun"
        ) from error
    finally:
        faulthandler.cancel_dump_traceback_later()


def _ring_hosts(hostfile: str) -> int:
    try:
        return len(json.loads(Path(hostfile).read_text(encoding="utf-8")))
    except ValueError:  # `mlx.launch -n 1` leaves it empty
        return 1
    except OSError as error:
        raise ValueError(f"MLX_HOSTFILE names {hostfile}, which cannot be read: {error}") from error

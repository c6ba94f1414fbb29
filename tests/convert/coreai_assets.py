"""Assets of Core AI for tests: a model written as one, and tokens sent through it."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import golden_set  # imports openelm_mlx, so that OpenBLAS comes before mlx.core
import numpy as np
import pytest

from convert.coreai_graph import build
from convert.coreai_runner import Bundle, Runner
from convert.coreai_weights import settle
from openelm_mlx.model import Model

needs_coreai = pytest.mark.skipif(
    importlib.util.find_spec("coreai") is None, reason="the extra coreai is not installed"
)


def copy_of(model: Model) -> Model:
    """The same weights in another, plain model, for what changes a model in place."""
    twin = Model(model.args)
    twin.load_weights(golden_set.flat(model), strict=True)
    twin.eval()
    return twin


def write_asset(model: Model, folder: Path, weights: str | None = None) -> Bundle:
    """A plain model as an asset without a bundle around it."""
    program = build(model, settle(model, weights))
    asset = folder / "tiny.aimodel"
    program.save(asset, {})
    args = model.args
    return Bundle(
        folder=folder,
        name="tiny",
        asset=asset,
        vocab_size=args.vocab_size,
        context=args.max_context_length,
    )


@contextmanager
def running(model: Model, folder: Path, weights: str | None = None) -> Iterator[Runner]:
    """``write_asset``, in Apple's runtime."""
    with Runner(write_asset(model, folder, weights)) as runner:
        yield runner


def in_chunks(runner: Runner, ids: Sequence[int], sizes: Sequence[int]) -> np.ndarray:
    """(n, V) float32 logits of a new sequence that goes in by pieces."""
    runner.reset()
    stops = np.cumsum([0, *sizes])
    assert stops[-1] == len(ids)
    pieces = [runner.feed_all(ids[a:b]) for a, b in pairwise(stops.tolist())]
    return np.concatenate(pieces).astype(np.float32)

"""Fixtures that several test modules share."""

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import blas_threads  # noqa: F401  # before OpenBLAS
import golden_set  # imports openelm_mlx, so that OpenBLAS comes before mlx.core
import mlx.core as mx
import pytest
import tiny_tokenizer as tiny
from model_makers import model_of
from slow_params import slow

from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import Tokenizer


def pytest_configure() -> None:
    """A shell's background job ignores Ctrl-C, and so would every command that tests start."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Keep what collecting made out of the garbage collector's rounds, a tenth of the time."""
    gc.collect()
    gc.freeze()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that take ``golden_model`` once for each tiny model at hand: two, and slow ones."""
    if "golden_model" in metafunc.fixturenames:
        models = golden_set.models()
        metafunc.parametrize("golden_model", [*models[:2], *slow(*models[2:])])


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Files are written, but the disk is not waited for, which took longer than the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Path]:
    """``golden("io/x.safetensors")``: the best copy there is, or the test is skipped."""

    def path(name: str) -> Path:
        found = golden_set.find(name)
        if found is None:
            pytest.skip(f"golden {name} is not in the committed cut")
        return found

    return path


@pytest.fixture
def tiny_args() -> ModelArgs:
    """Unequal layers: heads [2, 4], kv heads [1, 2], feed-forward [0.5, 1.0]; 61 tokens."""
    return ModelArgs.from_scaling(
        num_transformer_layers=2,
        model_dim=32,
        head_dim=8,
        qkv_multipliers=(0.5, 1.0),
        ffn_multipliers=(0.5, 1.0),
        num_gqa_groups=2,
        ffn_dim_divisor=8,
        vocab_size=61,
    )


@pytest.fixture
def tiny_model(tiny_args: ModelArgs) -> Model:
    """Float32, in eval mode, norm weights far from 1 so that a forgotten norm shows."""
    return model_of(tiny_args, seed=1)


@pytest.fixture
def tiny_model_dir(tiny_model: Model, tmp_path: Path) -> Path:
    """``tiny_model`` saved as a model folder without a tokenizer."""
    from openelm_mlx.checkpoint import save_model

    folder = tmp_path / "tiny"
    save_model(tiny_model, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tiny.TinyTokenizer:
    """320 pieces with byte fallback, unk 0, bos 1, eos 2, no pad: ``.path`` and ``.tokenizer``."""
    path = tiny.train(tmp_path_factory.mktemp("tokenizer") / "tokenizer.model")
    return tiny.TinyTokenizer(path, Tokenizer.from_path(path))


@pytest.fixture(scope="session")
def complete_dir(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: tiny.TinyTokenizer
) -> Path:
    """A self-contained, read-only model folder: unequal layers, 320 rows, ``tiny_tokenizer``."""
    from openelm_mlx.checkpoint import save_model

    args = ModelArgs.from_scaling(
        num_transformer_layers=2,
        model_dim=32,
        head_dim=8,
        qkv_multipliers=(0.5, 1.0),
        ffn_multipliers=(0.5, 1.0),
        num_gqa_groups=2,
        ffn_dim_divisor=8,
        vocab_size=tiny_tokenizer.tokenizer.vocab_size,
    )
    mx.random.seed(2)
    folder = tmp_path_factory.mktemp("models") / "complete"
    model = Model(args)
    table = model.transformer.token_embeddings
    table.weight[:259] *= 0.1  # seldom the likeliest: special and byte pieces read as noise
    save_model(model, folder, tokenizer=tiny_tokenizer.tokenizer)
    return folder

"""Small models, batches and runs for the tests of training."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from openelm_mlx.batches import Batch
from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Model

VOCAB = 23


def make_model(seed: int = 3) -> Model:
    """Two unequal layers, 23 tokens, float32."""
    mx.random.seed(seed)
    model = Model(
        ModelArgs.from_scaling(
            num_transformer_layers=2,
            model_dim=16,
            head_dim=4,
            qkv_multipliers=(0.5, 1.0),
            ffn_multipliers=(0.5, 1.0),
            num_gqa_groups=2,
            ffn_dim_divisor=4,
            vocab_size=VOCAB,
        )
    )
    mx.eval(model.parameters())
    return model


def make_batch(seed: int, rows: int = 4, length: int = 8) -> Batch:
    """Sequences that count up by one, of unequal lengths: learnable in a few steps."""
    rng = random.Random(seed)
    tokens, targets, mask = [], [], []
    for _ in range(rows):
        start, n = rng.randrange(VOCAB), rng.randint(3, length)
        ids = [(start + i) % VOCAB for i in range(length + 1)]
        tokens.append(ids[:-1])
        targets.append(ids[1:])
        mask.append([1.0] * n + [0.0] * (length - n))
    return Batch(
        tokens=mx.array(tokens, dtype=mx.int32),
        targets=mx.array(targets, dtype=mx.int32),
        mask=mx.array(mask),
        samples=tuple(f"batch {seed} row {r}" for r in range(rows)),
    )


class CountingBatches:
    """An endless source with an exact position."""

    def __init__(self, rows: int = 4, fail_at: int | None = None) -> None:
        self.position, self.rows, self.fail_at = 0, rows, fail_at

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = make_batch(self.position, self.rows)
        self.position += 1
        if self.position == self.fail_at:
            return Batch(
                tokens=batch.tokens,
                targets=batch.targets,
                mask=batch.mask * float("nan"),
                samples=batch.samples,
            )
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]


def weights_of(model: Model) -> dict[str, mx.array]:
    """name -> array, for comparisons."""
    leaves: Any = tree_flatten(model.parameters())
    return dict(leaves)


def equal_weights(a: Model, b: Model) -> bool:
    """Bit for bit."""
    other = weights_of(b)
    return all(mx.array_equal(x, other[name]).item() for name, x in weights_of(a).items())

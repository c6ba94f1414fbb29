"""A real model that says what a test wants: each token has one successor, whatever came before."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import mlx.core as mx

from openelm_mlx.checkpoint import save_model
from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import Tokenizer

PIECES = ["▁the", "▁h", "ou", "s", "e", "▁sa", "i", "d", "▁o", "n", "c", "."]
TEXT = "the house said onc."


def ids_of(tokenizer: Tokenizer, pieces: Sequence[str] = PIECES) -> list[int]:
    """The ids of pieces."""
    table = {tokenizer.piece(i): i for i in range(tokenizer.vocab_size)}
    return [table[piece] for piece in pieces]


def chain(*ids: Sequence[int]) -> dict[int, int]:
    """Successors along sequences of ids."""
    return {a: b for run in ids for a, b in pairwise(run)}


def chain_model(
    successors: Mapping[int, int], *, vocab_size: int, otherwise: int = 2, context: int = 2048
) -> Model:
    """A model that puts nearly all probability on ``successors[token]``, else on ``otherwise``.

    The embedding is the identity and the layers add nothing, so that the head, one row a
    successor, sees the newest token alone; the caches are filled as in any model.
    """
    args = ModelArgs.from_scaling(
        num_transformer_layers=2,
        model_dim=vocab_size,
        head_dim=32,
        qkv_multipliers=(0.1, 0.2),
        ffn_multipliers=(0.1, 0.2),
        num_gqa_groups=1,
        ffn_dim_divisor=8,
        vocab_size=vocab_size,
        max_context_length=context,
        share_input_output_layers=False,
    )
    model = Model(args)
    table = [successors.get(token, otherwise) for token in range(vocab_size)]
    head = mx.zeros((vocab_size, vocab_size))
    head[mx.array(table), mx.arange(vocab_size)] = 10.0
    weights = {"transformer.token_embeddings.weight": mx.eye(vocab_size), "lm_head.weight": head}
    for i, layer in enumerate(model.layers):
        for name, linear in (
            ("attn.out_proj", layer.attn.out_proj),
            ("ffn.proj_2", layer.ffn.proj_2),
        ):
            weights[f"transformer.layers.{i}.{name}.weight"] = mx.zeros_like(linear.weight)
    model.load_weights(list(weights.items()), strict=False)
    model.eval()
    mx.eval(model.parameters())
    return model


def save_talker(folder: Path, tokenizer: Tokenizer) -> Path:
    """Write a complete model folder that continues an empty prompt with TEXT; context 64."""
    successors = chain([1, *ids_of(tokenizer), 2])
    model = chain_model(successors, vocab_size=tokenizer.vocab_size, context=64)
    save_model(model, folder, tokenizer=tokenizer)
    return folder

"""A real model that says what a test wants: each token has one successor, whatever came before."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import mlx.core as mx

from openelm_mlx.config import ModelArgs
from openelm_mlx.model import Model


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

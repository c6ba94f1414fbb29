"""Parameter names and vocabulary rows: CoreNet <-> Hugging Face = mlx_lm = ours.

CoreNet writes ``layers.0.attn.qkv_proj.weight`` where the others write
``transformer.layers.0.attn.qkv_proj.weight``; shapes and order are equal (BEHAVIOURS 13). Its
vocabulary has 32128 rows (32000 is the padding id, the rest is spare) where the Hub's has 32000.
"""

import mlx.core as mx

PREFIX = "transformer."
TABLES = ("transformer.token_embeddings.weight", "lm_head.weight")  # one row a vocabulary entry
_HEADS = {"classifier": "lm_head"}  # the untied output head


def to_huggingface(name: str) -> str:
    """CoreNet's name of a parameter -> Hugging Face's; names that have the prefix stay."""
    stem, dot, rest = name.partition(".")
    if stem in _HEADS:
        return _HEADS[stem] + dot + rest
    if name.startswith(PREFIX) or stem in _HEADS.values():
        return name
    return PREFIX + name


def to_corenet(name: str) -> str:
    """Hugging Face's name of a parameter -> CoreNet's.

    Raises:
        ValueError: for a name that is neither the head nor below ``transformer.``.
    """
    stem, dot, rest = name.partition(".")
    for corenet, huggingface in _HEADS.items():
        if stem == huggingface:
            return corenet + dot + rest
    if not name.startswith(PREFIX):
        raise ValueError(f"{name!r} is not a parameter of OpenELM; expected 'transformer.…'")
    return name.removeprefix(PREFIX)


def is_corenet(names: set[str]) -> bool:
    """Whether a checkpoint uses CoreNet's names, also inside LoRA wrappers."""
    return any(name.startswith(("token_embeddings.", "layers.0.")) for name in names)


def split_rows(table: mx.array, vocab_size: int) -> tuple[mx.array, mx.array | None]:
    """Divide a (rows, D) table into the first ``vocab_size`` rows and what lies beyond.

    Returns:
        (vocab_size, D) and (rows - vocab_size, D), the second None where nothing lies beyond.

    Raises:
        ValueError: if the table has fewer rows than that.
    """
    rows = table.shape[0]
    if rows < vocab_size:
        raise ValueError(
            f"the checkpoint has {rows} vocabulary rows, fewer than the {vocab_size} asked for; "
            f"give --vocab-size {rows} or less"
        )
    return table[:vocab_size], table[vocab_size:] if rows > vocab_size else None


def join_rows(table: mx.array, rest: mx.array) -> mx.array:
    """The inverse of :func:`split_rows`: (V, D) and (R, D) -> (V + R, D) in ``table``'s dtype."""
    return mx.concatenate([table, rest.astype(table.dtype)])

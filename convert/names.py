"""Parameter names and vocabulary rows: CoreNet <-> Hugging Face = mlx_lm = ours.

CoreNet writes ``layers.0.attn.qkv_proj.weight`` where the others write
``transformer.layers.0.attn.qkv_proj.weight``; shapes and order are equal (BEHAVIOURS 13). Its
vocabulary has 32128 rows (32000 is the padding id, the rest is spare) where the Hub's has 32000.
"""

import mlx.core as mx

PREFIX = "transformer."
TABLES = ("transformer.token_embeddings.weight", "lm_head.weight")  # one row a vocabulary entry
ROWS_FILE = "corenet_rows.safetensors"  # rows past the vocabulary, kept beside the model
CORENET_ROWS, HUB_ROWS = 32128, 32000  # how many rows either has as released
_HEADS = {"classifier": "lm_head"}  # the untied output head
_LAYER_ORDER = (
    *("attn.qkv_proj", "attn.q_norm", "attn.k_norm", "attn.out_proj"),
    *("ffn.proj_1", "ffn.proj_2", "ffn_norm", "attn_norm"),
)
_ORDER = ("token_embeddings", "layers", "norm", "classifier")


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


def corenet_order(name: str) -> tuple[int, int, int]:
    """Sort key that puts CoreNet's names in the order of its ``state_dict``.

    Source: apple/corenet@1aa3acd ``general_gpt.py``, the order in which modules are made.
    """
    stem, *rest = name.split(".")
    part = ".".join(rest[1:]).removesuffix(".weight")
    layer = int(rest[0]) if stem == "layers" else 0
    return (
        _ORDER.index(stem) if stem in _ORDER else len(_ORDER),
        layer,
        _LAYER_ORDER.index(part) if part in _LAYER_ORDER else len(_LAYER_ORDER),
    )


def is_corenet(names: set[str]) -> bool:
    """Whether a checkpoint uses CoreNet's names, also inside LoRA wrappers."""
    return any(name.startswith(("token_embeddings.", "layers.0.")) for name in names)


def split_rows(table: mx.array, vocab_size: int) -> tuple[mx.array, mx.array | None]:
    """Divide a (rows, D) table into the first ``vocab_size`` rows and what lies beyond.

    Returns:
        (vocab_size, D) and (rows - vocab_size, D), the second None where nothing lies beyond;
        views of ``table``, not copies.

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

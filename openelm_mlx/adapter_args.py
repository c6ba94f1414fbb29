"""Settings of low-rank adapters, checked, and what ``scale`` means."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, Self

# A module's short name -> where it is: inside a layer, or in the model.
LAYER_MODULES = {
    "qkv_proj": "attn.qkv_proj",
    "out_proj": "attn.out_proj",
    "proj_1": "ffn.proj_1",
    "proj_2": "ffn.proj_2",
}
MODEL_MODULES = {"token_embeddings": "transformer.token_embeddings", "lm_head": "lm_head"}
# apple/corenet@1aa3acd projects/openelm/peft_configs/openelm_lora_*.yaml
APPLE_TARGETS = ("qkv_proj", "out_proj", "proj_1", "proj_2", "token_embeddings")


@dataclass(frozen=True, kw_only=True)
class AdapterArgs:
    """Low-rank adapter settings.

    ``target_modules`` takes OpenELM's own names (``qkv_proj out_proj proj_1 proj_2
    token_embeddings``, and ``lm_head`` where the head is untied), mlx_lm's keys inside a layer
    (``attn.qkv_proj``), or one module's whole path (``transformer.layers.2.attn.qkv_proj``,
    whatever ``num_layers`` says). The default is Apple's set. The embedding is in no layer:
    ``num_layers`` does not touch it. Under ``kind="dora"`` it gets plain LoRA, the one combination
    that runs in CoreNet, unless ``embedding_magnitude`` is set.

    Raises:
        ValueError: for the first setting that is out of range or no name of a module.
    """

    rank: int = 8
    scale: float = 20.0  # multiplies lora_a @ lora_b; alpha / rank in PEFT's terms
    dropout: float = 0.0  # on the adapters' input, not on the base's
    kind: Literal["lora", "dora"] = "lora"
    target_modules: Sequence[str] = APPLE_TARGETS
    num_layers: int = -1  # the last n layers, -1 for all, as in mlx_lm
    use_rslora: bool = False  # `scale` was made as alpha / sqrt(rank): kept for PEFT and CoreNet
    # The length that DoRA learns of the embedding: PEFT's, one a feature, or mlx_lm's, one a token.
    embedding_magnitude: Literal["none", "feature", "token"] = "none"
    adapt_tied_head: bool = False  # mlx_lm's way: the embedding's adapter reaches a tied head too

    def __post_init__(self) -> None:
        _check_rank(self.rank)
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"adapter scale must be a positive number, got {self.scale}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"adapter dropout must lie in [0, 1), got {self.dropout}")
        if self.kind not in ("lora", "dora"):
            raise ValueError(f"adapter kind must be lora or dora, got {self.kind!r}")
        if self.num_layers != -1 and self.num_layers < 1:
            raise ValueError(
                f"num_layers must be positive, or -1 for all layers, got {self.num_layers}"
            )
        if isinstance(self.target_modules, str):
            raise ValueError(
                f"target_modules must be a list of names, got the text {self.target_modules!r}"
            )
        object.__setattr__(self, "target_modules", tuple(dict.fromkeys(self.target_modules)))
        _check_targets(self.target_modules)
        self._check_magnitude()

    @classmethod
    def from_alpha(
        cls,
        *,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        kind: Literal["lora", "dora"] = "lora",
        target_modules: Sequence[str] = APPLE_TARGETS,
        num_layers: int = -1,
        use_rslora: bool = False,
        embedding_magnitude: Literal["none", "feature", "token"] = "none",
    ) -> Self:
        """Settings in CoreNet's and PEFT's terms, with ``alpha`` in place of ``scale``."""
        return cls(
            rank=rank,
            scale=scale_of(alpha, rank, use_rslora=use_rslora),
            dropout=dropout,
            kind=kind,
            target_modules=target_modules,
            num_layers=num_layers,
            use_rslora=use_rslora,
            embedding_magnitude=embedding_magnitude,
        )

    @property
    def adapts_embedding(self) -> bool:
        """Whether the token embedding is among the targets."""
        return any(short_name(target) == "token_embeddings" for target in self.target_modules)

    def _check_magnitude(self) -> None:
        magnitude = self.embedding_magnitude
        if magnitude not in ("none", "feature", "token"):
            raise ValueError(
                f"embedding_magnitude must be none, feature or token, got {magnitude!r}"
            )
        if magnitude != "none" and not (self.kind == "dora" and self.adapts_embedding):
            raise ValueError(
                f"embedding_magnitude {magnitude!r} needs kind dora and token_embeddings among the "
                "target modules"
            )
        linear = any(short_name(target) != "token_embeddings" for target in self.target_modules)
        if self.kind == "dora" and magnitude == "none" and not linear:
            raise ValueError(
                "DoRA on token_embeddings alone would be plain LoRA: use kind lora, or set "
                "embedding_magnitude to feature (PEFT's) or token (mlx_lm's)"
            )

    @property
    def alpha(self) -> float:
        """What CoreNet and PEFT call alpha: the inverse of :func:`scale_of`."""
        return self.scale * (math.sqrt(self.rank) if self.use_rslora else self.rank)


def scale_of(alpha: float, rank: int, *, use_rslora: bool = False) -> float:
    """The factor before ``lora_a @ lora_b``: alpha / rank, for rsLoRA alpha / sqrt(rank).

    Kalajdzievski 2023 (arXiv 2312.03732) for the second.

    Raises:
        ValueError: if ``rank`` is no positive integer.
    """
    _check_rank(rank)
    return alpha / (math.sqrt(rank) if use_rslora else rank)


def short_name(target: str) -> str:
    """``attn.qkv_proj`` or ``transformer.layers.2.attn.qkv_proj`` -> ``qkv_proj``."""
    return target.rpartition(".")[2]


def mlx_lm_key(target: str) -> str:
    """A target as mlx_lm's ``lora_parameters.keys`` spell it; whole paths stay."""
    return (LAYER_MODULES | MODEL_MODULES).get(target, target)


def matches(target: str, path: str) -> bool:
    """Whether a target names the module at ``path``, short, by mlx_lm's key or in full."""
    key = mlx_lm_key(target)
    return path == key or (key in LAYER_MODULES.values() and path.endswith("." + key))


def _check_rank(rank: int) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank <= 0:
        raise ValueError(
            f"adapter rank must be a positive integer, got {rank!r}; "
            "use --fine-tune-type full to train without adapters"
        )


def _check_targets(targets: Sequence[str]) -> None:
    known = [*LAYER_MODULES, *MODEL_MODULES]
    if not targets:
        raise ValueError(f"target_modules is empty; choose from {', '.join(known)}")
    for target in targets:
        if short_name(target) not in known:
            near = get_close_matches(short_name(target), known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(
                f"OpenELM has no module {target!r}{hint}; it has {', '.join(known)} "
                "(queries, keys and values are one matrix, qkv_proj)"
            )

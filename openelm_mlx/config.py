"""Layer-wise scaling: the settings of an OpenELM model and the four published sizes.

Knows Hugging Face's ``config.json`` (names and keys), not files. Widths follow Apple's code:
apple/corenet@1aa3acd ``corenet/modeling/models/language_modeling/general_gpt.py``; the paper is
Mehta et al. 2024 (arXiv 2404.14619), section 2.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from openelm_mlx.config_check import problems
from openelm_mlx.scaling import MULTIPLIER, make_divisible, per_layer

logger = logging.getLogger(__name__)

# Keys of a config.json that say nothing about the architecture: kept on save, never warned about.
_NEUTRAL_KEYS = frozenset(
    {
        *("architectures", "auto_map", "model_file", "name", "model_name", "_name_or_path"),
        *("torch_dtype", "dtype", "quantization", "quantization_config", "transformers_version"),
        *("pad_token_id", "unk_token_id", "return_dict", "is_decoder", "license"),
        *("output_attentions", "output_hidden_states"),
    }
)


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """An OpenELM architecture, with every per-layer width worked out.

    Field names and defaults are those of Apple's ``OpenELMConfig`` (Hugging Face,
    ``configuration_openelm.py``). A multiplier may be one number (all layers alike), a pair (linear
    over the layers) or, for ``ffn_multipliers``, one number a layer; after construction
    ``num_query_heads``, ``num_kv_heads`` and ``ffn_multipliers`` hold one value a layer.

    Raises:
        ValueError: listing every setting that is out of range or contradicts another.
    """

    model_type: str = "openelm"
    vocab_size: int = 32000
    max_context_length: int = (
        2048  # tokens; what the model was trained for, not a limit of the code
    )
    num_transformer_layers: int = 12
    model_dim: int = 2048
    head_dim: int = 128
    qkv_multipliers: MULTIPLIER | None = None  # None: 1.0, or unknown where the lists are given
    num_query_heads: Sequence[int] = ()
    num_kv_heads: Sequence[int] = ()
    num_gqa_groups: int = 1  # query heads per key-value head
    ffn_multipliers: MULTIPLIER = 4.0
    ffn_with_glu: bool = True
    ffn_dim_divisor: int = 256
    activation_fn_name: str = "swish"
    normalization_layer_name: str = "rms_norm"
    normalize_qk_projections: bool = False
    share_input_output_layers: bool = False
    rope_freq_constant: float = 10000
    rope_max_length: int = 4096  # size of CoreNet's table, which grows; kept for Apple's code
    rms_norm_eps: float = 1e-6  # fixed in Apple's code; mlx_lm reads this key
    initializer_range: float = 0.02  # unused by Apple's code; kept for it
    use_cache: bool = True
    bos_token_id: int = 1
    eos_token_id: int | Sequence[int] = 2
    tie_word_embeddings: bool | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # config keys that are not ours

    def __post_init__(self) -> None:
        found = problems({f.name: getattr(self, f.name) for f in fields(self)})
        if found:
            raise ValueError("config: " + "; ".join(found))
        self._resolve_heads()
        self._resolve_ffn()

    def _scaled_query_heads(self) -> list[int]:
        """What the multipliers alone give."""
        multipliers = 1.0 if self.qkv_multipliers is None else self.qkv_multipliers
        divisor = self.head_dim * self.num_gqa_groups
        return [
            make_divisible(self.model_dim * m, divisor) // self.head_dim
            for m in per_layer("qkv_multipliers", multipliers, self.num_transformer_layers)
        ]

    def _resolve_heads(self) -> None:
        """Fill ``num_query_heads`` and ``num_kv_heads``; given lists win over the multipliers."""
        groups, scaled = self.num_gqa_groups, self._scaled_query_heads()
        kv_heads = list(self.num_kv_heads)
        query_heads = list(self.num_query_heads) or [k * groups for k in kv_heads] or scaled
        kv_heads = kv_heads or [q // groups for q in query_heads]
        for i, (q, k) in enumerate(zip(query_heads, kv_heads, strict=True)):
            if q < 1 or k < 1 or q % k:
                raise ValueError(
                    f"config: layer {i} has {q} query and {k} key-value heads; the first must be "
                    "a positive multiple of the second"
                )
        object.__setattr__(self, "num_query_heads", tuple(query_heads))
        object.__setattr__(self, "num_kv_heads", tuple(kv_heads))

    def _lists_contradict_multipliers(self) -> bool:
        query_heads = list(self.num_query_heads)
        derived = [q // self.num_gqa_groups for q in query_heads]
        scaled = query_heads if self.qkv_multipliers is None else self._scaled_query_heads()
        return list(self.num_kv_heads) != derived or query_heads != scaled

    def _resolve_ffn(self) -> None:
        multipliers = per_layer(
            "ffn_multipliers", self.ffn_multipliers, self.num_transformer_layers, expanded=True
        )
        object.__setattr__(self, "ffn_multipliers", tuple(multipliers))
        if isinstance(self.qkv_multipliers, Sequence):
            object.__setattr__(self, "qkv_multipliers", tuple(self.qkv_multipliers))

    @property
    def ffn_dims(self) -> list[int]:
        """Inner width of each layer's feed-forward network."""
        return [make_divisible(m * self.model_dim, self.ffn_dim_divisor) for m in self._ffn_ratios]

    @property
    def _ffn_ratios(self) -> list[float]:
        """``ffn_multipliers`` with the type it has after construction."""
        ratios = self.ffn_multipliers
        return list(ratios) if isinstance(ratios, Sequence) else [ratios]

    @property
    def layer_parameters(self) -> list[int]:
        """Parameters of each transformer layer."""
        qk_norm = 2 * self.head_dim if self.normalize_qk_projections else 0
        up = 2 if self.ffn_with_glu else 1
        return [
            self.model_dim * self.head_dim * (2 * q + 2 * k)
            + self.model_dim * ffn * (up + 1)
            + 2 * self.model_dim
            + qk_norm
            for q, k, ffn in zip(
                self.num_query_heads, self.num_kv_heads, self.ffn_dims, strict=True
            )
        ]

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, the tied table counted once."""
        tables = 1 if self.share_input_output_layers else 2
        return (
            tables * self.vocab_size * self.model_dim + sum(self.layer_parameters) + self.model_dim
        )

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """Bytes that one more token adds to the key-value cache of all layers."""
        return 2 * sum(self.num_kv_heads) * self.head_dim * bytes_per_value

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Read a Hugging Face ``config.json``.

        Absent keys take Apple's defaults; keys that are not known are kept in ``extra`` and named
        in one warning. Per-layer head counts win over multipliers that say otherwise, with one
        warning.

        Args:
            config: the parsed JSON object.

        Raises:
            ValueError: for another ``model_type`` or settings that make no OpenELM model.
        """
        known = {f.name for f in fields(cls)} - {"extra"}
        extra = {key: value for key, value in config.items() if key not in known}
        unknown = sorted(set(extra) - _NEUTRAL_KEYS)
        if unknown:
            logger.warning("config: keys kept but not used: %s", ", ".join(unknown))
        given = {k: v for k, v in config.items() if k in known and v is not None}
        args = cls(**given, extra=extra)
        if args._lists_contradict_multipliers():
            logger.warning(
                "config: the per-layer head counts contradict qkv_multipliers / num_gqa_groups; "
                "the per-layer lists are used"
            )
        return args

    @classmethod
    def from_scaling(
        cls,
        *,
        num_transformer_layers: int,
        model_dim: int,
        head_dim: int,
        qkv_multipliers: MULTIPLIER = (0.5, 1.0),
        ffn_multipliers: MULTIPLIER = (0.5, 4.0),
        num_gqa_groups: int = 4,
        ffn_dim_divisor: int = 256,
        vocab_size: int = 32000,
        normalize_qk_projections: bool = True,
        share_input_output_layers: bool = True,
        **settings: Any,
    ) -> Self:
        """Build a layer-wise scaled architecture as CoreNet's ``GPTConfig`` does.

        The defaults are those of the four published sizes. Layer i of N takes
        alpha = lo + (hi - lo) i / (N - 1), rounded to two decimals as NumPy rounds (paper, eq. 1).

        Args:
            num_transformer_layers: N.
            model_dim: width of the residual stream.
            head_dim: width of a head.
            qkv_multipliers: one number, or (first, last) layer's query width / ``model_dim``.
            ffn_multipliers: one number, or (first, last) layer's inner width / ``model_dim``.
            num_gqa_groups: query heads per key-value head.
            ffn_dim_divisor: inner widths are multiples of this.
            vocab_size: rows of the embedding table.
            normalize_qk_projections: RMSNorm on queries and keys.
            share_input_output_layers: tie the output head to the embedding.
            **settings: any other field.

        Raises:
            ValueError: as the constructor does.
        """
        return cls(
            num_transformer_layers=num_transformer_layers,
            model_dim=model_dim,
            head_dim=head_dim,
            qkv_multipliers=qkv_multipliers,
            ffn_multipliers=ffn_multipliers,
            num_gqa_groups=num_gqa_groups,
            ffn_dim_divisor=ffn_dim_divisor,
            vocab_size=vocab_size,
            normalize_qk_projections=normalize_qk_projections,
            share_input_output_layers=share_input_output_layers,
            **settings,
        )

    @classmethod
    def preset(cls, name: str, *, vocab_size: int = 32000) -> Self:
        """One of the published sizes: ``270M``, ``450M``, ``1.1B`` or ``3B``.

        Args:
            name: the size, also as ``OpenELM-1_1B`` or ``apple/OpenELM-1_1B-Instruct``.
            vocab_size: 32000 as released on the Hub; CoreNet trains with 32128 rows.

        Raises:
            ValueError: for any other name, listing those that exist.
        """
        size = name.rsplit("/", 1)[-1].lower().replace("_", ".")
        size = size.removeprefix("openelm-").removesuffix("-instruct")
        if size not in _PRESETS:
            raise ValueError(f"no preset {name!r}; choose one of 270M, 450M, 1.1B, 3B")
        layers, model_dim, head_dim = _PRESETS[size]
        return cls.from_scaling(
            num_transformer_layers=layers,
            model_dim=model_dim,
            head_dim=head_dim,
            vocab_size=vocab_size,
        )

    def to_dict(self) -> dict[str, Any]:
        """The ``config.json`` that Apple's Hugging Face code, mlx_lm and this library read.

        Returns:
            JSON-ready values; ``ffn_multipliers`` and the head counts expanded to one a layer, the
            kept unknown keys included, ``tie_word_embeddings: false`` where the head is untied
            (without it transformers would tie it).
        """
        out: dict[str, Any] = {"architectures": ["OpenELMForCausalLM"], **self.extra}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("extra", "tie_word_embeddings") or value is None:
                continue
            if f.name == "rms_norm_eps" and value == 1e-6:
                continue  # Apple's code has no such key
            out[f.name] = list(value) if isinstance(value, tuple) else value
        if not self.share_input_output_layers:
            out["tie_word_embeddings"] = False
        return out

    def with_vocab_size(self, vocab_size: int) -> Self:
        """The same architecture with another number of embedding rows."""
        return replace(self, vocab_size=vocab_size)


_PRESETS = {  # layers, model_dim, head_dim: corenet general_gpt.py, gpt_configs
    "270m": (16, 1280, 64),
    "450m": (20, 1536, 64),
    "1.1b": (28, 2048, 64),
    "3b": (36, 3072, 128),
}

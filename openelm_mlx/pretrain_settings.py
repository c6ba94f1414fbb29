"""What pretraining is made of: the architecture, the text, and how it is cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx

from openelm_mlx.config import ModelArgs

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ArchitectureArgs:
    """The model to train: a published size, or one scaled anew."""

    preset: str | None = None  # 270M, 450M, 1.1B or 3B
    num_transformer_layers: int | None = None  # without a preset
    model_dim: int | None = None  # width of the residual stream
    head_dim: int = 64
    qkv_multipliers: Sequence[float] = (0.5, 1.0)  # query width / model_dim, first and last layer
    ffn_multipliers: Sequence[float] = (0.5, 4.0)  # inner width / model_dim, first and last layer
    num_gqa_groups: int = 4  # query heads per key-value head
    ffn_dim_divisor: int = 256
    vocab_size: int | None = None  # rows of the embedding; default: the tokenizer's pieces
    max_context_length: int = 2048
    normalize_qk_projections: bool = True
    share_input_output_layers: bool = True
    dtype: str | None = None  # of the weights; default bfloat16 on a GPU, else float32

    def __post_init__(self) -> None:
        problems = []
        if self.preset is None and None in (self.num_transformer_layers, self.model_dim):
            problems.append("give preset, or num_transformer_layers and model_dim")
        if self.preset is not None and (self.num_transformer_layers or self.model_dim):
            problems.append("preset already says num_transformer_layers and model_dim; give one")
        if self.dtype is not None and self.dtype not in DTYPES:
            problems.append(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if problems:
            raise ValueError("architecture: " + "; ".join(problems))

    def build(self, pieces: int) -> ModelArgs:
        """The architecture for a tokenizer with that many pieces.

        Raises:
            ValueError: if the vocabulary is smaller than the tokenizer, or the shape impossible.
        """
        rows = self.vocab_size or pieces
        if rows < pieces:
            raise ValueError(
                f"vocab_size {rows} is smaller than the tokenizer's {pieces} pieces; give at "
                f"least {pieces}"
            )
        if self.preset is not None:
            return ModelArgs.preset(self.preset, vocab_size=rows)
        return ModelArgs.from_scaling(
            num_transformer_layers=self.num_transformer_layers or 0,
            model_dim=self.model_dim or 0,
            head_dim=self.head_dim,
            qkv_multipliers=_one_or_pair(self.qkv_multipliers),
            ffn_multipliers=_one_or_pair(self.ffn_multipliers),
            num_gqa_groups=self.num_gqa_groups,
            ffn_dim_divisor=self.ffn_dim_divisor,
            vocab_size=rows,
            max_context_length=self.max_context_length,
            normalize_qk_projections=self.normalize_qk_projections,
            share_input_output_layers=self.share_input_output_layers,
        )

    def weights_dtype(self) -> mx.Dtype:
        """The dtype of the weights here."""
        on_gpu = mx.default_device().type == mx.gpu
        name = self.dtype or ("bfloat16" if on_gpu else "float32")
        dtype: mx.Dtype = getattr(mx, name)
        return dtype


@dataclass(frozen=True, kw_only=True)
class TextArgs:
    """The text to train on, and how it becomes batches."""

    data: Sequence[str]  # files, folders, patterns, Hub data sets, YAML lists of CoreNet's form
    valid_data: Sequence[str] = ()  # the same, for validation
    tokenizer: str  # file, folder or Hub id
    data_root: str = ""  # folder that relative names in YAML lists are in
    text_key: str = "text"  # of a record's text
    data_mode: str = "packed"  # or "corenet": one piece a sequence, cut or padded
    separate_documents: bool = True  # packed documents do not see each other
    batch_size: int = 16  # sequences of a micro-batch, over all ranks
    max_seq_length: int = 2048  # tokens of a sequence
    shuffle: bool = True
    epochs: int | None = None  # passes over the text; default: as many as iters needs
    on_damage: str = "fail"  # or "skip": what a damaged line or file does
    corenet_workers: int = 1  # data workers a rank whose file order is followed
    corenet_ranks: int | None = None  # ranks of the run that is followed; default: the machines

    def __post_init__(self) -> None:
        problems = []
        if not self.data:
            problems.append("data must name at least one file, folder or data set")
        if self.data_mode not in ("packed", "corenet"):
            problems.append(f"data_mode {self.data_mode!r} is not one of packed, corenet")
        if self.on_damage not in ("fail", "skip"):
            problems.append(f"on_damage {self.on_damage!r} is not one of fail, skip")
        if self.data_mode == "corenet" and self.epochs is not None:
            problems.append("epochs has no effect in corenet mode, whose data is endless")
        problems += [
            f"{name} must be at least {least}, got {getattr(self, name)}"
            for name, least in (("batch_size", 1), ("max_seq_length", 2))
            if getattr(self, name) < least
        ]
        if problems:
            raise ValueError("text: " + "; ".join(problems))


def entries(names: Sequence[str]) -> list[Any]:
    """Entries of a mixture, names of lists that come with the package turned into their files."""
    folder = Path(str(files("openelm_mlx") / "recipes"))
    known = {p.stem: p for p in folder.glob("data_*.yaml")}
    return [str(known.get(name, name)) for name in names]


def _one_or_pair(values: Sequence[float]) -> float | Sequence[float]:
    return values[0] if len(values) == 1 else tuple(values)

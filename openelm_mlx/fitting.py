"""From a config and named tensors to a model that fits them, quantised where they are.

Knows names, shapes and kinds of numbers; not the files they come from.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from openelm_mlx.config import ModelArgs
from openelm_mlx.mismatch import check_tensors
from openelm_mlx.model import Model
from openelm_mlx.weight_files import StoredTensor, one_line

T = TypeVar("T")
_HEADS = ("lm_head.weight", "transformer.classifier.weight")


def build_model(
    args: ModelArgs, weights: Mapping[str, mx.array], *, source: str, lazy: bool = False
) -> Model:
    """A model with the given tensors, quantised as ``args`` says, in eval mode.

    Args:
        args: the architecture; ``args.extra["quantization"]`` as mlx_lm writes it.
        weights: Hugging Face's or CoreNet's names.
        source: where the tensors came from, for messages.
        lazy: do not evaluate the weights.

    Raises:
        ValueError: naming all missing, unexpected and mis-shaped tensors at once.
    """
    weights = Model(args).sanitize(with_huggingface_names(weights))
    model = fitting_model(args, weights, source=source)
    model.load_weights(list(weights.items()), strict=True)
    model.eval()
    if not lazy:
        mx.eval(model.parameters())
    return model


def fitting_model(args: ModelArgs, tensors: Mapping[str, StoredTensor], *, source: str) -> Model:
    """An unfilled model whose layers are quantised where the tensors are, after checking them.

    Args:
        args: see :func:`build_model`.
        tensors: every tensor under its name in the model; values are not looked at.
        source: where they came from, for messages.

    Raises:
        ValueError: naming all missing, unexpected and mis-shaped tensors at once, or those of
            another kind of number.
    """
    model = Model(args)
    _quantize_like(model, set(tensors), quantization_of(args) or {}, source)
    pairs: Any = tree_flatten(model.parameters())
    expected: dict[str, mx.array] = dict(pairs)
    check_tensors(
        {name: array.shape for name, array in expected.items()},
        {name: tensor.shape for name, tensor in tensors.items()},
        source=source,
    )
    wrong = [n for n, t in tensors.items() if is_float(t.dtype) != is_float(expected[n].dtype)]
    if wrong:
        raise ValueError(
            f"{source}: {len(wrong)} tensors hold another kind of number than expected, first "
            f"{wrong[0]} with {tensors[wrong[0]].dtype}; weights must be floating-point, or packed "
            "by MLX with their settings under quantization in config.json"
        )
    return model


def settle_tying(
    args: ModelArgs, config: Mapping[str, Any], tensors: Mapping[str, object]
) -> ModelArgs:
    """``args`` tied where the config says nothing of it and there is no head of its own.

    Args:
        args: read from ``config``.
        config: the JSON object itself; Apple's default for an absent key is an untied head.
        tensors: by name in the model.
    """
    if "share_input_output_layers" in config or any(name in tensors for name in _HEADS):
        return args
    return replace(args, share_input_output_layers=True)


def quantization_of(args: ModelArgs) -> dict[str, Any] | None:
    """The ``quantization`` entry of a config in mlx_lm's form, None for plain weights."""
    entry = args.extra.get("quantization") or args.extra.get("quantization_config")
    return dict(entry) if entry else None


def with_huggingface_names(weights: Mapping[str, T]) -> dict[str, T]:
    """Tensors under Hugging Face's names, also when the file has CoreNet's."""
    from convert.names import is_corenet, to_huggingface

    if not is_corenet(set(weights)):
        return dict(weights)
    return {to_huggingface(name): tensor for name, tensor in weights.items()}


def is_float(dtype: mx.Dtype) -> bool:
    """Whether a type holds floating-point numbers, packed ones aside."""
    return mx.issubdtype(dtype, mx.floating)


def _quantize_like(
    model: Model, names: set[str], quantization: Mapping[str, Any], source: str
) -> None:
    """Turn into quantised layers what the file holds quantised, with the config's settings."""
    defaults = {k: quantization[k] for k in ("group_size", "bits", "mode") if k in quantization}

    def settings(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in names:
            return False
        own = quantization.get(path, quantization.get(path.removeprefix("transformer."), {}))
        return {**defaults, **own} if isinstance(own, Mapping) else defaults

    try:
        if quantization:
            nn.quantize(model, class_predicate=settings)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{source}: the quantization entry of config.json fits no such layers: "
            f"{one_line(error)}"
        ) from error

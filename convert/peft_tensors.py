"""The tensors of PEFT's adapter files under our names, and back.

PEFT keeps ``base_model.model.<module>.lora_A.weight`` (r, in) and ``lora_B.weight`` (out, r), for
an embedding ``lora_embedding_A`` (r, V) and ``lora_embedding_B`` (D, r), for DoRA
``lora_magnitude_vector`` (out,), in an embedding (D,). Both factors of ours lie the other way.
Source: huggingface/peft v0.21.2 ``utils/save_and_load.py``, ``tuners/lora/layer.py``.
"""

import re
from collections.abc import Mapping

import mlx.core as mx

from openelm_mlx.adapter_args import MODEL_MODULES
from openelm_mlx.adapter_layers import dense_shape, is_embedding
from openelm_mlx.fitting import is_float
from openelm_mlx.lora import get_module, module_paths
from openelm_mlx.mismatch import check_tensors
from openelm_mlx.model import Model

EMBEDDING = MODEL_MODULES["token_embeddings"]
_PREFIX = "base_model.model."
_TENSOR = re.compile(
    re.escape(_PREFIX) + r"(?P<module>.+)\.lora_"
    r"(?P<part>A\.weight|B\.weight|embedding_A|embedding_B|magnitude_vector(\.weight)?)"
)
_BASE_WEIGHT = re.compile(re.escape(_PREFIX) + r"(?P<module>.+?)(\.base_layer)?\.weight")
_LEAVES = {
    **{"A.weight": "lora_a", "embedding_A": "lora_a"},
    **{"B.weight": "lora_b", "embedding_B": "lora_b"},
    **{"magnitude_vector": "m", "magnitude_vector.weight": "m"},
}
_LINEAR_PARTS = {"lora_a": "A.weight", "lora_b": "B.weight", "m": "magnitude_vector"}
_EMBEDDING_PARTS = {"lora_a": "embedding_A", "lora_b": "embedding_B", "m": "magnitude_vector"}

Leaves = dict[str, mx.array]


def from_peft_tensors(
    tensors: Mapping[str, mx.array], model: Model, *, source: str
) -> dict[str, Leaves]:
    """Module -> leaf -> array in our layout, in the model's order, held against the model.

    Args:
        tensors: PEFT's names -> arrays.
        model: the base.
        source: folder, for messages.

    Raises:
        ValueError: if a name is none of LoRA's, a module is not in the model, shapes do not fit
            (all named, with both), or the file brings other base weights than the model's.
    """
    _check_floating(tensors, source)
    names: dict[str, dict[str, str]] = {}
    for name in _without_base_weights(tensors, model, source):
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise ValueError(
                f"{source}: {name} is no LoRA or DoRA tensor that PEFT writes, such as "
                f"{_PREFIX}transformer.layers.0.attn.qkv_proj.lora_A.weight"
            )
        names.setdefault(match["module"], {})[_LEAVES[match["part"]]] = name
    if not names:
        raise ValueError(f"{source}: the file holds no adapter")
    _check_modules(list(names), model, source)
    _check_shapes(names, tensors, model, source)
    return {
        module: {leaf: tensors[name].T for leaf, name in names[module].items()}
        for module in module_paths(model)
        if module in names
    }


def to_peft_tensors(modules: Mapping[str, Leaves]) -> dict[str, mx.array]:
    """PEFT's names -> arrays, of module -> leaf -> array in our layout."""
    return {
        f"{_PREFIX}{module}.lora_{_parts(module)[leaf]}": mx.contiguous(array.T)
        for module, leaves in modules.items()
        for leaf, array in leaves.items()
    }


def _parts(module: str) -> dict[str, str]:
    return _EMBEDDING_PARTS if module == EMBEDDING else _LINEAR_PARTS


def _check_floating(tensors: Mapping[str, mx.array], source: str) -> None:
    wrong = [name for name, array in tensors.items() if not is_float(array.dtype)]
    if wrong:
        raise ValueError(
            f"{source}: {len(wrong)} tensors are not floating-point, first {wrong[0]} with "
            f"{tensors[wrong[0]].dtype}"
        )


def _without_base_weights(tensors: Mapping[str, mx.array], model: Model, source: str) -> list[str]:
    """The adapters' names; PEFT stores targeted or resized tables beside them: equal ones go."""
    adapters = []
    for name, array in tensors.items():
        match = None if ".lora_" in name else _BASE_WEIGHT.fullmatch(name)
        if match is None or match["module"] not in module_paths(model):
            adapters.append(name)
            continue
        own = get_module(model, match["module"]).weight
        if own.shape != array.shape or not mx.array_equal(array.astype(own.dtype), own).item():
            raise ValueError(
                f"{source}: {name} {list(array.shape)} is another weight than the model's "
                f"{list(own.shape)}; give the very base the adapters were trained on, with its "
                "table resized as it was then"
            )
    return adapters


def _check_modules(modules: list[str], model: Model, source: str) -> None:
    paths = module_paths(model)
    unknown = [module for module in modules if module not in paths]
    if unknown:
        names = ", ".join(dict.fromkeys(path.rpartition(".")[2] for path in paths))
        raise ValueError(
            f"{source} adapts {len(unknown)} modules that the model does not have, first "
            f"{unknown[0]}; in its {len(model.layers)} layers and beside them it has {names} "
            "(queries, keys and values are one matrix, qkv_proj)"
        )


def _check_shapes(
    names: Mapping[str, Mapping[str, str]],
    tensors: Mapping[str, mx.array],
    model: Model,
    source: str,
) -> None:
    """Hold every tensor against the layer it adapts, in PEFT's names and layout."""
    expected: dict[str, tuple[int, ...]] = {}
    for module, leaves in names.items():
        layer = get_module(model, module)
        rows, columns = dense_shape(layer)
        inputs, outputs = (rows, columns) if is_embedding(layer) else (columns, rows)
        first = next(iter(leaves.values()))
        factor = tensors[leaves.get("lora_a", first)]
        rank = factor.shape[0] if factor.ndim == 2 else 1
        shapes = {"lora_a": (rank, inputs), "lora_b": (outputs, rank), "m": (outputs,)}
        for leaf, part in _parts(module).items():
            if leaf in leaves or leaf != "m":
                name = leaves.get(leaf, f"{_PREFIX}{module}.lora_{part}")
                expected[name] = shapes[leaf]
    found = {name: tensors[name].shape for leaves in names.values() for name in leaves.values()}
    check_tensors(expected, found, source=f"{source} (adapters, against the model)")

"""Apple's LoRA and DoRA numbers under our names, without the code that converts them for users."""

from typing import Any

import golden_set  # imports openelm_mlx, so that OpenBLAS comes before mlx.core
import mlx.core as mx
import numpy as np
import pytest

from convert.pt_file import PtFile
from openelm_mlx.config import ModelArgs
from openelm_mlx.lora import AdapterArgs, add_adapters
from openelm_mlx.model import Model

LINEAR = ("qkv_proj", "out_proj", "proj_1", "proj_2")
VARIANTS = {
    "lora_linear": AdapterArgs(rank=4, scale=2.5, target_modules=LINEAR),
    "lora_recipe_with_embedding": AdapterArgs(rank=4, scale=2.5),
    "rslora_linear": AdapterArgs(rank=4, scale=5.0, use_rslora=True, target_modules=LINEAR),
    "dora_linear": AdapterArgs(rank=4, scale=2.5, kind="dora", target_modules=LINEAR),
    "dora_linear_lora_embedding": AdapterArgs(rank=4, scale=2.5, kind="dora"),
}
UNTIED = {
    "num_transformer_layers": 2,
    "model_dim": 32,
    "head_dim": 8,
    "num_query_heads": [2, 4],
    "num_kv_heads": [1, 2],
    "num_gqa_groups": 2,
    "ffn_multipliers": [0.5, 1.0],
    "ffn_dim_divisor": 8,
    "vocab_size": 61,
    "share_input_output_layers": False,
}  # with unequal layers, for random_model
# CoreNet's end of a name -> ours; both factors lie the other way round.
_ENDS = {
    ".lora_A.lora.weight": ".lora_a",
    ".lora_B.lora.weight": ".lora_b",
    ".lora_embedding_A.lora": ".lora_a",
    ".lora_embedding_B.lora": ".lora_b",
    ".lora_magnitude_vector.lora": ".m",
}


def find(name: str) -> Any:
    """A file of the golden lora folder, or the test is skipped."""
    path = golden_set.find(f"lora/{name}")
    if path is None:
        pytest.skip(f"golden lora/{name} is not in the committed cut")
    return path


def read_pt(name: str) -> dict[str, mx.array]:
    with PtFile(find(name)) as file:
        return {k: tensor.load() for k, tensor in file.state_dict().items()}


def base_model() -> Model:
    config = golden_set.read_json(find("lora.json"))["config"]
    model = Model(ModelArgs.from_dict(config))
    weights = read_pt("base.pt")
    model.load_weights([(f"transformer.{k}", v) for k, v in weights.items()], strict=True)
    model.eval()
    return model


def our_names(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """CoreNet's adapter tensors, or their gradients; all others are left out."""
    out = {}
    for name, array in tensors.items():
        for theirs, ours in _ENDS.items():
            if name.endswith(theirs):
                out[f"transformer.{name.removesuffix(theirs)}{ours}"] = array.T
    return out


def adapter_tensors(variant: str) -> dict[str, mx.array]:
    return our_names(read_pt(f"{variant}.adapter_only.pt"))


def adapted_model(variant: str) -> Model:
    """The base with Apple's adapter tensors in our layers, in eval mode."""
    model = base_model()
    add_adapters(model, VARIANTS[variant])
    fill(model, adapter_tensors(variant))
    return model


def fill(model: Model, tensors: dict[str, mx.array]) -> None:
    model.load_weights(list(tensors.items()), strict=False)


def io(name: str) -> np.ndarray:
    arrays: Any = mx.load(str(find("io.safetensors")))
    if name not in arrays:
        pytest.skip(f"golden {name} is not in the committed cut")
    return np.array(arrays[name])


def input_ids() -> mx.array:
    return mx.array(io("input_ids").astype(np.int32))


def randomise(model: Model, seed: int = 3) -> None:
    """Give all adapters of a model factors that matter, so that none goes unseen."""
    from openelm_mlx.lora import adapter_state

    mx.random.seed(seed)
    drawn = {
        name: mx.random.uniform(0.5, 2.0, array.shape)
        if name.endswith(".m")
        else mx.random.normal(array.shape) * 0.2
        for name, array in adapter_state(model).items()
    }
    fill(model, drawn)


def logits(model: Model, tokens: mx.array) -> np.ndarray:
    return np.array(model(tokens).astype(mx.float32))


def largest(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())

"""The PEFT library itself judges: it reads our folders, and its own become ours."""

import warnings
from pathlib import Path
from typing import Any

import golden_set
import mlx.core as mx
import numpy as np
import pytest
from folder_makers import assert_same_weights
from golden_lora import largest, logits, randomise
from model_makers import random_tokens
from peft_folders import LINEAR, TABLE, base_folder, base_model, tensors_in
from when_used import WhenUsed

from convert.peft import from_peft, to_peft
from openelm_mlx.adapter_fuse import fuse_model
from openelm_mlx.checkpoint import load_model
from openelm_mlx.lora import (
    AdapterArgs,
    adapted_modules,
    add_adapters,
    load_adapters,
    save_adapters,
)
from openelm_mlx.model import Model

pytestmark = pytest.mark.slow

torch: Any = WhenUsed("torch")
peft: Any = WhenUsed("peft")

TOKENS = random_tokens(2, 9, 61)
TARGETS = ["qkv_proj", "out_proj", "proj_1", "proj_2", "token_embeddings"]


def torch_model(model: Model) -> Any:
    """The matrices of a model as a tree of torch modules of the same names."""
    root = torch.nn.Module()
    for name, weight in golden_set.numpy_weights(model).items():
        *parents, last = name.removesuffix(".weight").split(".")
        if weight.ndim != 2:
            continue
        node = root
        for part in parents:
            if part not in node._modules:
                node.add_module(part, torch.nn.Module())
            node = node._modules[part]
        rows, columns = weight.shape
        if last == "token_embeddings":
            layer = torch.nn.Embedding(rows, columns)
        else:
            layer = torch.nn.Linear(columns, rows, bias=False)
        layer.weight.data = torch.from_numpy(weight.copy())
        node.add_module(last, layer)
    root.forward = lambda x: x
    root.prepare_inputs_for_generation = lambda x: x  # PEFT looks for it in a causal model
    return root


def merged_logits(model: Model, wrapped: Any) -> np.ndarray:
    """Logits of our model with the weights that PEFT merges."""
    weights = golden_set.numpy_weights(model)
    weights.setdefault("lm_head.weight", weights[f"{TABLE}.weight"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = wrapped.merge_and_unload()
    for module in (*LINEAR, TABLE):
        weights[f"{module}.weight"] = plain.get_submodule(module).weight.detach().numpy()
    out = base_model(tied=False)
    out.load_weights([(name, mx.array(array)) for name, array in weights.items()], strict=True)
    return logits(out, TOKENS)


def outputs(module: Any, layer: Any, width: int, is_table: bool) -> tuple[np.ndarray, np.ndarray]:
    """What PEFT's module and our layer make of the same input."""
    if is_table:
        ids = np.arange(61)
        return module(torch.from_numpy(ids)).detach().numpy(), np.array(layer(mx.array(ids)))
    x = np.random.default_rng(2).normal(size=(5, width)).astype(np.float32)
    return module(torch.from_numpy(x)).detach().numpy(), np.array(layer(mx.array(x)))


def assert_modules_agree(wrapped: Any, model: Model) -> None:
    for path, layer in adapted_modules(model).items():
        module = wrapped.base_model.model.get_submodule(path)
        width = layer.lora_a.shape[0]
        found = outputs(module, layer, width, path == TABLE)
        np.testing.assert_allclose(found[1], found[0], atol=2e-5, err_msg=path)


@pytest.mark.parametrize(
    "args",
    [
        AdapterArgs(rank=4, scale=2.5, target_modules=TARGETS[:4]),
        AdapterArgs(rank=4, scale=5.0, use_rslora=True),
        AdapterArgs(rank=3, scale=0.7, kind="dora", target_modules=TARGETS[:4]),
        AdapterArgs(rank=2, scale=2.0, kind="dora"),
        AdapterArgs(rank=2, scale=2.0, kind="dora", embedding_magnitude="feature"),
        AdapterArgs(rank=2, scale=1.5, num_layers=1),
    ],
    ids=["lora", "rslora", "dora", "coreNet's dora", "peft's dora", "last layer"],
)
def test_peft_reads_our_folder(args: AdapterArgs, tmp_path: Path) -> None:
    model = base_model()
    add_adapters(model, args)
    randomise(model)
    save_adapters(model, tmp_path / "ours", args)
    to_peft(tmp_path / "ours", base_folder(tmp_path / "base"), tmp_path / "peft")
    wrapped = peft.PeftModel.from_pretrained(torch_model(base_model()), str(tmp_path / "peft"))
    wrapped.eval()  # a missing or unexpected tensor would have been a warning, hence an error
    model.eval()
    assert_modules_agree(wrapped, model)
    expected = logits(model, TOKENS)
    assert largest(merged_logits(base_model(), wrapped), expected) < 1e-4
    fuse_model(model)
    assert largest(logits(model, TOKENS), expected) < 1e-4


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True, "rank_pattern": {"layers.1.attn.qkv_proj": 6, "proj_1": 1}},
        {"rank_pattern": {"proj_2": 2}, "alpha_pattern": {r"layers\.0\.ffn\.proj_2": 3}},
        {"target_modules": ["qkv_proj", "proj_1"], "layers_to_transform": [1]},
        {"target_modules": r".*\.layers\.0\..*proj", "use_dora": True},
        {"exclude_modules": ["out_proj"], "init_lora_weights": "gaussian"},
    ],
    ids=["lora", "dora", "rslora ranks", "alphas", "layers", "expression", "excluded"],
)
def test_pefts_own_folder_becomes_ours(
    settings: dict[str, Any], safe: bool, tmp_path: Path
) -> None:
    config = peft.LoraConfig(
        **{"r": 4, "lora_alpha": 10, "target_modules": TARGETS, "task_type": None, **settings}
    )
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(torch_model(base_model()), config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            drawn = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.data = drawn.abs() + 0.5 if "magnitude" in name else drawn
    wrapped.eval()
    if safe:
        wrapped.save_pretrained(str(tmp_path / "peft"))
    else:
        save_as_bin(wrapped, tmp_path / "peft")
    base = base_folder(tmp_path / "base")
    from_peft(tmp_path / "peft", base, tmp_path / "ours")
    model = load_model(base)
    load_adapters(model, tmp_path / "ours")
    model.eval()
    assert_modules_agree(wrapped, model)
    assert largest(merged_logits(base_model(), wrapped), logits(model, TOKENS)) < 1e-4
    if safe and not {"rank_pattern", "alpha_pattern"} & set(settings):
        to_peft(tmp_path / "ours", base, tmp_path / "again")
        assert_same_weights(tensors_in(tmp_path / "again"), tensors_in(tmp_path / "peft"))


def save_as_bin(wrapped: Any, folder: Path) -> None:
    """What PEFT's ``safe_serialization=False`` writes, also where that has gone."""
    wrapped.save_pretrained(str(folder))
    torch.save(peft.get_peft_model_state_dict(wrapped), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()

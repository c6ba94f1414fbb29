"""The ways in which the weights of a folder are stored."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx

from convert import pt_file

INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
Weights = Mapping[str, mx.array]
Layout = Callable[[Path, Weights], None]


def write_index(folder: Path, name: str, weight_map: object) -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def one_file(folder: Path, weights: Weights) -> None:
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights))


def sharded(folder: Path, weights: Weights) -> None:
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2]}
    parts["model-00002-of-00002.safetensors"] = names[1::2]
    for file, part in parts.items():
        mx.save_safetensors(str(folder / file), {n: weights[n] for n in part})
    write_index(folder, INDEX, {n: file for file, part in parts.items() for n in part})


def shards_without_index(folder: Path, weights: Weights) -> None:
    sharded(folder, weights)
    (folder / INDEX).unlink()


def corenet_mlx(folder: Path, weights: Weights) -> None:
    mx.save_safetensors(str(folder / "weights.safetensors"), dict(weights))


def torch_file(folder: Path, weights: Weights) -> None:
    pt_file.write(folder / "pytorch_model.bin", dict(weights))


def torch_state_dict(folder: Path, weights: Weights) -> None:
    pt_file.write(folder / "pytorch_model.bin", {"state_dict": dict(weights), "epoch": 3})


def torch_shards(folder: Path, weights: Weights) -> None:
    names = sorted(weights)
    parts = {"pytorch_model-00001-of-00002.bin": names[::2]}
    parts["pytorch_model-00002-of-00002.bin"] = names[1::2]
    for file, part in parts.items():
        pt_file.write(folder / file, {n: weights[n] for n in part})
    write_index(folder, TORCH_INDEX, {n: file for file, part in parts.items() for n in part})


def npz(folder: Path, weights: Weights) -> None:
    mx.savez(str(folder / "weights.npz"), **weights)


LAYOUTS: list[Layout] = [
    *(one_file, sharded, shards_without_index, corenet_mlx),
    *(torch_file, torch_state_dict, torch_shards, npz),
]

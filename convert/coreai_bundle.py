"""The folder that Apple's Swift package loads: asset, metadata, tokenizer, provenance, licence.

Layout: apple/coreai-models@86b363d, ``metadata.json`` version 0.2. Knows nothing of the graph.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from convert.coreai_api import PACKAGE, VERSION, Program
from convert.coreai_graph import FUNCTION, STATES
from convert.coreai_runner import METADATA, METADATA_VERSION, Bundle
from convert.licence import copy_licence
from convert.source import PROVENANCE, Source
from openelm_mlx.atomic import flush
from openelm_mlx.chat_template import APPLE_INSTRUCT_TEMPLATE
from openelm_mlx.config import ModelArgs
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.weight_files import read_json, write_json

NEEDS = "macOS 27 or iOS 27"
_KIND = "openelm.weights"  # in the metadata's user_data, whose values are strings


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What goes into a bundle.

    Attributes:
        name: of the bundle and its asset.
        source: where the weights came from.
        args: of the model.
        weights: a key of ``convert.coreai_weights.KINDS``.
        tokenizer: of the model.
        chat: whether the chat template goes with it.
        adapters: the folder whose adapters were fused, by name.
    """

    name: str
    source: Source
    args: ModelArgs
    weights: str
    tokenizer: Tokenizer
    chat: bool
    adapters: str | None


def write_bundle(folder: Path, program: Program, contents: Contents) -> Bundle:
    """Write everything but a verification.

    Args:
        folder: existing and empty.
        program: of the model.
        contents: all else.

    Raises:
        OSError: if something cannot be written.
    """
    asset = f"{contents.name}.aimodel"
    program.save(folder / asset, _about(contents))
    with ThreadPoolExecutor(1) as thread:
        on_disk = thread.submit(flush, folder / asset)  # takes as long as all the rest
        write_json(folder / METADATA, _metadata(contents, asset))
        write_json(folder / PROVENANCE, _provenance(contents))
        (folder / "tokenizer").mkdir()
        template = contents.tokenizer.chat_template or APPLE_INSTRUCT_TEMPLATE
        contents.tokenizer.save(
            folder / "tokenizer", chat_template=template if contents.chat else None
        )
        copy_licence(contents.source.folder, folder)
        on_disk.result()
    return Bundle.open(folder)


def weights_of(bundle: Bundle) -> str:
    """What a bundle's weights are stored as.

    Raises:
        ValueError: if we did not write it.
    """
    found = (read_json(bundle.folder / METADATA).get("user_data") or {}).get(_KIND)
    if not isinstance(found, str):
        raise ValueError(
            f"{bundle.folder / METADATA} does not say how the weights are stored ({_KIND}); only "
            "bundles of `openelm convert coreai` can be verified"
        )
    return found


def _metadata(contents: Contents, asset: str) -> dict[str, Any]:
    """What the Swift package reads, and under ``user_data`` what we do."""
    args, source = contents.args, contents.source
    return {
        "metadata_version": METADATA_VERSION,
        "kind": "llm",
        "name": contents.name,
        "assets": {"main": asset},
        "language": {
            "tokenizer": source.name,  # asked of the Hub only where the folder's own is missing
            "vocab_size": args.vocab_size,
            "max_context_length": args.max_context_length,
            "embedded_tokenizer": True,
            "function_map": {"main": [FUNCTION]},
            "states": dict.fromkeys(STATES, "kv_cache"),
        },
        "source": {"hf_model_id": source.name},  # a model_definition may only be "torch"
        "compression": "mlx affine" if contents.weights.startswith("mlx") else None,
        "user_data": {
            _KIND: contents.weights,
            "openelm.needs": NEEDS,
            "openelm.licence": source.licence or "unknown",
        },
    }


def _about(contents: Contents) -> Mapping[str, str]:
    source = contents.source
    return {
        "author": "Apple" if source.is_apples else "",
        "license": source.licence or "",
        "description": (
            f"OpenELM, {contents.args.num_parameters / 1e6:.0f} M parameters, weights "
            f"{contents.weights}, from {source.name} by openelm-mlx"
        ),
    }


def _provenance(contents: Contents) -> dict[str, Any]:
    entries = contents.source.provenance("model folder")
    if contents.adapters is not None:
        entries["adapters"] = contents.adapters
    versions = {name: version(name) for name in ("openelm-mlx", "mlx")}
    return {**entries, "weights": contents.weights, "versions": {**versions, PACKAGE: VERSION}}

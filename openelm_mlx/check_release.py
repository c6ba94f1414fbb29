"""Stage: ``openelm check-release``: hold a release of OpenELM against what is published of it.

Tensors, parameter count, config, and for 270M-Instruct a greedy continuation; one JSON verdict.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from openelm_mlx.checkpoint import load_args, load_model
from openelm_mlx.config import ModelArgs
from openelm_mlx.fitting import quantization_of
from openelm_mlx.generate import generate
from openelm_mlx.hub import local_or_download
from openelm_mlx.model import Model, num_parameters
from openelm_mlx.tokenizer_search import load_tokenizer
from openelm_mlx.weight_files import read_json

_NAME = re.compile(r"OpenELM-(270M|450M|1[._]1B|3B)(-Instruct)?", re.IGNORECASE)
_FIELDS = (
    *("vocab_size", "max_context_length", "num_transformer_layers", "model_dim", "head_dim"),
    *("num_gqa_groups", "num_query_heads", "num_kv_heads", "ffn_multipliers", "ffn_dims"),
    *("ffn_with_glu", "activation_fn_name", "normalize_qk_projections"),
    *("share_input_output_layers", "rope_freq_constant", "rope_max_length", "rms_norm_eps"),
    *("bos_token_id", "eos_token_id"),
)

# Counted from the configurations of apple/corenet@1aa3acd with the Hub's 32000 rows.
PARAMETERS = {
    "270M": 271_527_168,
    "450M": 457_179_136,
    "1.1B": 1_079_891_456,
    "3B": 3_036_647_424,
}


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """A published greedy continuation in float32."""

    prompt: str
    prompt_ids: tuple[int, ...]
    tokens: int
    text: str
    source: str


CONTINUATIONS = {
    "270M-Instruct": Continuation(
        prompt="Once upon a time there was",
        prompt_ids=(1, 9038, 2501, 263, 931, 727, 471),
        tokens=64,
        text=" a man named John Smith. John Smith was a hard-working farmer, a good husband, and a "
        "good father. He loved his family dearly, and he cherished every moment with them.\n"
        "But one day, John's life changed forever.\n"
        "John's wife, Mary, died suddenly of",
        source="coremltools' guide 'convert OpenELM': transformers 4.46.3, torch 2.5.1",
    )
}


def check_release(
    path_or_repo: str | Path,
    *,
    tokenizer: str | Path | None = None,
    revision: str | None = None,
) -> dict[str, Any]:
    """Compare a release with published facts.

    Args:
        path_or_repo: a folder or Hub repository whose name, or whose recorded source, is that of a
            published OpenELM, such as ``apple/OpenELM-270M-Instruct``.
        tokenizer: file, folder or Hub id, in place of the release's own.
        revision: branch, tag or commit of a repository.

    Returns:
        JSON-ready: ``release``, ``ok``, and under ``checks`` one entry each with ``ok`` (None where
        there is nothing to check), what was expected and what was found.

    Raises:
        FileNotFoundError: if there is no such folder or repository.
        ValueError: if its name is that of no published OpenELM.
    """
    folder = local_or_download(path_or_repo, revision=revision)
    release = _release(path_or_repo, folder)
    size = release.removesuffix("-Instruct")
    checks: dict[str, dict[str, Any]] = {"config": _check_config(folder, size)}
    try:
        model = load_model(folder, lazy=True)
    except (ValueError, FileNotFoundError) as error:
        checks["tensors"] = {"ok": False, "problem": str(error)}
    else:
        checks["tensors"] = {"ok": True}
        checks["parameters"] = _check_parameters(model, size)
        repo = None if Path(path_or_repo).expanduser().is_dir() else str(path_or_repo)
        checks["continuation"] = _check_continuation(model, release, folder, repo, tokenizer)
    return {
        "release": f"OpenELM-{release}",
        "source": str(path_or_repo),
        "ok": all(check["ok"] is not False for check in checks.values()),
        "checks": checks,
    }


def _release(path_or_repo: str | Path, folder: Path) -> str:
    """``270M`` or ``270M-Instruct``, from the name or from where the folder says it came from."""
    for name in (Path(path_or_repo).name, folder.resolve().name, *_sources(folder)):
        found = _NAME.search(name)
        if found:
            return found[1].upper().replace("_", ".") + ("-Instruct" if found[2] else "")
    raise ValueError(
        f"{path_or_repo} is named like no published OpenELM; expected a name with "
        f"OpenELM-{{{', '.join(PARAMETERS)}}}, with or without -Instruct"
    )


def _sources(folder: Path) -> Iterator[str]:
    """Names in a folder's provenance, newest first."""
    file = folder / "openelm.json"
    entry: Any = read_json(file) if file.is_file() else None
    while isinstance(entry, dict):
        yield str(entry.get("source", ""))
        entry = entry.get("made_from")


def _check_config(folder: Path, size: str) -> dict[str, Any]:
    try:
        found = load_args(folder)
    except ValueError as error:
        return {"ok": False, "problem": str(error)}
    published = ModelArgs.preset(size)
    differences = {
        name: {"expected": getattr(published, name), "found": getattr(found, name)}
        for name in _FIELDS
        if getattr(published, name) != getattr(found, name)
    }
    return {"ok": not differences, "differences": differences}


def _check_parameters(model: Model, size: str) -> dict[str, Any]:
    """Elements of the tensors; of a quantised model those of the matrices that they pack."""
    packed = quantization_of(model.args) is not None
    found = model.args.num_parameters if packed else num_parameters(model)
    return {"ok": found == PARAMETERS[size], "expected": PARAMETERS[size], "found": found}


def _check_continuation(
    model: Model, release: str, folder: Path, repo: str | None, tokenizer: str | Path | None
) -> dict[str, Any]:
    published = CONTINUATIONS.get(release)
    if published is None:
        return {"ok": None, "reason": "no continuation of this release is published"}
    if quantization_of(model.args) is not None:
        return {"ok": None, "reason": "the published one is of unquantised weights in float32"}
    try:
        found = load_tokenizer(
            tokenizer, model_path=folder, repo=repo, vocab_size=model.args.vocab_size
        )
    except (ValueError, OSError) as error:
        return {"ok": False, "problem": str(error)}
    ids = tuple(found.encode(published.prompt))
    if ids != published.prompt_ids:
        problem = "the tokenizer gives other ids for the prompt"
        return {"ok": False, "problem": problem, "expected": published.prompt_ids, "found": ids}
    model.set_dtype(mx.float32)
    text = generate(model, found, list(ids), max_tokens=published.tokens)
    return {
        "ok": text == published.text,
        "prompt": published.prompt,
        "expected": published.text,
        "found": text,
        "published_by": published.source,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``openelm check-release``."""
    parser.add_argument("repo", metavar="REPO", help="Hub repository, or a folder of that name")
    parser.add_argument("--tokenizer", help="tokenizer.model, tokenizer.json, folder or Hub id")
    parser.add_argument("--revision", help="branch, tag or commit of the repository")


def run(args: argparse.Namespace) -> int:
    """Write the verdict to standard output; 0 only if everything holds."""
    verdict = check_release(args.repo, tokenizer=args.tokenizer, revision=args.revision)
    sys.stdout.write(json.dumps(verdict, indent=2, ensure_ascii=False) + "\n")
    return 0 if verdict["ok"] else 1

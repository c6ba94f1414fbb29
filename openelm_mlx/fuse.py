"""Stage: adapters folded into their model, for a folder that needs them no more.

The sums are made in float32 and rounded once; what the rounding and, in a quantised base, the
quantising take is measured and said. Knows no training.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx.utils import tree_flatten

from openelm_mlx.adapter_args import AdapterArgs
from openelm_mlx.adapter_files import weights_file
from openelm_mlx.adapter_fuse import dequantize_model, fuse_model
from openelm_mlx.atomic import atomic_folder, refuse_existing_folder
from openelm_mlx.chat_template import is_instruct
from openelm_mlx.checkpoint import load_model, with_dtype, write_companions
from openelm_mlx.compatibility import where_it_runs
from openelm_mlx.config import ModelArgs
from openelm_mlx.fitting import quantization_of
from openelm_mlx.fuse_report import Cost, Report, describe, relative, stored_in, warn
from openelm_mlx.lora import adapted_modules, load_adapters, set_module
from openelm_mlx.model import Model
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.tokenizer_files import has_tokenizer
from openelm_mlx.weight_files import write_weights

if TYPE_CHECKING:
    from convert.quantize_check import Sample
    from convert.source import Source

_TOKENS = 64  # of the sample: enough to see an error, and seconds in 16 bit on a CPU


def fuse(
    model: str | Path,
    adapter_path: str | Path,
    output: str | Path,
    *,
    dequantize: bool = False,
    tokenizer: str | Path | None = None,
    overwrite: bool = False,
) -> Report:
    """Write a model folder that does what a model and its adapters do together.

    The tokenizer, the chat template and the licence of the base go with it.

    Args:
        model: the base, a model folder or Hub repository.
        adapter_path: an adapter folder of ours or mlx_lm's, also one of whole weights ("full").
        output: the folder to write.
        dequantize: store a quantised model in floating point instead of quantising again.
        tokenizer: file, folder or Hub id, for a base that has none.
        overwrite: replace a folder that is there.

    Raises:
        FileNotFoundError: if a folder or file is missing.
        FileExistsError: if ``output`` is there and may not be replaced.
        ValueError: if the adapters do not fit the model or are damaged, or ``dequantize`` is asked
            for a model that is not quantised.
    """
    from convert.quantize_check import make_sample
    from convert.source import Source

    refuse_existing_folder(output, overwrite=overwrite)
    source = Source.find(model)
    if dequantize and not quantization_of(source.args):
        raise ValueError(f"{source.name} is not quantised; leave --dequantize out")
    adapter_path = Path(adapter_path).expanduser()
    fused = load_model(source.folder, lazy=True)  # the adapters are checked before it is read
    args = load_adapters(fused, adapter_path)
    fused.eval()
    before = fused.args
    found, _ = source.companions(tokenizer, instruct=False, output=output)
    sample = make_sample(None, found, before.vocab_size)
    cost = _fuse(fused, args, sample, dequantize=dequantize)
    report = Report(
        folder=Path(output),
        args=args,
        cost=cost,
        stored=stored_in(fused),
        quantized=bool(quantization_of(fused.args)),
        head_untied=before.share_input_output_layers and not fused.args.share_input_output_layers,
        no_longer=_no_longer(before, fused.args),
    )
    warn(report)
    if tokenizer is None and has_tokenizer(source.folder):
        template = found is not None and found.chat_template is not None
    else:  # Apple's repositories have none
        template = is_instruct(source.name)
    entries = _provenance(source, adapter_path, report)
    with atomic_folder(output, overwrite=overwrite) as temporary:
        _write(temporary, fused, source, tokenizer=found, instruct=template, provenance=entries)
    return report


def _fuse(model: Model, args: AdapterArgs | None, sample: "Sample", *, dequantize: bool) -> Cost:
    """Fuse in place, between measurements of the logits."""
    tokens = mx.array([sample.documents[0][:_TOKENS]])
    adapted, change, lost = _logits(model, tokens), None, {}
    if args is not None:
        with _without_adapters(model):
            base = _logits(model, tokens)
        change = relative(adapted, base)
        lost = fuse_model(model, dequantize=dequantize)
    elif dequantize:
        dequantize_model(model, model.transformer.norm.weight.dtype)
    error = relative(_logits(model, tokens), adapted)
    if not math.isfinite(error):
        raise ValueError("the logits with the adapters are not finite; the adapter is damaged")
    return Cost(lost=lost, text=sample.name, logit_change=change, logit_error=error)


def _logits(model: Model, tokens: mx.array) -> mx.array:
    """(1, L, V) float32, computed in the model's own types."""
    logits = model(tokens).astype(mx.float32)
    mx.eval(logits)
    return logits


@contextmanager
def _without_adapters(model: Model) -> Iterator[None]:
    """The base alone, for a while."""
    adapters = adapted_modules(model)
    for path, adapter in adapters.items():
        set_module(model, path, adapter.base)
    yield
    for path, adapter in adapters.items():
        set_module(model, path, adapter)


def _no_longer(before: ModelArgs, after: ModelArgs) -> dict[str, str]:
    old, new = (where_it_runs(args, quantization_of(args)) for args in (before, after))
    return {name: why for name, why in new.items() if why and why != old[name]}


def _write(
    folder: Path,
    model: Model,
    source: "Source",
    *,
    tokenizer: Tokenizer | None,
    instruct: bool,
    provenance: dict[str, Any],
) -> None:
    from convert.licence import copy_licence

    parameters: Any = tree_flatten(model.parameters())
    write_weights(folder, parameters)
    write_companions(
        folder,
        with_dtype(model.args, dict(parameters)),
        tokenizer=tokenizer,
        instruct=instruct,
        provenance=provenance,
    )
    copy_licence(source.folder, folder)


def _provenance(source: "Source", adapter_path: Path, report: Report) -> dict[str, Any]:
    from convert.source import sha256

    args, cost = report.args, report.cost
    settings = {} if args is None else {"rank": args.rank, "scale": args.scale}
    return {
        **source.provenance("model folder"),
        "adapters": {
            "name": adapter_path.resolve().name,
            "sha256": sha256(weights_file(adapter_path)),
            "kind": "full" if args is None else args.kind,
            **settings,
        },
        "fused": {**asdict(cost), "lost": cost.mean_lost},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``openelm fuse``."""
    parser.add_argument("--model", required=True, metavar="M", help="the base: folder or Hub id")
    parser.add_argument("--adapter-path", required=True, metavar="A", help="adapter folder")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--dequantize",
        action="store_true",
        help="store a quantised base in floating point, so that nothing is quantised twice",
    )
    parser.add_argument("--tokenizer", metavar="T", help="for a base that has none")
    parser.add_argument("--overwrite", action="store_true", help="replace the output")


def run(args: argparse.Namespace) -> int:
    """Run ``openelm fuse``."""
    report = fuse(
        args.model,
        args.adapter_path,
        args.output,
        dequantize=args.dequantize,
        tokenizer=args.tokenizer,
        overwrite=args.overwrite,
    )
    sys.stdout.write(describe(report) + "\n")
    return 0

"""Generate text with a Core ML package: through Core ML on macOS, in NumPy elsewhere.

The rules of ``openelm generate``: samplers, stop texts and what ends the text are the same.
"""

import argparse
import logging
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from openelm_mlx.generate import Response, stream_text
from openelm_mlx.generation_settings import GenerateArgs, add_sampler_arguments, prompt_ids
from openelm_mlx.sampling import apply_all

if TYPE_CHECKING:  # kept out of `openelm convert run-coreml --help`, which has to be quick
    from convert.coreml_client import Client
    from openelm_mlx.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_UNITS = ("all", "cpu", "gpu", "ane")


def stream(
    client: "Client",
    tokenizer: "Tokenizer",
    prompt: str | Sequence[int],
    args: GenerateArgs | None = None,
) -> Generator[Response, None, None]:
    """Continue a prompt step by step, as ``openelm_mlx.stream_generate`` does.

    Args:
        client: of a package; what it was fed before is forgotten.
        tokenizer: of the model that the package was made from.
        prompt: text, or token ids; exactly one BOS is put in front either way.
        args: how to continue; None takes the defaults.

    Yields:
        One :class:`Response` a token and a closing one.

    Raises:
        ContextFull: if the prompt leaves no room in the package's context.
        ValueError: for an id that the package has no embedding of.
    """
    from convert.coreml_client import ContextFull

    args = args or GenerateArgs()
    ids = prompt_ids(tokenizer, prompt)
    room = client.contract.context - len(ids)
    if room < 1:
        raise ContextFull(
            f"the prompt has {len(ids)} tokens and the package's context is "
            f"{client.contract.context}; shorten it, or export with a larger --context"
        )
    client.reset()
    budget = min(args.max_tokens, room)
    tokens = generate_ids(client, ids, args, budget)
    return stream_text(tokens, tokenizer, args, len(ids), budget, args.max_tokens > room)


def generate_ids(
    client: "Client", prompt: Sequence[int], args: GenerateArgs, budget: int
) -> Generator[int, None, None]:
    """Pick up to ``budget`` tokens after a prompt that is fed first; end tokens included."""
    sampler, processors = args.sampler(), args.processors()
    history = list(prompt)
    scores = client.feed(history)
    for n in range(budget):
        logits = mx.array(scores)[None]  # (1, V) float32
        logits = apply_all(processors, mx.array(history, dtype=mx.int32), logits)
        picked: Any = sampler(logits).tolist()
        token = int(picked[0])
        history.append(token)
        yield token
        if n + 1 < budget:
            scores = client.feed([token])


def find_tokenizer(package: Path, asked: str | None, vocab_size: int | None = None) -> "Tokenizer":
    """The tokenizer asked for, else that of the bundle beside the package.

    Args:
        package: the ``.mlpackage``.
        asked: file, folder or Hub id.
        vocab_size: rows of the package's logits; a tokenizer with more pieces is refused.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if its files are damaged, or it is not the package's.
    """
    from convert.coreml_bundle import bundle_folder
    from openelm_mlx.tokenizer import load_tokenizer
    from openelm_mlx.tokenizer_files import has_tokenizer

    bundle = bundle_folder(package)
    if asked is None and not has_tokenizer(bundle):
        raise FileNotFoundError(
            f"{bundle} holds no tokenizer; give one with --tokenizer: a bundle, a model folder, a "
            "tokenizer.model, a tokenizer.json or a Hub id"
        )
    given = Path(asked) if asked is not None else bundle
    folder = given if given.is_dir() else bundle
    return load_tokenizer(
        asked, model_path=folder if folder.is_dir() else None, vocab_size=vocab_size
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``openelm convert run-coreml``."""
    add = parser.add_argument
    add("package", metavar="FILE.mlpackage", help="what `openelm convert coreml` wrote")
    add("--prompt", required=True, metavar="TEXT", help="text to continue; - reads standard input")
    add("--tokenizer", metavar="T", help="default: that of the bundle beside the package")
    add("--compute-units", choices=_UNITS, help="on macOS; default: those it was exported for")
    add_sampler_arguments(parser)
    add("--verbose", action="store_true", help="say the speed on standard error")


def run(args: argparse.Namespace) -> int:
    """Run ``openelm convert run-coreml``: text to standard output as it comes."""
    from convert.coreml_describe import describe
    from convert.coreml_predictor import client_of, open_package

    settings = GenerateArgs.from_namespace(args)
    description = describe(args.package)
    tokenizer = find_tokenizer(Path(args.package), args.tokenizer, description.vocab_size)
    client = client_of(open_package(args.package, units=args.compute_units), description)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    last: Response | None = None
    for last in stream(client, tokenizer, prompt, settings):
        sys.stdout.write(last.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    if last is not None and last.finish_reason == "context":
        logger.warning("stopped: the package's context is full")
    if last is not None and args.verbose:
        sys.stderr.write(
            f"prompt {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tokens/s; output "
            f"{last.generation_tokens} tokens, {last.generation_tps:.1f} tokens/s\n"
        )
    return 0

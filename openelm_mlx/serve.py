"""Stage: ``openelm serve``: mlx_lm's OpenAI-compatible server on one model folder.

The flags and the start; what differs from ``mlx_lm.server`` is in ``server``.
"""

import argparse
import logging

from openelm_mlx.generate import add_model_arguments, required
from openelm_mlx.sampling import check_sampling

logger = logging.getLogger(__name__)

_MANY = 1000  # tokens: a server answers more than one request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``openelm serve``."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", metavar="H", help="address to listen on (127.0.0.1)")
    add("--port", type=int, default=8080, metavar="N", help="port, 0 for any free one (8080)")
    add("--max-tokens", type=int, default=512, metavar="N", help="where a request names none (512)")
    add("--temp", type=float, default=0.0, metavar="T", help="the same (default 0, greedy)")
    add("--top-p", type=float, default=1.0, metavar="P", help="the same (default 1)")
    add("--top-k", type=int, default=0, metavar="K", help="the same (default 0, off)")
    add("--min-p", type=float, default=0.0, metavar="P", help="the same (default 0, off)")
    add("--decode-concurrency", type=int, default=16, metavar="N", help="answers at a time (16)")
    add("--prompt-concurrency", type=int, default=8, metavar="N", help="prompts at a time (8)")
    add(
        "--prompt-cache-size",
        type=int,
        default=10,
        metavar="N",
        help="conversations whose keys and values are kept (default 10, 0 for none)",
    )
    add(
        "--prompt-cache-gb",
        type=float,
        default=1.0,
        metavar="GB",
        help="memory they may take, in 1e9 bytes (default 1)",
    )
    add(
        "--allowed-origins",
        default="*",
        metavar="URLS",
        help="web pages that may ask, separated by commas (default *: all)",
    )


def run(args: argparse.Namespace) -> int:
    """Run ``openelm serve`` until Ctrl-C."""
    check(args)
    from openelm_mlx.checkpoint import load

    model, found = load(args.model, args.adapter_path, args.tokenizer, need_tokenizer=True)
    tokenizer = required(found)
    from openelm_mlx.cpu_weights import prepare_for_generation
    from openelm_mlx.server import Server

    prepare_for_generation(model, tokens=_MANY)
    with Server(args, model, tokenizer) as server:
        logger.info("serving %s at http://%s:%d/v1", args.model, args.host, server.port)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            logger.info("stopped")
    return 0


def check(args: argparse.Namespace) -> None:
    """Refuse flags that are out of range.

    Raises:
        ValueError: naming the flag.
    """
    if not 0 <= args.port <= 65535:
        raise ValueError(f"--port must be 0 to 65535, got {args.port}")
    for name in ("max_tokens", "decode_concurrency", "prompt_concurrency"):
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be at least 1, got {getattr(args, name)}")
    if args.prompt_cache_size < 0:
        raise ValueError(f"--prompt-cache-size must be 0 or more, got {args.prompt_cache_size}")
    if not 0 <= args.prompt_cache_gb < float("inf"):
        raise ValueError(f"--prompt-cache-gb must be 0 or more, got {args.prompt_cache_gb}")
    check_sampling(temp=args.temp, top_p=args.top_p, top_k=args.top_k, min_p=args.min_p)

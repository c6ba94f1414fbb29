"""How to continue a prompt: settings, their checks, their flags and the cache they ask for."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from openelm_mlx.cache import make_cache
from openelm_mlx.decoding import PREFILL_STEP
from openelm_mlx.model import Model
from openelm_mlx.sampling import (
    Processor,
    Sampler,
    check_sampling,
    make_sampler,
    repetition_penalty,
)

if TYPE_CHECKING:
    from openelm_mlx.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class GenerateArgs:
    """How to continue a prompt.

    Raises:
        ValueError: for values out of range and combinations that do not work together.
    """

    max_tokens: int = 256
    temp: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int | None = None  # newest tokens that count; None: prompt and output
    stop: Sequence[str] = ()  # texts before which the output ends
    seed: int | None = None
    num_draft_tokens: int = 4  # proposed a step by the draft model
    prompt_lookup: int = 0  # tokens proposed a step by repeating the prompt; 0 is off
    max_kv_size: int | None = None  # tokens kept by a rotating cache
    kv_bits: int | None = None  # 8 or 4: quantised cache
    kv_group_size: int = 64
    prefill_step: int = PREFILL_STEP

    def __post_init__(self) -> None:
        check_sampling(temp=self.temp, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p)
        problems = [
            f"{name} must be at least 1, got {value}"
            for name in ("max_tokens", "num_draft_tokens", "prefill_step")
            if (value := getattr(self, name)) < 1
        ]
        if self.prompt_lookup < 0:
            problems.append(f"prompt_lookup must be 0 (off) or more, got {self.prompt_lookup}")
        if self.kv_bits is not None and self.kv_bits not in (2, 3, 4, 6, 8):
            problems.append(f"kv_bits must be one of 2, 3, 4, 6, 8, got {self.kv_bits}")
        if self.kv_bits is not None and self.max_kv_size is not None:
            problems.append("max_kv_size and kv_bits cannot be combined; leave one out")
        if self.max_kv_size is not None and self.max_kv_size < 8:
            problems.append(f"max_kv_size must be at least 8 tokens, got {self.max_kv_size}")
        if self.max_kv_size is not None and self.prompt_lookup:
            problems.append("prompt_lookup needs a cache that can go back: leave out max_kv_size")
        if any(not text for text in self.stop):
            problems.append("a stop text is empty; give at least one character")
        if problems:
            raise ValueError("generate: " + "; ".join(problems))

    def check_draft(self, draft: bool) -> None:
        """Refuse settings that a draft model cannot go with.

        Args:
            draft: whether there is one.

        Raises:
            ValueError: naming them.
        """
        if draft and self.prompt_lookup:
            raise ValueError("generate: a draft model and prompt_lookup exclude each other")
        if draft and self.max_kv_size is not None:
            raise ValueError(
                "generate: a draft model needs a cache that can go back: leave out max_kv_size"
            )

    def sampler(self) -> Sampler:
        """A fresh sampler with these settings; equal seeds give equal draws."""
        return make_sampler(
            self.temp, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p, seed=self.seed
        )

    def processors(self) -> list[Processor]:
        """What changes the logits before the sampler."""
        if self.repetition_penalty == 1:
            return []
        return [repetition_penalty(self.repetition_penalty, self.repetition_window)]

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> Self:
        """The settings among parsed flags; flags that were not given keep the defaults."""
        given = vars(namespace)
        names = [f.name for f in fields(cls) if given.get(f.name) is not None]
        return cls(**{name: given[name] for name in names})


def add_sampling_arguments(parser: argparse.ArgumentParser, *, temp: float = 0.0) -> None:
    """Add the sampler and cache flags that generate and chat share.

    Args:
        parser: to extend; every default is None, which leaves the dataclass's.
        temp: the default temperature that the help names.
    """
    add_sampler_arguments(parser, temp=temp)
    add = parser.add_argument
    add("--max-kv-size", type=int, metavar="N", help="rotating cache: forget all but N tokens")
    add("--kv-bits", type=int, metavar="B", help="quantise the cache to B bits (8 or 4)")
    add("--kv-group-size", type=int, metavar="N", help="values a group in it (default 64)")
    add("--prefill-step", type=int, metavar="N", help="prompt tokens a forward pass (default 512)")


def add_sampler_arguments(parser: argparse.ArgumentParser, *, temp: float = 0.0) -> None:
    """Add the flags that say which tokens are picked and where the text ends.

    Args:
        parser: to extend, as :func:`add_sampling_arguments`.
        temp: the default temperature that the help names.
    """
    add = parser.add_argument
    add("--max-tokens", type=int, metavar="N", help="tokens to generate at most (default 256)")
    add("--temp", type=float, metavar="T", help=f"temperature, 0 is greedy (default {temp})")
    add("--top-p", type=float, metavar="P", help="sample from the likeliest tokens summing to P")
    add("--top-k", type=int, metavar="K", help="sample from the K likeliest tokens")
    add("--min-p", type=float, metavar="P", help="drop tokens below P times the likeliest one")
    add(
        "--repetition-penalty",
        type=float,
        metavar="R",
        help="divide the scores of tokens seen before, as Hugging Face does; Apple's card uses 1.2",
    )
    add(
        "--repetition-window",
        type=int,
        metavar="N",
        help="newest tokens that the penalty looks at (default: all of prompt and output)",
    )
    add("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    add("--seed", type=int, metavar="N", help="repeat the same draws")


def prompt_ids(tokenizer: "Tokenizer", prompt: str | Sequence[int]) -> list[int]:
    """Token ids with exactly one BOS in front: two of them ruin the output, none ruins scores."""
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.with_bos(prompt)


def make_generation_cache(model: Model, args: GenerateArgs) -> list[Any]:
    """The cache that the settings ask for: ours, or mlx_lm's rotating or quantised one.

    Raises:
        ValueError: if the heads cannot be quantised in groups of ``kv_group_size``.
    """
    num_layers = len(model.layers)
    if args.max_kv_size is not None:
        from mlx_lm.models.cache import RotatingKVCache

        return [RotatingKVCache(max_size=args.max_kv_size, keep=4) for _ in range(num_layers)]
    if args.kv_bits is not None:
        from mlx_lm.models.cache import QuantizedKVCache

        if model.args.head_dim % args.kv_group_size or args.kv_group_size not in (32, 64, 128):
            raise ValueError(
                f"kv_bits needs heads that divide into groups of {args.kv_group_size} (32, 64 or "
                f"128), this model's have {model.args.head_dim}; choose another kv_group_size or "
                "leave kv_bits out"
            )
        return [
            QuantizedKVCache(group_size=args.kv_group_size, bits=args.kv_bits)
            for _ in range(num_layers)
        ]
    return make_cache(num_layers)


def token_budget(model: Model, args: GenerateArgs, prompt_tokens: int) -> tuple[int, bool]:
    """How many tokens may be generated, and whether the context is what limits them.

    Args:
        model: whose ``max_context_length`` counts.
        args: the settings.
        prompt_tokens: in the cache and to come.

    Raises:
        ValueError: if the prompt alone fills the context, or ``max_kv_size`` exceeds it.
    """
    context = model.args.max_context_length
    if args.max_kv_size is not None:
        if args.max_kv_size > context:
            raise ValueError(
                f"max_kv_size {args.max_kv_size} is beyond the model's context of {context} "
                "tokens; give that or less"
            )
        return args.max_tokens, False
    if prompt_tokens >= context:
        raise ValueError(
            f"the prompt has {prompt_tokens} tokens and the model's context is {context}; shorten "
            f"it, or give --max-kv-size {context} to forget the oldest tokens"
        )
    return min(args.max_tokens, context - prompt_tokens), args.max_tokens > context - prompt_tokens

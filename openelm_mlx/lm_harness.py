"""The adapter between lm-eval and our models: what its tasks ask for, in batches.

Exactly one BOS stands before every text, as Apple evaluated (``add_bos_token=True``); contexts and
continuations are told apart by lm-eval's own ``_encode_pair``. lm-eval (extra ``eval``) is imported
when asked for.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tqdm import tqdm

from openelm_mlx.model import Model
from openelm_mlx.scoring import Memory, log_likelihoods
from openelm_mlx.tokenizer import Tokenizer

_MAX_NEW_TOKENS = 256  # of a generation that does not say, as in lm-eval
_SAMPLING = ("temperature", "top_p", "top_k")


class Answers:
    """What lm-eval asks of a model; the part of :func:`harness_class` that is ours.

    Args:
        model: in eval mode.
        tokenizer: of the model.
        batch_size: contexts a forward pass.
        max_length: tokens; by default the model's context.
        share: compute equal contexts and prefixes once.
        memory: of log-likelihoods that were computed before.

    Raises:
        ValueError: if the tokenizer has neither BOS nor EOS.
    """

    cache_hook: Any  # lm-eval's, see its LM

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        share: bool = True,
        memory: Memory | None = None,
    ) -> None:
        super().__init__()
        if tokenizer.bos_id is None and tokenizer.eos_id is None:
            raise ValueError(f"{tokenizer.source} has neither BOS nor EOS; tasks need one")
        self.model = model
        self.text_tokenizer = tokenizer  # `tokenizer` is Transformers' in lm-eval
        self.batch_size = batch_size
        self.max_length = max_length or model.args.max_context_length
        self.share = share
        self.memory = memory

    @property
    def eot_token_id(self) -> int:
        """The end of text, or the beginning where there is no end."""
        ends = (self.text_tokenizer.eos_id, self.text_tokenizer.bos_id)
        return next(index for index in ends if index is not None)

    @property
    def prefix_token_id(self) -> int:
        """BOS, the context of what has none."""
        starts = (self.text_tokenizer.bos_id, self.text_tokenizer.eos_id)
        return next(index for index in starts if index is not None)

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's caches of requests."""
        return self.text_tokenizer.source.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **ignored: Any
    ) -> list[int]:
        """Ids, with one BOS unless ``add_special_tokens`` is False."""
        return self.text_tokenizer.encode(string, bos=add_special_tokens is not False)

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """(nats, whether greedy) of each request's continuation."""
        quiet = disable_tqdm or not sys.stderr.isatty()
        return super().loglikelihood(requests, quiet)  # type: ignore[misc]  # lm-eval's TemplateLM

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **ignored: Any,
    ) -> list[tuple[float, bool]]:
        quiet = disable_tqdm or not sys.stderr.isatty()
        with tqdm(total=len(requests), unit="request", disable=quiet) as bar:
            scores = log_likelihoods(
                self.model,
                [(context, continuation) for _, context, continuation in requests],
                batch_size=self.batch_size,
                max_length=self.max_length,
                share=self.share,
                progress=bar.update,
                memory=self.memory,
            )
        found = [(score.logprob, score.greedy) for score in scores]
        for (texts, _, _), answer in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Nats of whole texts after BOS, by lm-eval's windows of the model's context."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows: list[tuple[None, list[int], list[int]]] = []
        counts = []
        for text in (request.args[0] for request in requests):
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [(None, *make_disjoint_window(window)) for window in cut]
            counts.append(len(parts))
            windows += parts
        scores = iter(self._loglikelihood_tokens(windows, disable_tqdm))
        return [math.fsum(next(scores)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to the first of its ``until`` texts."""
        found: dict[int, str] = {}
        quiet = disable_tqdm or not sys.stderr.isatty()
        with tqdm(total=len(requests), unit="text", disable=quiet) as bar:
            for settings, numbers in _by_settings(requests).items():
                contexts = [requests[number].args[0] for number in numbers]
                answers = self._generate(contexts, dict(settings), lambda *_: bar.update())
                found.update(zip(numbers, answers, strict=True))
        return [found[number] for number in range(len(requests))]

    def _generate(
        self, contexts: Sequence[str], settings: dict[str, Any], progress: Any
    ) -> list[str]:
        from openelm_mlx.batch import generate_batch
        from openelm_mlx.generation_settings import GenerateArgs

        new = min(settings["max_tokens"], self.max_length - 2)
        room = self.max_length - new - 1  # tokens of a context after BOS
        ids = [self.tok_encode(text, add_special_tokens=False)[-room:] for text in contexts]
        args = GenerateArgs(**{**settings, "max_tokens": new})
        results = generate_batch(
            *(self.model, self.text_tokenizer, ids, args),
            batch_size=self.batch_size,
            progress=progress,
        )
        return [result.text for result in results]


@cache
def harness_class() -> Any:
    """The class of the adapter: :class:`Answers` as a ``lm_eval.api.model.TemplateLM``.

    Raises:
        ImportError: naming the extra, if lm-eval is not installed.
    """
    try:
        from lm_eval.api.model import TemplateLM
    except ImportError as error:
        raise ImportError(
            'tasks need lm-eval: pip install "openelm-mlx[eval]" (--suite commonsense does not)',
            name="lm_eval",
        ) from error
    return type("HarnessModel", (Answers, TemplateLM), {})


def _by_settings(requests: Sequence[Any]) -> dict[tuple[tuple[str, Any], ...], list[int]]:
    """Numbers of requests that are generated alike."""
    groups: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for number, request in enumerate(requests):
        settings = _generation_settings(request.args[1])
        groups.setdefault(tuple(settings.items()), []).append(number)
    return groups


def _generation_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """lm-eval's generation settings as ours; greedy unless it says ``do_sample``."""
    until = given.get("until") or ()
    new = next(
        (given[k] for k in ("max_gen_toks", "max_new_tokens", "max_tokens") if k in given), 0
    )
    settings: dict[str, Any] = {
        "stop": (until,) if isinstance(until, str) else tuple(text for text in until if text),
        "max_tokens": new or _MAX_NEW_TOKENS,
    }
    if given.get("do_sample"):
        names = {"temperature": "temp", "top_p": "top_p", "top_k": "top_k"}
        settings |= {names[k]: given[k] for k in _SAMPLING if given.get(k) is not None}
    return settings

"""A Core AI bundle against MLX: Apple's own runtime computes the logits, on Linux too.

The same tokens go through it in one pass, one by one, and in chunks. The reference is MLX in
float32 on exactly the weights that the bundle stores. n tokens, V vocabulary.
"""

import json
import logging
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np

from convert.coreai_api import PACKAGE, VERSION
from convert.coreai_bundle import NEEDS, weights_of
from convert.coreai_runner import Bundle, Runner
from convert.coreai_weights import settle, widen
from openelm_mlx.atomic import atomic_file
from openelm_mlx.model import Model

logger = logging.getLogger(__name__)

LIMITS = {"fp32": 1e-4, "mlx-fp32": 1e-4, "fp16": 0.3, "mlx": 0.3}
_USUAL_LOGIT = 5.0  # the limits hold for logits up to this, and grow with larger ones
_TOKENS, _FEWEST = 32, 4
# Seconds that Apple's Linux runtime takes for a token and a parameter, and for a call and a
# parameter (float16 is a plain loop there, codes are dequantised at each call); measured at 270M.
_A_TOKEN = {"fp32": 1e-9, "mlx-fp32": 1e-9, "fp16": 33e-9, "mlx": 33e-9}
_A_CALL = {"fp32": 0, "mlx-fp32": 18e-9, "fp16": 0, "mlx": 100e-9}
_PATIENCE = 120.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Verification:
    """How far a bundle's logits are from MLX's.

    Attributes:
        bundle: its name.
        weights: how they are stored.
        tokens: that went through, in each of the three ways.
        max_logit_error: largest absolute difference, for ``full``, ``stepwise`` and ``chunked``.
        limit: what it may be.
        largest_logit: of MLX.
        same_first_choice: share of positions whose likeliest token is the same.
        wrong_choices: positions where it is not, and MLX's lead is above twice the error.
        seconds: for loading, and for each of the three ways.
        executed_by: what computed the bundle's logits.
        needs: systems on which apps can use it.
        run_on_a_device: false: nothing here ran on Apple hardware but where the judge did.
        holds: whether the bundle is right.
    """

    bundle: str
    weights: str
    tokens: int
    max_logit_error: dict[str, float]
    limit: float
    largest_logit: float
    same_first_choice: float
    wrong_choices: int
    seconds: dict[str, float]
    executed_by: str
    needs: str
    run_on_a_device: bool
    holds: bool


def verify(
    bundle: Bundle,
    model: Model,
    *,
    tokens: int | None = None,
    tolerance: float | None = None,
) -> Verification:
    """Compare a bundle with the model it was made from.

    Args:
        bundle: of ``openelm convert coreai``.
        model: its source, adapters fused; its parameters become float32.
        tokens: to send through; None takes 32, or fewer where Apple's Linux runtime is slow.
        tolerance: largest error of a logit; None takes ``LIMITS``, times the largest logit / 5
            where that is more than 1.

    Raises:
        ImportError: if the extra ``coreai`` is not installed.
        RuntimeError: if Apple's runtime fails.
        ValueError: if model and bundle do not fit together.
    """
    weights = weights_of(bundle)
    try:
        if model.args.vocab_size != bundle.vocab_size:
            raise ValueError(
                f"the one has {bundle.vocab_size} tokens, the other {model.args.vocab_size}"
            )
        settle(model, weights)
    except ValueError as error:
        raise ValueError(f"{bundle.name} was not made from this model: {error}") from error
    widen(model)
    count = _count(tokens, bundle, weights, model.args.num_parameters)
    ids = np.random.default_rng(0).integers(0, bundle.vocab_size, count).tolist()
    expected = np.array(model(mx.array([ids], dtype=mx.int32))[0])  # (n, V) float32
    found, seconds = _run(bundle, ids)
    return _judge(bundle, weights, expected, found, seconds, tolerance)


def _count(tokens: int | None, bundle: Bundle, weights: str, parameters: int) -> int:
    """How many tokens to send: the asked number, or as many as ``_PATIENCE`` allows."""
    if tokens is not None and not _FEWEST <= tokens <= bundle.context:
        raise ValueError(
            f"--tokens {tokens} is not between {_FEWEST} and the context of {bundle.context}"
        )
    a_token, a_call = _A_TOKEN[weights] * parameters, _A_CALL[weights] * parameters
    once = 3 * a_token + a_call  # a token more is a call more in one of three ways
    if tokens is None:
        wanted = int((_PATIENCE - 4 * a_call) / once)
        tokens = min(max(_FEWEST, min(_TOKENS, wanted)), bundle.context)
    minutes = (tokens * once + 4 * a_call) / 60
    if minutes > 1 and platform.system() == "Linux":
        logger.info(
            "Apple's Linux runtime is slow with %s weights: %d tokens may take %.0f minutes",
            *(weights, tokens, minutes),
        )
    return tokens


def _run(bundle: Bundle, ids: Sequence[int]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """(n, V) logits by each way, and the seconds it took."""
    n = len(ids)
    ways = {
        "full": [n],
        "stepwise": [1] * n,
        "chunked": [n - n // 2 - 1, 1, n // 2],
    }
    found: dict[str, np.ndarray] = {}
    seconds: dict[str, float] = {}
    start = time.perf_counter()
    with Runner(bundle) as runner:
        seconds["load"] = time.perf_counter() - start
        for way, sizes in ways.items():
            start = time.perf_counter()
            runner.reset()
            stops = np.cumsum([0, *sizes]).tolist()
            pieces = [runner.feed_all(ids[a:b]) for a, b in pairwise(stops)]
            found[way] = np.concatenate(pieces).astype(np.float32)
            seconds[way] = time.perf_counter() - start
    return found, {way: round(value, 3) for way, value in seconds.items()}


def _judge(
    bundle: Bundle,
    weights: str,
    expected: np.ndarray,
    found: dict[str, np.ndarray],
    seconds: dict[str, float],
    tolerance: float | None,
) -> Verification:
    largest = float(np.abs(expected).max())
    limit = tolerance or LIMITS[weights] * max(1.0, largest / _USUAL_LOGIT)
    errors = {way: float(np.abs(logits - expected).max()) for way, logits in found.items()}
    top = np.partition(expected, -2, axis=-1)
    lead = top[:, -1] - top[:, -2]
    same = found["full"].argmax(-1) == expected.argmax(-1)
    wrong = int((~same & (lead > 2 * errors["full"])).sum())
    right = all(error <= limit for error in errors.values())  # false for NaN too
    return Verification(
        bundle=bundle.name,
        weights=weights,
        tokens=len(expected),
        max_logit_error=errors,
        limit=limit,
        largest_logit=largest,
        same_first_choice=float(same.mean()),
        wrong_choices=wrong,
        seconds=seconds,
        executed_by=f"Apple's Core AI runtime ({PACKAGE} {VERSION}) on {_here()}",
        needs=NEEDS,
        run_on_a_device=False,
        holds=right and not wrong,
    )


def _here() -> str:
    return f"{platform.system()} {platform.machine()}, CPU"


def write_report(verification: Verification, file: Path) -> None:
    """Write the JSON report and, beside it, the same as Markdown."""
    contents = asdict(verification)
    for path, text in (
        (file, json.dumps(contents, indent=2) + "\n"),
        (file.with_suffix(".md"), markdown(verification)),
    ):
        with atomic_file(path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def markdown(verification: Verification) -> str:
    """The report as a page."""
    v = verification
    rows = [
        f"| {way} | {error:.2e} | {v.seconds[way]:.2f} |"
        for way, error in v.max_logit_error.items()
    ]
    lines = [
        f"# {v.bundle}: {'holds' if v.holds else 'DOES NOT HOLD'}",
        "",
        f"Weights {v.weights}, {v.tokens} tokens, against MLX in float32 on the stored weights.",
        "",
        "| tokens go in | largest error of a logit | seconds |",
        "|---|---|---|",
        *rows,
        "",
        f"Limit {v.limit:.2e}; largest logit {v.largest_logit:.2f}; same first choice at "
        f"{v.same_first_choice:.1%} of the positions, {v.wrong_choices} wrong beyond the error.",
        "",
        f"Executed by {v.executed_by}. Not run on a device. Apps need {v.needs}.",
    ]
    return "\n".join(lines) + "\n"


def describe(verification: Verification) -> str:
    """The report for a terminal, two lines."""
    v = verification
    errors = ", ".join(f"{way} {error:.1e}" for way, error in v.max_logit_error.items())
    verdict = "holds" if v.holds else "does not hold"
    return (
        f"{verdict}: {v.tokens} tokens, largest error of a logit {errors} (limit {v.limit:.1e}), "
        f"same first choice {v.same_first_choice:.1%}\n"
        f"executed by {v.executed_by}; not run on a device; apps need {v.needs}"
    )

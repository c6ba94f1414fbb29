"""Scores from a Core AI bundle, run by Apple's own runtime in a process of its own."""

from pathlib import Path

from openelm_mlx.stepwise_scoring import StepwiseScorer


def bundle_scorer(path: Path) -> StepwiseScorer:
    """A scorer of a bundle; close it after use.

    Raises:
        FileNotFoundError: if a part of the bundle is missing.
        ImportError: if the extra ``coreai`` is not installed.
        RuntimeError: if the runtime does not load it.
        ValueError: if its metadata are damaged.
    """
    from convert.coreai_runner import Bundle, Runner

    bundle = Bundle.open(path)
    runner = Runner(bundle)
    try:
        return StepwiseScorer(runner, context=bundle.context, every_row=True, close=runner.close)
    except BaseException:
        runner.close()
        raise


def bundle_context(path: Path) -> int:
    """Tokens that a bundle's model can hold."""
    from convert.coreai_runner import Bundle

    return Bundle.open(path).context

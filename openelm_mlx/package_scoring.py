"""Scores from a Core ML package: by Core ML on macOS, elsewhere by the project's evaluator.

The latter is slow (NumPy, and one token at a time where the package gives the last logits only):
for small limits.
"""

from pathlib import Path

from openelm_mlx.stepwise_scoring import StepwiseScorer


def package_scorer(path: Path, *, float32: bool) -> StepwiseScorer:
    """A scorer of an ``.mlpackage``, called as an app calls it.

    Args:
        path: of the package.
        float32: have the evaluator compute in float32; else in the types that the package names.

    Raises:
        FileNotFoundError: if there is no package.
        ValueError: if it is damaged, or its metadata do not say how it is called.
    """
    from convert.coreml_describe import describe
    from convert.coreml_predictor import client_of, open_package

    package = open_package(path, precision="float32" if float32 else "native")
    client = client_of(package, describe(path))
    contract = client.contract
    return StepwiseScorer(client, context=contract.context, every_row=contract.all_logits)


def package_context(path: Path) -> int:
    """Tokens that a package's cache holds.

    Raises:
        FileNotFoundError: if there is no package.
        ValueError: if its metadata do not say it.
    """
    from convert.coreml_client import Contract
    from convert.coreml_describe import describe

    return Contract.from_metadata(describe(path).metadata).context

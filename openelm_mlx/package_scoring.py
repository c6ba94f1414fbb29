"""Scores from a Core ML package, anywhere: run by the project's evaluator, called as an app does.

Slow (NumPy, one token at a time where the package gives the last logits only): for small limits.
"""

from pathlib import Path

from openelm_mlx.stepwise_scoring import StepwiseScorer


def package_scorer(path: Path, *, float32: bool) -> StepwiseScorer:
    """A scorer of an ``.mlpackage``.

    Args:
        path: of the package.
        float32: compute in float32; else in the types that the package names, as a device would.

    Raises:
        FileNotFoundError: if there is no package.
        ValueError: if it is damaged, or its metadata do not say how it is called.
    """
    from convert.coreml_client import CLIENTS, Contract
    from convert.mil_eval import Package

    package = Package(path, precision="float32" if float32 else "native")
    contract = Contract.from_metadata(package.metadata)
    client = CLIENTS[contract.interface](package, contract)
    return StepwiseScorer(client, context=contract.context, every_row=contract.all_logits)


def package_context(path: Path) -> int:
    """Tokens that a package's cache holds."""
    from convert.coreml_client import Contract
    from convert.mil_eval import Package

    return Contract.from_metadata(Package(path).metadata).context

"""Settings of the preference loss."""

from dataclasses import dataclass

LOSSES = ("sigmoid", "hinge", "rso", "ipo")


@dataclass(frozen=True, kw_only=True)
class PreferenceArgs:
    """Settings of the preference loss.

    Raises:
        ValueError: naming what is out of range.
    """

    loss: str = "sigmoid"  # "rso" is the hinge loss of that paper, without its sampling
    beta: float = 0.01  # strength of the pull towards the reference model
    loss_chunk: int = 256  # tokens whose logits exist at a time

    def __post_init__(self) -> None:
        problems = []
        if self.loss not in LOSSES:
            problems.append(f"loss {self.loss!r} is not one of {', '.join(LOSSES)}")
        if not self.beta > 0:
            problems.append(f"beta must be positive, got {self.beta}")
        if self.loss_chunk < 1:
            problems.append(f"loss_chunk must be at least 1, got {self.loss_chunk}")
        if problems:
            raise ValueError("dpo: " + "; ".join(problems))

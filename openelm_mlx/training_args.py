"""Settings of the training loop."""

from dataclasses import dataclass, field

from openelm_mlx.distributed import BACKENDS

CHECKPOINT_MODES = ("none", "scores", "attention", "layer")


@dataclass(frozen=True, kw_only=True)
class TrainArgs:
    """Settings of the loop.

    Raises:
        ValueError: listing what is out of range.
    """

    grad_accumulation_steps: int = 1  # micro-batches an update
    max_grad_norm: float = 1.0  # 0 does not clip
    seed: int = 0
    steps_per_report: int = 10  # updates between lines on the terminal
    steps_per_eval: int = 200  # updates between validations; 0 validates at the end only
    val_batches: int = 25  # of a validation; -1 takes all
    save_every: int = 200  # updates between states; 0 saves at the end only
    keep_states: int = 2
    # recompute attention's "scores", "attention" or the whole "layer" going backward; true: "layer"
    grad_checkpoint: str = field(default="none", metadata={"words": {True: "layer", False: "none"}})
    compile: bool | None = None  # None: on a GPU
    corenet_accumulation: bool = False  # add the means of micro-batches, as CoreNet does
    # wall time after which a step is the last, the schedule fitted into it; 0 sets no bound
    max_seconds: float = 0.0
    early_stopping: int = 0  # stop after so many validations without a better one; 0 never
    backend: str = "any"  # joins ranks: ring, mpi, nccl, jaccl; any is what launched them
    fully_shard: bool = False  # a piece of each layer on each rank; needs nccl or jaccl
    # seconds without progress that end a run on several ranks; 0 never
    stall_timeout: float = 600.0

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least {least}, got {getattr(self, name)}"
            for name, least in (
                *(("grad_accumulation_steps", 1), ("max_grad_norm", 0), ("seed", 0)),
                *(("steps_per_report", 1), ("steps_per_eval", 0), ("val_batches", -1)),
                *(("save_every", 0), ("keep_states", 1), ("early_stopping", 0)),
                *(("max_seconds", 0), ("stall_timeout", 0)),
            )
            if getattr(self, name) < least
        ]
        if self.grad_checkpoint not in CHECKPOINT_MODES:
            problems.append(
                f"grad_checkpoint {self.grad_checkpoint!r} is not one of "
                + ", ".join(CHECKPOINT_MODES)
            )
        if self.backend not in BACKENDS:
            problems.append(f"backend {self.backend!r} is not one of {', '.join(BACKENDS)}")
        if problems:
            raise ValueError("training: " + "; ".join(problems))

    @property
    def bound(self) -> str:
        """The bound by time, in words that follow a number of updates; empty without one."""
        return f", or what {self.max_seconds:g} s have room for" if self.max_seconds else ""

"""How a run shows where it is: a bar on standard error, and W&B where asked for."""

import sys
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm


class Progress:
    """A bar on standard error with loss, speed and memory; silent where that is no terminal.

    Args:
        total: updates in all.
        done: updates made before.
        show: False on ranks other than 0.
    """

    def __init__(self, total: int, done: int, *, show: bool) -> None:
        self._bar = tqdm(
            total=total,
            initial=done,
            unit="step",
            dynamic_ncols=True,
            disable=not (show and sys.stderr.isatty()),
        )

    def step(self, line: Mapping[str, Any], total: int) -> None:
        """Show one training step, and how many there will be as far as is known."""
        self._bar.total = total
        self._bar.update(1)
        self._bar.set_postfix_str(
            f"loss {line['loss']:.4f}, {line['tokens_per_second']:.0f} tokens/s, "
            f"{line['peak_memory_gb']:.2f} GB"
        )

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if not self._bar.disable:
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


class WandbReporter:
    """Sends every line to Weights & Biases through its own library.

    Args:
        project: name of the project there.
        settings: kept with the run.

    Raises:
        ValueError: where ``wandb`` is not installed.
    """

    def __init__(self, project: str, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError("--report-to wandb needs it installed: pip install wandb") from error
        self._run = wandb.init(project=project, config=dict(settings))

    def write(self, line: Mapping[str, Any]) -> None:
        """Send one line."""
        self._run.log({k: v for k, v in line.items() if k != "step"}, step=line["step"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()

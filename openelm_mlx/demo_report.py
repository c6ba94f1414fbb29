"""The report of a demo: one page with what was done, what came of it, and the commands."""

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openelm_mlx import __version__, blas
from openelm_mlx.atomic import atomic_file
from openelm_mlx.demo_room import Room, program
from openelm_mlx.doctor import report as examine
from openelm_mlx.plots import have_matplotlib

_PICTURES = {"pretrain": "loss.png", "finetune": "lora/loss.png", "perplexity": "compare.png"}


def write_report(room: Room) -> Path:
    """Write ``report.md`` from what the steps have left.

    Returns:
        Its path.
    """
    with atomic_file(room.path("report.md")) as file:
        file.write_text(render(room), encoding="utf-8")
    return room.path("report.md")


def render(room: Room) -> str:
    """The page as Markdown."""
    seconds = sum(step.seconds for step in room.done.values())
    parts = [
        "# OpenELM from text to app\n\n"
        f"A model trained, tuned, quantised and exported in {seconds:.0f} seconds, on text that "
        f"any Python has. {_machine()}.",
        *_answers(room),
    ]
    for name, step in room.done.items():
        lines = "\n".join(step.lines)
        commands = "\n".join(step.commands)
        parts.append(f"## {step.title}\n\n```\n{lines}\n```")
        picture = _PICTURES.get(name)
        if picture and room.path(picture).is_file():
            parts.append(f"![{step.title}]({picture})")
        if name == "pretrain" and room.path("layers.png").is_file():
            parts.append("![widths and parameters of the layers](layers.png)")
        if commands:
            parts.append(f"By hand, {step.seconds:.1f} s here:\n\n```\n{commands}\n```")
    parts.append("## What would make it better\n\n" + "\n".join(f"- {x}" for x in advice(room)))
    return "\n\n".join(parts) + "\n"


def advice(room: Room) -> list[str]:
    """What would make the demo faster, or its model better, on this machine."""
    found: Any = examine()["to_mend"]
    lines = [
        f"faster: {gap}: {command}"
        for gap, command in found.items()
        if "optional" not in gap and "g++" not in gap
    ]
    if blas.status.startswith("off"):
        lines.append("faster: leave out OPENELM_MLX_OPENBLAS=0")
    if blas.mlx_backend() == "cpu" and not lines:
        lines.append(
            "faster: a Mac with Apple silicon, or an NVIDIA GPU (make demo BACKEND=cuda13)"
        )
    start = " ".join(program())
    lines.append(
        f"better: more time: {start} demo --output {room.folder}-long --pretrain-seconds 600 "
        "--finetune-seconds 120"
    )
    if not have_matplotlib():
        lines.append('pictures: pip install "openelm-mlx[plot]"')
    return lines


def _answers(room: Room) -> Iterator[str]:
    """The questions before and after, and what to make of them."""
    step = room.done.get("questions")
    if step is None:
        return
    for each in step.facts["questions"]:
        yield (
            f"> **{each['prompt']}**\n>\n> before: {each['before']}\n>\n> after: {each['after']}"
            f"\n>\n> true: {each['completion']}"
        )
    scored = room.done.get("perplexity")
    found = {} if scored is None else scored.facts["perplexity"]
    values = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
    yield (
        "The questions are none of those it was tuned on. A model of this size learns the form of "
        "an answer, not what is true."
        + (f" Perplexity of unseen questions with their answers: {values}." if values else "")
    )


def _machine() -> str:
    backend = blas.mlx_backend()
    how = f", {blas.status}" if backend == "cpu" else ""
    return (
        f"openelm-mlx {__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}, MLX on {backend}{how}"
    )

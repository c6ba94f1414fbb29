"""The commands that the README shows, and what stands in for their words when they are run.

A new command needs nothing here if its words are among STAND_INS. Else: give its words a stand-in
(files are made by ``readme_room``), add flags that keep it small to SMALLER, or name it in NOT_RUN
with the reason.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r"^(?:\$ )?((?:mlx\.launch|mpirun) .*?)?(?:\S*/)?openelm (.*)$")
_TWO_WORDS = ("convert", "tokenizer")

# Word of the README -> words in the room; where a command means another thing by it, by command.
STAND_INS: dict[str, str] = {
    **{"M": "openelm-270m", "DIR": "tiny", "PATH": "my-data", "R": "tiny.yaml", "A": "adapters"},
    **{"FILE": "corpus/valid.jsonl", "RUN": "adapters", "P": "'the old king'", "N": "320"},
    **{"FILE.pt": "checkpoint_average.pt", "REPO_OR_DIR": "openelm-270m", "…": "my-data"},
    **{"FILE.mlpackage": "package.mlpackage", "BUNDLE": "bundle", "CKPT...": "tiny openelm-270m"},
    **{"PATH...": "corpus/train.jsonl corpus/valid.jsonl", "FILE.json": "numbers.json"},
    **{"FILE.jsonl": "prompts.jsonl", "apple/OpenELM-270M-Instruct": "openelm-270m"},
    **{"folder": "tiny", "corpus/": "corpus", "commonsense": "my-data", "tuned": "tiny"},
    **{"tuned-8bit": "tiny", "App.mlpackage": "package.mlpackage"},
}
FOR_COMMAND: dict[str, dict[str, str]] = {
    "dpo": {"PATH": "pairs"},
    "evaluate": {
        "corpus/valid.jsonl": "prompts.jsonl --text-key prompt",  # short: packages are slow
        "commonsense": "commonsense",
        "zero-shot": "commonsense --data-dir dataset",  # whose tasks are on the Hub
    },
    "bench": {
        **{"--size": "--model", "270M": "tiny"},
        "mlx_lm": "mlx_lm --cases kernels --trials 1",
    },
    "convert corenet": {"--preset": "--config", "270M": "checkpoint_average.yaml"},
    "convert peft": {"DIR": "peft-adapters"},
}
# Flags at the end of a command, where later ones win, that keep it small.
SMALLER: dict[str, str] = {
    "chat": "--max-tokens 4",
    "convert corenet": "--config checkpoint_average.yaml",
    "convert coreml": "--context 64 --prefill 8",
    "convert run-coreml": "--max-tokens 4",
    "demo": "--limit 300 --vocab-size 400 --pretrain-seconds 2 --finetune-seconds 1",
    "dpo": "--iters 4 --epochs none --batch-size 4 --max-seq-length 64 --max-prompt-length 32",
    "evaluate": "--max-seq-length 64 --limit 4",
    "finetune": "--iters 4 --epochs none --batch-size 4 --max-seq-length 64",
    "generate": "--max-tokens 4",
    "convert quantize": "--group-size 32",
}
# Command -> the package of an extra, without which it is skipped.
NEEDS: dict[str, str] = {
    "plot": "matplotlib",
    "convert coreai": "coreai",
    "convert verify-coreai": "coreai",
}
# Command, or the launcher before it -> why it is not run here; its words are parsed all the same.
NOT_RUN: dict[str, str] = {
    "mlx.launch": "several processes or machines: tests/test_distributed.py joins ranks",
    "mpirun": "several processes: tests/test_distributed.py",
    "serve": "answers until it is stopped: tests/test_serve.py",
    "check-release": "downloads Apple's release: tests/test_check_release.py has a stand-in",
}


@dataclass(frozen=True)
class Shown:
    """A command of the README.

    Attributes:
        text: as it is printed.
        launcher: what stands before ``openelm``, if it is started by another program.
        words: after ``openelm``, comments taken off.
        inline: in a line of text, where it may be a name alone.
    """

    text: str
    launcher: str
    words: tuple[str, ...]
    inline: bool

    @property
    def command(self) -> str:
        """``generate``, ``convert coreml``."""
        return " ".join(self.words[: 2 if self.words[0] in _TWO_WORDS else 1])

    @property
    def is_name(self) -> bool:
        """Whether it only names a command."""
        return self.inline and " ".join(self.words) == self.command

    @property
    def not_run(self) -> str | None:
        """Why it is not run, or None."""
        launcher = self.launcher.split(" ")[0]
        return NOT_RUN.get(launcher) or NOT_RUN.get(self.command)

    def replaced(self) -> list[str]:
        """The words with stand-ins, outputs below ``made``, and the flags that keep it small."""
        meant = STAND_INS | FOR_COMMAND.get(self.command, {})
        out: list[str] = []
        for before, word in zip(("", *self.words), self.words, strict=False):
            if before in ("--output", "--plot"):
                out.append(f"made/{word}")
            else:
                out += shlex.split(meant[word]) if word in meant else [word]
        return out + shlex.split(SMALLER.get(self.command, ""))


def shown_commands() -> list[Shown]:
    """Every command of the README, each text once."""
    return list({shown.text: shown for shown in (*_in_blocks(), *_in_lines())}.values())


def python_blocks() -> list[str]:
    """Python code that the README shows."""
    return [text for language, text in _FENCE.findall(README) if language == "python"]


def flags_in_prose() -> set[str]:
    """Every ``--flag`` between backticks outside of code blocks."""
    spans = re.findall(r"`([^`]+)`", _FENCE.sub("", README))
    return {flag for span in spans for flag in re.findall(r"--[a-z][a-z0-9-]*", span)}


def _in_blocks() -> Iterator[Shown]:
    for _, text in _FENCE.findall(README):
        for line in text.replace("\\\n", " ").splitlines():
            found = _LINE.match(line)
            if found:
                words = tuple(shlex.split(found[2], comments=True))
                yield Shown(line.strip(), found[1] or "", words, inline=False)


def _in_lines() -> Iterator[Shown]:
    for span in re.findall(r"`([^`\n]+)`", _FENCE.sub("", README)):
        found = _LINE.match(span)
        if found:
            yield Shown(span, found[1] or "", tuple(shlex.split(found[2])), inline=True)

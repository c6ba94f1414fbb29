"""``openelm <command>``: picks a command and imports only that one.

Results go to standard output, progress and warnings to standard error. Exit code 0; 2 for a usage
error; 1 for a failure, said in one line; 130 for Ctrl-C. OPENELM_MLX_TRACEBACK=1 shows tracebacks.
"""

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NoReturn

from openelm_mlx import __version__

Route = tuple[str, str, str]  # module, suffix of its two functions, one line of help

COMMANDS: dict[str, Route] = {
    "generate": ("openelm_mlx.generate", "", "continue a prompt, or a file of prompts"),
    "chat": ("openelm_mlx.chat", "", "talk to an Instruct model"),
    "serve": ("openelm_mlx.serve", "", "OpenAI-compatible server (mlx_lm's) on a model folder"),
    "finetune": ("openelm_mlx.finetune", "", "tune a model: LoRA, DoRA or all parameters"),
    "pretrain": ("openelm_mlx.pretrain", "", "train a model from scratch on text"),
    "dpo": ("openelm_mlx.dpo", "", "tune a model on pairs of a better and a worse answer"),
    "fuse": ("openelm_mlx.fuse", "", "fold adapters into their model"),
    "tokenizer": ("openelm_mlx.tokenizer_training", "tokenizer", "train a SentencePiece tokenizer"),
    "average": ("convert.average", "average", "average checkpoints, as CoreNet does"),
    "evaluate": ("openelm_mlx.evaluate", "", "perplexity of text, and scores on tasks"),
    "info": ("openelm_mlx.info", "", "layers, widths, parameters, bytes, and where a folder runs"),
    "bench": ("openelm_mlx.bench", "", "speed and memory, side by side with mlx_lm"),
    "demo": ("openelm_mlx.demo", "", "the whole road on a small model, offline, in 3 minutes"),
    "plot": ("openelm_mlx.plot_command", "", "draw a run's loss, a bench, or a model's layers"),
    "doctor": ("openelm_mlx.doctor", "", "versions, backend, memory, and what is missing"),
    "check-release": ("openelm_mlx.check_release", "", "hold a release against published facts"),
    "convert": ("convert.cli", "", "checkpoints to and from other frameworks"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; the console script ``openelm``.

    Args:
        argv: the arguments; None takes ``sys.argv``.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    handler = _StderrHandler()
    logging.getLogger().addHandler(handler)
    for package in ("openelm_mlx", "convert"):
        logging.getLogger(package).setLevel(logging.INFO)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `openelm … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:
        if os.environ.get("OPENELM_MLX_TRACEBACK") == "1":
            raise
        print(f"error: {explain(error)}", file=sys.stderr)
        return 1
    finally:
        logging.getLogger().removeHandler(handler)


def _run(arguments: Sequence[str]) -> int:
    """Run the command and flush, so that a reader who left shows here and not at exit."""
    try:
        code = run_route("openelm", COMMANDS, arguments, description=__doc__)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    sys.stdout.flush()
    return code


def run_route(
    program: str, routes: Mapping[str, Route], argv: Sequence[str], *, description: str | None
) -> int:
    """Parse ``argv`` with the chosen route's own flags and run it.

    Args:
        program: what stands before the route on the command line.
        routes: name -> module, suffix and help.
        argv: the arguments after ``program``.
        description: for the help; its first line is shown.

    Returns:
        The route's exit code.
    """
    parser = Parser(
        prog=program, description=(description or "").partition("\n")[0].replace("`", "")
    )
    if program == "openelm":
        parser.add_argument("--version", action="version", version=f"openelm-mlx {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, (module, suffix, text) in routes.items():
        nested = name == "convert" and program == "openelm"
        sub = commands.add_parser(name, help=text, description=text, add_help=not nested)
        if name != chosen:
            continue
        if nested:
            return int(import_module(module).run(argv[list(argv).index(name) + 1 :]))
        implementation = import_module(module)
        getattr(implementation, f"add_{suffix}_arguments" if suffix else "add_arguments")(sub)
        sub.set_defaults(run_command=getattr(implementation, f"run_{suffix}" if suffix else "run"))
    args = parser.parse_args(argv)
    return int(args.run_command(args))


class _StderrHandler(logging.Handler):
    """Log records as ``level: message`` lines on whatever standard error is at that moment."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record; information that was given before only once."""
        line = f"{record.levelname.lower()}: {record.getMessage()}"
        if record.levelno <= logging.INFO and line in self._said:
            return
        self._said.add(line)
        print(line, file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and where help is, and exit with 2."""
        self.exit(2, f"error: {message}; see `{self.prog} --help`\n")


def explain(error: BaseException) -> str:
    """An exception as one line for a person."""
    if isinstance(error, ImportError):
        from openelm_mlx.doctor import explain_import_error

        known = explain_import_error(error)
        if known:
            return known
    if isinstance(error, MemoryError):
        return "out of memory; see `openelm info` for what a model needs"
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and error.filename:
        text = f"{error.filename}: {error.strerror}"
    return text or type(error).__name__


if __name__ == "__main__":
    sys.exit(main())

"""The steps of the demo, each by the commands that a person would type."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openelm_mlx import blas
from openelm_mlx.checkpoint import load_args
from openelm_mlx.demo_room import Room, python
from openelm_mlx.metrics import read_metrics
from openelm_mlx.plots import have_matplotlib
from openelm_mlx.python_text import write_all

PACKAGE = "OpenELM.mlpackage"
_BEGINNING = "Return a new"
_SAMPLE = ("--max-tokens", 40, "--temp", 0.7, "--top-p", 0.9, "--seed", 1)
_ANSWER = ("--max-tokens", 32)
_QUESTIONS = 3
_SCORED = 40  # unseen questions that all models are scored on
# Without a fast BLAS a narrower model and smaller updates, of which there are more, learn faster.
_SLOW = ("--batch-size", 4)
_SLOW_MODEL = ("--model-dim", 64, "--num-gqa-groups", 1)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step.

    Attributes:
        name: under which it is kept.
        title: for a person.
        work: does it in the demo's folder.
    """

    name: str
    title: str
    work: Callable[[Room], None]


def text(room: Room) -> None:
    """Text and questions from this Python's own documentation."""
    limit = room.settings.limit
    flags = [] if limit is None else ["--limit", str(limit)]
    room.show_command([*python(), "-m", "openelm_mlx.python_text", str(room.folder), *flags])
    made = write_all(room.folder, limit=limit)
    room.say(f"{made['documents']:,} texts, {made['questions']:,} questions with answers")


def tokenizer(room: Room) -> None:
    """A SentencePiece tokenizer."""
    data, size = room.path("text/train.jsonl"), room.settings.vocab_size
    out = room.openelm(
        *("tokenizer", "train", "--data", data, "--vocab-size", size),
        *("--output", room.path("tokenizer"), "--overwrite"),
    )
    room.say(out.strip().partition(": ")[2])


def pretrain(room: Room) -> None:
    """A model from scratch, then a sample of what it writes."""
    data = room.path("text")
    base = room.path("base")
    room.openelm(
        *("pretrain", "--recipe", "pretrain_demo", "--data", data / "train.jsonl"),
        *("--valid-data", data / "valid.jsonl", "--tokenizer", room.path("tokenizer")),
        *(*(_SLOW_MODEL if slow_blas() else ()), *_slow()),
        *_seconds(room.settings.pretrain_seconds),
        *("--output", base, "--resume" if base.exists() else "--overwrite"),
    )
    args = load_args(base)
    room.say(
        f"{args.num_parameters:,} parameters in {args.num_transformer_layers} layers, heads "
        f"{args.num_query_heads[0]} to {args.num_query_heads[-1]}, FFN {args.ffn_dims[0]} to "
        f"{args.ffn_dims[-1]}"
    )
    _say_losses(room, "base", start=math.log(args.vocab_size))


def sample(room: Room) -> None:
    """What the model writes."""
    out = room.openelm("generate", "--model", room.path("base"), "--prompt", _BEGINNING, *_SAMPLE)
    room.step.facts["sample"] = f"{_BEGINNING} {_line(out)}"
    room.say(f"{_BEGINNING} {_line(out)}")


def finetune(room: Room) -> None:
    """LoRA adapters on questions and answers."""
    lora = room.path("lora")
    room.openelm(
        *("finetune", "--recipe", "finetune_demo", "--model", room.path("base")),
        *("--data", room.path("questions"), *_slow()),
        *_seconds(room.settings.finetune_seconds),
        *("--output", lora, "--resume" if lora.exists() else "--overwrite"),
    )
    _say_losses(room, "lora")


def questions(room: Room) -> None:
    """The same questions before and after, none of which was tuned on."""
    asked = room.step.facts["questions"] = []
    for record in _unseen(room):
        words = ["generate", "--model", room.path("base"), "--prompt", record["prompt"], *_ANSWER]
        before = _line(room.openelm(*words))
        after = _line(room.openelm(*words, "--adapter-path", room.path("lora")))
        asked.append({**record, "before": before, "after": after})
        room.say(
            *(record["prompt"], f"  before: {before}", f"  after:  {after}"),
            f"  true:   {record['completion']}",
        )


def quantize(room: Room) -> None:
    """The adapters folded in, then 4 bits a weight."""
    room.openelm(
        *("fuse", "--model", room.path("base"), "--adapter-path", room.path("lora")),
        *("--output", room.path("tuned"), "--overwrite"),
    )
    out = room.openelm(
        *("convert", "quantize", room.path("tuned"), "--bits", 4, "--group-size", 32),
        *("--output", room.path("4bit"), "--overwrite"),
    )
    room.say(*out.splitlines()[1:])


def coreml(room: Room) -> None:
    """A Core ML package with MLX's own 4-bit codes, held against MLX before it appears."""
    out = room.openelm(
        *("convert", "coreml", room.path("4bit"), "--output", room.path(PACKAGE)),
        *("--context", 64, "--weights", "mlx", "--all-logits"),
        *("--data", room.path("text/questions.jsonl"), "--overwrite"),
    )
    room.say(*(line.replace(f"{room.folder}/", "") for line in out.splitlines()))
    prompt = _unseen(room)[0]["prompt"]
    out = room.openelm(
        *("convert", "run-coreml", room.path(PACKAGE), "--prompt", prompt, "--max-tokens", 16)
    )
    room.say(f"{prompt} {_line(out)}")


def perplexity(room: Room) -> None:
    """Each step scored on questions that none has seen."""
    result = room.path("compare.json")
    names = [room.path(name) for name in ("base", "lora", "tuned", "4bit", PACKAGE)]
    out = room.openelm(
        *("evaluate", "--compare", *names, "--data", room.path("text/questions.jsonl")),
        *("--limit", _SCORED, "--sample-tokens", 0, "--output", result, "--overwrite"),
    )
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))["models"]
    room.step.facts["perplexity"] = {Path(k).stem: row["perplexity"] for k, row in found.items()}
    room.say(*out.rstrip().splitlines())


def pictures(room: Room) -> None:
    """The loss and the layers, where matplotlib is installed."""
    if not have_matplotlib():
        room.say('no pictures: they need matplotlib: pip install "openelm-mlx[plot]"')
        return
    base = room.path("base")
    room.openelm("plot", base, "--output", room.path("loss.png"))
    room.openelm("plot", base, "--layers", "--output", room.path("layers.png"))
    room.say("loss.png: pretraining; layers.png: layer-wise scaling; compare.png: the table above")


STEPS = (
    Step(name="text", title="English text that this Python has", work=text),
    Step(name="tokenizer", title="A SentencePiece tokenizer", work=tokenizer),
    Step(name="pretrain", title="A small layer-wise scaled OpenELM from scratch", work=pretrain),
    Step(name="sample", title="What it writes", work=sample),
    Step(name="finetune", title="LoRA on questions and answers", work=finetune),
    Step(name="questions", title="Questions it was not tuned on", work=questions),
    Step(name="quantize", title="Adapters folded in, 4 bits a weight", work=quantize),
    Step(name="coreml", title="A Core ML package, verified against MLX", work=coreml),
    Step(name="perplexity", title="Each step scored on unseen questions", work=perplexity),
    Step(name="pictures", title="Pictures", work=pictures),
)


def slow_blas() -> bool:
    """Whether float32 matrix products go through MLX's slow reference BLAS."""
    return blas.mlx_backend() == "cpu" and not blas.status.startswith("loaded")


def _slow() -> tuple[object, ...]:
    return _SLOW if slow_blas() else ()


def _seconds(limit: float | None) -> tuple[object, ...]:
    return () if limit is None else ("--max-seconds", f"{limit:g}")


def _say_losses(room: Room, run: str, *, start: float | None = None) -> None:
    """The loss on unseen text, from the first validation to the last."""
    lines = read_metrics(room.path(run))
    steps = [line for line in lines if "loss" in line]
    valid = [line for line in lines if "val_loss" in line]
    first, last = valid[0], valid[-1]
    begun = f"{start:.2f} (chance), " if start else ""
    room.say(
        f"{len(steps):,} updates, {steps[-1]['tokens']:,} tokens; loss on unseen text {begun}"
        f"{first['val_loss']:.2f} at update {first['step']}, {last['val_loss']:.2f} at the end"
    )
    room.step.facts |= {"updates": len(steps), "first": first, "last": last}


def _unseen(room: Room) -> list[dict[str, str]]:
    """Questions with answers that the model is not tuned on, from all over the library."""
    lines = room.path("questions/valid.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines[:: max(1, len(lines) // _QUESTIONS)][:_QUESTIONS]]


def _line(text: str) -> str:
    return " ".join(text.split())

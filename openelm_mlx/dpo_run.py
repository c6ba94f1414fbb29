"""Preference tuning at work: pairs -> reference log-probabilities -> the training loop.

The reference is the model as it is before the first update. Its log-probabilities of all answers
are computed once and kept in the run's folder, so no second model is ever in memory, and nothing
that trains can move it (REPORTS B30).
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from openelm_mlx.atomic import atomic_file
from openelm_mlx.batches import Batch
from openelm_mlx.checkpoint import load
from openelm_mlx.distributed import (
    any_rank,
    array_of_rank_0,
    describe_world,
    sum_scalars,
    together,
    world,
)
from openelm_mlx.lora import trainable_count
from openelm_mlx.model import Model
from openelm_mlx.preference import preference_loss, sequence_logprobs_of
from openelm_mlx.run_folder import (
    finish_run,
    plan_text,
    prepare_run_folder,
    step_memory,
)
from openelm_mlx.tuning_pairs import EvalPairBatches, Pair, PairBatches, load_pairs
from openelm_mlx.tuning_run import begin_run, carry_out, prepare_model
from openelm_mlx.tuning_settings import (
    TuningSettings,
)
from openelm_mlx.weight_files import read_tensor_file

logger = logging.getLogger(__name__)

_REFERENCE_FILE = "reference.safetensors"


def tune_preferences(args: argparse.Namespace, settings: TuningSettings) -> int:
    """Tune a model on pairs, or show what would be done.

    Args:
        args: flags of :func:`openelm_mlx.run_flags.add_run_arguments`.
        settings: resolved, with :class:`PairArgs` and :class:`PreferenceArgs` as their own.

    Returns:
        The exit code.
    """
    pair_args, preference = settings.own
    keeps = not (args.overwrite or args.dry_run)  # nothing is thrown away before all is checked
    if keeps:
        prepare_run_folder(args.output, resume=args.resume, overwrite=False)
    tune = settings.tune
    model, tokenizer = load(tune.model, None, tune.tokenizer, need_tokenizer=True)
    if tokenizer is None:
        raise ValueError(f"{tune.model} has no tokenizer; give --tokenizer")
    pairs = load_pairs(tune.data, "train", tokenizer, pair_args)
    valid = load_pairs(tune.data, "valid", tokenizer, pair_args)
    prepare_model(model, settings)
    settings = settings.for_updates(len(_batches(pairs, settings, None).plan))
    plan = _plan(model, pairs, valid, settings)
    if args.dry_run:
        sys.stdout.write(f"{plan}\n{describe_pairs(pairs, tokenizer)}")
        return 0
    folder = begin_run(args, settings, plan)
    references = kept_references(folder, model, [*pairs, *valid], batch_size=tune.batch_size)
    outcome = carry_out(
        *(args, settings, folder, model, tokenizer),
        source=_batches(pairs, settings, references[: len(pairs)]),
        loss_fn=preference_loss(preference),
        validation=_validation(valid, settings, references[len(pairs) :]),
        stage="dpo",
    )
    return finish_run(folder, outcome, unit="pairs") if world().rank() == 0 else 0


def reference_logprobs(model: Model, pairs: Sequence[Pair], *, batch_size: int) -> mx.array:
    """Log-probability of every chosen and rejected answer under a model as it is now.

    Args:
        model: the reference; put into eval mode for it, and back.
        pairs: in order.
        batch_size: pairs a forward pass, over all ranks.

    Returns:
        (P, 2) float32, equal on all ranks.
    """
    group = world()
    was_training = model.training
    model.eval()
    source = PairBatches(pairs, batch_size=batch_size)
    found = mx.zeros((len(pairs), 2))
    chunks = list(source.all_pairs(batch_size))
    mine = chunks[group.rank() :: group.size()]
    quiet = not (sys.stderr.isatty() and group.rank() == 0)
    for numbers, batch in tqdm(mine, desc="reference", unit="batch", disable=quiet):
        logprobs = sequence_logprobs_of(model, batch)
        found[mx.array(numbers)] = logprobs.reshape(2, -1).T
        mx.eval(found)
    if was_training:
        model.train()
    found = sum_scalars(found, group)
    mx.eval(found)  # on all ranks at once: rank 0 alone goes on to write it
    return found


def kept_references(
    folder: Path, model: Model, pairs: Sequence[Pair], *, batch_size: int
) -> mx.array:
    """The reference log-probabilities of a run, computed once and kept in its folder.

    Args:
        folder: of the run; a resumed run finds them there, if they are of the same pairs.
        model: before the first update.
        pairs: training and validation pairs.
        batch_size: pairs a forward pass.

    Returns:
        (P, 2) float32, rank 0's on all ranks.
    """
    group, path = world(), folder / _REFERENCE_FILE
    digest = PairBatches(pairs, batch_size=batch_size).digest
    kept = together(lambda: _read_kept(path, digest) if group.rank() == 0 else None, group)
    if any_rank(kept is not None, group):  # the other ranks need not see rank 0's disk
        kept = array_of_rank_0(mx.zeros((len(pairs), 2)) if kept is None else kept, group)
        mx.eval(kept)
        return kept
    found = reference_logprobs(model, pairs, batch_size=batch_size)
    together(lambda: _keep(path, digest, found) if group.rank() == 0 else None, group)
    return found


def _read_kept(path: Path, digest: str) -> mx.array | None:
    if not path.is_file():
        return None
    kept = read_tensor_file(path)
    if list(kept) == [digest]:
        return kept[digest]
    logger.warning("%s is of other pairs and is computed anew", path)
    return None


def _keep(path: Path, digest: str, logprobs: mx.array) -> None:
    with atomic_file(path) as temporary:
        mx.save_safetensors(str(temporary), {digest: logprobs})


def describe_pairs(pairs: Sequence[Pair], tokenizer: Any, n: int = 2) -> str:
    """The first pairs as text, prompt and both answers apart."""
    lines = []
    for pair in pairs[:n]:
        lines.append(pair.name)
        for name, sample in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            learned = [int(i) for i, m in zip(sample.tokens, sample.mask, strict=True) if m]
            prompt = [int(i) for i, m in zip(sample.tokens, sample.mask, strict=True) if not m]
            if name == "chosen":
                lines.append(f"  prompt   ({len(prompt)} tokens): {tokenizer.decode(prompt)!r}")
            lines.append(f"  {name:8} ({len(learned)} tokens): {tokenizer.decode(learned)!r}")
    return "\n".join(lines) + "\n"


def _batches(
    pairs: Sequence[Pair], settings: TuningSettings, references: mx.array | None
) -> PairBatches:
    group = world()
    return PairBatches(
        pairs,
        batch_size=settings.tune.batch_size,
        seed=settings.train.seed,
        rank=group.rank(),
        world_size=group.size(),
        epochs=settings.tune.epochs,
        references=references,
    )


def _validation(
    pairs: Sequence[Pair], settings: TuningSettings, references: mx.array
) -> Callable[[], Iterable[Batch]] | None:
    if not pairs:
        return None
    group = world()
    batches = EvalPairBatches(
        pairs,
        batch_size=settings.tune.batch_size,
        rank=group.rank(),
        world_size=group.size(),
        references=references,
    )
    return lambda: batches


def _plan(
    model: Model, pairs: Sequence[Pair], valid: Sequence[Pair], settings: TuningSettings
) -> str:
    per_update = settings.tune.batch_size * settings.train.grad_accumulation_steps
    longest = max(max(len(p.chosen.tokens), len(p.rejected.tokens)) for p in pairs)
    facts = {
        "model": f"{settings.tune.model}, {model.args.num_parameters:,} parameters",
        "trained": f"{trainable_count(model):,} parameters ({settings.tune.fine_tune_type})",
        "pairs": f"train {len(pairs):,}, valid {len(valid):,}; the longest has {longest} tokens",
        "updates": f"{settings.schedule.iters:,} of {per_update} pairs, "
        f"{settings.schedule.iters * per_update / len(pairs):.2f} epochs"
        f"{settings.train.bound}",
        "machines": describe_world(),
    }
    memory = step_memory(
        model.args,
        model,
        batch_size=2 * -(-settings.tune.batch_size // world().size()),
        max_seq_length=longest,
        checkpoint=settings.train.grad_checkpoint,
    )
    return plan_text("preference tuning", settings.as_dict(), facts, memory)

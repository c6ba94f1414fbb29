"""Supervised fine-tuning: records -> samples -> the training loop -> adapters or a model.

LoRA and DoRA on plain or quantised models, or all parameters. The output folder receives
``adapters.safetensors`` and ``adapter_config.json``, or a model folder's files, and what every run
leaves: metrics, states, the loss as a picture, and ``recipe.yaml``.
"""

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openelm_mlx.adapter_files import write_adapter_files
from openelm_mlx.batches import Batches, Prefetch
from openelm_mlx.checkpoint import load
from openelm_mlx.distributed import describe_world, world
from openelm_mlx.fitting import quantization_of
from openelm_mlx.lora import adapter_state, add_adapters, trainable_count, warn_where_mlx_lm_differs
from openelm_mlx.model import Model
from openelm_mlx.objectives import LossFn, language_model_loss
from openelm_mlx.run_folder import (
    finish_run,
    plan_text,
    prepare_run_folder,
    reporters,
    save_model_into,
    step_memory,
)
from openelm_mlx.tokenizer import Tokenizer
from openelm_mlx.trainer import Outcome, train
from openelm_mlx.training_state import BEST, load_best
from openelm_mlx.tuning_batches import EvalBatches, TuningBatches
from openelm_mlx.tuning_data import Sample, describe_samples, load_split
from openelm_mlx.tuning_settings import TuningSettings, keep_recipe
from openelm_mlx.validation import evaluate

logger = logging.getLogger(__name__)


def tune(args: argparse.Namespace, settings: TuningSettings) -> int:
    """Tune as the settings say.

    Args:
        args: the flags of a run: ``output``, ``resume``, ``overwrite``, ``dry_run``, ``test``.
        settings: with ``TuningArgs`` and ``LossArgs`` as the stage's own.

    Returns:
        The exit code.

    Raises:
        FileNotFoundError: if model or data are missing.
        FileExistsError: if the output may not be written.
        ValueError: if data, model and settings do not fit together.
    """
    keeps = not (args.overwrite or args.dry_run)  # nothing is thrown away before all is checked
    if keeps:
        prepare_run_folder(args.output, resume=args.resume, overwrite=False)
    tuning, loss = settings.own
    given = settings.tune
    model, tokenizer = load(given.model, None, given.tokenizer, need_tokenizer=True)
    if tokenizer is None:
        raise ValueError(f"{given.model} has no tokenizer; give --tokenizer")
    splits = {
        split: load_split(given.data, split, tokenizer, tuning)
        for split in ("train", "valid", *(["test"] if args.test else []))
    }
    _check_context(model, splits["train"])
    prepare_model(model, settings)
    source = batches_of(splits["train"], settings)
    _check_ranks(source, world().size())
    settings = settings.for_updates(len(source.plan))
    plan = _plan(model, splits, source, settings)
    if args.dry_run:
        sys.stdout.write(f"{plan}\n{describe_samples(splits['train'], tokenizer)}")
        return 0
    folder = begin_run(args, settings, plan)
    outcome = carry_out(
        *(args, settings, folder, model, tokenizer),
        source=source,
        loss_fn=language_model_loss(loss),
        validation=evaluation_of(splits["valid"], settings),
        stage="finetune",
    )
    if args.test:
        _test(model, splits["test"], settings)
    return finish_run(folder, outcome) if world().rank() == 0 else 0


def begin_run(args: argparse.Namespace, settings: TuningSettings, plan: str) -> Path:
    """Make the folder of a run, once all is checked; show the plan and keep the recipe."""
    folder = Path(args.output)
    if args.overwrite:  # else it was made before the data were read
        folder = prepare_run_folder(folder, resume=args.resume, overwrite=True)
    if world().rank() == 0:
        sys.stdout.write(plan)
        keep_recipe(folder, settings, replace=False)
    return folder


def carry_out(
    args: argparse.Namespace,
    settings: TuningSettings,
    folder: Path,
    model: Model,
    tokenizer: Tokenizer,
    *,
    source: Batches,
    loss_fn: LossFn,
    validation: Any,
    stage: str,
) -> Outcome:
    """Train, go back to the best weights after an early stop, and save the result.

    Args:
        args: the flags of a run.
        settings: complete, see :meth:`TuningSettings.for_updates`.
        folder: of the run.
        model: prepared; trained in place.
        tokenizer: saved with a whole model.
        source: this rank's batches.
        loss_fn: (model, batch) -> (sum, n).
        validation: gives batches for one pass, or None.
        stage: for the provenance.
    """
    outcome = train(
        model,
        settings.optimizer.build(),
        Prefetch(source),
        loss_fn,
        settings.train,
        schedule=settings.schedule,
        validation=validation,
        run_folder=folder,
        resume=args.resume,
        settings=settings.as_dict(),
        reporters=reporters(args, settings.as_dict()),
    )
    is_first = world().rank() == 0
    if outcome.reason == "early" and (is_first or (folder / BEST).is_dir()):
        load_best(folder, model)
    if is_first:
        keep_recipe(folder, settings, replace=True)
        save_result(folder, model, tokenizer, settings, outcome, stage=stage)
    return outcome


def _check_context(model: Model, samples: Sequence[Sample]) -> None:
    longest = max(len(sample.tokens) - 1 for sample in samples)
    if longest > model.args.max_context_length:
        logger.warning(
            "samples have up to %d tokens, more than the %d that the model was made for; "
            "--max-seq-length %d cuts them",
            *(longest, model.args.max_context_length, model.args.max_context_length),
        )


def _check_ranks(source: TuningBatches, ranks: int) -> None:
    rows = max(rows for rows, _ in source.plan.shapes)
    if rows < ranks:
        logger.warning(
            "batches have %d rows for %d ranks, some of which will be idle; --no-share-rows gives "
            "each sample a row, a larger --batch-size more of them",
            *(rows, ranks),
        )


def prepare_model(model: Model, settings: TuningSettings) -> None:
    """Freeze and unfreeze, or add adapters, as the settings say.

    Raises:
        ValueError: if all parameters of a quantised model are to train, or the adapters do not fit.
    """
    if settings.adapters is not None:
        add_adapters(model, settings.adapters, seed=settings.train.seed)
        return
    if quantization_of(model.args):
        raise ValueError(
            f"{settings.tune.model} is quantised, so its weights cannot train; use "
            "--fine-tune-type lora or dora, or give the model before it was quantised"
        )
    model.unfreeze()


def batches_of(samples: Sequence[Sample], settings: TuningSettings) -> TuningBatches:
    """This rank's training batches; as many epochs as the settings name, or endless."""
    tuning, group = settings.own[0], world()
    return TuningBatches(
        samples,
        batch_size=settings.tune.batch_size,
        max_seq_length=tuning.max_seq_length,
        share_rows=tuning.share_rows,
        seed=settings.train.seed,
        rank=group.rank(),
        world_size=group.size(),
        epochs=settings.tune.epochs,
    )


def evaluation_of(samples: Sequence[Sample], settings: TuningSettings) -> Any:
    """What gives this rank's batches for one pass over some samples; None where there are none."""
    if not samples:
        return None
    tuning, group = settings.own[0], world()
    batches = EvalBatches(
        samples,
        batch_size=settings.tune.batch_size,
        max_seq_length=tuning.max_seq_length,
        share_rows=tuning.share_rows,
        rank=group.rank(),
        world_size=group.size(),
    )
    return lambda: batches


def save_result(
    folder: Path,
    model: Model,
    tokenizer: Tokenizer,
    settings: TuningSettings,
    outcome: Outcome,
    *,
    stage: str,
) -> None:
    """Write adapter files, or those of a model folder, into the folder of a run."""
    if settings.adapters is not None:
        warn_where_mlx_lm_differs(model, settings.adapters)
        write_adapter_files(folder, adapter_state(model), settings.adapters)
        return
    provenance = {
        "stage": stage,
        "base": settings.tune.model,
        "step": outcome.state.step,
        "settings": settings.as_dict(),
    }
    save_model_into(
        folder,
        model,
        tokenizer=tokenizer,
        instruct=tokenizer.chat_template is not None,
        provenance=provenance,
    )


def _test(model: Model, samples: Sequence[Sample], settings: TuningSettings) -> None:
    batches = evaluation_of(samples, settings)
    if batches is None:
        return  # said when the data was read
    loss, targets = evaluate(model, batches(), language_model_loss(settings.own[1]))
    if world().rank() == 0:
        sys.stdout.write(
            f"test loss {loss:.4f}, perplexity {math.exp(min(loss, 700)):.3f}, {targets} targets\n"
        )


def _plan(
    model: Model,
    splits: dict[str, list[Sample]],
    source: TuningBatches,
    settings: TuningSettings,
) -> str:
    samples, schedule = splits["train"], settings.schedule
    targets = sum(sample.num_targets for sample in samples)
    tokens = sum(len(sample.tokens) - 1 for sample in samples)
    updates = settings.train.grad_accumulation_steps
    passes = schedule.iters * updates / len(source.plan)
    rows, length = max(source.plan.shapes, key=lambda shape: shape[0] * shape[1])
    trained = trainable_count(model)
    facts = {
        "model": f"{settings.tune.model}, {model.args.num_parameters:,} parameters",
        "trained": f"{trained:,} parameters ({settings.tune.fine_tune_type})",
        "samples": ", ".join(f"{name} {len(found):,}" for name, found in splits.items()),
        "tokens": f"{tokens:,} an epoch, {targets:,} of them learned; {source.plan.share:.1%} of "
        "what is computed, the rest is padding",
        "updates": f"{schedule.iters:,}, {passes:.2f} epochs of {len(source.plan)} batches"
        f"{settings.train.bound}",
        "largest batch": f"{rows} rows of {length} tokens",
        "machines": describe_world(),
    }
    memory = step_memory(
        model.args,
        model,
        batch_size=math.ceil(rows / world().size()),
        max_seq_length=length,
        checkpoint=settings.train.grad_checkpoint,
    )
    return plan_text("supervised fine-tuning", settings.as_dict(), facts, memory)

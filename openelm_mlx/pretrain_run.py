"""Pretraining at work: text files -> tokenizer -> packed batches -> the training loop -> folder."""

import argparse
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from openelm_mlx.atomic import atomic_file
from openelm_mlx.batches import Batch, Batches, Prefetch
from openelm_mlx.config import ModelArgs
from openelm_mlx.data import PackedBatches
from openelm_mlx.data_corenet import CoreNetBatches
from openelm_mlx.data_sources import EntryFiles, find_sources, look_for
from openelm_mlx.distributed import describe_world, world
from openelm_mlx.losses import LossArgs
from openelm_mlx.model import Model
from openelm_mlx.objectives import language_model_loss
from openelm_mlx.optim import OptimizerArgs, ScheduleArgs
from openelm_mlx.pretrain_settings import ArchitectureArgs, TextArgs, entries
from openelm_mlx.recipe import render_settings, settings_of
from openelm_mlx.run_flags import RECIPE_FILE
from openelm_mlx.run_folder import (
    finish_run,
    plan_text,
    prepare_run_folder,
    reporters,
    save_model_into,
    step_memory,
)
from openelm_mlx.text_filters import TextFilters
from openelm_mlx.tokenizer import Tokenizer, load_tokenizer
from openelm_mlx.trainer import train
from openelm_mlx.training_args import TrainArgs
from openelm_mlx.training_state import load_best

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PretrainSettings:
    """All settings of a pretraining run."""

    text: TextArgs
    architecture: ArchitectureArgs
    filters: TextFilters
    train: TrainArgs
    schedule: ScheduleArgs
    optimizer: OptimizerArgs
    loss: LossArgs


def pretrain(args: argparse.Namespace, given: PretrainSettings) -> int:
    """Train a model from scratch, or show what would be done.

    Args:
        args: flags of :func:`openelm_mlx.run_flags.add_run_arguments`.
        given: the settings.

    Returns:
        The exit code.
    """
    text, architecture, filters = given.text, given.architecture, given.filters
    train_args, schedule, optimizer, loss = given.train, given.schedule, given.optimizer, given.loss
    settings = settings_of(text, architecture, filters, train_args, schedule, optimizer, loss)
    if args.dry_run:
        return _dry_run(text, architecture, filters, train_args, schedule, settings)
    tokenizer = load_tokenizer(text.tokenizer)
    model_args = architecture.build(tokenizer.vocab_size)
    source = batches_of(text, filters, tokenizer, model_args, seed=train_args.seed)
    validation = validation_of(text, filters, tokenizer)
    folder = prepare_run_folder(args.output, resume=args.resume, overwrite=args.overwrite)
    mx.random.seed(train_args.seed)
    model = new_model(model_args, architecture)
    if world().rank() == 0:
        sys.stdout.write(_plan(text, model, train_args, schedule, settings))
        if not (args.resume and (folder / RECIPE_FILE).is_file()):
            with atomic_file(folder / RECIPE_FILE) as file:
                file.write_text(render_settings(settings), encoding="utf-8")
    outcome = train(
        model,
        optimizer.build(),
        Prefetch(source),
        language_model_loss(loss),
        train_args,
        schedule=schedule,
        validation=validation,
        run_folder=folder,
        resume=args.resume,
        settings=settings,
        reporters=reporters(args, settings),
    )
    if world().rank() != 0:
        return 0
    if outcome.reason == "early":
        load_best(folder, model)
    save_model_into(
        folder,
        model,
        tokenizer=tokenizer,
        provenance={"stage": "pretrain", "step": outcome.state.step, "settings": settings},
    )
    return finish_run(folder, outcome)


def batches_of(
    text: TextArgs, filters: TextFilters, tokenizer: Tokenizer, args: ModelArgs, *, seed: int
) -> Batches:
    """The training batches of this rank.

    Args:
        text: which files, and how they are cut.
        filters: what is dropped and cleaned.
        tokenizer: of the model.
        args: the architecture, whose rows padding ids must stay within.
        seed: of the order.

    Raises:
        FileNotFoundError: naming files that are missing.
        ValueError: if an entry is malformed or a size impossible.
    """
    sources = find_sources(entries(text.data), text_key=text.text_key, root=text.data_root)
    group = world()
    damage: Any = text.on_damage
    common: dict[str, Any] = {
        "batch_size": text.batch_size,
        "max_seq_length": text.max_seq_length,
        "rank": group.rank(),
        "world_size": group.size(),
        "filters": filters,
        "shuffle": text.shuffle,
        "seed": seed,
        "on_damage": damage,
    }
    if text.data_mode == "corenet":
        pad_id = tokenizer.pad_id if tokenizer.pad_id < args.vocab_size else 0
        return CoreNetBatches(
            sources,
            tokenizer,
            **common,
            ranks=text.corenet_ranks,
            workers=text.corenet_workers,
            pad_id=pad_id,
        )
    return PackedBatches(
        sources,
        tokenizer,
        **common,
        separate_documents=text.separate_documents,
        epochs=text.epochs,
    )


def validation_of(
    text: TextArgs, filters: TextFilters, tokenizer: Tokenizer
) -> Callable[[], Iterable[Batch]] | None:
    """What gives one pass over the validation text, always in the same order."""
    if not text.valid_data:
        logger.info("no valid_data: the run goes without validation")
        return None
    sources = find_sources(entries(text.valid_data), text_key=text.text_key, root=text.data_root)
    group = world()

    def fresh() -> Iterable[Batch]:
        return PackedBatches(
            sources,
            tokenizer,
            batch_size=text.batch_size,
            max_seq_length=text.max_seq_length,
            rank=group.rank(),
            world_size=group.size(),
            separate_documents=text.separate_documents,
            filters=filters,
            shuffle=False,
            epochs=1,
        )

    return fresh


def new_model(args: ModelArgs, architecture: ArchitectureArgs) -> Model:
    """A model with fresh weights, drawn from MLX's current random state."""
    model = Model(args)
    model.set_dtype(architecture.weights_dtype())
    mx.eval(model.parameters())
    return model


def _plan(
    text: TextArgs, model: Model, train_args: TrainArgs, schedule: ScheduleArgs, settings: Any
) -> str:
    per_update = text.batch_size * text.max_seq_length * train_args.grad_accumulation_steps
    parameters = model.args.num_parameters
    facts = {
        "parameters": f"{parameters:,}, all trained, in {architecture_line(model.args)}",
        "updates": f"{schedule.iters:,}{train_args.bound}",
        "tokens": f"{per_update:,} an update, {per_update * schedule.iters:,} in all "
        f"({per_update * schedule.iters / parameters:.1f} a parameter)",
        "machines": describe_world(),
    }
    memory = step_memory(
        model.args,
        model,
        batch_size=-(-text.batch_size // world().size()),
        max_seq_length=text.max_seq_length,
        checkpoint=train_args.grad_checkpoint,
    )
    return plan_text("pretraining", settings, facts, memory)


def architecture_line(args: ModelArgs) -> str:
    """Layers and widths in one line."""
    heads, ffn = args.num_query_heads, args.ffn_dims
    return (
        f"{args.num_transformer_layers} layers of width {args.model_dim}, heads {heads[0]} to "
        f"{heads[-1]}, FFN {ffn[0]} to {ffn[-1]}, vocabulary {args.vocab_size}"
    )


def _dry_run(
    text: TextArgs,
    architecture: ArchitectureArgs,
    filters: TextFilters,
    train_args: TrainArgs,
    schedule: ScheduleArgs,
    settings: dict[str, Any],
) -> int:
    """Show the files, the plan and the first row; 1 if the run could not start."""
    found: list[EntryFiles] = [
        entry
        for names in (text.data, text.valid_data)
        if names
        for entry in look_for(entries(names), text_key=text.text_key, root=text.data_root)
    ]
    files, missing = (sum(len(getattr(e, key)) for e in found) for key in ("files", "missing"))
    sys.stdout.write("".join(entry.describe() + "\n" for entry in found))
    sys.stdout.write(f"{files - missing} of {files} files are there, {missing} are missing\n\n")
    tokenizer = load_tokenizer(text.tokenizer)
    model = Model(architecture.build(tokenizer.vocab_size))
    model.set_dtype(architecture.weights_dtype())
    sys.stdout.write(_plan(text, model, train_args, schedule, settings))
    if missing:
        return 1
    source = batches_of(text, filters, tokenizer, model.args, seed=train_args.seed)
    row: Any = next(source).tokens[0].tolist()
    sys.stdout.write(f"\nfirst row:\n{tokenizer.decode(row[:200])}\n")
    return 0

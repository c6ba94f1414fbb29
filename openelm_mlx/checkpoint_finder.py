"""A training run's folder -> its saved steps, averages and results, each as a model.

Runs of ours (states, best weights, result), folders of model folders, and CoreNet's ``.pt`` files.
"""

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from openelm_mlx.adapter_args import AdapterArgs
from openelm_mlx.adapter_files import CONFIG, WEIGHTS_FILES, read_adapter_folder
from openelm_mlx.checkpoint import load_args, load_model
from openelm_mlx.hub import local_or_download
from openelm_mlx.lora import add_adapters
from openelm_mlx.model import Model
from openelm_mlx.pretrain_settings import ArchitectureArgs
from openelm_mlx.recipe import load_recipe
from openelm_mlx.run_flags import RECIPE_FILE
from openelm_mlx.tokenizer import Tokenizer, load_tokenizer
from openelm_mlx.tokenizer_files import has_tokenizer
from openelm_mlx.training_state import BEST, STATES, verify
from openelm_mlx.weight_files import find_weight_files, read_json, read_tensor_file

Kind = Literal["state", "average", "best", "result", "folder"]
_ORDER = ("state", "folder", "best", "result", "average")  # of what has the same step
_STATE_WEIGHTS = "weights.safetensors"
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One set of weights of a run.

    Attributes:
        name: of the file or folder, or what was averaged.
        kind: what it is.
        step: updates made; None where nothing says it.
        files: that its weights come from.
        model: loads it; what was loaded before from the same run may change.
    """

    name: str
    kind: Kind
    step: int | None
    files: tuple[Path, ...]
    model: Callable[[], Model]


@dataclass(frozen=True, kw_only=True)
class Found:
    """All checkpoints of a folder, in order of steps, and the tokenizer they share."""

    checkpoints: list[Checkpoint]
    tokenizer: Tokenizer


@contextmanager
def find_checkpoints(
    folder: str | Path,
    *,
    base: str | None = None,
    tokenizer: str | None = None,
    average_last: int | None = None,
) -> Iterator[Found]:
    """Look for all weights that a training run left.

    Args:
        folder: a run of ours, or one that holds model folders or ``.pt`` files.
        base: the model that was tuned, in place of the one that the run's recipe names; for
            ``.pt`` files, one of the same architecture.
        tokenizer: in place of the run's own.
        average_last: also the mean of every so many neighbouring states, as CoreNet's release is.

    Raises:
        FileNotFoundError: if there is no such folder, or nothing in it.
        ValueError: if something in it is damaged, or states are fewer than ``average_last``.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist; give the --output of a training run")
    with tempfile.TemporaryDirectory(prefix="openelm-checkpoints-") as room:
        found = [*_run_checkpoints(folder, base, average_last), *_folders(folder)]
        found += _corenet_files(folder, Path(room), base, tokenizer)
        if not found:
            raise FileNotFoundError(
                f"{folder} holds neither {STATES}/, nor model folders, nor .pt files; give the "
                "--output of a training run"
            )
        last = max((c.step for c in found if c.step is not None), default=0)
        found.sort(key=lambda c: (last if c.step is None else c.step, _ORDER.index(c.kind), c.name))
        yield Found(checkpoints=found, tokenizer=_tokenizer(folder, base, tokenizer, found))


def _run_checkpoints(folder: Path, base: str | None, average: int | None) -> list[Checkpoint]:
    """States, means of states, the best weights, and the result of a run of ours."""
    states = sorted((folder / STATES).glob("step-*"))
    recipe = _recipe(folder)
    if not states and not (folder / BEST).is_dir():
        if average is not None:
            raise ValueError(f"{folder} holds no states to average; leave --average-last out")
        return [_folder(folder, "result")] if (folder / "config.json").is_file() else []
    load = _Reloaded(folder, recipe, base)
    found = [_state(state, "state", load) for state in states]
    if (folder / BEST).is_dir():
        found.append(_state(folder / BEST, "best", load))
    steps = {checkpoint.step for checkpoint in found}
    if (folder / "config.json").is_file():
        result = _folder(folder, "result")
        found += [result] if result.step not in steps else []
    return found + _averages(found[: len(states)], average, load)


def _state(folder: Path, kind: Kind, load: "_Reloaded") -> Checkpoint:
    facts = verify(folder)
    weights = folder / _STATE_WEIGHTS
    return Checkpoint(
        name=folder.name,
        kind=kind,
        step=int(facts["state"]["step"]),
        files=(weights,),
        model=lambda: load(read_tensor_file(weights)),
    )


def _averages(
    states: Sequence[Checkpoint], count: int | None, load: "_Reloaded"
) -> list[Checkpoint]:
    if count is None:
        return []
    if len(states) < count:
        raise ValueError(
            f"--average-last {count} needs as many states, and the run has {len(states)}; train "
            "with a higher --keep-states"
        )
    groups = [states[i - count : i] for i in range(count, len(states) + 1)]
    return [
        Checkpoint(
            name=f"mean of {group[0].name} to {group[-1].name}",
            kind="average",
            step=group[-1].step,
            files=tuple(c.files[0] for c in group),
            model=lambda group=group: load(_mean([c.files[0] for c in group])),  # type: ignore[misc]
        )
        for group in groups
    ]


def _mean(files: Sequence[Path]) -> dict[str, mx.array]:
    """The mean of each tensor, summed in float32, in the type of the first file."""
    first = read_tensor_file(files[0])
    total = {name: array.astype(mx.float32) for name, array in first.items()}
    for file in files[1:]:
        for name, array in read_tensor_file(file).items():
            total[name] = total[name] + array
        mx.eval(total)
    return {name: (array / len(files)).astype(first[name].dtype) for name, array in total.items()}


class _Reloaded:
    """One model of a run, into which the weights of one state after the other are put."""

    def __init__(self, folder: Path, recipe: Mapping[str, Any], base: str | None) -> None:
        self._folder, self._recipe, self._base = folder, recipe, base
        self._model: Model | None = None

    def __call__(self, weights: dict[str, mx.array]) -> Model:
        if self._model is None:
            self._model = _empty_model(self._folder, self._recipe, self._base)
            self._model.eval()
        self._model.load_weights(list(weights.items()), strict=False)
        mx.eval(self._model.parameters())
        return self._model


def _empty_model(folder: Path, recipe: Mapping[str, Any], base: str | None) -> Model:
    """The model that a run trained, its trained weights still to come."""
    has_config = (folder / "config.json").is_file()
    if "fine_tune_type" in recipe or (base is not None and not has_config):
        model = load_model(local_or_download(base or recipe["model"]))
        if recipe.get("fine_tune_type") != "full":
            add_adapters(model, _adapter_args(folder, recipe))
        return model
    if has_config:
        return Model(load_args(folder))
    if "tokenizer" not in recipe:
        raise ValueError(
            f"{folder} says neither in config.json nor in {RECIPE_FILE} what model it trains; give "
            "--model"
        )
    names = {field.name for field in fields(ArchitectureArgs)}
    architecture = ArchitectureArgs(**{k: v for k, v in recipe.items() if k in names})
    return Model(architecture.build(load_tokenizer(recipe["tokenizer"]).vocab_size))


def _adapter_args(folder: Path, recipe: Mapping[str, Any]) -> AdapterArgs:
    """Of the result, where there is one, else of the recipe of a run under way."""
    if (folder / CONFIG).is_file() and any((folder / name).is_file() for name in WEIGHTS_FILES):
        args = read_adapter_folder(folder).args
        if args is not None:
            return args
    names = {field.name for field in fields(AdapterArgs)}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in recipe.items() if k in names}
    return AdapterArgs(**{**values, "kind": recipe["fine_tune_type"]})


def _recipe(folder: Path) -> Mapping[str, Any]:
    file = folder / RECIPE_FILE
    return load_recipe(file).values if file.is_file() else {}


def _folders(folder: Path) -> list[Checkpoint]:
    """Model folders within a folder."""
    return [
        _folder(path, "folder")
        for path in sorted(folder.iterdir())
        if path.is_dir() and not path.name.startswith(".") and (path / "config.json").is_file()
    ]


def _folder(path: Path, kind: Kind) -> Checkpoint:
    file = path / "openelm.json"
    facts = read_json(file) if file.is_file() else {}
    parts = facts.get("average_of")
    step = facts.get("step")
    if parts:
        kind, step = "average", max(filter(None, map(_step_in, parts)), default=None)
    elif "average" in path.name:
        kind = "average"
    return Checkpoint(
        name=path.name,
        kind=kind,
        step=_step_in(path.name) if step is None and kind != "result" else step,
        files=tuple(find_weight_files(path)),
        model=lambda: load_model(path),
    )


def _corenet_files(
    folder: Path, room: Path, base: str | None, tokenizer: str | None
) -> list[Checkpoint]:
    """CoreNet's model files, each made a model folder when its turn comes.

    Their architecture is that of ``config.yaml`` beside them, which CoreNet keeps there, or of the
    model named; without, one of the published sizes.
    """
    config = local_or_download(base) / "config.json" if base else folder / "config.yaml"

    def load(path: Path) -> Model:
        from convert.corenet import from_corenet

        own = config if config.is_file() else None
        made = from_corenet(
            path, room / "model", config=own, tokenizer=tokenizer or base, overwrite=True
        )
        model = load_model(made)
        mx.eval(model.parameters())  # before the next one takes the folder
        return model

    return [
        Checkpoint(
            name=path.name,
            kind="average" if "average" in path.name else "folder",
            step=_step_in(path.stem),
            files=(path,),
            model=lambda path=path: load(path),  # type: ignore[misc]
        )
        for path in sorted(folder.glob("*.pt"))
        if not path.name.startswith("training_checkpoint")  # hold a model-only file's weights again
    ]


def _step_in(name: str) -> int | None:
    """The last number in a name: ``checkpoint_epoch_0_iter_50000`` is step 50000."""
    numbers = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else None


def _tokenizer(
    folder: Path, base: str | None, tokenizer: str | None, found: Sequence[Checkpoint]
) -> Tokenizer:
    """The one named, the run's own, its base's, or that of a model folder within."""
    recipe = _recipe(folder)
    if tokenizer is None and not has_tokenizer(folder):
        tokenizer = recipe.get("tokenizer")
    if tokenizer is not None:
        return load_tokenizer(tokenizer)
    model = base or recipe.get("model")
    places = [folder, *([local_or_download(model)] if model else [])]
    places += [file.parent for checkpoint in found for file in checkpoint.files]
    own = next(filter(has_tokenizer, places), None)
    if own is None:
        raise ValueError(f"{folder} holds no tokenizer; give --tokenizer")
    return Tokenizer.from_path(own)

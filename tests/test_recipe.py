"""Recipes and flags: precedence, types, and messages that name key, line and remedy."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from openelm_mlx.adapter_args import AdapterArgs
from openelm_mlx.losses import LossArgs
from openelm_mlx.optim import OptimizerArgs, ScheduleArgs
from openelm_mlx.recipe import (
    Recipe,
    add_flags,
    chosen,
    load_recipe,
    pick_one,
    recipe_names,
    render_settings,
    resolve,
    settings_of,
    words,
)

TRAINING = (ScheduleArgs, OptimizerArgs, LossArgs, AdapterArgs)


@dataclass(frozen=True, kw_only=True)
class Odd:
    """One field of each kind."""

    data: Path  # where it lies
    steps: int = 3
    rate: float = 0.5  # a 5 % share
    fast: bool = False
    compile: bool | None = None
    limit: int | None = 7
    mode: Literal["a", "b"] = "a"
    names: Sequence[str] = ("x", "y")
    text: str = "t"
    # how much to recompute
    recompute: str = field(default="none", metadata=words(true="layer", false="none"))


def parse(argv: list[str], *classes: type, without: Sequence[str] = ()) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, *classes, without=without)
    return parser.parse_args(argv)


def recipe(text: str, tmp_path: Path) -> Recipe:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    return load_recipe(path)


def odd(argv: list[str], text: str, tmp_path: Path) -> Odd:
    (made,) = resolve(parse(argv, Odd), recipe(text, tmp_path), Odd)
    assert isinstance(made, Odd)
    return made


def test_a_flag_wins_over_the_recipe_and_the_recipe_over_the_default(tmp_path: Path) -> None:
    made = odd(["--steps", "9"], "data: d\nsteps: 5\nrate: 0.25\n", tmp_path)
    assert (made.steps, made.rate, made.limit) == (9, 0.25, 7)


def test_b2_every_key_is_a_flag_and_every_flag_a_key(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "data": "d",
        "steps": 8,
        "rate": 1.5,
        "fast": True,
        "compile": False,
        "limit": None,
        "mode": "b",
        "names": ["p", "q"],
        "text": "word",
        "recompute": "attention",
    }
    argv = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            argv += [f"--{flag}", *(value if isinstance(value, list) else [str(value).lower()])]
    from_recipe = odd([], yaml.safe_dump(values), tmp_path)
    assert from_recipe == odd(argv, "", tmp_path)
    assert from_recipe == Odd(
        data=Path("d"),
        **{k: tuple(v) if k == "names" else v for k, v in values.items() if k != "data"},
    )


def test_every_training_dataclass_can_be_made_into_flags() -> None:
    namespace = parse(["--lr-schedule", "linear", "--rank", "4"], *TRAINING, without=["kind"])
    schedule, _, _, adapters = resolve(namespace, None, *TRAINING, fixed={"kind": "dora"})
    assert (schedule.lr_schedule, adapters.rank, adapters.kind) == ("linear", 4, "dora")
    assert adapters.target_modules == AdapterArgs().target_modules


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "'1e-4'", "1.0e-4", "0.0001"])
def test_a_learning_rate_that_yaml_reads_as_text_is_a_number(text: str, tmp_path: Path) -> None:
    (schedule,) = resolve(
        argparse.Namespace(), recipe(f"learning_rate: {text}\n", tmp_path), ScheduleArgs
    )
    assert schedule.learning_rate == 1e-4


@pytest.mark.parametrize(("text", "value"), [("1e3", 1000), ("1000.0", 1000), ("'12'", 12)])
def test_a_whole_number_may_be_written_in_other_ways(text: str, value: int, tmp_path: Path) -> None:
    made = odd([], f"data: d\nsteps: {text}\n", tmp_path)
    assert made.steps == value
    assert type(made.steps) is int


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("steps: 1.5", "line 2: steps must be a whole number, got 1.5"),
        ("steps: yes", "steps must be a whole number, got True"),
        ("steps: many", "steps must be a whole number, got 'many'"),
        ("steps:", "steps must be a whole number, got nothing"),
        ("rate: .nan", "rate must be a number, got nan"),
        ("rate: [1]", r"rate must be a number, got \[1\]"),
        ("fast: 1", "fast must be true or false, got 1"),
        ("limit: some", "limit must be a whole number or none, got 'some'"),
        ("mode: c", "mode must be one of a, b, got 'c'"),
        ("mode: no", "got False; put text that YAML reads as something else into quotes"),
        ("text: 7", "text must be text, got 7; put text"),
        ("names: x", r"names must be a list, each text, got 'x'; write \[x\]"),
    ],
)
def test_a_value_of_the_wrong_type_is_named_with_key_file_and_line(
    line: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"r\.yaml.*{message}"):
        odd([], f"data: d\n{line}\n", tmp_path)


def test_b2_an_unknown_key_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    text = "learning-rate: 1e-3\nwarmup: 5\nlora_parameters: {rank: 8}\nzzz: 1\n"
    with pytest.raises(ValueError, match="unknown key") as caught:
        resolve(argparse.Namespace(), recipe(text, tmp_path), *TRAINING)
    message = str(caught.value)
    assert "line 1: unknown key 'learning-rate' (did you mean learning_rate?)" in message
    assert "unknown key 'warmup' (did you mean warmup_" in message
    assert "recipes are flat" in message
    assert message.endswith("unknown key 'zzz'")
    assert "\n" not in message


def test_all_problems_of_all_dataclasses_are_said_at_once(tmp_path: Path) -> None:
    text = "rank: 0\nbeta1: 2\nz_loss: much\nlearning_rate: 1e-5\nmin_learning_rate: 1e-3\n"
    with pytest.raises(ValueError, match="adapter rank") as caught:
        resolve(argparse.Namespace(), recipe(text, tmp_path), *TRAINING)
    message = str(caught.value)
    for part in ("beta1 must be in", "z_loss must be a number", "min_learning_rate must be"):
        assert part in message
    assert "r.yaml line 1)" in message  # a dataclass's own complaint is traced to its line
    assert "line 4" in message
    assert "line 5" in message


def test_a_missing_key_without_a_default_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data must be given$"):
        odd([], "steps: 1\n", tmp_path)


def test_a_key_that_has_no_effect_in_this_run_is_an_error(tmp_path: Path) -> None:
    unused = {"rank": "fine_tune_type full trains the whole model"}
    namespace = parse(["--rank", "4"], AdapterArgs, ScheduleArgs)
    with pytest.raises(ValueError, match="--rank has no effect: fine_tune_type full"):
        resolve(namespace, None, ScheduleArgs, unused=unused)
    with pytest.raises(ValueError, match="line 1: rank has no effect: fine_tune_type full"):
        resolve(argparse.Namespace(), recipe("rank: 4", tmp_path), ScheduleArgs, unused=unused)


def test_a_key_that_the_command_sets_cannot_stand_in_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown key 'kind'"):
        resolve(
            argparse.Namespace(),
            recipe("kind: dora", tmp_path),
            AdapterArgs,
            fixed={"kind": "lora"},
        )


def test_two_dataclasses_share_a_key_and_get_one_value(tmp_path: Path) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Loop:
        """A loop."""

        iters: int = 10
        log: str = "x"

    schedule, loop = resolve(
        argparse.Namespace(), recipe("iters: 77", tmp_path), ScheduleArgs, Loop
    )
    assert schedule.iters == loop.iters == 77
    schedule, loop = resolve(argparse.Namespace(), None, ScheduleArgs, Loop)
    assert schedule.iters == loop.iters == ScheduleArgs().iters  # the first one's default


def test_a_shared_key_with_two_types_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Loop:
        """A loop."""

        iters: str = "10"

    with pytest.raises(TypeError, match=r"Loop\.iters"):
        resolve(argparse.Namespace(), None, ScheduleArgs, Loop)


def test_none_on_the_command_line_overrides_the_recipe(tmp_path: Path) -> None:
    assert odd(["--limit", "none"], "data: d\nlimit: 3\n", tmp_path).limit is None


def test_true_and_the_bare_flag_stand_for_a_word(tmp_path: Path) -> None:
    assert odd([], "data: d\nrecompute: true\n", tmp_path).recompute == "layer"
    assert odd([], "data: d\nrecompute: false\n", tmp_path).recompute == "none"
    for argv in (["--recompute"], ["--recompute", "true"], ["--recompute", "layer"]):
        assert odd(argv, "data: d\n", tmp_path).recompute == "layer"


def test_a_wrong_flag_is_a_usage_error_in_the_same_words() -> None:
    with pytest.raises(argparse.ArgumentError, match="--steps: must be a whole number, got 'x'"):
        parse(["--steps", "x"], Odd)


def test_help_comes_from_the_fields_comments() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Odd, AdapterArgs, defaults={"steps": 44})
    text = " ".join(parser.format_help().split())
    assert "One field of each kind" in text
    assert "--rate X a 5 % share (default 0.5)" in text
    assert "--mode {a,b} (default a)" in text
    assert "--steps N (default 44)" in text
    assert "how much to recompute (default none)" in text
    assert "multiplies lora_a @ lora_b; alpha / rank in PEFT's terms (default 20.0)" in text


def test_b32_the_resolved_settings_can_be_printed_and_read_back(tmp_path: Path) -> None:
    made = odd(["--rate", "1e-7"], "data: some dir\nlimit: null\ntext: 'yes'\n", tmp_path)
    schedule = ScheduleArgs(learning_rate=1e-4)
    settings = settings_of(made, schedule)
    assert json.loads(json.dumps(settings)) == settings
    again = resolve(
        argparse.Namespace(), recipe(render_settings(settings), tmp_path), Odd, ScheduleArgs
    )
    assert again == (made, schedule)


def test_one_key_can_be_asked_for_before_the_rest_is_resolved(tmp_path: Path) -> None:
    text = recipe("mode: b\nsteps: bad", tmp_path)
    assert chosen(argparse.Namespace(), text, "mode", Odd) == "b"
    assert chosen(parse(["--mode", "a"], Odd), text, "mode", Odd) == "a"
    assert chosen(argparse.Namespace(), text, "steps", Odd) == 3  # reported by resolve
    assert chosen(argparse.Namespace(), None, "mode", Odd) == "a"


def test_of_two_keys_that_exclude_each_other_the_flag_counts(tmp_path: Path) -> None:
    both = recipe("epochs: 3", tmp_path)
    pick = ("iters", "epochs")
    assert pick_one(argparse.Namespace(iters=5), both, *pick) == "iters"
    assert pick_one(argparse.Namespace(iters=None), both, *pick) == "epochs"
    assert pick_one(argparse.Namespace(), None, *pick) is None
    with pytest.raises(ValueError, match="flags: iters and epochs exclude each other"):
        pick_one(argparse.Namespace(iters=5, epochs=1), both, *pick)
    with pytest.raises(ValueError, match=r"r\.yaml: iters and epochs exclude each other"):
        pick_one(argparse.Namespace(), recipe("epochs: 3\niters: 9", tmp_path), *pick)


def test_an_unknown_recipe_lists_those_that_exist() -> None:
    with pytest.raises(FileNotFoundError, match="did you mean finetune_lora") as caught:
        load_recipe("finetune_lroa")
    assert all(name in str(caught.value) for name in recipe_names())


def test_a_recipe_is_found_by_name_with_and_without_its_ending() -> None:
    assert load_recipe("finetune_lora") == load_recipe("finetune_lora.yaml")


def test_an_empty_recipe_is_no_error(tmp_path: Path) -> None:
    assert recipe("# nothing\n", tmp_path).values == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "a recipe is a list of `key: value` lines"),
        ("a: [1\nb: 2", "is not YAML"),
        ("a: !!python/object:os.system x", "is not YAML"),
        ("steps: 1\nrate: 2\nsteps: 3\n", "steps stands on line 1 and 3"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(
    text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        recipe(text, tmp_path)
    assert "\n" not in str(caught.value)
    assert "r.yaml" in str(caught.value)

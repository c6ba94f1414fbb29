"""Every command and Python block that the README shows works, on small models."""

import argparse
import io
import shutil
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
from command_line import run_here
from finetune_runs import without_plots
from readme_commands import NEEDS, NOT_RUN, Shown, flags_in_prose, python_blocks, shown_commands
from readme_room import furnish
from tiny_tokenizer import TinyTokenizer

from convert.cli import ROUTES
from openelm_mlx.cli import COMMANDS

SHOWN = shown_commands()
WITH_WORDS = [shown for shown in SHOWN if not shown.is_name]
TO_RUN = [shown for shown in WITH_WORDS if not shown.not_run]
# Flags of other programs that the README speaks of.
FOREIGN = {
    *(
        "--hosts",
        "--over",
        "--backend",
        "--output-hostfile",
        "--hostfile",
    ),  # mlx.launch and its kin
    "--trust-remote-code",
}


def texts(shown: list[Shown]) -> list[str]:
    return [each.text for each in shown]


def all_routes() -> Iterator[tuple[str, str, str]]:
    """(command, module, suffix of its functions) of every command and route."""
    for name, (module, suffix, _) in COMMANDS.items():
        if name != "convert":
            yield name, module, suffix
    for name, (module, suffix, _) in ROUTES.items():
        yield f"convert {name}", module, suffix


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """Commands parse their words and do nothing more; what they parsed is kept here."""
    kept: list[argparse.Namespace] = []

    def keep(args: argparse.Namespace) -> int:
        kept.append(args)
        return 0

    for _, module, suffix in all_routes():
        name = f"run_{suffix}" if suffix else "run"
        monkeypatch.setattr(import_module(module), name, keep)
    return kept


@pytest.fixture(scope="module")
def furnished(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: TinyTokenizer
) -> Iterator[Path]:
    room = tmp_path_factory.mktemp("readme") / "room"
    room.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        without_plots(patch)
        furnish(room, tiny_tokenizer.path)
    yield room
    shutil.rmtree(room)


@pytest.fixture
def room(furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to work in."""
    copy = shutil.copytree(furnished, tmp_path / "room")
    monkeypatch.chdir(copy)
    monkeypatch.setattr("sys.stdin", io.StringIO("the old king\n"))
    without_plots(monkeypatch)
    return copy


def test_the_readme_shows_commands_to_run_in_blocks_and_in_lines() -> None:
    assert len(TO_RUN) > 15
    assert {shown.inline for shown in TO_RUN} == {True, False}
    assert python_blocks()


@pytest.mark.parametrize("shown", WITH_WORDS, ids=texts(WITH_WORDS))
def test_a_shown_command_has_only_flags_and_words_that_exist(
    shown: Shown, parsed: list[argparse.Namespace], capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_here(capsys, *shown.replaced())
    assert outcome.code == 0, outcome.err
    assert len(parsed) == 1


def test_what_is_not_run_is_still_shown_and_has_a_reason() -> None:
    used = {shown.not_run for shown in WITH_WORDS}
    for what, reason in NOT_RUN.items():
        assert reason in used, f"the README no longer shows {what}: take it out of NOT_RUN"


def test_flags_that_the_text_names_are_flags_of_some_command() -> None:
    known = set(FOREIGN)
    for command, module, suffix in all_routes():
        parser = argparse.ArgumentParser(prog=command)
        name = f"add_{suffix}_arguments" if suffix else "add_arguments"
        getattr(import_module(module), name)(parser)
        known |= {option for action in parser._actions for option in action.option_strings}
        known |= {
            option
            for action in parser._actions
            if isinstance(action, argparse._SubParsersAction)
            for sub in action.choices.values()
            for each in sub._actions
            for option in each.option_strings
        }
    assert flags_in_prose() - known == set()


@pytest.mark.slow
@pytest.mark.parametrize("shown", TO_RUN, ids=texts(TO_RUN))
def test_a_shown_command_runs(shown: Shown, room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shown.command in NEEDS:
        pytest.importorskip(NEEDS[shown.command])
    words = shown.replaced()
    outcome = run_here(capsys, *words)
    assert outcome.code == 0, f"openelm {' '.join(words)}: {outcome.err}"
    made = [word for before, word in pairwise(words) if before == "--output"]
    if "--dry-run" not in words:
        assert all((room / word).exists() for word in made), made


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(python_blocks())))
def test_a_python_block_runs(number: int, room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(python_blocks()[number], f"README, Python block {number + 1}", "exec"), {})
    capsys.readouterr()

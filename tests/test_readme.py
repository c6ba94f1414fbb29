"""The README is held against the project: its tree, its commands and its recipes exist."""

import re
from pathlib import Path

import pytest

from convert.cli import ROUTES
from openelm_mlx.cli import COMMANDS
from openelm_mlx.recipe import recipe_names

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", ["openelm_mlx", "convert"])
def test_the_tree_names_every_module_and_no_other(package: str) -> None:
    tree = README.split("## The tree")[1].split("```")[1]
    sections = re.split(r"^(\w[\w.]*)/ ", tree, flags=re.MULTILINE)
    section = sections[sections.index(package) + 1]
    named = set(re.findall(r"^  (\w+)\.py ", section, flags=re.MULTILINE))
    assert named == {path.stem for path in (ROOT / package).glob("*.py")}


def test_every_command_and_route_is_in_the_table() -> None:
    for name in COMMANDS:
        if name != "convert":
            assert f"`openelm {name}" in README or f"· `openelm {name}" in README, name
    for route in ROUTES:
        assert re.search(rf"`(openelm convert )?{route}[ `]", README), route


def test_commands_that_the_readme_shows_exist() -> None:
    for command, route in re.findall(r"openelm ([a-z-]+)(?: ([a-z-]+))?", README):
        if command == "mlx":  # the project's own name
            continue
        assert command in COMMANDS or command == "demo", command
        if command == "convert" and route:
            assert route in ROUTES or route == "coreml", route


def test_recipes_that_the_readme_names_exist() -> None:
    text = README[README.index("The package brings") :].split("each line")[0]
    named = set()
    for pattern in re.findall(r"`([\w{},]+)`", text):
        head, brace, rest = pattern.partition("{")
        tails = rest.rstrip("}").split(",") if brace else [""]
        named |= {head + tail for tail in tails}
    assert named == set(recipe_names())

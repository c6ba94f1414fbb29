"""Runs the code cells of a notebook in this process: what Jupyter would do, without Jupyter."""

import ast
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "notebooks"


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook, ``source`` joined to one text."""
    found = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in found]


def is_parameters(cell: dict[str, Any]) -> bool:
    """Whether a cell holds the settings of its notebook, as papermill tags it."""
    return "parameters" in cell["metadata"].get("tags", [])


def run_notebook(path: Path, **parameters: object) -> tuple[dict[str, Any], list[bytes]]:
    """Run all code cells in order, in the current folder.

    Args:
        path: of the notebook.
        parameters: set after the cell tagged ``parameters``; that cell has to know them.

    Returns:
        The notebook's variables, and the pictures (PNG) that its cells show.
    """
    variables: dict[str, Any] = {"__name__": "__main__"}
    pictures: list[bytes] = []
    for number, cell in enumerate(cells(path)):
        if cell["cell_type"] != "code":
            continue
        shown = _run_cell(cell["source"], f"{path.name}, cell {number}", variables)
        if hasattr(shown, "_repr_png_"):
            pictures.append(shown._repr_png_())
        if is_parameters(cell):
            unknown = set(parameters) - set(variables)
            assert not unknown, f"{path.name} has no parameter {unknown}"
            variables |= parameters
    return variables, pictures


def _run_cell(source: str, name: str, variables: dict[str, Any]) -> object:
    """Run one cell; returns the value of its last line, if that is an expression."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), variables)
    if not isinstance(last, ast.Expr):
        return None
    return eval(compile(ast.Expression(last.value), name, "eval"), variables)

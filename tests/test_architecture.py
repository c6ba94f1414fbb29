"""Modules import only what lies below them, and importing the package costs milliseconds."""

import ast
import json
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from importlib.resources import files

import import_rules
import pytest
import yaml

import openelm_mlx

HEAVY = [
    "coremltools",
    "datasets",
    "huggingface_hub",
    "lm_eval",
    "matplotlib",
    "mlx_lm",
    "pyarrow",
    "tokenizers",
    "torch",
    "transformers",
]
MODEL = "openelm_mlx.model"


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def faults_of(module: str, text: str) -> list[str]:
    """Faults of one module's text, put in place of the real one."""
    return import_rules.faults({module: text}, set(import_rules.LAYER_OF))


def test_every_module_imports_only_what_lies_below_it() -> None:
    found = import_rules.faults(import_rules.sources())
    assert not found, "\n".join(found)


def test_imports_have_no_cycle() -> None:
    texts = import_rules.sources()
    graph = {
        module: {item.target for item in import_rules.imports(text, set(texts))} & set(texts)
        for module, text in texts.items()
        if module != "openelm_mlx"  # its lazy names, under TYPE_CHECKING, reach everything
    }
    assert sum(map(len, graph.values())) > len(graph) / 2  # the graph was really read
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def test_no_module_has_a_name_that_says_nothing() -> None:
    words = {module.rpartition(".")[2] for module in import_rules.sources()}
    assert words & import_rules.EMPTY_NAMES == set()


@pytest.mark.parametrize(
    ("module", "text", "fault"),
    [
        (MODEL, "from openelm_mlx.trainer import train", "layer 4 is not below layer 1"),
        (MODEL, "def f():\n    import openelm_mlx.cli", "layer 7 is not below layer 1"),
        (MODEL, "from openelm_mlx import load", "layer 3 is not below layer 1"),
        (MODEL, "from openelm_mlx.data import Batch", "layer 1 is not below layer 1"),
        (MODEL, "from openelm_mlx.nowhere import x", "not in the import table"),
        (MODEL, "from .config import ModelArgs", "full name"),
        (MODEL, "import numpy as np", "mlx alone"),
        ("openelm_mlx.trainer", "def f():\n    import mlx_lm", "not a third party of layer 4"),
        ("openelm_mlx.generate", "import mlx_lm", "only inside a function"),
        ("openelm_mlx.generate", "def f():\n    import torch", "not a third party of layer 5"),
        ("openelm_mlx.checkpoint", "from convert.names import to_hf", "only inside a function"),
        ("openelm_mlx.lora", "def f():\n    import convert.names", "does not import convert"),
        ("convert.names", "from openelm_mlx.config import ModelArgs", "not below layer 0"),
        ("openelm_mlx", "from openelm_mlx.model import Model", "lazy public name"),
        ("openelm_mlx.stuff", "", "add it to the table"),
    ],
)
def test_a_breach_of_the_table_is_found(module: str, text: str, fault: str) -> None:
    found = faults_of(module, text)
    assert len(found) == 1
    assert fault in found[0]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (MODEL, "import math\nimport mlx.nn as nn\nfrom openelm_mlx.cache import Cache"),
        (MODEL, "from openelm_mlx import __version__"),
        ("openelm_mlx.checkpoint", "def f():\n    from convert.names import to_hf"),
        ("openelm_mlx.generate", "def f():\n    import mlx_lm"),
        ("openelm_mlx.demo", "import convert.coreml\nfrom openelm_mlx import finetune"),
        ("openelm_mlx.tokenizer", "import sentencepiece\nimport openelm_mlx.detokenizer"),
        ("openelm_mlx", "if TYPE_CHECKING:\n    from openelm_mlx.model import Model"),
    ],
)
def test_what_the_table_allows_is_let_through(module: str, text: str) -> None:
    assert faults_of(module, text) == []


def test_importing_the_package_takes_under_a_tenth_of_a_second() -> None:
    code = (
        "import time; t = time.process_time(); import openelm_mlx; print(time.process_time() - t)"
    )
    assert any(float(run_python(code)) < 0.1 for _ in range(5))  # once: other work only adds


def test_importing_the_package_loads_neither_mlx_nor_numpy() -> None:
    loaded = json.loads(
        run_python("import json, sys, openelm_mlx; print(json.dumps([*sys.modules]))")
    )
    assert {"mlx.core", "mlx_lm", "numpy", "convert", *HEAVY} & set(loaded) == set()


@pytest.mark.parametrize("before", ["", "import openelm_mlx.cli, openelm_mlx.generate as _"])
def test_the_public_generate_is_the_function_whatever_was_imported_before(before: str) -> None:
    """Guards a bug: the first import of the module of that name had taken the function's place."""
    code = (
        f"{before}\nfrom openelm_mlx import load, generate\nimport openelm_mlx\n"
        "from openelm_mlx import generate as again\n"
        "print(callable(generate), generate is again is openelm_mlx.generate)"
    )
    assert run_python(code).split() == ["True", "True"]


@pytest.mark.slow
def test_no_module_loads_a_heavy_package_when_imported() -> None:
    on_mlx_lm = {"openelm_mlx.server", "openelm_mlx.server_generation"}  # imported by need
    modules = sorted(set(import_rules.sources()) - on_mlx_lm)
    code = (
        "import importlib, json, sys\n"
        f"for name in {modules}:\n    importlib.import_module(name)\n"
        f"print(json.dumps(sorted(set({HEAVY}) & set(sys.modules))))"
    )
    assert json.loads(run_python(code)) == []


def test_public_names_stand_in_the_modules_they_point_to() -> None:
    texts = import_rules.sources()
    assert set(openelm_mlx.__all__) - {"__version__"} <= set(openelm_mlx._PUBLIC)
    written = {name: module for name, module in openelm_mlx._PUBLIC.items() if module in texts}
    assert {"Model", "ModelArgs"} <= set(written)
    for name, module in written.items():
        defined = "export" if name == "export_coreml" else name
        tree = ast.parse(texts[module])
        names = {getattr(node, "name", None) for node in tree.body} | {
            alias.asname
            for node in tree.body
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        assert defined in names, f"{module} has no {defined}"


def test_package_data_is_found_through_importlib() -> None:
    root = files("openelm_mlx")
    assert root.joinpath("py.typed").is_file()
    recipes = sorted(p.name for p in root.joinpath("recipes").iterdir() if p.name.endswith(".yaml"))
    assert recipes
    for name in recipes:
        settings = yaml.safe_load(root.joinpath("recipes", name).read_text(encoding="utf-8"))
        assert isinstance(settings, dict), name
        assert settings, name

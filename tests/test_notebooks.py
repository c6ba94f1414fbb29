"""The notebooks run from the first cell to the last, and are kept without their outputs.

They run by ``exec`` in a temporary folder, with small settings: Jupyter's kernel is some twenty
packages more and would run the same cells.
"""

import json
from pathlib import Path

import pytest
from notebook_runner import FOLDER, is_parameters, run_notebook
from notebook_runner import cells as cells_of

SMALL = {
    "01_generate": {"UPDATES": 20, "VOCAB": 400, "DOCUMENTS": 150},
    "02_finetune_lora": {
        **{"UPDATES": 20, "TUNING_UPDATES": 8, "QUESTIONS": 120},
        **{"VOCAB": 400, "DOCUMENTS": 150},
    },
    "03_export_coreml": {
        **{"UPDATES": 6, "VOCAB": 400, "DOCUMENTS": 120, "KINDS": ("fp16", "palette4")},
    },
    "04_layerwise_scaling": {"UPDATES": 8, "SEEDS": (0, 1), "VOCAB": 400, "DOCUMENTS": 80},
}
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", NOTEBOOKS, ids=names(NOTEBOOKS))
def test_a_notebook_is_kept_without_outputs_and_begins_with_its_settings(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    code = [cell for cell in cells_of(path) if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert is_parameters(code[0])
    ids = [cell["id"] for cell in cells_of(path)]
    assert len(set(ids)) == len(ids)
    assert cells_of(path)[0]["source"].startswith("# ")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=names(NOTEBOOKS))
def test_a_notebook_runs_to_its_end_and_leaves_files_only_where_it_says(
    path: Path, room: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    variables, pictures = run_notebook(path, **SMALL[path.stem])
    assert capsys.readouterr().out
    assert [entry.name for entry in room.iterdir()] == ["runs"]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    if path.stem == "01_generate":
        assert variables["plain"] == variables["looked_up"]
    if path.stem == "02_finetune_lora":
        assert len(pictures) == 1
        assert len(variables["before"]) == len(variables["after"]) == 3
        assert variables["valid"][-1] < variables["valid"][0]
    if path.stem == "03_export_coreml":
        assert variables["made"].verification.holds
        assert variables["sizes"]["palette4"] < variables["sizes"]["fp16"]
    if path.stem == "04_layerwise_scaling":
        assert len(pictures) == 3
        assert len(variables["differences"]) == 2
        losses = [run for runs in variables["curves"].values() for run in runs]
        assert all(run[-1][1] < run[0][1] for run in losses)


def test_a_parameter_that_a_notebook_does_not_know_is_an_error(room: Path) -> None:
    with pytest.raises(AssertionError, match="has no parameter"):
        run_notebook(FOLDER / "01_generate.ipynb", UPDATE=3)
    assert not list(room.iterdir())

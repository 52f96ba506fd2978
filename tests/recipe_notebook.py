"""A recipe away from its notebook: single cells, all cells in this process, and whole runs with papermill."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
import torch

from utils.cookbook import notebooks
from utils.cookbook.verdicts import LINE
from utils.rows import read_rows

FOLDER = Path(__file__).parents[1] / "notebooks"


def code_cells(recipe: str) -> list:
    return notebooks.code_cells(notebooks.load(FOLDER / f"{recipe}.ipynb"))


def source_with(recipe: str, text: str) -> str:
    """The source of the first code cell that holds `text`."""
    return next(cell.source for cell in code_cells(recipe) if text in cell.source)


def source_of(recipe: str, tag: str) -> str:
    """The source of the first code cell with this tag."""
    return next(cell.source for cell in code_cells(recipe) if tag in notebooks.tags(cell))


def said(cell) -> str:
    """What a cell printed, as stored in the notebook."""
    return "".join(output.get("text", "") for output in cell.get("outputs", []))


def claims_of(text: str) -> dict[str, str]:
    """Verdict by claim, from the lines that the cell `claims` prints."""
    return {found["id"]: found["verdict"] for found in map(LINE.match, text.splitlines()) if found}


def set_up(recipe: str, **given: Any) -> dict:
    """The names after the parameters and the set-up, which end where the cell `machine` comes."""
    names: dict = {}
    for cell in code_cells(recipe):
        if "machine" in notebooks.tags(cell):
            return names
        exec(cell.source, names)
        if "parameters" in notebooks.tags(cell):
            assert given.keys() <= names.keys()
            names |= given
    raise AssertionError(f"{recipe} has no cell tagged machine")


def check_refused(recipe: str, given: dict, told: str) -> None:
    """The set-up cells refuse these parameters, with this text on one line."""
    with pytest.raises((TypeError, ValueError), match=told) as caught, torch.no_grad():
        set_up(recipe, **given)
    assert "\n" not in str(caught.value)


def run_here(recipe: str, capsys, **given: Any) -> dict[str, str]:
    """Every code cell in this process (a kernel of its own would only cost time): what was printed, by tag.

    Peaks of the machine are made up: the limit does not matter here, and takes seconds to measure.
    """
    peaks = SimpleNamespace(gemm_flops_per_s=1e15, read_bytes_per_s=1e15)
    names: dict = {"__name__": f"recipe_{recipe[:2]}"}  # code that looks at a function asks for its module
    shown: dict[str, str] = {}
    for cell in code_cells(recipe):
        exec(cell.source, names)
        if "parameters" in notebooks.tags(cell):
            assert given.keys() <= names.keys()
            names |= given
        if "measure_peaks" in names:
            names["measure_peaks"] = lambda *a, **k: peaks
        out = capsys.readouterr().out
        for tag in notebooks.tags(cell):
            shown[tag] = shown.get(tag, "") + out
    return shown


def run_whole(recipe: str, folder: Path, **parameters: Any) -> tuple[nbformat.NotebookNode, list[dict]]:
    """The executed notebook and the rows that it wrote (none: [])."""
    papermill = pytest.importorskip("papermill")
    rows = folder / "rows.jsonl"
    done = papermill.execute_notebook(
        str(FOLDER / f"{recipe}.ipynb"),
        str(folder / "out.ipynb"),
        parameters={"rows": str(rows), **parameters},
        cwd=str(FOLDER),
        progress_bar=False,
    )
    return done, read_rows(rows) if rows.exists() else []


def claims_in(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """Verdict by claim of an executed notebook."""
    return claims_of(said(notebooks.cells_by_tag(notebook)["claims"]))

"""Small notebooks for the tests of `run` and the command line: no torch, a row written by hand."""

import json
import shutil
from pathlib import Path

from utils.cookbook.parameters import code_cells

PARAMETERS = """\
device: str = "auto"  # where it runs
seed: int = 0  # seed of the inputs
rows: str = ""  # row file
rate: float = 0.5  # a share # of one
fast: bool = True  # a switch
sizes: list[int] = [1, 2]  # the points
"""
ROW = """\
import json
row = {"label": "fast", "speedup": 2.0 + seed, "verdict": "faster", "same": True, "rule": "bitwise"}
with open(rows, "a") as file:
    print(json.dumps(row), file=file)
"""


def write_notebook(path: Path, *cells: tuple[str, str], outputs: dict[str, str] | None = None, why: str = "") -> Path:
    """A notebook of code cells given as (tags separated by commas, source); the kernel that it names exists nowhere."""
    made = []
    for tags, source in cells:
        text = (outputs or {}).get(tags)
        made.append(
            {
                "cell_type": "code",
                "id": f"cell-{len(made)}",
                "metadata": {"tags": tags.split(",")} if tags else {},
                "source": source,
                "outputs": [{"output_type": "stream", "name": "stdout", "text": text}] if text else [],
                "execution_count": None,
            }
        )
    metadata = {"kernelspec": {"name": "nowhere", "display_name": "nowhere", "language": "python"}}
    metadata |= {"cookbook": {"why": why}} if why else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "metadata": metadata, "cells": made}))
    return path


def toy(folder: Path, name: str = "01_toy", *cells: tuple[str, str], row: bool = True, why: str = "a toy") -> Path:
    """A recipe: parameters, the given cells, then (unless `row` is false) a `measure` cell that writes a row."""
    last = [("measure,nbval-ignore-output", ROW)] if row else []
    return write_notebook(folder / f"{name}.ipynb", ("parameters", PARAMETERS), *cells, *last, why=why)


def papermill_here(path, copy, values, *rest):
    """In place of run._papermill: the cells run in this process, for what does not depend on a kernel."""
    space = {}
    for source, tags in code_cells(path):
        exec(source, space)
        space |= values if "parameters" in tags else {}
    shutil.copy(path, copy)
    return "", ""

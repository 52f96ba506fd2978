"""The structure check of a recipe: what a reader, a driver and nbval count on, without running anything."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ..claims import load_claims
from .check_code import claim_ids, code_problems, control_problems, parameter_problems
from .check_prose import clock_numbers, exercise_problems, heading_problems, link_problems, opening_problems
from .notebooks import NAME, UNCOMPARED, code_cells, compared, label, load, output_text, prefix_hash, tag, tags
from .parameters import declared, papermill_misses

if TYPE_CHECKING:
    from nbformat import NotebookNode

ANATOMY = ("parameters", "machine", "figure", "baseline", "technique", "check", "control")
ANATOMY += ("cost", "measure", "limits", "recorded", "claims")
SEVERAL = {"check", "control", "cost", "limits", "recorded"}  # may be told in more than one cell
LIVE = {"machine", "measure"}  # what nbval must not compare; `limits` may be either
SPEAKS = set(ANATOMY) - {"parameters", "baseline", "technique"}  # must show something
MAX_LINES = {"technique": 40}
LINES = 25
MAX_BYTES = 200_000
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|Users|mnt|opt|workspace)/[\w.-]+|\b[A-Za-z]:\\+Users\b")
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


def check(path: str | Path, claims: Mapping[str, object] | None = None) -> list[str]:
    """Problems of one recipe, one line each with what to do; an empty list when it is in order.

    `claims` replaces data/claims.yaml. Nothing is executed.
    """
    path = Path(path).resolve()
    try:
        nb = load(path)
    except ValueError as error:
        return [str(error)]
    claims = load_claims() if claims is None else claims
    problems = file_problems(path, nb)
    problems += tag_problems(nb)
    stripped = all(cell.execution_count is None for cell in code_cells(nb))
    if stripped:
        problems.append("its outputs are not stored, so nothing would be compared: refresh the notebook")
    for number, cell in enumerate(code_cells(nb), start=1):
        where = label(nb, number)
        found = code_problems(cell.source, compared=compared(cell))
        found += length_problems(cell)
        if tag(cell) == "parameters":
            found += parameter_problems(cell.source)
        if tag(cell) == "control":
            found += control_problems(cell.source)
        found += [] if stripped else stored_problems(nb, number)
        problems += [f"{where}: {text}" for text in found]
    problems += parameter_readings(path)
    problems += text_problems(path, nb, claims)
    problems += claim_problems(path.stem, nb, claims)
    return problems


def file_problems(path: Path, nb: NotebookNode) -> list[str]:
    """Name, size, metadata."""
    problems = []
    if not NAME.fullmatch(path.stem):
        problems.append(f"name {path.name}: expected NN_snake_case.ipynb")
    if (size := path.stat().st_size) > MAX_BYTES:
        problems.append(f"{size:,} bytes; at most {MAX_BYTES:,}: make the figure smaller or print less")
    extra = sorted(set(nb.metadata) - {"cookbook", "kernelspec", "language_info"})
    extra += sorted({key for cell in nb.cells for key in cell.metadata} - {"tags", "cookbook"})
    if extra or nb.metadata.get("kernelspec", {}).get("name") != "python3":
        problems.append(f"metadata is not clean ({', '.join(extra) or 'kernel'}): refresh it")
    why = nb.metadata.get("cookbook", {}).get("why", "")
    if len(why) > 40:
        problems.append(f"metadata cookbook.why {why!r}: at most 40 characters, about six words")
    return problems


def tag_problems(nb: NotebookNode) -> list[str]:
    """The cells of the anatomy: all there, in order, and compared or not as they should be."""
    problems = []
    for place, cell in enumerate(nb.cells):
        unknown = sorted(set(tags(cell)) - {*ANATOMY, UNCOMPARED})
        if unknown:
            problems.append(f"cell {place + 1} of the file: tag {', '.join(unknown)} is unknown; remove it")
        if cell.cell_type != "code" and tags(cell):
            problems.append(f"cell {place + 1} of the file: tag on a text cell; tag the code cell")
        if len(set(tags(cell)) & set(ANATOMY)) > 1:
            problems.append(f"cell {place + 1} of the file: more than one tag of the anatomy; split the cell")
    names = [tag(cell) for cell in code_cells(nb)]
    for name in ANATOMY:
        if name not in names:
            problems.append(f"no cell is tagged `{name}`")
        elif names.count(name) > 1 and name not in SEVERAL:
            problems.append(f"{names.count(name)} cells are tagged `{name}`; expected one")
    order = [name for name in names if name in ANATOMY]
    for before, after in pairwise(order):
        if ANATOMY.index(after) < ANATOMY.index(before):
            problems.append(f"`{after}` comes after `{before}`; the order is {', '.join(ANATOMY)}")
            break
    if names[:1] != ["parameters"]:
        problems.append("the first code cell must be tagged `parameters`")
    if "machine" in names and "" not in names[: names.index("machine")]:
        problems.append("no set-up cell without a tag between `parameters` and `machine`")
    for number, cell in enumerate(code_cells(nb), start=1):
        if tag(cell) in LIVE and compared(cell):
            problems.append(f"{label(nb, number)}: its output is live; tag it {UNCOMPARED} as well")
        if not compared(cell) and tag(cell) not in LIVE | {"limits"}:
            problems.append(f"{label(nb, number)}: only machine, measure and limits may be {UNCOMPARED}")
    return problems


def length_problems(cell: NotebookNode) -> list[str]:
    lines, most = len(cell.source.strip().splitlines()), MAX_LINES.get(tag(cell), LINES)
    return [f"{lines} lines; at most {most}: split it, or move what is not the idea to utils"] if lines > most else []


def stored_problems(nb: NotebookNode, number: int) -> list[str]:
    """What is stored with code cell `number`."""
    cell = code_cells(nb)[number - 1]
    problems = []
    if cell.execution_count is None:
        return ["has no execution count, so nothing would be compared: refresh the notebook"]
    if cell.execution_count != number:
        problems.append(f"has the count {cell.execution_count}; counts run 1, 2, 3 …: refresh the notebook")
    if not cell.outputs and tag(cell) in SPEAKS:
        problems.append("shows nothing: print what it found, then refresh the notebook")
    kinds = {kind for output in cell.outputs for kind in output.get("data", {})}
    if tag(cell) == "figure" and cell.outputs and "image/png" not in kinds:
        problems.append("shows no picture: end it with utils.figures.finish(fig)")
    if "image/svg+xml" in kinds:
        problems.append("stores an SVG, which differs each time; show a PNG")
    if any(kind.startswith("application/vnd.jupyter.widget") for kind in kinds):
        problems.append("stores a widget; print what matters")
    for output in cell.outputs:
        if output.output_type == "error":
            problems.append(f"stores an error ({output.ename}); catch it and print what it teaches")
        if output.get("name") == "stderr":
            problems.append("stores stderr; remove the cause or filter that one warning, then refresh the notebook")
    problems += leaks(output_text(cell.outputs), compared(cell))
    digest = cell.metadata.get("cookbook", {}).get("hash")
    if not compared(cell) and digest != prefix_hash(nb, number):
        problems.append("its stored output is of older code: refresh the notebook")
    return problems


def leaks(text: str, is_compared: bool) -> list[str]:
    """What of a machine shows in an output."""
    problems = []
    if found := MACHINE_PATH.search(text):
        problems.append(f"shows a path of a machine ({found[0]}); print the name only")
    host = socket.gethostname()
    if re.search(r"[\d-]", host) and len(host) > 5 and re.search(rf"(?<![\w-]){re.escape(host)}(?![\w-])", text):
        problems.append("shows this machine's host name; leave it out")
    if is_compared and (found := ADDRESS.search(text)):
        problems.append(f"shows a memory address ({found[0]}); print a value, not an object")
    return problems


def parameter_readings(path: Path) -> list[str]:
    """Parameters that papermill's own reading misses."""
    try:
        missed = papermill_misses(path)
    except ValueError:
        return []  # said by parameter_problems or tag_problems
    advice = "one `=` a line, no quotes in the type, no `=` in the comment"
    return [f"papermill does not see the parameter {name}: {advice}" for name in missed]


def text_problems(path: Path, nb: NotebookNode, claims: Mapping[str, object]) -> list[str]:
    """Title, headings, exercises, links, numbers."""
    cells = [cell for cell in nb.cells if cell.cell_type == "markdown"]
    texts = [cell.source for cell in cells]
    first = nb.cells[0] if nb.cells else None
    problems = opening_problems(first.source if first is not None and first.cell_type == "markdown" else "")
    problems += heading_problems(texts)
    try:
        names = list(declared(path))
    except ValueError:
        names = []
    problems += exercise_problems(texts, path.stem, names)
    problems += half_problems(nb)
    for cell in cells:
        problems += link_problems(cell, path.parent)
        problems += clock_numbers(cell.source, claims)
    return problems


def half_problems(nb: NotebookNode) -> list[str]:
    """`recorded` and `claims` stand in the half *Evidence*, the others before it."""
    starts = [
        i for i, c in enumerate(nb.cells) if c.cell_type == "markdown" and re.search(r"^#+ Evidence", c.source, re.M)
    ]
    if not starts:
        return []  # said by heading_problems
    problems = []
    for place, cell in enumerate(nb.cells):
        late = tag(cell) in ("recorded", "claims")
        if tag(cell) in ANATOMY and late != (place > starts[0]):
            problems.append(f"`{tag(cell)}` must come {'after' if late else 'before'} the heading Evidence")
    return problems


def claim_problems(recipe: str, nb: NotebookNode, claims: Mapping[str, object]) -> list[str]:
    """The claims cell settles this recipe's claims, all of them and no others."""
    cell = next((cell for cell in code_cells(nb) if tag(cell) == "claims"), None)
    if cell is None:
        return []
    named = claim_ids(cell.source)
    problems = []
    for name in named:
        if name not in claims:
            problems.append(f"`claims`: {name} is not in data/claims.yaml")
        elif claims[name].recipe != recipe:
            problems.append(f"`claims`: {name} belongs to {claims[name].recipe} (data/claims.yaml)")
    left = [claim.id for claim in claims.values() if claim.recipe == recipe and claim.id not in named]
    if left:
        problems.append(f"`claims`: {', '.join(left)} of data/claims.yaml is not settled")
    return problems

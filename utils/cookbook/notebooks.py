"""Find notebooks, read them, and speak of their cells as a reader sees them."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing nbformat takes a second, which a mistyped command line should not cost
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
UNCOMPARED = "nbval-ignore-output"  # the one nbval tag a cell may carry
NAME = re.compile(r"\d\d_[a-z0-9]+(_[a-z0-9]+)*")  # NN_snake_case

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def load(path: str | Path) -> NotebookNode:
    """Read a version 4 notebook. A cell without an id gets one that depends only on its tag and place.

    Raises ValueError, one line, when the file is not such a notebook; OSError when it cannot be read.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8")
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not a notebook: {error}") from None
    if not isinstance(raw, dict) or raw.get("nbformat") != 4 or not isinstance(raw.get("cells"), list):
        raise ValueError(f"{path}: not a version 4 notebook")
    _give_ids(raw["cells"])
    raw["nbformat_minor"] = max(5, raw.get("nbformat_minor", 0))
    import nbformat

    try:
        return nbformat.reads(json.dumps(raw), as_version=4)
    except Exception as error:  # nbformat's own errors share no base class
        raise ValueError(f"{path}: not a valid notebook: {str(error).splitlines()[0]}") from None


def _give_ids(cells: list[dict]) -> None:
    seen = {cell.get("id") for cell in cells}
    for place, cell in enumerate(cells):
        if not cell.get("id"):
            names = cell.get("metadata", {}).get("tags") or [f"cell-{place:02d}"]
            name = re.sub(r"[^a-zA-Z0-9-_]", "-", names[0])[:50]
            while name in seen:
                name += f"-{place:02d}"
            cell["id"] = name
            seen.add(name)


def tags(cell: dict) -> list[str]:
    """The tags of a cell."""
    return list(cell["metadata"].get("tags", []))


def tag(cell: dict) -> str:
    """The tag that names a cell's place in the anatomy; "" when it has none."""
    return next((name for name in tags(cell) if name != UNCOMPARED), "")


def compared(cell: dict) -> bool:
    """True when nbval compares the outputs of this cell."""
    return UNCOMPARED not in tags(cell)


def code_cells(nb: NotebookNode) -> list[NotebookNode]:
    """The code cells in order; the first is the one that Jupyter numbers [1]."""
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def cells_by_tag(notebook: NotebookNode | str | Path) -> dict[str, NotebookNode]:
    """First cell of each tag, in the order of the notebook."""
    nb = notebook if isinstance(notebook, dict) else load(notebook)
    found: dict[str, NotebookNode] = {}
    for cell in nb.cells:
        for name in tags(cell):
            found.setdefault(name, cell)
    return found


def prefix_hash(nb: NotebookNode, number: int) -> str:
    """Hash of code cells [1] to [number]: what the output of cell [number] depends on. First 16 hex of sha256."""
    sources = [cell.source for cell in code_cells(nb)[:number]]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()[:16]


def find_recipes(folder: str | Path | None = None) -> list[Path]:
    """The recipes in order: every NN_snake_case.ipynb of `folder`.

    Without one: of the folder in COOKBOOK_NOTEBOOKS (for tests and for a team's own), else of the project's.
    """
    folder = Path(folder or os.environ.get("COOKBOOK_NOTEBOOKS") or NOTEBOOKS)
    return sorted(path for path in folder.glob("*.ipynb") if NAME.fullmatch(path.stem))


def resolve(name: str | Path, folder: str | Path | None = None) -> Path:
    """A recipe by number ("7", "07"), prefix, name or path.

    Raises ValueError, one line, with the nearest valid name when nothing or more than one recipe fits.
    """
    text = str(name)
    if text.endswith(".ipynb") and Path(text).is_file():
        return Path(text).resolve()
    recipes = {path.stem: path for path in find_recipes(folder)}
    wanted = Path(text).stem if text.endswith(".ipynb") else text
    if wanted.isdigit():
        wanted = f"{int(wanted):02d}_"
    if wanted in recipes:
        return recipes[wanted]
    fits = [stem for stem in recipes if wanted and stem.startswith(wanted)]
    if len(fits) == 1:
        return recipes[fits[0]]
    if fits:
        raise ValueError(f"recipe {text!r} is not one recipe: {', '.join(fits)}")
    near = difflib.get_close_matches(text, recipes, n=1, cutoff=0.5)
    near = near or [stem for stem in recipes if text and text in stem]
    hint = f"nearest: {near[0]}" if near else f"there are: {', '.join(recipes) or 'none'}"
    raise ValueError(f"no recipe {text!r}; {hint}")


def short_name(path: str | Path) -> str:
    """How the command line names a notebook: its number for a recipe of this project, else its path."""
    path = Path(path).resolve()
    if path.parent == NOTEBOOKS and NAME.fullmatch(path.stem):
        return path.stem[:2]
    return shown_path(path)


def shown_path(path: str | Path) -> str:
    """The path as a person would type it from here."""
    path = Path(path).resolve()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def label(nb: NotebookNode, number: int) -> str:
    """Code cell `number` (from 1, as Jupyter shows it) in words: "cell [5], tag `check`"."""
    cell = code_cells(nb)[number - 1]
    if tag(cell):
        return f"cell [{number}], tag `{tag(cell)}`"
    lines = cell.source.strip().splitlines()
    return f"cell [{number}], `{lines[0][:60]}`" if lines else f"cell [{number}]"


def plain(text: str) -> str:
    """Text without terminal colours."""
    return _ANSI.sub("", text)


def output_text(outputs: list[dict]) -> str:
    """What a cell shows, as text: streams, text values (an image by its text), errors."""
    parts = []
    for output in outputs:
        if output["output_type"] == "stream":
            mark = "" if output["name"] == "stdout" else f"[{output['name']}] "
            parts.append(mark + output["text"])
        elif output["output_type"] == "error":
            parts.append(f"{output['ename']}: {output['evalue']}")
        else:
            data = output["data"]
            parts.extend(str(data[kind]) for kind in sorted(data, reverse=True) if kind.startswith("text/"))
    return "\n".join(plain(part).rstrip("\n") for part in parts)


def stored_and_came(stored: list[dict], came: list[dict], limit: int = 20) -> str:
    """The lines that differ between two lists of outputs, at most `limit`: `stored: …` and `came:   …`."""
    before, after = output_text(stored).splitlines(), output_text(came).splitlines()
    lines = []
    for mark in difflib.ndiff(before, after):
        if mark.startswith("- "):
            lines.append(f"stored: {mark[2:]}")
        elif mark.startswith("+ "):
            lines.append(f"came:   {mark[2:]}")
    if not before and after:
        lines.insert(0, "stored: nothing")
    if before and not after:
        lines.append("came:   nothing")
    if not lines:
        lines.append(f"stored: {len(stored)} outputs ({_kinds(stored)})")
        lines.append(f"came:   {len(came)} outputs ({_kinds(came)})")
    hidden = len(lines) - limit
    return "\n".join(lines[:limit] + ([f"… and {hidden} more lines"] if hidden > 0 else []))


def _kinds(outputs: list[dict]) -> str:
    kinds = [", ".join(output["data"]) if "data" in output else output["output_type"] for output in outputs]
    return "; ".join(kinds) or "nothing"

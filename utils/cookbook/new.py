"""Write a new recipe that runs and passes the structure check."""

from __future__ import annotations

import re
from pathlib import Path

from .notebooks import NAME, NOTEBOOKS, UNCOMPARED, find_recipes, shown_path
from .template import cells


def new(name: str, folder: str | Path | None = None) -> Path:
    """Write notebooks/NN_name.ipynb from the template, run it once to store its outputs, return its path.

    Raises ValueError, one line, for a name that is not NN_snake_case or is taken, before anything is written; and
    RefreshError, with nothing left behind, when the template does not run here.
    """
    import nbformat

    from .refresh import refresh

    folder = Path(folder) if folder else NOTEBOOKS
    name = name.removesuffix(".ipynb")
    check_name(name, folder)
    nb = nbformat.v4.new_notebook()
    for place, (tag, source) in enumerate(cells(name)):
        if tag == "md":
            nb.cells.append(nbformat.v4.new_markdown_cell(source, id=f"text-{place:02d}"))
        else:
            tags = [tag, UNCOMPARED] if tag in ("machine", "measure") else [tag] if tag else []
            cell = nbformat.v4.new_code_cell(source, id=tag or f"code-{place:02d}", metadata={"tags": tags})
            nb.cells.append(cell)
    path = folder / f"{name}.ipynb"
    path.write_text(nbformat.writes(nb) + "\n", encoding="utf-8")
    try:
        refresh(path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def check_name(name: str, folder: Path) -> None:
    """Raises ValueError, one line, when `name` cannot become a recipe of `folder`."""
    recipes = {path.stem: path for path in find_recipes(folder)}
    numbers = {stem[:2]: stem for stem in recipes}
    free = next((f"{number:02d}" for number in range(1, 100) if f"{number:02d}" not in numbers), "")
    if not NAME.fullmatch(name):
        words = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
        number, _, rest = words.partition("_")
        good = words if NAME.fullmatch(words) else f"{free}_{rest if number.isdigit() and rest else words or 'name'}"
        raise ValueError(f"recipe name {name!r}; expected NN_snake_case, for example {good}")
    if name[:2] in numbers:
        taken = shown_path(recipes[numbers[name[:2]]])
        raise ValueError(f"recipe number {name[:2]} is taken by {taken}; the next free one is {free}")
    if not folder.is_dir():
        raise ValueError(f"{shown_path(folder)}: there is no such folder to write {name}.ipynb to")

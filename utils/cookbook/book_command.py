"""`./cookbook book`: the recipes as a site to read, without a network."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from .usage import UsageError, usage

OUT = Path(__file__).resolve().parents[2] / "build" / "book"


def book(
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="where the site goes (build/book)")] = None,
) -> None:
    """Build the recipes as a site to read."""
    from .notebooks import ROOT, shown_path
    from .versions import lacking, ranges

    if missing := lacking(ranges(ROOT, ("book",))):
        raise UsageError(f"the book needs {', '.join(missing)}: {sys.executable} -m pip install -e '.[book]'")
    from .book import BookError, build, check_out
    from .cli import recipes

    folder = Path.cwd() / (out or OUT)
    with usage():
        check_out(folder)
        notebooks = recipes()
        if not notebooks:
            raise UsageError("there is no recipe to show")
    try:
        pages = build(folder, notebooks)
    except BookError as error:
        print(f"FAILED the book was not written; Sphinx says:\n{error}")
        raise typer.Exit(1) from None
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{pages} pages, {size / 1e6:.0f} MB. Open {shown_path(folder)}{os.sep}index.html")

"""`./cookbook report ROWS…`: merge the rows of many runs and machines into tables, files and curves."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from .usage import UsageError, usage

RESULTS = Path(__file__).resolve().parents[2] / "data" / "results"
FORMATS = {"--csv": (".csv", ".tsv"), "--md": (".md",)}  # their file may be left out: the table then goes to stdout


class Report(TyperCommand):
    """`--csv` and `--md` with or without a file: what follows is the file only when it has the right ending."""

    def parse_args(self, context, arguments):
        given, rest = [], list(arguments)
        while rest:
            given.append(argument := rest.pop(0))
            if argument in FORMATS and not (rest and (rest[0] == "-" or rest[0].endswith(FORMATS[argument]))):
                given.append("-")
        return super().parse_args(context, given)


def report(
    rows: Annotated[list[Path] | None, typer.Argument(metavar="ROWS", help="row files, or folders of them")] = None,
    recipe: Annotated[str | None, typer.Option(metavar="RECIPE", help="only the rows of this recipe")] = None,
    by: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="a line for each value of it")] = None,
    plot: Annotated[str | None, typer.Option(metavar="x=…,y=…,hue=…", help="curves with intervals, a PNG")] = None,
    png: Annotated[Path, typer.Option(metavar="FILE", help="where --plot draws")] = Path("report.png"),
    price: Annotated[str | None, typer.Option(metavar="MONEY", help="per hour: 2.5, or H200=3.5,A100=1.2")] = None,
    outputs: Annotated[str | None, typer.Option(metavar="COLUMN", help="outputs of one call, for --price")] = None,
    csv: Annotated[str | None, typer.Option(metavar="[FILE]", help="all rows; without a file: to stdout")] = None,
    parquet: Annotated[Path | None, typer.Option(metavar="FILE", help="all rows (needs pyarrow)")] = None,
    md: Annotated[str | None, typer.Option(metavar="[FILE]", help="the tables as Markdown")] = None,
    adopt: Annotated[Path | None, typer.Option(metavar="FILE", help="add measured rows to data/results")] = None,
) -> None:
    """Rows of many runs and machines as tables.

    Without ROWS: those of this repository. Damaged and foreign rows are named on stderr.
    """
    if adopt:
        with usage():
            if rows:
                raise ValueError(f"--adopt {adopt}: takes one file and no other rows; got {rows[0]} too")
            raise typer.Exit(adopt_file(adopt))
    with usage():
        from .report_rows import row_files

        files = row_files(rows or [RESULTS])
        check_outputs(files, csv, parquet, md, png if plot else None)
        if outputs and not price:
            raise ValueError(f"--outputs {outputs}: only --price needs it")
    merged, frame, sections, notes = tables(files, recipe, by or [], price, outputs, plot, png)
    for problem in merged.problems:
        print(f"cookbook: {problem}", file=sys.stderr)
    if merged.twice:
        notes.append(f"{merged.twice:,} rows were there twice and counted once")
    with usage():
        notes += write(frame, sections, csv, parquet, md)
    if csv != "-" and md != "-":
        print("\n\n".join(section.text() for section in sections))
        print("\n".join(["", *notes]) if notes else "", end="\n" if notes else "")


def tables(files, recipe, by, price, outputs, plot, png):
    """(merged rows, those of the one recipe, sections, notes). Column names are checked before anything is written."""
    from . import report as tables
    from .cli import recipe as resolve
    from .cli import recipes
    from .report_drift import drift_section, machine_sections
    from .report_plot import parse_plot
    from .report_plot import plot as draw
    from .report_rows import column, merge

    with usage():
        wanted = parse_plot(plot) if plot else None
        merged = merge(files, recipes())
        frame = merged.rows
        if recipe and len(frame):
            known = set(frame["recipe"])
            name = recipe if recipe in known else resolve(recipe).stem
            frame = frame[frame["recipe"] == name].copy()
        if not len(frame):
            where = f" of {recipe}" if recipe else ""
            raise ValueError(
                f"no usable row{where} in {len(files)} file{'s' * (len(files) != 1)}"
                + "".join(f"; {p}" for p in merged.problems[:1])
            )
        by = [column(name, frame, "--by ") for name in by]
        notes = []
        sections = tables.recipe_sections(frame, by)
        if len(tables.compared(frame)):
            if tables.compared(frame)["machine"].nunique() > 1:
                sections += [*machine_sections(frame), drift_section(frame)]
            if price:
                each = column(outputs, frame, "--outputs ") if outputs else None
                tables.add_cost(frame, tables.prices(price, frame), each)
                sections.append(tables.cost_section(frame))
            if wanted:
                notes.append(draw(frame, wanted, png))
        elif price or wanted:
            raise ValueError(f"{'--price' if price else '--plot'}: no row here came from a comparison")
    return merged, frame, sections, notes


def check_outputs(files: list[Path], csv: str | None, parquet: Path | None, md: str | None, png: Path | None) -> None:
    """Raises ValueError, one line, for a file that cannot be written, or that holds the rows themselves."""
    for option, name in (("--csv", csv), ("--parquet", parquet), ("--md", md), ("--png", png)):
        if name is None or name == "-":
            continue
        path = Path(name)
        if path.resolve() in files:
            raise ValueError(f"{option} {name}: that file holds the rows; give another one")
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(f"{option} {name}: cannot write there; give another file")
    if parquet is not None and importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"--parquet {parquet}: needs pyarrow: {sys.executable} -m pip install pyarrow")


def write(frame, sections, csv: str | None, parquet: Path | None, md: str | None) -> list[str]:
    """Write the files that were asked for. Returns a line for each."""
    notes = []
    frame = frame.drop(columns="spot")  # for comparing only
    text = "\n\n".join(section.markdown() for section in sections)
    if csv == "-":
        frame.to_csv(sys.stdout, index=False)
    if md == "-":
        print(text)
    try:
        if csv and csv != "-":
            _parent(csv)
            frame.to_csv(csv, index=False, sep="\t" if csv.endswith(".tsv") else ",")
            notes.append(f"{csv}: {len(frame):,} rows, {len(frame.columns)} columns")
        if parquet:
            _parent(parquet)
            plain(frame).to_parquet(parquet, index=False)
            notes.append(f"{parquet}: {len(frame):,} rows, {len(frame.columns)} columns")
        if md and md != "-":
            _parent(md)
            Path(md).write_text(text + "\n", encoding="utf-8")
            notes.append(f"{md}: {len(sections)} table{'s' * (len(sections) != 1)}")
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or csv or parquet or md}: {error.strerror}") from None
    return notes


def _parent(name: str | Path) -> None:
    Path(name).absolute().parent.mkdir(parents=True, exist_ok=True)


def plain(frame):
    """Columns of one type each, as Parquet wants them: a column of lists, or of mixed values, becomes JSON text."""
    import json

    made = frame.copy()
    for name in [name for name in made.columns if made[name].dtype == "object"]:
        kinds = {type(value) for value in made[name] if value is not None and value == value}
        if len(kinds) > 1 or list in kinds:
            made[name] = made[name].map(lambda value: None if value is None or value != value else json.dumps(value))
    return made


def adopt_file(file: Path) -> int:
    """`--adopt`: add the rows of a file to data/results, say which verdicts flip. Returns the exit status."""
    from .adopt import adopt
    from .cli import recipes

    for line in adopt(file, recipes(), RESULTS):
        print(line, flush=True)  # executing the recipes takes long, and may be stopped
    return 0

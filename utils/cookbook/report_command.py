"""`./cookbook report ROWS…`: merge the rows of many runs and machines into tables, files and curves."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from typer.core import TyperCommand

from .usage import UsageError, usage

RESULTS = Path(__file__).resolve().parents[2] / "data" / "results"
FORMATS = {"--csv": (".csv", ".tsv"), "--md": (".md",)}  # their file may be left out: the table then goes to stdout
HOLD_ROWS = (".jsonl", ".json")
PNG = Path("report.png")
ALWAYS = ("recipe", "label", "machine")  # columns of every table: --by adds them no second time
MOST = 4  # problems in the one line that says why nothing can be used


class Report(TyperCommand):
    """`--csv` and `--md` with or without a file."""

    def parse_args(self, context, arguments):
        given, rest = [], list(arguments)
        while rest:
            given.append(argument := rest.pop(0))
            if argument in FORMATS and not (rest and is_output(argument, rest[0])):
                given.append("-")
        return super().parse_args(context, given)


def is_output(option: str, name: str) -> bool:
    """Is what follows `--csv` or `--md` the file to write? Else it is a row file, and the table goes to stdout.

    It is where its ending says so, and where it is not there yet. Raises UsageError where it can be neither.
    """
    if name == "-" or name.endswith(FORMATS[option]):
        return True
    if name.startswith("-") or Path(name).is_file():
        return False
    if Path(name).is_dir():
        example = Path(name) / f"report{FORMATS[option][0]}"
        raise UsageError(f"{option} {name}: is a folder; give a file, such as {example} (rows go before {option})")
    if name.endswith(HOLD_ROWS):
        raise UsageError(f"{option} {name}: no such row file; a file to write ends in {' or '.join(FORMATS[option])}")
    return True


def report(
    rows: Annotated[list[Path] | None, typer.Argument(metavar="ROWS", help="row files, or folders of them")] = None,
    recipe: Annotated[str | None, typer.Option(metavar="RECIPE", help="only the rows of this recipe")] = None,
    by: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="a line for each value of it")] = None,
    plot: Annotated[str | None, typer.Option(metavar="x=…,y=…,hue=…", help="curves with intervals, a PNG")] = None,
    png: Annotated[Path | None, typer.Option(metavar="FILE", help="where --plot draws (report.png)")] = None,
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
        if png and not plot:
            raise ValueError(f"--png {png}: only --plot draws; such as --plot x=patches")
        if outputs and not price:
            raise ValueError(f"--outputs {outputs}: only --price needs it")
        png = (png or PNG) if plot else None
        if png and not png.suffix and not png.is_dir():
            png = png.with_name(f"{png.name}.png")
        check_outputs(files, csv, parquet, md, png)
    merged, frame, sections, notes = tables(files, recipe, by or [], price, outputs, plot, png)
    for problem in merged.problems:
        print(f"cookbook: {problem}", file=sys.stderr)
    if merged.twice:
        were = "row was" if merged.twice == 1 else "rows were"
        notes.append(f"{merged.twice:,} {were} there twice and counted once")
    with usage():
        from .report import wrapped

        notes += write(frame, sections, csv, parquet, md)
    if csv != "-" and md != "-":
        print("\n\n".join(section.text() for section in sections))
        print("\n".join(["", *map(wrapped, notes)]) if notes else "", end="\n" if notes else "")
    else:  # stdout holds the data
        print("".join(f"cookbook: {note}\n" for note in notes), end="", file=sys.stderr)


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
            said = [f"no usable row{where} in {len(files)} file{'s' * (len(files) != 1)}", *merged.problems[:MOST]]
            rest = len(merged.problems) - MOST
            raise ValueError("; ".join([*said, *([f"and {rest} more"] if rest > 0 else [])]))
        by = [name for name in dict.fromkeys(column(name, frame, "--by ") for name in by) if name not in ALWAYS]
        notes = []
        sections = tables.recipe_sections(frame, by)
        if len(tables.compared(frame)):
            if tables.compared(frame)["machine"].nunique() > 1:
                sections += [*machine_sections(frame), drift_section(frame)]
            if price:
                each = column(outputs, frame, "--outputs ") if outputs else None
                per_hour, unpriced = tables.prices(price, frame)
                tables.add_cost(frame, per_hour, each)
                sections.append(tables.cost_section(frame, each))
                notes += unpriced
            if wanted:
                notes += draw(frame, wanted, png)
        elif price or wanted:
            raise ValueError(f"{'--price' if price else '--plot'}: no row here came from a comparison")
    return merged, frame, sections, notes


def check_outputs(files: list[Path], csv: str | None, parquet: Path | None, md: str | None, png: Path | None) -> None:
    """Raises ValueError, one line, for a file that cannot be written, or that holds the rows themselves."""
    for option, name in (("--csv", csv), ("--parquet", parquet), ("--md", md), ("--png", png)):
        if name is None or name == "-":
            continue
        path, folder = Path(name), Path(name).absolute().parent
        if path.resolve() in files:
            raise ValueError(f"{option} {name}: that file holds the rows; give another one")
        if path.is_dir():
            raise ValueError(f"{option} {name}: is a folder; give a file in it")
        if not folder.is_dir():
            raise ValueError(f"{option} {name}: no folder {Path(name).parent}; make it first, or give another file")
        if path.exists() and path.suffix in HOLD_ROWS:
            raise ValueError(f"{option} {name}: that looks like a row file; give another one")
        if option == "--png" and path.suffix != ".png":
            raise ValueError(f"--png {name}: expected a file that ends in .png")
        if not (os.access(path, os.W_OK) if path.exists() else _writable(folder)):
            raise ValueError(f"{option} {name}: cannot write there; give another file")
    if parquet is not None and importlib.util.find_spec("pyarrow") is None:
        raise ValueError(f"--parquet {parquet}: needs pyarrow: {sys.executable} -m pip install pyarrow")


def _writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def write(frame, sections, csv: str | None, parquet: Path | None, md: str | None) -> list[str]:
    """Write the files that were asked for. Returns a line for each."""
    notes = []
    frame = frame.drop(columns="spot")  # for comparing only
    text = "\n\n".join(section.markdown() for section in sections)
    size = f"{len(frame):,} row{'s' * (len(frame) != 1)}, {len(frame.columns)} columns"
    if csv == "-":
        frame.to_csv(sys.stdout, index=False)
    if md == "-":
        print(text)
    try:
        if csv and csv != "-":
            frame.to_csv(csv, index=False, sep="\t" if csv.endswith(".tsv") else ",")
            notes.append(f"{csv}: {size}")
        if parquet:
            plain(frame).to_parquet(parquet, index=False)
            notes.append(f"{parquet}: {size}")
        if md and md != "-":
            Path(md).write_text(text + "\n", encoding="utf-8")
            notes.append(f"{md}: {len(sections)} table{'s' * (len(sections) != 1)}")
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or csv or parquet or md}: {error.strerror}") from None
    return notes


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

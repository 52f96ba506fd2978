"""The tables of `sweep`: what would run, and what came of it. At most 80 columns."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .notebooks import shown_path
from .run import Outcome
from .sweep_points import Point, failed_before, read_done, short, time_left, time_text
from .sweep_spec import Spec
from .table import NONE, WIDTH, headline, interval_text, render, same_answer, speedup_text, verdict_text


@dataclass
class Result:
    """What became of a point in this start: "kept" (done before), "done", "failed", "interrupted", "waiting"."""

    point: Point
    state: str = "waiting"
    outcome: Outcome | None = None
    tries: int = 0


def _table(spec: Spec, *columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for name in (*spec.varying, *columns):
        number = name in ("here", "took")
        table.add_column(Text(name), overflow="fold", justify="right" if number else "left", no_wrap=name in columns)
    return table


def _values(spec: Spec, point: Point) -> list[str]:
    return [short(point.parameters[name]) for name in spec.varying]


def plan_table(spec: Spec, points: list[Point]) -> str:
    """What `--dry-run` shows: every point, its key, and whether it is done."""
    table = _table(spec, "key", "state", "took")
    for point in points:
        done = read_done(point)
        state = "done" if done else "failed before" if failed_before(point) else "to do"
        took = time_text(done["seconds"]) if done and done.get("seconds") else NONE
        table.add_row(*map(Text, (*_values(spec, point), point.key, state, took)))
    return render(table, WIDTH)


def estimate(
    spec: Spec, todo: int, known: tuple[list[float], str], price: float | None = None, workers: int = 1
) -> str:
    """The time left and its money, in one or two lines; `price` is for an hour of one device.

    Without a finished point there is only a bound: every try of every point until its time limit.
    """
    seconds, origin = known
    if not todo:
        return "nothing to do: every point is done"
    left = time_left(seconds, todo, workers)
    on = f" on {workers} devices" if workers > 1 else ""
    if left is None:
        left = math.ceil(todo / workers) * spec.time_limit * (spec.retries + 1)
        text = f"{todo} to do; no finished point to estimate from: at most {time_text(left)}{on} (the time limit)"
        money = f", {left / 3600 * price * workers:,.2f} at {price:g} an hour" if price is not None else ""
    else:
        spread = f" ({time_text(min(seconds))} to {time_text(max(seconds))})" if len(seconds) > 1 else ""
        count = f"{len(seconds)} finished point{'s' * (len(seconds) != 1)}{f' {origin}' if origin else ''}"
        text = f"{todo} to do, about {time_text(left)}{on}: mean of {count}{spread}"
        money = f"; {left / 3600 * price * workers:,.2f} at {price:g} an hour" if price is not None else ""
    return textwrap.fill(text + money, WIDTH)


def rows_of(spec: Spec, point: Point, rows: list[dict]) -> list[dict]:
    """The rows that are about the point: those that the spec's `show` asks for, then those of its own case.

    A recipe also writes rows of its losing cases; a row with case.patches = 16 does not stand for patches=64.
    """
    about = {f"case.{name}": point.parameters[name] for name in spec.varying}
    for wanted, absent in ((spec.show, False), (about, True)):
        fits = [row for row in rows if all((absent and k not in row) or row.get(k) == v for k, v in wanted.items())]
        rows = fits or rows
    return rows


def results_of(spec: Spec, results: list[Result], out: Path, rows_file: Path, count: int) -> str:
    """What a sweep ends with: a line a point, then its failures, then where the rows are."""
    table = _table(spec, "here", "95 %\ninterval", "same\nanswer?", "verdict", "took")
    unmarked, unfit = False, 0
    for result in results:
        cells = [NONE, NONE, NONE, {"failed": "FAILED", "waiting": "not run"}.get(result.state, result.state), NONE]
        if result.state in ("done", "kept") and (done := read_done(result.point)):
            row, marked = headline(rows_of(spec, result.point, done["rows"]))
            unfit += not any(all(one.get(k) == v for k, v in spec.show.items()) for one in done["rows"])
            shown = speedup_text(row)
            unmarked |= not marked
            took = time_text(done["seconds"]) if done.get("seconds") else NONE
            cells = [shown + "*" * (not marked), interval_text(row), same_answer(row), verdict_text(row), took]
        table.add_row(*map(Text, (*_values(spec, result.point), *cells)))
    notes = ["* the best valid row of several: the notebook marks none as its headline"] if unmarked else []
    if unfit:
        wanted = ", ".join(f"{name}: {value}" for name, value in spec.show.items())
        notes += textwrap.wrap(f"no row of {_count(unfit, 'point')} has what `show` asks for ({wanted})", WIDTH)
    failures = [failure(result) for result in results if result.state == "failed"]
    return "\n\n".join(["\n".join([render(table, WIDTH), *notes]), *failures, summary(results, out, rows_file, count)])


def failure(result: Result) -> str:
    """A failed point: which, how often it was tried, why, and where its notebook and log are."""
    outcome, tries = result.outcome, f"{result.tries} tr{'y' if result.tries == 1 else 'ies'}"
    kept = [name for name in (f"{outcome.recipe}.ipynb", "log.txt") if (result.point.folder / name).exists()]
    why = f"{outcome.where}: {outcome.why}" if outcome.where else outcome.why
    wrap = {"width": WIDTH, "initial_indent": "  ", "subsequent_indent": "  ", "break_on_hyphens": False}
    return "\n".join(
        [
            *textwrap.wrap(f"FAILED {result.point.label} ({tries})", WIDTH, subsequent_indent="  "),
            *textwrap.wrap(why, **wrap),
            f"  {shown_path(result.point.folder)}/ has {' and '.join(kept) or 'nothing'}",
        ]
    )


def summary(results: list[Result], out: Path, rows_file: Path, count: int) -> str:
    states = [result.state for result in results]
    parts = [f"{states.count('done') + states.count('kept')} done"]
    if "kept" in states:
        parts[0] += f" ({states.count('kept')} before)"
    parts += [f"{states.count('failed')} failed"]
    if rest := states.count("waiting") + states.count("interrupted"):
        parts.append(f"{rest} not run: the same command goes on")
    elif "failed" in states:
        parts[-1] += ": the same command tries them again"
    lines = [f"{_count(len(results), 'point')}: {', '.join(parts)}", f"{_count(count, 'row')}: {shown_path(rows_file)}"]
    lines += [f"next: ./cookbook report {shown_path(rows_file)}"] if count else []
    return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"

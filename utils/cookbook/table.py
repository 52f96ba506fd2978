"""The table that `run` ends with: one line per recipe, at most 80 columns; `--wide` shows every row in full."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..unknown_ratio import UNKNOWN, is_unknown
from .parameters import declared
from .presets import shipped_values
from .run import Outcome, rows_between

RESULTS = Path(__file__).resolve().parents[2] / "data" / "results"
WIDTH = 80
NONE = "—"
NOT_THE_POINT = ("device", "rows", "seed")  # parameters that leave a point what it is
VALID = ("faster", "slower", "equivalent", "inconclusive")  # verdicts that come with a speed-up


def headline(rows: Iterable[Mapping]) -> tuple[Mapping | None, bool]:
    """The row that stands for a recipe: (row, was it marked by the notebook?).

    A row with `headline: true` (the last one, when several runs left several); else the best valid row, which the
    table says; else any row.
    """
    rows = [row for row in rows if row.get("provenance") != "reported"]
    marked = [row for row in rows if row.get("headline")]
    if marked:
        return ([row for row in marked if not unknown_ratio(row)] or marked)[-1], True
    valid = [row for row in rows if speedup_text(row) != NONE]
    best = max(valid, key=lambda row: row["speedup"], default=None)
    return best or (rows[-1] if rows else None), len(rows) <= 1


def usual(notebook: Path) -> Callable[[Mapping], bool]:
    """A function: was this row measured at the recipe's defaults, or at a shipped preset?"""
    defaults = {name: p.default for name, p in declared(notebook).items() if name not in NOT_THE_POINT}
    points = [defaults | values for values in ({}, *shipped_values(notebook.stem))]
    return lambda row: any(all(row.get(f"param.{k}", v) == point[k] for k, v in defaults.items()) for point in points)


def usual_rows(rows: Iterable[Mapping], notebook: Path | None) -> list[Mapping]:
    """The compared rows that may stand for a recipe: the usual ones; all rows where there are none."""
    rows = list(rows)
    try:
        is_usual = usual(notebook)
    except (OSError, TypeError, ValueError):  # a notebook that is not there, or declares nothing
        return rows
    return [row for row in rows if row.get("verdict") and is_usual(row)] or rows


def recorded_gpu(recipe: str, folder: Path | None = None, notebook: Path | None = None) -> Mapping | None:
    """The headline of the committed rows that were measured on a CUDA device; None when there are none."""
    rows = rows_between((folder or RESULTS) / f"{recipe}.jsonl", 0)
    on_gpu = [r for r in rows if r.get("provenance") == "measured" and str(r.get("device", "")).startswith("cuda")]
    return headline(usual_rows(on_gpu, notebook))[0]


def why_of(notebook: Path | None, row: Mapping | None = None) -> str:
    """Six words on why it is so: the row's `why`, else the notebook's metadata `cookbook.why`."""
    if row and row.get("why"):
        return str(row["why"])
    try:
        return str(json.loads(notebook.read_text(encoding="utf-8"))["metadata"]["cookbook"]["why"])
    except (AttributeError, OSError, ValueError, KeyError, TypeError):
        return ""


def speedup_text(row: Mapping | None) -> str:
    """Such as "11.8x": three digits. A row whose outputs differ, or that failed, has no speed-up."""
    speedup = row.get("speedup") if row else None
    if not isinstance(speedup, (int, float)) or not math.isfinite(speedup) or row.get("verdict") not in VALID:
        return NONE
    if unknown_ratio(row):
        return NONE
    digits = 0 if speedup >= 100 else 1 if speedup >= 10 else 2
    return f"{speedup:.{digits}f}x"


def unknown_ratio(row: Mapping) -> bool:
    """Did the noise leave the ratio itself unknown? An end of the interval that is no number counts as none."""
    ends = (row.get("ci_low"), row.get("ci_high"))
    return is_unknown(row.get("verdict"), *(end if isinstance(end, (int, float)) else None for end in ends))


def interval_text(row: Mapping | None) -> str:
    """Such as "11.2–12.5"; "unknown" where noise left the ratio unknown; — without a speed-up or an interval."""
    if row and unknown_ratio(row):
        return UNKNOWN
    low, high = (row or {}).get("ci_low"), (row or {}).get("ci_high")
    known = speedup_text(row) != NONE and low is not None and high is not None
    return f"{low:.3g}–{high:.3g}" if known else NONE


def same_answer(row: Mapping | None) -> str:
    """yes, approx. (a declared metric holds instead of equality), NO, or — when nothing was compared."""
    if not row or row.get("same") is None:
        return NONE
    if not row["same"]:
        return "NO"
    return "approx." if row.get("rule") == "approximate" else "yes"


def card(name: str | None) -> str:
    """A device's name as short as people say it: "NVIDIA H200" is H200, "NVIDIA A100-SXM4-80GB" is A100."""
    words = [word for word in (name or "").split() if word.upper() not in ("NVIDIA", "AMD", "TESLA", "GEFORCE")]
    return words[0].partition("-")[0] if words else ""


def recorded_text(row: Mapping | None) -> str:
    return f"{speedup_text(row)} {card(row.get('device_name'))}".strip() if row else NONE


def results_table(outcomes: list[Outcome], *, wide: bool = False, results: Path | None = None) -> str:
    """The table of a run, as text without colours."""
    return (_wide if wide else _narrow)(outcomes, results)


def _narrow(outcomes: list[Outcome], results: Path | None) -> str:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False)
    for name, options in (
        ("recipe", {"no_wrap": True, "max_width": 24}),
        ("here", {"no_wrap": True}),
        ("recorded\nGPU", {}),
        ("same\nanswer?", {"no_wrap": True}),
        ("verdict", {"no_wrap": True}),
        ("why", {"ratio": 1, "overflow": "fold"}),
    ):
        table.add_column(Text(name), **options)
    unmarked = False
    for outcome in outcomes:
        row, marked = headline(outcome.rows)
        if outcome.state in ("failed", "interrupted"):
            why = outcome.where or outcome.why  # the report above has both
            cells = [NONE, NONE, outcome.state, why if len(why) <= 50 else f"{why[:49]}…"]
        else:
            unmarked |= not marked
            cells = [speedup_text(row) + "*" * (not marked), same_answer(row), verdict_text(row)]
            cells.append(why_of(outcome.path, row))
        here, same, verdict, why = cells
        recorded = recorded_text(recorded_gpu(outcome.recipe, results, outcome.path))
        table.add_row(*map(Text, (outcome.recipe, here, recorded, same, verdict, why)))
    notes = ["* the best valid row of several: the notebook marks none as its headline"] if unmarked else []
    return "\n".join([render(table, WIDTH), *notes])


def verdict_text(row: Mapping | None) -> str:
    return str((row or {}).get("verdict") or NONE)


def _wide(outcomes: list[Outcome], results: Path | None) -> str:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    names = (
        "recipe|candidate|here|95 % interval|verdict|same answer?|time|baseline|peak memory|of limit|set-up|break-even"
    )
    for name in (*names.split("|"), "recorded GPU", "why"):
        table.add_column(Text(name), no_wrap=True)
    for outcome in outcomes:
        recorded, why = recorded_text(recorded_gpu(outcome.recipe, results, outcome.path)), why_of(outcome.path)
        if outcome.state in ("failed", "interrupted"):
            why = f"{outcome.where}: {outcome.why}".removeprefix(": ")
            table.add_row(*map(Text, (outcome.recipe, NONE, NONE, NONE, outcome.state, *[NONE] * 7, recorded, why)))
        for row in outcome.rows if outcome.state not in ("failed", "interrupted") else ():
            table.add_row(*map(Text, (outcome.recipe, *wide_cells(row), recorded, str(row.get("why") or why))))
    return render(table, 1000)  # as wide as it is: a shell wraps lines, less -S scrolls them


def wide_cells(row: Mapping) -> list[str]:
    """Candidate, speed-up, interval, verdict, same answer?, times, memory, share of the limit, set-up, break-even."""
    shown = speedup_text(row)
    case = " ".join(f"{k.removeprefix('case.')}={v}" for k, v in row.items() if k.startswith("case."))
    label = f"{row.get('label') or NONE}{f' ({case})' if case else ''}"
    rule = f"{same_answer(row)} ({row['rule']})" if row.get("rule") else same_answer(row)
    memory = bytes_text(row.get("peak_bytes"))
    if row.get("baseline_peak_bytes") is not None:
        memory += f" of {bytes_text(row['baseline_peak_bytes'])}"
    share = f"{row['share_of_limit']:.0%}" if row.get("share_of_limit") is not None else NONE
    times = [seconds_text(row.get("median_s")), seconds_text(row.get("baseline_median_s"))]
    return [label, shown, interval_text(row), verdict_text(row), rule, *times, memory, share, *setup_cells(row)]


def setup_cells(row: Mapping) -> list[str]:
    """First call, and after how many calls it is paid for (the row's own `break_even_calls`, when it was measured)."""
    setup, calls = row.get("first_call_s"), row.get("break_even_calls")
    saved = (row.get("baseline_median_s") or 0) - (row.get("median_s") or 0)
    if calls is None and setup and saved > 0 and row.get("verdict") == "faster":
        calls = math.ceil(setup / saved - 1e-6)
    return [seconds_text(setup), f"{calls:,.0f} calls" if isinstance(calls, (int, float)) else NONE]


def seconds_text(seconds: float | None) -> str:
    if not isinstance(seconds, (int, float)):
        return NONE
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def bytes_text(count: float | None) -> str:
    if not isinstance(count, (int, float)):
        return NONE
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def render(table: Table, width: int) -> str:
    """A table as plain text, no line longer than `width`, no spaces at the ends."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, legacy_windows=False).print(table, highlight=False)
    return "\n".join(line.rstrip() for line in file.getvalue().rstrip("\n").splitlines())

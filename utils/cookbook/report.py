"""The tables of a report: for each recipe what its rows say, and what an output costs. Text or Markdown."""

from __future__ import annotations

import math
import numbers
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..rows import VERDICTS, verdict_summary
from .report_rows import described, pooled
from .table import NONE, VALID, WIDTH, render, unknown_ratio

MOST = 40  # lines of a long table on a terminal
MARKS = {"current": "", "older": " †", "unknown": " ‡"}
NOTES = {
    "older": "† measured with older code of the recipe",
    "unknown": "‡ the row does not say with which code, or the recipe is not here",
}


@dataclass
class Section:
    """A table of the report, as text or as Markdown.

    `wrap` is the column that may take several lines. As text it shows at most `most` lines (0: all of them).
    """

    title: str
    headings: Sequence[str] = ()
    lines: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wrap: int = -1
    most: int = 0

    def text(self) -> str:
        """At most 80 columns."""
        parts, notes = [wrapped(self.title)], list(self.notes)
        lines = self.lines[: self.most or None]
        if len(lines) < len(self.lines):
            notes.insert(0, f"… and {len(self.lines) - len(lines):,} more; --md has them all")
        if lines:
            table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
            wrap = self.wrap % len(self.headings)
            for place, heading in enumerate(self.headings):
                right = all(re.fullmatch(r"[\d.,x%—-]+", line[place]) for line in lines)
                options = {"ratio": 1} if place == wrap else {"justify": "right"} if right else {}
                table.add_column(Text(heading), overflow="fold", **options)
            for line in lines:
                table.add_row(*map(Text, line))
            parts.append(render(table, WIDTH))
        return "\n".join([*parts, *map(wrapped, notes)])

    def markdown(self) -> str:
        """A heading, a table, and its notes."""
        parts = [f"## {self.title}"]
        if self.lines:
            cells = [self.headings, ["---"] * len(self.headings), *self.lines]
            parts.append(
                "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in cells)
            )
        return "\n\n".join([*parts, *self.notes])


def wrapped(text: str) -> str:
    """The text in lines of at most 80 columns."""
    return textwrap.fill(text, WIDTH, break_on_hyphens=False)


# ---------------------------------------------------------------------------------------------------- tables


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """The measured rows that came from a comparison."""
    if "verdict" not in rows.columns:
        return rows.iloc[:0]
    return rows[(rows["provenance"] == "measured") & rows["verdict"].notna()]


def latest(rows: pd.DataFrame) -> pd.DataFrame:
    """The newest row of every point on every machine: what is set side by side, looked at for drift, and priced."""
    found = compared(rows)
    when = pd.to_datetime(found["date"], errors="coerce", utc=True, format="ISO8601") if len(found) else None
    return (
        found.assign(when=when)
        .sort_values("when", kind="stable", na_position="first")
        .drop_duplicates(["spot", "machine"], keep="last")
        .drop(columns="when")
        if len(found)
        else found
    )


def older_note(rows: pd.DataFrame) -> list[str]:
    """What to say where `latest` leaves rows out."""
    older = len(compared(rows)) - len(latest(rows))
    return [f"{_count(older, 'older row')} of the same points left out: the newest counts"] if older else []


def with_ratios(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows without the speed-ups that noise left unknown."""
    if not len(rows):
        return rows
    about = [name for name in ("verdict", "ci_low", "ci_high", "warnings") if name in rows]
    unknown = [unknown_ratio(row) for row in rows[about].to_dict("records")]
    return rows.assign(speedup=rows["speedup"].mask(pd.Series(unknown, index=rows.index)))


def recipe_sections(rows: pd.DataFrame, by: Sequence[str] = ()) -> list[Section]:
    """For each recipe: geometric mean and range of the speed-ups, and the count of every verdict.

    A line is a candidate on a machine, and a value of each column of `by`; a note says over which cases it is taken.
    Rows of older code have their own line.
    """
    sections = []
    for recipe, here in rows.groupby("recipe", sort=True):
        found = with_ratios(compared(here))
        measured = int((here["provenance"] == "measured").sum())
        title = f"{recipe}: {_count(measured, 'measured row')}"
        if measured:
            title += f" of {_count(here['run_id'].nunique(), 'run')}"
        if alone := measured - len(found):
            title += f", {alone} without a comparison"
        if told := len(here) - measured:
            title += f"; {told} reported, never averaged"
        headings = [
            "candidate",
            *(name.partition(".")[2] or name for name in by),
            "machine",
            "rows",
            "geomean",
            "range",
        ]
        section = Section(title, [*headings, "verdicts"])
        keys = ["label", "code", *by, "machine"]
        texts = pd.DataFrame({key: found[key].map(_value) for key in keys})
        over: dict[str, list[str]] = {}
        for values, group in found.groupby([texts[key] for key in keys], sort=False):
            label, code, *rest = values
            summary = verdict_summary(group[["provenance", "verdict", "speedup"]].to_dict("records"))
            section.lines.append(
                [label + MARKS[code], *rest, str(len(group)), *_speedups(group, summary), _verdicts(summary)]
            )
            over.setdefault(pooled_text(group["spot"]), []).append(label)
        section.lines.sort(key=lambda line: [natural(text) for text in line[:-4]])
        section.notes = [*pooled_note(over), *(note for code, note in NOTES.items() if (found["code"] == code).any())]
        sections.append(section)
    return sections


def pooled_text(spots: Iterable[str]) -> str:
    """Such as "4 cases (case.k, param.dtype)": what a mean is taken over; "" for one case."""
    number, names = pooled(spots)
    return f"{number} cases ({', '.join(names)})" if number > 1 else ""


def pooled_note(over: dict[str, list[str]]) -> list[str]:
    """A note for means taken over several cases: text of `pooled_text` → candidates."""
    named = {text: (repr(one) if "," in one else one for one in labels) for text, labels in over.items() if text}
    parts = [f"over {text}: {', '.join(dict.fromkeys(labels))}" for text, labels in named.items()]
    return [f"means {'; '.join(parts)}. --by splits them"] if parts else []


def natural(text: str) -> list[tuple[float, str]]:
    """A sorting key in which 2.9 comes before 2.13, and 64 before 1024."""
    return [(float(part), "") if part.isdecimal() else (-1.0, part) for part in re.split(r"(\d+)", text)]


def _value(value: Any) -> str:
    if value is None or value is pd.NA or value != value:
        return NONE
    return (
        f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)
    )  # 64, of a column with gaps


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _speedups(group: pd.DataFrame, summary: dict) -> list[str]:
    valid = group[group["verdict"].isin(VALID)]["speedup"].dropna()
    span = times(valid.min()) if summary["averaged"] == 1 else f"{valid.min():.3g}–{valid.max():.3g}"
    return [times(summary["geomean"]), span if summary["averaged"] else NONE]


def _verdicts(summary: dict) -> str:
    return ", ".join(f"{summary[name]} {name}" for name in VERDICTS if summary[name])


def times(value: float | None) -> str:
    """Such as "11.8x"."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}x"


# ---------------------------------------------------------------------------------------------------- cost


def prices(text: str, rows: pd.DataFrame) -> tuple[dict[str, float], list[str]]:
    """(money per hour of each device name, notes), from "2.5" or "H200=3.5,A100=1.2".

    A card without a row is a note. Raises ValueError, one line, where no row has a price at all.
    """
    names = [str(name) for name in compared(rows)["device_name"].dropna().unique()] if len(compared(rows)) else []
    if "=" not in text:
        return dict.fromkeys(names, _price(text, text)), []
    found: dict[str, tuple[float, str]] = {}
    without = []
    for part in map(str.strip, text.split(",")):
        card, _, value = part.partition("=")
        price, fits = _price(value, part), [one for one in names if _names(card.strip(), one)]
        for one in fits:
            if found.get(one, (price,))[0] != price:
                raise ValueError(f"--price: {found[one][1]!r} and {part!r} are both {one}; give it one price")
            found[one] = price, part
        if not fits:
            without.append(part)
    told = f"no row of such a device; there are: {', '.join(names) or 'none'}"
    if not found:
        raise ValueError(f"--price {text!r}: {told}")
    return {name: price for name, (price, _) in found.items()}, [f"--price {part!r}: {told}" for part in without]


def _names(card: str, device: str) -> bool:
    """Is the card a whole word of the device's name? H20 is not an H200."""
    return bool(card) and re.search(rf"(?<!\w){re.escape(card)}(?!\w)", device, re.IGNORECASE) is not None


def _price(value: str, shown: str) -> float:
    try:
        price = float(value)
    except ValueError:
        price = math.nan
    if not (price > 0 and math.isfinite(price)):
        raise ValueError(f"--price {shown!r}: expected money per hour, such as 2.5 or H200=3.5,A100=1.2")
    return price


def add_cost(rows: pd.DataFrame, per_hour: dict[str, float], outputs: str | None = None) -> None:
    """Add the columns cost_per_output and baseline_cost_per_output: seconds per call x money per second / outputs.

    A call gives one output, or as many as the column `outputs` says. Rows without a valid answer cost nothing sensible:
    they have no cost.
    """
    each = 1
    if outputs:
        each = rows[outputs].map(lambda value: value if _above_0(value) else math.nan).astype(float)
        if not each.notna().any():
            example = next((value for value in rows[outputs].tolist() if value == value and value is not None), None)
            raise ValueError(f"--outputs {outputs}: expected numbers above 0 in it, got {example!r}")
    money = rows["device_name"].map(per_hour) / 3600
    valid = rows["verdict"].isin(VALID) & (rows["provenance"] == "measured")
    for prefix in ("", "baseline_"):
        rows[f"{prefix}cost_per_output"] = (rows[f"{prefix}median_s"] * money / each).where(valid)


def _above_0(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and 0 < value < math.inf


def cost_section(rows: pd.DataFrame, outputs: str | None = None) -> Section:
    """What outputs cost with the baseline and with each candidate: the newest row of every point."""
    newest = latest(rows)
    found = newest.dropna(subset=["cost_per_output"])
    many = next((n for n in (1, 1_000) if len(found) and n * found["cost_per_output"].median() >= 0.1), 1_000_000)
    headings = ["recipe", "candidate", "machine", "baseline", "here", "point"]
    section = Section(f"Cost of {_count(many, 'output')}", headings, most=MOST)
    words = described(found["spot"].unique())
    keys = ("recipe", "label", "machine")
    listed = found[[*keys, "spot", "cost_per_output", "baseline_cost_per_output"]].to_dict("records")
    listed.sort(key=lambda row: [natural(str(text)) for text in (*(row[key] for key in keys), words[row["spot"]])])
    for row in listed:
        costs = [f"{many * row[f'{prefix}cost_per_output']:.3g}" for prefix in ("baseline_", "")]
        section.lines.append([row["recipe"][:2], str(row["label"]), row["machine"], *costs, words[row["spot"]]])
    section.notes += older_note(rows)
    invalid = int((~newest["verdict"].isin(VALID)).sum())
    if invalid:
        section.notes.append(f"{_count(invalid, 'point')} without a cost: the newest row has no valid answer")
    if outputs and (bare := int(newest[outputs].map(lambda value: not _above_0(value)).sum())):
        section.notes.append(f"{_count(bare, 'point')} without a cost: {outputs} is no number above 0 there")
    if without := sorted(set(newest["machine"]) - set(found["machine"])):
        section.notes.append(f"no price, or no valid row: {'; '.join(without)}")
    return section

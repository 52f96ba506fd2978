"""Machines side by side, and drift: which verdicts are other ones on another machine or with another torch.

Only the same point is compared: recipe, candidate, baseline, parameters and case are equal, and the device and the
version of torch are what differs.
"""

from __future__ import annotations

import itertools
import math

import pandas as pd

from ..unknown_ratio import UNKNOWN
from .report import (
    MOST,
    Section,
    compared,
    latest,
    natural,
    older_note,
    pooled_note,
    pooled_text,
    times,
    with_ratios,
)
from .report_rows import described
from .table import NONE, VALID, unknown_ratio

SURE = ("faster", "slower", "equivalent")  # what a later run may contradict
# What is looked at of a row.
SHOWN = (
    "spot",
    "recipe",
    "label",
    "machine",
    "device_name",
    "torch",
    "verdict",
    "speedup",
    "ci_low",
    "ci_high",
    "code_hash",
)
SIDE_BY_SIDE = 3  # machines in one table of 80 columns


def machine_sections(rows: pd.DataFrame) -> list[Section]:
    """Machines side by side: mean speed-up over the points that all of them measured, and time against the first.

    With more than three machines there are more tables; the first machine is in each of them.
    """
    found = with_ratios(latest(rows))
    machines = sorted(found["machine"].unique(), key=natural) if len(found) else []
    groups = [machines] if len(machines) <= SIDE_BY_SIDE else _with_first(machines)
    return [_side_by_side(found, group) for group in groups if len(group) > 1]


def _with_first(machines: list[str]) -> list[list[str]]:
    step = SIDE_BY_SIDE - 1
    return [[machines[0], *machines[start : start + step]] for start in range(1, len(machines), step)]


def _side_by_side(found: pd.DataFrame, machines: list[str]) -> Section:
    headings = ["recipe", "points", *machines, "candidate"]
    section = Section("Machines side by side: mean speed-up, and time against the first", headings)
    over: dict[str, list[str]] = {}
    valid = found[found["verdict"].isin(VALID) & (found["speedup"] > 0) & (found["median_s"] > 0)]
    for (recipe, label), group in valid.groupby(["recipe", "label"], sort=True):
        speedups = group.pivot(index="spot", columns="machine", values="speedup").reindex(columns=machines).dropna()
        seconds = group.pivot(index="spot", columns="machine", values="median_s").reindex(speedups.index)
        if not len(speedups):
            continue
        over.setdefault(pooled_text(speedups.index), []).append(str(label))
        cells = [
            f"{times(_mean(speedups[name]))}, time {_mean(seconds[name] / seconds[machines[0]]):.2f}"
            if name != machines[0]
            else times(_mean(speedups[name]))
            for name in machines
        ]
        section.lines.append([str(recipe)[:2], str(len(speedups)), *cells, str(label)])
    section.notes = [note.removesuffix(". --by splits them") for note in pooled_note(over)]
    if not section.lines:
        section.notes = ["no point was measured on all of them"]
        section.title += f" ({'; '.join(machines)})"
    return section


def _mean(values: pd.Series) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def change(first: str, second: str) -> str:
    """What two verdicts on one point are: a "flip" or the "same" when both are decided, else "failed" or "open".

    "failed": on one side alone the answer was wrong or the run failed. "open": nothing that one could contradict.
    """
    if first in SURE and second in SURE:
        return "same" if first == second else "flip"
    return "failed" if (first in VALID) != (second in VALID) else "open"


def drift(rows: pd.DataFrame) -> tuple[list[dict], dict[str, int]]:
    """(flips and failures, how many pairs are what). A pair is one point, on two machines or with two torch versions.

    Pairs that differ in one of the two say more, so pairs that differ in both count only where a point has no others.
    """
    found = latest(rows)
    changed, counts = [], dict.fromkeys(("flip", "same", "failed", "open"), 0)
    spots: dict[str, list[dict]] = {}
    shown = found[[name for name in SHOWN if name in found]]
    for row in shown.to_dict("records"):  # thousands of small groups: faster without pandas
        spots.setdefault(row["spot"], []).append(row)
    for group in spots.values():
        here = sorted(group, key=lambda row: natural(row["machine"]))
        pairs = list(itertools.combinations(here, 2))
        single = [(a, b) for a, b in pairs if (a["device_name"] == b["device_name"]) != (a["torch"] == b["torch"])]
        for a, b in single or pairs:
            what = change(a["verdict"], b["verdict"])
            counts[what] += 1
            if what in ("flip", "failed"):
                changed.append({"from": a, "to": b})
    return changed, counts


def unstable(rows: pd.DataFrame) -> int:
    """Points whose verdict contradicts an earlier run on the same machine with the same torch."""
    found = compared(rows)
    if not len(found):
        return 0
    verdicts: dict[tuple[str, str], set[str]] = {}
    for spot, machine, verdict in zip(found["spot"], found["machine"], found["verdict"], strict=True):
        verdicts.setdefault((spot, machine), set()).add(verdict)
    contradicts = ("flip", "failed")
    return sum(any(change(a, b) in contradicts for a, b in itertools.combinations(s, 2)) for s in verdicts.values())


def drift_section(rows: pd.DataFrame) -> Section:
    """Every flip and failure: what was compared, then each machine with its verdict, speed-up and interval."""
    changed, counts = drift(rows)
    decided = counts["flip"] + counts["same"]
    section = Section(
        f"Drift: {counts['flip']} of {decided} pairs of decided verdicts flipped (other machine or torch)",
        ["recipe", "candidate", "from", "to", "point"],
        most=MOST,
    )
    words = described([pair["from"]["spot"] for pair in changed])
    for pair in changed:
        a, b = pair["from"], pair["to"]
        other = " †" if a.get("code_hash") != b.get("code_hash") else ""
        section.lines.append([a["recipe"][:2], f"{a['label']}{other}", _seen(a), _seen(b), words[a["spot"]]])
    if any(line[1].endswith("†") for line in section.lines):
        section.notes.append("† the two rows have other code: the code may be the reason")
    if counts["failed"]:
        section.notes.append(f"{_pairs(counts['failed'])} with a wrong answer or a failed run on one side: no flip")
    if counts["open"]:
        section.notes.append(f"{_pairs(counts['open'])} undecided (inconclusive, or failed on both sides): not counted")
    section.notes += older_note(rows)
    if count := unstable(rows):
        section.notes.append(
            f"{count} point{'s' * (count != 1)} got contradicting verdicts in runs on one machine: the newest counts"
        )
    return section


def _pairs(count: int) -> str:
    return f"{count} pair{'s' * (count != 1)}"


def _seen(row: dict) -> str:
    text = f"{row['machine']}: {row['verdict']}"
    if row["verdict"] not in VALID:
        return text
    if unknown_ratio(row):
        return f"{text} {UNKNOWN}"
    low, high = row.get("ci_low"), row.get("ci_high")
    interval = f" [{low:.3g}, {high:.3g}]" if low is not None and high is not None and low == low else ""
    return f"{text} {times(row['speedup']) if row['speedup'] is not None else NONE}{interval}"

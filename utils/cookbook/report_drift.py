"""Machines side by side, and drift: which verdicts are other ones on another machine or with another torch.

Only the same point is compared: recipe, candidate, baseline, parameters and case are equal, and the device and the
version of torch are what differs.
"""

from __future__ import annotations

import itertools
import math

import pandas as pd

from .report import MOST, Section, compared, natural, times
from .report_rows import described
from .table import NONE, VALID

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


def latest(rows: pd.DataFrame) -> pd.DataFrame:
    """The newest row of every point on every machine."""
    found = compared(rows)
    if not len(found):
        return found
    return found.sort_values("date", kind="stable").drop_duplicates(["spot", "machine"], keep="last")


def machine_sections(rows: pd.DataFrame) -> list[Section]:
    """Machines side by side: mean speed-up over the points that all of them measured, and time against the first.

    With more than three machines there are more tables; the first machine is in each of them.
    """
    found = latest(rows)
    machines = sorted(found["machine"].unique(), key=natural) if len(found) else []
    groups = [machines] if len(machines) <= SIDE_BY_SIDE else _with_first(machines)
    return [_side_by_side(found, group) for group in groups if len(group) > 1]


def _with_first(machines: list[str]) -> list[list[str]]:
    step = SIDE_BY_SIDE - 1
    return [[machines[0], *machines[start : start + step]] for start in range(1, len(machines), step)]


def _side_by_side(found: pd.DataFrame, machines: list[str]) -> Section:
    headings = ["recipe", "points", *machines, "candidate"]
    section = Section("Machines side by side: mean speed-up, and time against the first", headings)
    valid = found[found["verdict"].isin(VALID) & (found["speedup"] > 0) & (found["median_s"] > 0)]
    for (recipe, label), group in valid.groupby(["recipe", "label"], sort=True):
        speedups = group.pivot(index="spot", columns="machine", values="speedup").reindex(columns=machines).dropna()
        seconds = group.pivot(index="spot", columns="machine", values="median_s").reindex(speedups.index)
        if not len(speedups):
            continue
        cells = [
            f"{times(_mean(speedups[name]))}, time {_mean(seconds[name] / seconds[machines[0]]):.2f}"
            if name != machines[0]
            else times(_mean(speedups[name]))
            for name in machines
        ]
        section.lines.append([str(recipe)[:2], str(len(speedups)), *cells, str(label)])
    if not section.lines:
        section.notes = ["no point was measured on all of them"]
        section.title += f" ({'; '.join(machines)})"
    return section


def _mean(values: pd.Series) -> float:
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def flipped(first: str, second: str) -> bool:
    """Do two verdicts contradict each other? `inconclusive` contradicts only a failure."""
    if (first in VALID) != (second in VALID):
        return True
    return first != second and first in SURE and second in SURE


def drift(rows: pd.DataFrame) -> tuple[list[dict], int]:
    """(flips, number of pairs looked at). A pair is one point, on two machines or with two versions of torch.

    Pairs that differ in one of the two say more, so pairs that differ in both count only where a point has no others.
    """
    found = latest(rows)
    flips, looked = [], 0
    spots: dict[str, list[dict]] = {}
    for row in found[[name for name in SHOWN if name in found]].to_dict(
        "records"
    ):  # thousands of small groups: faster without pandas
        spots.setdefault(row["spot"], []).append(row)
    for group in spots.values():
        here = sorted(group, key=lambda row: natural(row["machine"]))
        pairs = list(itertools.combinations(here, 2))
        single = [(a, b) for a, b in pairs if (a["device_name"] == b["device_name"]) != (a["torch"] == b["torch"])]
        for a, b in single or pairs:
            looked += 1
            if flipped(a["verdict"], b["verdict"]):
                flips.append({"from": a, "to": b})
    return flips, looked


def unstable(rows: pd.DataFrame) -> int:
    """Points whose verdict contradicts an earlier run on the same machine with the same torch."""
    found = compared(rows)
    if not len(found):
        return 0
    verdicts: dict[tuple[str, str], set[str]] = {}
    for spot, machine, verdict in zip(found["spot"], found["machine"], found["verdict"], strict=True):
        verdicts.setdefault((spot, machine), set()).add(verdict)
    return sum(any(flipped(a, b) for a, b in itertools.combinations(seen, 2)) for seen in verdicts.values())


def drift_section(rows: pd.DataFrame) -> Section:
    """Every flip: what was compared, then each machine with its verdict, speed-up and interval."""
    flips, looked = drift(rows)
    section = Section(
        f"Drift: {len(flips)} of {looked} verdicts flipped between machines or torch versions",
        ["recipe", "candidate", "from", "to", "point"],
        most=MOST,
    )
    words = described([flip["from"]["spot"] for flip in flips])
    for flip in flips:
        a, b = flip["from"], flip["to"]
        other = " †" if a.get("code_hash") != b.get("code_hash") else ""
        section.lines.append([a["recipe"][:2], f"{a['label']}{other}", _seen(a), _seen(b), words[a["spot"]]])
    if any(line[1].endswith("†") for line in section.lines):
        section.notes.append("† the two rows have other code: the code may be the reason")
    if count := unstable(rows):
        section.notes.append(
            f"{count} point{'s' * (count != 1)} got contradicting verdicts in runs on one machine: the newest counts"
        )
    return section


def _seen(row: dict) -> str:
    text = f"{row['machine']}: {row['verdict']}"
    if row["verdict"] not in VALID:
        return text
    low, high = row.get("ci_low"), row.get("ci_high")
    interval = f" [{low:.3g}, {high:.3g}]" if low is not None and high is not None and low == low else ""
    return f"{text} {times(row['speedup']) if row['speedup'] is not None else NONE}{interval}"

"""Rows of many runs and machines as one table: reading them, and saying what cannot be used, and why.

No torch here: ten thousand rows are read in a second. Every field of a row is a column of one pandas table, with a few
columns of our own beside them:
    file, line       where the row came from
    machine          device and torch version, as short as they are still different
    code             "current", "older" or "unknown": the row's code against the recipe as it is now
    spot             recipe, candidate, baseline, parameters and case as text: equal for what may be compared
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pandas as pd

from ..rows import SCHEMA_VERSION, VERDICTS, code_hash
from .notebooks import shown_path
from .table import card

DONE = "row.json"  # what a sweep leaves of a finished point
UNFINISHED = object()  # a last line without its end
MEDIANS = ("median_s", "baseline_median_s")
SECONDS = (1e-10, 1e7)  # of a call: less than a tick of any clock, and four months
DECIDED = ("faster", "slower", "equivalent")
APART = 100  # the speed-up is a ratio of paired rounds, that of the medians another; units taken for others are not
NOT_A_POINT = ("param.device", "param.rows")  # where it ran, and where it was written


@dataclass
class Merged:
    """All rows as one table, and what could not be used, named."""

    rows: pd.DataFrame
    problems: list[str] = field(default_factory=list)  # one line each: file, lines, why
    twice: int = 0  # rows that were there more than once, kept once


def row_files(given: Iterable[str | Path]) -> list[Path]:
    """The row files that are meant: files, and every *.jsonl and row.json below a folder.

    Raises ValueError, one line, for what is not there.
    """
    found: list[Path] = []
    for item in map(Path, given):
        if item.is_dir():
            inside = sorted(filter(_holds_rows, item.rglob("*.json*")), key=lambda path: (path.name == DONE, path))
            if not inside:
                raise ValueError(f"{item}: no row file (*.jsonl, row.json) in this folder")
            found += inside
        elif item.is_file():
            found.append(item)
        else:
            here = [str(path) for path in item.parent.glob("*")] if item.parent.is_dir() else []
            near = get_close_matches(str(item), here, n=1, cutoff=0.5)
            raise ValueError(f"no row file {str(item)!r}" + (f"; nearest: {near[0]}" if near else ""))
    return list(dict.fromkeys(path.resolve() for path in found))


def _holds_rows(path: Path) -> bool:
    """Of a point of a sweep only row.json counts: what a failed try left beside it is no result."""
    return path.name == DONE or (path.suffix == ".jsonl" and path.parent.parent.name != "points")


def merge(paths: Iterable[Path], notebooks: Iterable[Path] = ()) -> Merged:
    """Read the files. What is damaged or foreign is named in `problems`; a row that is there twice is kept once."""
    rows: list[dict] = []
    seen: set[bytes] = set()
    bad: dict[tuple[str, str], list[int]] = {}
    twice = 0
    empty: list[str] = []
    for path in paths:
        shown, number = shown_path(path), 0
        for number, line, row in _objects(path):
            if fault := _fault(row):
                bad.setdefault((shown, fault), []).append(number)
            elif line in seen:
                twice += path.name != DONE  # a sweep has its rows in one file as well
            else:
                seen.add(line)
                rows.append(row | {"file": shown, "line": number})
        if not number:
            empty.append(f"{shown}: empty, no row in it")
    problems = [f"{shown}, {line_numbers(lines)}: {fault}" for (shown, fault), lines in bad.items()]
    return Merged(_with_columns(rows, notebooks), problems + empty, twice)


def row_faults(path: Path) -> Iterable[tuple[int, Any, str]]:
    """(line number, value, what is wrong with it or "") of every line of a row file."""
    return ((number, row, _fault(row)) for number, _, row in _objects(path))


def _objects(path: Path) -> Iterable[tuple[int, bytes, Any]]:
    """(line number, text, value) of every line that is not empty; the value is None where it is damaged."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{shown_path(path)}: cannot be read ({error.strerror})") from None
    if path.name == DONE:  # one file for one point of a sweep: a row, or several
        value = _parsed(data)
        if isinstance(value, dict) and isinstance(value.get("rows"), list):
            value = value["rows"]
        for row in value if isinstance(value, list) else [value]:
            yield 1, _identity(row), row
        return
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            value = _parsed(line)
            text = _identity(value) if b'"point":' in line else line.strip()
            yield number, text, UNFINISHED if value is None and number == len(lines) else value


def _identity(row: Any) -> bytes:
    """The text of a row as it was first written: a sweep adds the key of the point when it collects its rows."""
    if isinstance(row, dict):
        row = {name: value for name, value in row.items() if name != "point"}
    return json.dumps(row, ensure_ascii=False).encode()


def _parsed(text: bytes) -> Any:
    def refuse(token: str):
        raise ValueError(token)  # NaN and Infinity are no JSON

    try:
        return json.loads(text.decode("utf-8"), parse_constant=refuse)
    except ValueError:
        return None


def _fault(row: Any) -> str:
    """Why this is no row of ours; "" when it is one."""
    if row is UNFINISHED:
        return "unfinished: the writer was stopped in it"
    if not isinstance(row, dict):
        return "damaged; expected one JSON object a line"
    version = row.get("schema_version")
    if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
        return f"foreign: schema_version={version!r}, expected 1 to {SCHEMA_VERSION}"
    if row.get("provenance") not in ("measured", "reported"):
        return f"foreign: provenance={row.get('provenance')!r}, expected 'measured' or 'reported'"
    if not isinstance(row.get("recipe"), str) or not row["recipe"]:
        return f"foreign: recipe={row.get('recipe')!r}, expected the name of a recipe"
    if row["provenance"] == "measured" and row.get("verdict") not in (None, *VERDICTS):
        return f"foreign: verdict={row['verdict']!r}, expected one of {', '.join(VERDICTS)}"
    for name in ("speedup", "ci_low", "ci_high", *MEDIANS):
        value = row.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            return f"foreign: {name}={value!r}, expected a number or null"
        if value is not None and value <= 0 and name in ("speedup", *MEDIANS):
            return f"foreign: {name}={value!r}, expected more than 0"
    return _absurd(row) or (_incomplete(row) if row["provenance"] == "measured" else "")


def _absurd(row: dict) -> str:
    """A time or a size that nothing can have; "" when there is none."""
    for name, value in row.items():
        time = name.endswith("_s") and not name.endswith("_per_s")
        if not isinstance(value, (int, float)) or not (time or name.endswith("_bytes")):
            continue
        if value < 0:
            return f"absurd: {name}={value!r}, expected 0 or more"
        if name in MEDIANS and not SECONDS[0] <= value <= SECONDS[1]:
            return f"absurd: {name}={value!r}, expected seconds of a call, {SECONDS[0]:g} to {SECONDS[1]:g}"
    time, baseline, speedup = (row.get(name) for name in (*MEDIANS, "speedup"))
    told = row.get("verdict") in DECIDED and time and baseline and speedup
    if told and not 1 / APART <= baseline / time / speedup <= APART:
        return f"absurd: speedup={speedup!r}, but the medians give {baseline / time:.3g}"
    return ""


def _incomplete(row: dict) -> str:
    """What utils.rows writes into every measured row, and this one lacks; "" when nothing is missing."""
    for name in ("run_id", "date", "device_name", *(["label"] if row.get("verdict") else [])):
        if not row.get(name):
            return f"a measured row without {name}"
    return ""


def line_numbers(lines: list[int]) -> str:
    """[3, 4, 5, 9] -> "lines 3–5, 9"."""
    parts: list[list[int]] = []
    for number in lines:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return f"line{'s' * (len(lines) > 1)} " + ", ".join("–".join(map(str, part)) for part in parts)


def _with_columns(rows: list[dict], notebooks: Iterable[Path]) -> pd.DataFrame:
    hashes = {path.stem: code_hash(path) for path in notebooks}
    machines = machine_names([row for row in rows if row["provenance"] == "measured"])
    for row in rows:
        now, then = hashes.get(row["recipe"]), row.get("code_hash")
        row["code"] = "unknown" if not (now and then) else "current" if now == then else "older"
        row["machine"] = machines.get(_machine(row)) if row["provenance"] == "measured" else None
        row["spot"] = spot_of(row)
    made = pd.DataFrame(rows) if rows else pd.DataFrame(columns=["recipe", "provenance"])
    if "verdict" in made:
        for name in ("speedup", "ci_low", "ci_high", *MEDIANS):  # also where no row has one, or all have null
            made[name] = pd.to_numeric(made[name]) if name in made else math.nan
    return made


def _machine(row: dict) -> tuple[str, str]:
    return str(row.get("device_name") or row.get("device") or "?"), str(row.get("torch") or "?")


def machine_names(rows: Iterable[dict]) -> dict[tuple[str, str], str]:
    """Short names of (device name, torch version): "H200, 2.13.0". What would be the same in short stays long."""
    keys = list(dict.fromkeys(map(_machine, rows)))
    devices, versions = (
        [list(dict.fromkeys(part)) for part in zip(*keys, strict=True)] or [[], []] if keys else [[], []]
    )
    device = _short(devices, card, lambda name: re.sub("^(NVIDIA|AMD) (GeForce )?", "", name))
    version = _short(versions, lambda name: name.partition("+")[0])
    return {key: f"{device[key[0]]}, {version[key[1]]}" for key in keys}


def _short(names: list[str], *shorter: Callable[[str], str]) -> dict[str, str]:
    """Every name by the first of the rules that leaves it different from all others."""
    made = {}
    for name in names:
        for rule in shorter:
            short = rule(name)
            if short and sum(rule(other) == short for other in names) == 1:
                break
        else:
            short = name
        made[name] = short
    return made


def spot_of(row: dict) -> str:
    """Recipe, candidate, baseline, parameters and case as text. The device is left out: it is what is compared."""
    parts = {k: v for k, v in row.items() if k.startswith(("param.", "case.")) and k not in NOT_A_POINT}
    parts |= {k: row.get(k) for k in ("recipe", "label", "baseline_label", "mode", "cache")}
    return json.dumps(parts, sort_keys=True)


def described(spots: Iterable[str]) -> dict[str, str]:
    """Each spot in words: its case and those parameters that are not the same in all spots of the recipe."""
    parts = {spot: json.loads(spot) for spot in spots}
    names: dict[str, set[str]] = {}
    for fields in parts.values():
        names.setdefault(fields["recipe"], set()).update(fields)
    values: dict[tuple[str, str], set[str]] = {}
    for fields in parts.values():
        for name in names[fields["recipe"]]:  # also those that this spot lacks
            values.setdefault((fields["recipe"], name), set()).add(json.dumps(fields.get(name)))
    made = {}
    for spot, fields in parts.items():
        words: dict[str, str] = {}  # param.patches and case.patches are one word where they are equal
        for name, value in fields.items():
            if name.startswith(("case.", "param.")) and len(values[fields["recipe"], name]) > 1:
                short = name.partition(".")[2]
                if words.setdefault(short, f"{short}={value}") != f"{short}={value}":
                    words[name] = f"{name}={value}"
        made[spot] = " ".join(words.values())
    return made


def pooled(spots: Iterable[str]) -> tuple[int, list[str]]:
    """(number of different spots, the fields in which they differ): over what a mean of their rows is taken."""
    found = [json.loads(spot) for spot in dict.fromkeys(spots)]
    values = {name: [str(fields.get(name)) for fields in found] for name in set().union(*found)}
    differ = [name for name, here in sorted(values.items()) if len(set(here)) > 1 and name != "recipe"]
    twin = {name: f"case.{name.partition('.')[2]}" for name in differ if name.startswith("param.")}
    return len(found), [name for name in differ if values[name] != values.get(twin.get(name))]


# ---------------------------------------------------------------------------------------------------- columns


def column(name: str, rows: pd.DataFrame, what: str) -> str:
    """The column that `name` means: itself, else with "case." in front (the point within a recipe), else "param.".

    The tables call the label a candidate, so that name is understood as well. Raises ValueError with the nearest name.
    """
    for one in (name, f"case.{name}", f"param.{name}", *(["label"] if name == "candidate" else [])):
        if one in rows.columns:
            return one
    names = {c.partition(".")[2]: c for c in rows.columns if c.startswith(("case.", "param."))}
    near = get_close_matches(name, [*rows.columns, *names], n=1, cutoff=0.0)
    nearest = names.get(near[0], near[0]) if near and near[0] not in rows.columns else "".join(near)
    raise ValueError(f"{what}{name!r}: no row has such a field; nearest: {nearest}")

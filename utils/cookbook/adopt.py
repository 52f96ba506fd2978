"""`./cookbook report --adopt FILE`: add measured rows to data/results, where compared cells and claims read them.

A file is adopted whole or not at all. Nothing that names a person, a host or a folder gets in, no row gets in twice,
and what the recipes then say about their claims is derived by executing them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path

from ..rows import append_rows, code_hash, read_rows
from .notebooks import shown_path
from .parameters import convert, declared, nearest
from .report_fields import Fields, fields_of
from .report_rows import line_numbers, row_faults, spot_of
from .table import NOT_THE_POINT, VALID, usual

RESULTS = Path(__file__).resolve().parents[2] / "data" / "results"
DEVICE = re.compile(r"(cpu|mps|(cuda|xpu|hpu|npu)(:\d+)?)")
APART = 3  # the speed-up is a ratio of paired rounds: that of the medians may differ, but not so much
NEEDED = ("run_id", "date", "device", "device_name", "torch", "python", "env_id")
# Fields that say whose machine it was. Everything else of utils.machine.machine_record may be published.
PRIVATE = re.compile(r"(.*_)?(host|hostname|host_name|node_name|user|username|user_name|ip_address|cwd|home)")
VERSIONS = ("driver", "torch", "cuda", "cudnn", "triton", "python", "platform")  # look like addresses, are none
TRACES = [
    (re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])"), "HOST"),
    (re.compile(r"\bfile://"), ""),  # then a plain path, which utils.rows cuts
    (re.compile(r"(?<=\w):(?=/(?!/))"), ": "),  # host:/folder, and no URL
    (re.compile(r"\b[A-Za-z]:\\(?:[^\s\\\"']+\\)*"), ""),
    (re.compile(r"\b[\w.+-]+@(?:[\w-]+(?:\.[\w-]{2,})+|[\w-]+(?=:))"), "USER@HOST"),  # and no matrix product a@b
    (re.compile(r"\b(?:[\w-]+\.)+(?:internal|local|localdomain|lan|amazonaws\.com)\b"), "HOST"),
    (re.compile(r"\bip(?:-\d{1,3}){4}\b"), "HOST"),
]


def adopt(
    file: Path,
    notebooks: Iterable[Path],
    results: Path | None = None,
    verdicts: Callable[[Path], dict[str, str]] | None = None,
) -> Iterator[str]:
    """Add the rows of `file` to `results`. Gives lines of text: what was done, what to do next, then what changes.

    What to do next comes before the notebooks are executed, so that whoever stops that still has it.
    `verdicts(notebook)` gives the verdicts on the notebook's claims once the rows are there (default: execute it).
    Raises ValueError, one line, when a row cannot be adopted; nothing is written then.
    """
    results = results or RESULTS
    recipes = {path.stem: path for path in notebooks}
    given, unknown = checked_rows(file, recipes, results)
    with _held(results):
        rows, dropped = cleaned(given)
        fresh = {recipe: _new(rows, recipe, results) for recipe in dict.fromkeys(row["recipe"] for row in rows)}
        files = {results / f"{recipe}.jsonl": new for recipe, new in fresh.items() if new}
        made = {path for path in files if not path.exists()}
        _write(files)
    for recipe, new in fresh.items():
        total = sum(row["recipe"] == recipe for row in rows)
        yield _summary(recipe, new, total, recipes[recipe])
    if unknown:
        yield f"fields that the recipe does not write now (the rows are of older code): {', '.join(sorted(unknown))}"
    if dropped:
        yield f"left out, because it says whose machine it was: {', '.join(sorted(dropped))}"
    yield from _to_do(fresh, results, made)
    for recipe, new in fresh.items():
        if new:
            yield from _flips(recipes[recipe], verdicts or executed_verdicts)


def _to_do(fresh: dict[str, list[dict]], results: Path, made: set[Path]) -> Iterator[str]:
    """What is left for the user to do. A second adoption says it again: the first may have been stopped."""
    for recipe in fresh:
        path = results / f"{recipe}.jsonl"
        if path in made or _untracked(path):
            yield f"{shown_path(path)} is a new file, not in git yet. Next: git add {shown_path(path)}"
    if changed := [recipe[:2] for recipe, new in fresh.items() if new]:
        yield f"the stored outputs are older than the rows now. Next: ./cookbook refresh {' '.join(changed)}"
        yield "then: ./cookbook readme"
    else:
        numbers = " ".join(recipe[:2] for recipe in fresh)
        yield f"Next, if that was not done yet: ./cookbook refresh {numbers}"
        yield "then: ./cookbook readme"


def _untracked(path: Path) -> bool:
    """Does git know the folder, and not the file?"""
    try:
        asked = ["git", "-C", str(path.parent), "ls-files", "--error-unmatch", path.name]
        return subprocess.run(asked, capture_output=True, timeout=30).returncode == 1  # 128: no repository
    except (OSError, subprocess.SubprocessError):
        return False


def checked_rows(file: Path, recipes: dict[str, Path], results: Path) -> tuple[list[dict], set[str]]:
    """(the rows of the file, fields of older code that are not known now).

    Raises ValueError, one line, naming the lines that cannot be adopted, and why.
    """
    if file.is_dir():
        inside = [path.name for path in sorted(file.glob("*.jsonl"))]
        expected = f"one file, such as {file / inside[0]}" if inside else "one file of rows"
        raise ValueError(f"--adopt {file}: is a folder; expected {expected}")
    if not file.is_file():
        raise ValueError(f"--adopt {file}: no such file")
    rows, faults, unknown = [], {}, set()
    fields = cache(lambda recipe: fields_of(recipes[recipe], results))
    for number, row, fault in row_faults(file):
        fault = fault or _refused(row, recipes)
        if not fault and (strange := _strange(row, fields(row["recipe"]))):
            if row.get("code_hash") in (None, code_hash(recipes[row["recipe"]])):
                fault = f"unknown field {strange[0]!r}; nearest: {fields(row['recipe']).nearest(strange[0])}"
            unknown.update(strange)
        if fault:
            faults.setdefault(fault, []).append(number)
        else:
            rows.append(row)
    if faults:
        said = [f"{line_numbers(lines)}: {fault}" for fault, lines in faults.items()]
        rest = sum(map(len, list(faults.values())[3:]))
        more = f"; and {rest} more line{'s' * (rest != 1)}" if rest else ""
        raise ValueError(f"--adopt {file}: nothing was added: {'; '.join(said[:3])}{more}")
    if not rows:
        raise ValueError(f"--adopt {file}: no row in it")
    return rows, unknown


def _strange(row: dict, fields: Fields) -> list[str]:
    """Fields of the row that rows of the recipe do not have, but for those that are left out anyway."""
    return [name for name in row if name not in fields and name != "param.rows" and not _private(name)]


def _refused(row: dict, recipes: dict[str, Path]) -> str:
    """Why a well-formed row cannot be adopted; "" when it can."""
    if row["provenance"] != "measured":
        return "a reported row; only measured rows are adopted (utils.rows.reported writes reported ones)"
    if row.get("source"):
        return f"source={row['source']!r} in a measured row: what a source reports is no measurement"
    if row["recipe"] not in recipes:
        return f"unknown recipe {row['recipe']!r}; {nearest(row['recipe'], recipes)}"
    for name in NEEDED:
        if not row.get(name):
            return f"a measured row without {name}"
    if row.get("verdict") in VALID and row.get("speedup") is None:
        return f"verdict={row['verdict']!r} without a speedup"
    for name, value in row.items():
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, list | dict) for v in value)):
            return f"field {name!r} is nested; rows are flat"
    return _contradicts(row) or _wrong_type(row, recipes[row["recipe"]])


def _contradicts(row: dict) -> str:
    """What no measurement can give, or what the row itself contradicts; "" when there is nothing of the kind."""
    if not isinstance(row["run_id"], str):
        return f"run_id={row['run_id']!r}, expected text"
    if not DEVICE.fullmatch(str(row["device"])):
        return f"device={row['device']!r}, expected such as cpu, cuda or cuda:0"
    try:
        date = datetime.fromisoformat(str(row["date"]))
    except ValueError:
        return f"date={row['date']!r}, expected such as 2026-11-30T10:00:00Z"
    if date.replace(tzinfo=date.tzinfo or UTC) > datetime.now(UTC) + timedelta(days=1):
        return f"date={row['date']!r} is in the future"
    time, baseline = row.get("median_s"), row.get("baseline_median_s")
    speedup, low, high = (row.get(name) for name in ("speedup", "ci_low", "ci_high"))
    if speedup is None:
        return ""
    if (low is not None and speedup < low) or (high is not None and speedup > high):
        return f"speedup={speedup!r} is outside its interval [{low!r}, {high!r}]"
    if time and baseline and not 1 / APART <= baseline / time / speedup <= APART:
        return f"speedup={speedup!r}, but the medians give {baseline / time:.3g}"
    verdict = row.get("verdict")
    if verdict == "faster" and (low if low is not None else speedup) <= 1:
        return f"verdict='faster', but speedup={speedup!r} and ci_low={low!r}"
    if verdict == "slower" and (high if high is not None else speedup) >= 1:
        return f"verdict='slower', but speedup={speedup!r} and ci_high={high!r}"
    return ""


def _wrong_type(row: dict, notebook: Path) -> str:
    """A parameter that is not of the type that the notebook declares; one it no longer has may stay."""
    for name, parameter in declared(notebook).items():
        value = row.get(f"param.{name}")
        try:
            if value is not None:
                if isinstance(value, str) and not parameter.type.startswith("str"):
                    raise ValueError
                convert(value, parameter.type)
        except ValueError:
            return f"param.{name}={value!r}, expected {parameter.type}"
    return ""


# ---------------------------------------------------------------------------------------------------- cleaning


def cleaned(rows: list[dict]) -> tuple[list[dict], set[str]]:
    """(the rows as utils.rows would write them, without traces of a person or a place; the fields left out)."""
    dropped: set[str] = set()
    made = [_without_traces(row, dropped) for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        append_rows(Path(folder, "rows.jsonl"), made)
        return read_rows(Path(folder, "rows.jsonl")), dropped


def _without_traces(row: dict, dropped: set[str]) -> dict:
    private = {name for name in row if _private(name)}
    dropped |= private
    private |= {"param.rows"} & set(row)
    secrets = [str(row[name]) for name in private if len(str(row[name])) > 2]
    return {name: _clean(name, value, secrets) for name, value in row.items() if name not in private}


def _private(name: str) -> bool:
    return PRIVATE.fullmatch(name.rpartition(".")[2].lower()) is not None


def _clean(name: str, value, secrets: list[str]):
    if isinstance(value, list):
        return [_clean(name, item, secrets) for item in value]
    if not isinstance(value, str) or name in VERSIONS:
        return value
    for pattern, instead in TRACES:
        value = pattern.sub(instead, value)
    for secret in secrets:
        value = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "HOST", value)
    return value


# ---------------------------------------------------------------------------------------------------- writing


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The folder for this adoption alone."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _new(rows: list[dict], recipe: str, results: Path) -> list[dict]:
    """The rows of the recipe that its file does not have yet, each once."""
    path = results / f"{recipe}.jsonl"
    old = read_rows(path) if path.is_file() else []
    seen = {_text(row) for row in old}
    new = {_text(row): row for row in rows if row["recipe"] == recipe}
    fresh = [row for text, row in new.items() if text not in seen]
    known = {_measurement(row) for row in old if row.get("verdict")}
    for row in fresh:
        if row.get("verdict") and _measurement(row) in known:
            which = f"{row.get('label')!r} of run {row['run_id']} at {row['date']}"
            raise ValueError(f"--adopt: nothing was added: {recipe}, {which} is there with other values")
        if row.get("verdict"):
            known.add(_measurement(row))
    return fresh


def _measurement(row: dict) -> tuple[str, str, str]:
    return str(row.get("run_id")), str(row.get("date")), spot_of(row)


def _text(row: dict) -> str:
    return json.dumps({name: value for name, value in row.items() if name != "point"}, sort_keys=True)


def _write(files: dict[Path, list[dict]]) -> None:
    """Add rows to every file: all are made beside the old ones first, then renamed over them."""
    made: list[tuple[Path, Path]] = []
    try:
        for path, rows in files.items():
            part = path.with_name(f".{path.name}.{os.getpid()}")
            made.append((part, path))
            if path.exists():
                shutil.copy2(path, part)
            append_rows(part, rows)  # synced
        for part, path in made:
            os.replace(part, path)
    finally:
        for part, _ in made:
            part.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------- what changes


def _summary(recipe: str, new: list[dict], total: int, notebook: Path) -> str:
    text = f"{recipe}: {len(new)} row{'s' * (len(new) != 1)} added"
    if total > len(new):
        text += f", {total - len(new)} there already"
    now = code_hash(notebook)
    if older := sum(row.get("code_hash") != now for row in new):
        text += f", {older} measured with older or unknown code (kept, and marked in reports)"
    is_usual = usual(notebook)
    other = {
        f"{name}={row[f'param.{name}']!r}"
        for name, parameter in declared(notebook).items()
        for row in new
        if not is_usual(row)
        and name not in NOT_THE_POINT
        and row.get(f"param.{name}", parameter.default) != parameter.default
    }
    if other:
        text += f"; neither the defaults nor a preset: {', '.join(sorted(other))}"
    return text


def _flips(notebook: Path, verdicts: Callable[[Path], dict[str, str]]) -> list[str]:
    """Which verdicts on claims are other ones now."""
    from .verdicts import settled_in

    before = {one.id: one.verdict for one in settled_in(notebook)}
    try:
        after = verdicts(notebook)
    except ValueError as error:  # RefreshError: the notebook fails with these rows
        return [f"{notebook.stem}: its claims could not be derived: {str(error).splitlines()[0]}"]
    flips = [
        f"{name}: {before.get(name, 'not settled')} → {after.get(name, 'not settled')}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]
    return flips or [f"{notebook.stem}: no verdict on a claim changes"]


def executed_verdicts(notebook: Path) -> dict[str, str]:
    """The verdicts that a fresh execution of the notebook prints: its defaults, on the CPU, nothing stored.

    Raises ValueError (RefreshError) when a cell fails.
    """
    import nbformat

    from .notebooks import load
    from .refresh import execute
    from .verdicts import settled_in

    nb = execute(load(notebook), notebook)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, notebook.name)
        copy.write_text(nbformat.writes(nb), encoding="utf-8")
        return {one.id: one.verdict for one in settled_in(copy)}

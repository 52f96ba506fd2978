"""The points of a sweep: keys, folders, and the one file that says a point is done.

A point lives in <out>/points/<key>/ with what `run` writes for a recipe (executed notebook, rows, the kernel's
stderr), log.txt when a try failed, and, last, row.json, renamed into place: done means that file. So a kill at any
moment loses nothing that was finished and repeats nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from ..rows import code_hash
from .identity import device_name
from .notebooks import plain, shown_path
from .parameters import resolved
from .run import FREE_BYTES, Job, Outcome, kept
from .sweep_spec import Spec
from .whole_file import write_whole

POINT_BYTES = 2_000_000  # an executed notebook with its figures, generously
OURS = "cookbook sweep"


@dataclass(frozen=True)
class Identity:
    """What else decides whether a finished point still holds: where it runs, and the code that runs."""

    device_name: Callable[[str], str]  # of the parameter `device`
    torch: str | None
    code: str  # hash of the recipe's code cells up to `measure`


@dataclass(frozen=True)
class Point:
    """One point: the job, and the folder that is named after its key."""

    key: str
    job: Job
    folder: Path
    parameters: dict[str, Any]  # all of them, defaults included, without `rows`
    device_name: str
    torch: str | None
    code: str
    label: str  # "patches=64 dtype=float32"


def here(recipe: Path) -> Identity:
    """The identity of this machine. torch is not imported."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = None
    return Identity(device_name, torch, code_hash(recipe))


def points_of(spec: Spec, out: Path, identity: Identity) -> list[Point]:
    """The points of a spec in its order."""
    defaults = resolved(spec.recipe, {})
    found = []
    for values in spec.points:
        parameters = {name: value for name, value in (defaults | values).items() if name != "rows"}
        device = identity.device_name(str(parameters.get("device", "auto")))
        about = [identity.code, parameters, device, identity.torch]
        key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
        label = " ".join(f"{name}={short(parameters[name])}" for name in spec.varying)
        folder = out / "points" / key
        job = Job(spec.recipe, values)
        found.append(Point(key, job, folder, parameters, device, identity.torch, identity.code, label))
    return found


def short(value: Any) -> str:
    """A parameter's value in a table or a label."""
    return str(value).replace(" ", "") if isinstance(value, list | dict) else str(value)


def check_disk(out: Path, todo: int) -> None:
    """Raises ValueError, one line, when the disk of `out` cannot hold that many more points."""
    free, needed = shutil.disk_usage(out).free, FREE_BYTES + todo * POINT_BYTES
    if free < needed:
        raise ValueError(f"--out {out}: {free / 1e6:.0f} MB free, {needed / 1e6:.0f} MB needed for {todo} points")


def check_folder(folder: Path | None, option: str) -> None:
    """Raises ValueError, one line, when nothing can be written in `folder`, there or not. Leaves nothing behind."""
    if folder is None:
        return
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{option} {shown_path(folder)}: not a folder; give another one") from None
    except OSError as error:
        raise ValueError(f"{option} {shown_path(folder)}: cannot write there ({error.strerror})") from None
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


# ---------------------------------------------------------------------------------------------- what is done


def read_done(point: Point) -> dict | None:
    """The point's row.json; None when it is not done."""
    found = _read(point.folder / "row.json")
    return found if found and found.get("key") == point.key else None


def _read(path: Path) -> dict | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    ours = isinstance(found, dict) and found.get("written_by") == OURS and isinstance(found.get("rows"), list)
    return found if ours and found["rows"] and all(isinstance(row, dict) for row in found["rows"]) else None


def write_done(point: Point, outcome: Outcome, tries: int) -> dict:
    """Say that the point is done. Returns what was written."""
    done = {
        "written_by": OURS,
        "key": point.key,
        "recipe": point.job.recipe,
        "code_hash": point.code,
        "device_name": point.device_name,
        "torch": point.torch,
        "parameters": point.parameters,
        "tries": tries,
        "seconds": outcome.seconds,
        "rows": outcome.rows,
    }
    write_whole(point.folder / "row.json", json.dumps(done, indent=1).encode())
    return done


def recovered(point: Point) -> Outcome | None:
    """The outcome of a point that was finished when its driver was killed, before row.json was there."""
    outcome = kept(point.job, point.folder, point.key)
    return replace(outcome, state="done") if outcome else None


def failed_before(point: Point) -> bool:
    """Did the last try of an earlier start fail? Asked of points that are not done."""
    return (point.folder / "log.txt").exists()


def write_log(folder: Path, outcome: Outcome, number: int, tries: int) -> None:
    """Add a failed try to the point's log: where, why, and the traceback that the notebook holds."""
    where = f"{outcome.where}: " if outcome.where else ""
    text = f"try {number} of {tries}: {where}{outcome.why}\n{_traceback(outcome.copy)}\n"
    log = folder / "log.txt"
    before = log.read_bytes() if log.exists() else b""
    write_whole(log, before + text.encode())


def _traceback(copy: Path | None) -> str:
    """The last traceback in an executed notebook; "" when there is none."""
    try:
        cells = json.loads(copy.read_text(encoding="utf-8"))["cells"]
        errors = [o for cell in cells for o in cell.get("outputs", []) if o.get("output_type") == "error"]
        return plain("\n".join(errors[-1]["traceback"])) + "\n" if errors else ""
    except (AttributeError, OSError, ValueError, KeyError, TypeError):
        return ""


def write_rows(out: Path, points: Iterable[Point]) -> tuple[Path, int]:
    """<out>/rows.jsonl from the row.json files: the rows of every point that is done, each once, with its key.

    Returns the file and the number of rows. It is made again each time, so it never holds a row twice.
    """
    rows = [row | {"point": point.key} for point in points if (done := read_done(point)) for row in done["rows"]]
    path = out / "rows.jsonl"
    write_whole(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    return path, len(rows)


# ---------------------------------------------------------------------------------------------- time left


def known_seconds(out: Path, points: list[Point]) -> tuple[list[float], str]:
    """(seconds that finished points took, which points): of these points, else of older ones of the same recipe."""
    mine = [done["seconds"] for point in points if (done := read_done(point)) and _positive(done.get("seconds"))]
    if mine:
        return mine, ""
    older = [_read(path) for path in sorted((out / "points").glob("*/row.json"))]
    recipe = points[0].job.recipe
    found = [o["seconds"] for o in older if o and o.get("recipe") == recipe and _positive(o.get("seconds"))]
    return found, "of older code, other values or another machine" if found else ""


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def time_text(seconds: float) -> str:
    """About how long, as a person says it: "40 s", "3 min", "2 h 10 min"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"


def time_left(seconds: list[float], todo: int, workers: int = 1) -> float | None:
    """Seconds until `todo` more points are through, from the mean of the finished ones; None when none is."""
    return sum(seconds) / len(seconds) * todo / max(1, min(workers, todo)) if seconds and todo else None

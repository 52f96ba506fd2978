"""Result rows: one flat JSON object a line, in files that many writers may append to.

Every row has `schema_version`, `provenance` and `recipe`. Strings hold no path and no host name: paths are cut to their
last part on writing. Numbers are finite or null. Units: seconds (`*_s`), bytes (`*_bytes`), FLOP.

A row with provenance "measured" also has
    run_id, code_hash         the run, and the hash of the notebook's code cells up to the one tagged `measure`
    param.<name>              every declared parameter of the notebook, defaults included
    case.<name>               the point within the recipe, for example case.patches
    device ... env_id         all of utils.machine.machine_record, date included
and, when it comes from a comparison,
    label, baseline_label, verdict, speedup, ci_low, ci_high, median_s, baseline_median_s and the other fields of
    ComparisonRow (warnings joined by "; "), same, rule, same_reason, max_abs, max_rel, rmse, dtype,
    peak_bytes, output_bytes, baseline_peak_bytes, baseline_output_bytes
A row with provenance "reported" has `source` and whatever its source reports, under the same names.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import glob
import hashlib
import json
import math
import os
import re
import socket
import sys
import uuid
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing torch takes seconds, which reading rows should not cost
    import torch

try:
    import fcntl
except ImportError:  # no fcntl outside Unix: appends are then safe for one writer only
    fcntl = None

SCHEMA_VERSION = 1
VERDICTS = ("faster", "slower", "equivalent", "inconclusive", "invalid", "error")
_AVERAGED = ("faster", "slower", "equivalent", "inconclusive")
_REQUIRED = {"measured": ("recipe", "run_id", "date", "device_name"), "reported": ("recipe", "source")}
_ROOT = Path(__file__).resolve().parent.parent


@functools.cache
def _run_id(process: int) -> str:
    """An id for the rows of this process; one that was forked with this module loaded gets its own."""
    return uuid.uuid4().hex[:12]


# An absolute path: a slash that follows no word, dot, slash or colon (so no URL, no "owner/name", no "B/s").
_PATH = re.compile(r"(?<![\w/.:])~?(?:/[\w.+@%~-]+)+/?")


# ---------------------------------------------------------------------------------------------------- files


def append_rows(path: str | os.PathLike | None, rows: Iterable[Mapping]) -> None:
    """Append rows to a file: one locked write, synced to disk. `path` "" or None: check the rows and write nothing.

    A last line that a killed writer left unfinished is named in a warning and removed first.
    Raises ValueError for a row that is not flat or lacks a required field, OSError when the disk is full (the file is
    then as before).
    """
    lines = [_line(row) for row in rows]
    if not path or not lines:
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(target, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if fcntl:
            fcntl.flock(handle, fcntl.LOCK_EX)  # released on close, also when the process is killed
        size = _repaired_size(handle, target)
        data = "".join(line + "\n" for line in lines).encode()
        written = os.write(handle, data)
        if written != len(data):
            os.ftruncate(handle, size)
            raise OSError(f"{target.name}: only {written} of {len(data)} bytes fit on the disk; nothing was added")
        os.fsync(handle)
    finally:
        os.close(handle)


def read_rows(*paths_or_globs: str | os.PathLike) -> list[dict]:
    """All rows of the files, in order. A pattern may match nothing; a plain path must exist.

    A damaged last line is named in a warning and skipped; damage anywhere else raises ValueError naming file and line.
    """
    found: list[dict] = []
    for item in paths_or_globs:
        text = os.fspath(item)
        paths = sorted(glob.glob(text, recursive=True)) if glob.has_magic(text) and not os.path.exists(text) else [text]
        for path in paths:
            if not os.path.isfile(path):
                raise FileNotFoundError(f"{text} is no file of rows; expected a .jsonl file or a pattern")
            found += _read_file(Path(path))
    return found


def recorded_rows(recipe: str) -> list[dict]:
    """The committed rows of a recipe, data/results/<recipe>.jsonl; [] when there are none yet."""
    path = _ROOT / "data" / "results" / f"{recipe}.jsonl"
    return read_rows(path) if path.is_file() else []


# ---------------------------------------------------------------------------------------------------- making rows


def measured(
    recipe: str, namespace: Mapping[str, Any] | None = None, case: Mapping[str, Any] | None = None, **fields: Any
) -> dict:
    """A row of something measured here and now: `fields` beside its whole provenance.

    `namespace` is the notebook's globals(): parameters and the device are read from it.
    """
    from .machine import machine_record

    namespace = namespace or {}
    notebook = _notebook(recipe)
    row: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "provenance": "measured",
        "run_id": os.environ.get("COOKBOOK_RUN_ID") or _run_id(os.getpid()),
        "recipe": recipe,
        "code_hash": code_hash(notebook) if notebook else None,
    }
    for name in _parameter_names(notebook) if notebook else []:
        if name != "rows" and name in namespace:  # `rows` is a path, and says nothing about the result
            row[f"param.{name}"] = _plain(namespace[name])
    row |= {f"case.{name}": _plain(value) for name, value in (case or {}).items()}
    row |= machine_record(_device_of(namespace))
    clash = sorted(set(fields) & set(row))
    if clash:
        raise ValueError(f"field {clash[0]!r} is already part of the provenance of a row; expected another name")
    row |= {name: _plain(value) for name, value in fields.items()}
    return _checked(row)


def from_comparison(
    comparison: Any,
    *,
    recipe: str,
    namespace: Mapping[str, Any],
    case: Mapping[str, Any] | None = None,
    memory: Mapping[str, Any] | None = None,
) -> list[dict]:
    """One measured row for each candidate of a Comparison of utils.timing.

    `case` is the point that was compared, for example {"patches": 784}. `memory` maps labels (candidates and the
    baseline) to MemoryStats. Raises ValueError for a memory label that was not compared.
    """
    memory = dict(memory or {})
    labels = {label for row in comparison.rows for label in (row.label, row.baseline_label)}
    for label in memory:
        if label not in labels:
            raise ValueError(f"memory has {label!r}, which was not compared; expected one of {sorted(labels)}")
    made = []
    for row in comparison.rows:
        fields = _scalars(row)
        if "device" in fields:
            del fields["device"]  # the machine record names it
        fields |= _equivalence_fields(row.equivalence)
        for prefix, label in (("", row.label), ("baseline_", row.baseline_label)):
            if label in memory:
                fields[f"{prefix}peak_bytes"] = memory[label].peak_bytes
                fields[f"{prefix}output_bytes"] = memory[label].output_bytes
        fields.pop("num_threads", None)
        made.append(measured(recipe, namespace, case, **fields))
        if getattr(row, "num_threads", None):
            made[-1]["num_threads"] = row.num_threads  # those of the timed rounds, not of the kernel
    return made


def reported(recipe: str, source: str, **fields: Any) -> dict:
    """A row of what a source reports, for example reported("07_conv3d_to_linear", "000_...txt", median_s=31.605)."""
    fixed = {"schema_version": SCHEMA_VERSION, "provenance": "reported", "recipe": recipe, "source": source}
    clash = sorted(set(fields) & set(fixed))
    if clash:
        raise ValueError(f"field {clash[0]!r} of a reported row is fixed; expected another name")
    return _checked(fixed | {name: _plain(value) for name, value in fields.items()})


def code_hash(notebook: str | os.PathLike | Mapping) -> str:
    """First 16 hex digits of sha256 over the code cells up to and including the one tagged `measure`.

    The parameters cell and what papermill injects are left out: they are the row's param fields. Prose and stored
    outputs do not matter. Takes a path or the notebook itself.
    """
    digest = hashlib.sha256()
    for cell in _cells(notebook):
        tags = cell.get("metadata", {}).get("tags", [])
        if cell["cell_type"] != "code" or "parameters" in tags or "injected-parameters" in tags:
            continue
        digest.update(_source(cell).encode() + b"\0")
        if "measure" in tags:
            break
    return digest.hexdigest()[:16]


def verdict_summary(rows: Iterable[Mapping]) -> dict:
    """Counts of every verdict and the geometric mean of the speed-ups: {"geomean", "averaged", "faster", ...}.

    The mean is over rows with a usable speed-up, whatever their verdict; invalid rows and errors are counted, never
    averaged. Reported rows are left out. `geomean` is None when nothing could be averaged.
    """
    counts, logs = dict.fromkeys(VERDICTS, 0), []
    for row in rows:
        if row.get("provenance") == "reported":
            continue
        verdict, speedup = row.get("verdict"), row.get("speedup")
        if verdict not in counts:
            raise ValueError(f"verdict={verdict!r} in a row; expected one of {', '.join(VERDICTS)}")
        counts[verdict] += 1
        if verdict in _AVERAGED and speedup is not None and math.isfinite(speedup) and speedup > 0:
            logs.append(math.log(speedup))
    return {"geomean": math.exp(math.fsum(logs) / len(logs)) if logs else None, "averaged": len(logs), **counts}


# ---------------------------------------------------------------------------------------------------- details


def _checked(row: Mapping) -> dict:
    """The row as it will be written: flat, finite, without paths; ValueError names the field that is wrong."""
    clean: dict[str, Any] = {"schema_version": SCHEMA_VERSION}
    for name, value in row.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"field name {name!r} of a row; expected text")
        clean[name] = _clean(name, value)
    provenance = clean.get("provenance")
    if provenance not in _REQUIRED:
        raise ValueError(f"provenance={provenance!r} of a row; expected 'measured' or 'reported'")
    for name in _REQUIRED[provenance]:
        if not clean.get(name):
            raise ValueError(f"a {provenance} row has no {name}; make it with utils.rows.measured or reported")
    if not _known_version(clean["schema_version"]):
        raise ValueError(f"schema_version={clean['schema_version']!r} of a row; expected 1 to {SCHEMA_VERSION}")
    if provenance == "measured" and clean.get("verdict") not in (None, *VERDICTS):
        raise ValueError(f"verdict={clean['verdict']!r} of a row; expected one of {', '.join(VERDICTS)}")
    return clean


def _line(row: Mapping) -> str:
    return json.dumps(_checked(row), ensure_ascii=False, allow_nan=False)


def _clean(name: str, value: Any) -> Any:
    value = _plain(value)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return _without_places(value)
    if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        return [_clean(name, item) for item in value]
    raise ValueError(f"field {name!r} of a row is a {type(value).__name__}; rows are flat: numbers, text, null, lists")


def _plain(value: Any) -> Any:
    """Numbers of numpy and torch, dtypes and devices as plain Python values."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if not isinstance(value, bool | int | float | str) and hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        return value.item()
    return value


def _without_places(text: str) -> str:
    """No path but its last part, no host name."""
    text = _PATH.sub(lambda found: found.group().rstrip("/").rpartition("/")[2], text)
    host = socket.gethostname()
    return re.sub(rf"\b{re.escape(host)}\b", "HOST", text) if len(host) > 5 else text


def _scalars(row: Any) -> dict:
    """The fields of a ComparisonRow that are single values; warnings as one text."""
    found = {}
    for field in dataclasses.fields(row):
        value = _plain(getattr(row, field.name))
        if field.name == "warnings":
            found["warnings"] = "; ".join(map(str, value or [])) or None
        elif field.name == "error":
            found["error"] = str(value) if value else None
        elif value is None or isinstance(value, bool | int | float | str):
            found[field.name] = value
    found.pop("equivalence", None)
    return found


def _equivalence_fields(found: Any) -> dict:
    if found is None:
        return {"same": None, "rule": None, "same_reason": None}
    named = {"same": found.equivalent, "rule": found.rule, "same_reason": found.reason}
    return named | {name: getattr(found, name) for name in ("max_abs", "max_rel", "rmse", "dtype")}


def _device_of(namespace: Mapping[str, Any]) -> torch.device | None:
    from .machine import pick_device

    with contextlib.suppress(ValueError):
        return pick_device(str(namespace.get("device", "auto")))
    return None


def _notebook(recipe: str) -> Path | None:
    path = _ROOT / "notebooks" / f"{recipe}.ipynb"
    return path if path.is_file() else None


def _cells(notebook: str | os.PathLike | Mapping) -> list:
    if isinstance(notebook, Mapping):
        return notebook["cells"]
    return json.loads(Path(notebook).read_text(encoding="utf-8"))["cells"]


def _source(cell: Mapping) -> str:
    return cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])


def _parameter_names(notebook: Path) -> list[str]:
    """Names assigned in the cell tagged `parameters`."""
    names = []
    for cell in _cells(notebook):
        if "parameters" in cell.get("metadata", {}).get("tags", []):
            for node in ast.parse(_source(cell)).body:
                targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
                names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def _repaired_size(handle: int, path: Path) -> int:
    """Size of the file after an unfinished last line was dropped, or ended when only its line end is missing."""
    size = os.fstat(handle).st_size
    if not size or os.pread(handle, 1, size - 1) == b"\n":
        return size
    data = os.pread(handle, size, 0)
    start = data.rfind(b"\n") + 1
    if _parsed(data[start:]) is not None:
        os.write(handle, b"\n")
        return size + 1
    warnings.warn(f"{path.name}: the unfinished last line was dropped: {data[start : start + 60]!r}", stacklevel=3)
    os.ftruncate(handle, start)
    return start


def _read_file(path: Path) -> list[dict]:
    lines = path.read_bytes().split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        row = _parsed(line)
        if row is None:
            if number == len(lines):
                warnings.warn(f"{path.name}, line {number} is damaged and was skipped: {line[:60]!r}", stacklevel=3)
                break
            raise ValueError(f"{path.name}, line {number} is damaged: {line[:60]!r}; expected one JSON object a line")
        version = row.get("schema_version")
        if not _known_version(version):
            raise ValueError(
                f"{path.name}, line {number} has schema_version={version!r}; expected 1 to {SCHEMA_VERSION}"
            )
        found.append(row)
    return found


def _known_version(version: Any) -> bool:
    return isinstance(version, int) and not isinstance(version, bool) and 1 <= version <= SCHEMA_VERSION


def _parsed(line: bytes) -> dict | None:
    def refuse(token: str):
        raise ValueError(token)  # NaN and Infinity are no JSON

    try:
        row = json.loads(line.decode("utf-8"), parse_constant=refuse)
    except ValueError:  # also UnicodeDecodeError and JSONDecodeError
        return None
    return row if isinstance(row, dict) else None

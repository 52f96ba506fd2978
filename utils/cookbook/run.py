"""Execute recipes with papermill: resumable, and believed only when a result row came.

Papermill's output notebook says "completed" also for a kernel that died, so it is never asked whether a recipe
succeeded. A recipe is done when papermill raised nothing *and* the recipe appended a row. In the output folder a
recipe NN_name has NN_name.ipynb (executed copy), NN_name.rows.jsonl (only ever appended to), NN_name.log (the
kernel's own stderr, when it wrote any) and, renamed into place last, NN_name.status.json.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from .identity import device_name
from .notebooks import short_name, shown_path
from .parameters import code_cells, papermill_misses, resolved
from .whole_file import write_whole

FREE_BYTES = 50_000_000  # below this an output folder counts as full


@dataclass(frozen=True)
class Job:
    """One recipe to execute, with checked parameter values (those given; the notebook keeps its other defaults)."""

    path: Path
    values: dict[str, Any]

    @property
    def recipe(self) -> str:
        return self.path.stem


@dataclass
class Outcome:
    """What became of a job. `rows` are the rows of this run (or of the kept one); `why` is one line when it failed."""

    recipe: str
    state: str  # "done", "kept", "failed", "interrupted"
    rows: list[dict] = field(default_factory=list)
    seconds: float | None = None
    path: Path | None = None  # the notebook
    where: str = ""  # the failing cell: "cell [3], tag `check`"
    why: str = ""
    copy: Path | None = None


class Interrupted(Exception):
    """Ctrl-C; `outcomes` holds what was finished."""

    def __init__(self, outcomes: list[Outcome]):
        super().__init__("interrupted")
        self.outcomes = outcomes


def job_key(job: Job) -> str:
    """What a finished recipe is kept by: code cells, all parameters, the device's name, torch's version."""
    sources = [source for source, tags in code_cells(job.path) if "parameters" not in tags]
    values = resolved(job.path, job.values)
    try:
        torch_version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch_version = None
    identity = [sources, values, device_name(values.get("device", "auto")), torch_version]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def check_jobs(jobs: list[Job]) -> None:
    """Raises ValueError, one line, for a recipe that cannot report a row, or whose parameters papermill misreads.

    Also for a word in its metadata that asks for an unknown kind of kernel.
    """
    from .fork_kernel import asks_for_fresh

    for job in jobs:
        if "rows" not in resolved(job.path, {}):
            raise ValueError(f"{job.recipe} declares no parameter 'rows': it could not report a result row")
        if missed := papermill_misses(job.path):
            raise ValueError(
                f"{job.recipe}: papermill does not read parameter {missed[0]!r}: one `=` a line, plain types"
            )
        asks_for_fresh(job.path)


@contextmanager
def output_folder(out: Path, jobs: list[Job]) -> Iterator[Path]:
    """The output folder, made when missing and held for this run alone.

    Raises ValueError, one line: not a folder, not writable, full, in use, or holding a notebook that is not ours.
    """
    shown = shown_path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / ".lock", "a")  # noqa: SIM115 (held until the run ends; the kernel never inherits it)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"--out {shown}: not a folder; give a new folder or one of an earlier run") from None
    except OSError as error:
        raise ValueError(f"--out {shown}: cannot write there ({error.strerror}); give another folder") from None
    with lock:
        if (free := shutil.disk_usage(out).free) < FREE_BYTES:
            raise ValueError(
                f"--out {shown}: the disk is full ({free / 1e6:.0f} MB free, {FREE_BYTES / 1e6:.0f} needed)"
            )
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):  # anything else: a bucket mount without locks
                raise ValueError(f"--out {shown}: another run is writing there; wait, or give another folder") from None
        for job in jobs:
            copy = out / f"{job.recipe}.ipynb"
            if copy.exists() and not read_status(out, job.recipe):
                raise ValueError(f"--out {shown}: {copy.name} there was not written by run; give another folder")
        yield out


def read_status(out: Path, recipe: str) -> dict:
    """The status that an earlier run left; {} when there is none or it is not ours."""
    try:
        status = json.loads((out / f"{recipe}.status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) and status.get("written_by") == "cookbook run" else {}


def write_status(out: Path, recipe: str, **fields: Any) -> None:
    """Replace the recipe's status."""
    status = {"written_by": "cookbook run", "recipe": recipe, **fields}
    write_whole(out / f"{recipe}.status.json", json.dumps(status, indent=1).encode())


def end_of_lines(path: Path) -> int:
    """Size of a row file without an unfinished last line (the next append drops that)."""
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


def rows_between(path: Path, start: int, end: int | None = None) -> list[dict]:
    """Rows in bytes [start, end) of a row file; a damaged line is no row."""
    try:
        data = path.read_bytes()[start:end]
    except OSError:
        return []
    rows = []
    for line in data.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def kept(job: Job, out: Path, key: str) -> Outcome | None:
    """The outcome of an earlier run with the same key, when its rows are still there."""
    status = read_status(out, job.recipe)
    if status.get("state") != "done" or status.get("key") != key:
        return None
    rows = rows_between(Path(out / status["rows_file"]), *status["rows_bytes"])
    if not rows:
        return None
    return Outcome(job.recipe, "kept", rows, status.get("seconds"), job.path, copy=out / f"{job.recipe}.ipynb")


def run_recipes(jobs: list[Job], out: Path, progress, *, fresh: bool = False, timeout: float | None = None):
    """Execute the jobs one after another in `out` (see `output_folder`) and return an Outcome for each.

    A failing recipe stops nobody. `timeout`: seconds a recipe may take. Raises Interrupted on Ctrl-C.
    """
    quiet = logging.getLogger("papermill")
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False
    from .fork_kernel import forked_kernels

    outcomes: list[Outcome] = []
    keys = [job_key(job) for job in jobs]
    known = [None if fresh else kept(job, out, key) for job, key in zip(jobs, keys, strict=True)]
    work = [job.path for job, outcome in zip(jobs, known, strict=True) if outcome is None]
    scratch = Path(tempfile.mkdtemp(prefix="run"))
    try:
        # One notebook alone gains nothing from imports done ahead.
        with forked_kernels(work, progress.line) if len(work) > 1 else nullcontext():
            for place, (job, key, outcome) in enumerate(zip(jobs, keys, known, strict=True), 1):
                if outcome is None:
                    cells = sum(bool(source.strip()) for source, _ in code_cells(job.path)) + 1  # + injected parameters
                    progress.start(job.recipe, f"{place}/{len(jobs)}", cells)
                    outcome = execute(job, out, key, scratch, progress, timeout)
                outcomes.append(outcome)
                progress.end(describe(outcome))
                if outcome.state == "interrupted":
                    raise Interrupted(outcomes)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return outcomes


def execute(job: Job, out: Path, key: str, scratch: Path, progress, timeout: float | None) -> Outcome:
    """Execute one recipe with papermill. Returns its outcome; the status file says the same, unless interrupted.

    The one place that executes a notebook, for `run` and for the points of a sweep. Its kernel is forked inside
    `with forked_kernels(...)` (fork_kernel.py), where the notebook allows it, and a new process otherwise.
    """
    copy, log = out / f"{job.recipe}.ipynb", out / f"{job.recipe}.log"
    rows_file = Path(job.values.get("rows") or out / f"{job.recipe}.rows.jsonl").absolute()
    outcome = Outcome(job.recipe, "failed", path=job.path, copy=copy)
    try:
        before = end_of_lines(rows_file)
        keep_edited(copy, read_status(out, job.recipe))
        write_status(out, job.recipe, state="running", key=key)
        values = job.values | {"rows": str(rows_file)}
        outcome.where, outcome.why = _papermill(job.path, copy, values, log, scratch, progress, timeout)
        if not outcome.why:
            outcome.rows = rows_between(rows_file, before)
            outcome.why = "" if outcome.rows else f"it ended without writing a row to {shown_path(rows_file)}"
        outcome.state = "failed" if outcome.why else "done"
        outcome.seconds = _duration(copy)
        rows = {"rows_file": os.path.relpath(rows_file, out), "rows_bytes": [before, end_of_lines(rows_file)]}
        found = {"seconds": outcome.seconds, "where": outcome.where, "why": outcome.why, "copy_sha256": _sha256(copy)}
        parameters = resolved(job.path, job.values)
        write_status(out, job.recipe, state=outcome.state, key=key, parameters=parameters, **rows, **found)
    except KeyboardInterrupt:
        outcome.state, outcome.why = "interrupted", "stopped by Ctrl-C"
    except OSError as error:  # a disk that filled up, a folder that went away
        outcome.state, outcome.why = "failed", f"{error.strerror or error}: {error.filename or shown_path(out)}"
    if log.exists() and log.stat().st_size == 0:
        log.unlink()
    return outcome


def _papermill(path: Path, copy: Path, values: dict, log: Path, scratch: Path, progress, timeout) -> tuple[str, str]:
    """Run papermill in this process. Returns (failing cell, error), both "" when nothing was raised."""
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    from .fork_kernel import forks_for
    from .launch import RunKernelManager, kill_running, last_signal

    done, current, limit_reached = 0, ("", 0), threading.Event()

    def on_cell(cell, cell_index: int) -> None:
        nonlocal done, current
        if limit_reached.is_set():  # it passed while the kernel was still starting
            kill_running()
        progress.cell(done)
        done += 1
        tags = cell.metadata.get("tags", [])
        if "injected-parameters" not in tags:  # a cell of the copy only: not counted, so numbers fit the notebook
            tag = next((tag for tag in tags if not tag.startswith("nbval-")), "")
            current = (tag, current[1] + 1)

    def at_limit() -> None:
        limit_reached.set()
        kill_running()

    where_kernels_talk = {"connection_file": str(scratch / "kernel.json")}
    if len(str(scratch)) < 80:  # a socket's path holds about 100 bytes
        where_kernels_talk |= {"transport": "ipc", "ip": str(scratch / "ipc")}
    RunKernelManager.stderr_log, RunKernelManager.last_started = log, None
    RunKernelManager.forks = forks_for(path)
    timer = threading.Timer(timeout, at_limit) if timeout else None
    try:
        if timer:
            timer.daemon = True
            timer.start()
        papermill.execute_notebook(
            _literal(path),
            _literal(copy),
            values,
            kernel_name="python3",  # its spec is RunKernelManager's: never looked up
            language="python",
            cwd=str(path.parent),  # relative paths behave as in Jupyter and nbval
            progress_bar=False,
            config=Config({"KernelManager": where_kernels_talk}),
            kernel_manager_class=RunKernelManager,
            shutdown_kernel="immediate",
            iopub_timeout=60,
            on_cell_execute=on_cell,
        )
    except PapermillExecutionError as error:
        return _cell(current), f"{error.ename}: {error.evalue}".strip().splitlines()[0]
    except DeadKernelError:
        why = f"the kernel died{last_signal()}{_first_line(log)}"
        return _cell(current), f"stopped at its limit of {timeout:g} s" if limit_reached.is_set() else why
    except Exception as error:  # whatever papermill or a kernel that does not start raises: one recipe's failure
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        why = f"stopped at its limit of {timeout:g} s" if limit_reached.is_set() else ""
        with open(log, "a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        return _cell(current), why or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    finally:
        if timer:
            timer.cancel()
    return "", ""


def _literal(path: Path) -> str:
    """Papermill fills {names} into paths; braces of a folder's name are not that."""
    return str(path).replace("{", "{{").replace("}", "}}")


def _cell(current: tuple[str, int]) -> str:
    tag, number = current
    if not number:
        return "before the first cell"
    return f"cell [{number}]" + (f", tag `{tag}`" if tag else "")


def _first_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] if log.exists() else []
    return f": {lines[0][:200]}" if lines else ""


def _duration(copy: Path) -> float | None:
    try:
        return json.loads(copy.read_text(encoding="utf-8"))["metadata"]["papermill"]["duration"]
    except (OSError, ValueError, KeyError):
        return None


def _sha256(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def keep_edited(copy: Path, status: dict) -> None:
    """Move an executed copy that somebody has changed since aside: a run replaces only its own work."""
    if not copy.exists() or status.get("copy_sha256") in (None, _sha256(copy)):
        return
    number = 1
    while (aside := copy.with_name(f"{copy.stem}.edited-{number}.ipynb")).exists():
        number += 1
    os.replace(copy, aside)


def describe(outcome: Outcome) -> str:
    """What stays on the screen of one recipe: a line, or the report of a failure."""
    took = f", {outcome.seconds:.0f} s" if outcome.seconds is not None else ""
    rows = f"{len(outcome.rows)} row{'s' * (len(outcome.rows) != 1)}"
    if outcome.state == "done":
        return f"{outcome.recipe}: done, {rows}{took}"
    if outcome.state == "kept":
        return f"{outcome.recipe}: kept from an earlier run, {rows} (--fresh repeats it)"
    if outcome.state == "interrupted":
        return f"{outcome.recipe}: interrupted"
    where = f", {outcome.where}" if outcome.where else ""
    name = short_name(outcome.path or outcome.recipe)
    return "\n".join(
        [
            f"FAILED {outcome.recipe}.ipynb{where}",
            f"  {outcome.why}",
            f"  executed copy: {shown_path(outcome.copy)}" if outcome.copy and outcome.copy.exists() else "  no copy",
            f"  next: ./cookbook lab {name}   then ./cookbook run {name}",
        ]
    )

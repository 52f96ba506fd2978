"""Sweep points on this machine, one after another: two at once would measure each other."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from .run import Job, Outcome, execute
from .sweep_points import Point, recovered, write_log


def run_tries(
    job: Job, key: str, folder: Path, progress, *, retries: int, time_limit: float, scratch: Path
) -> tuple[Outcome, int]:
    """Execute one point in its folder until a try succeeds or `retries` are used up. Returns (outcome, tries)."""
    folder.mkdir(parents=True, exist_ok=True)
    quiet_papermill()
    for number in range(1, retries + 2):
        outcome = execute(job, folder, key, scratch, progress, time_limit)
        if outcome.state != "failed":
            break
        write_log(folder, outcome, number, retries + 1)
    return outcome, number


def run_local(
    points: list[Point], progress, *, retries: int, time_limit: float
) -> Iterator[tuple[Point, Outcome, int]]:
    """(point, outcome, tries) of each point as it ends. Stops after a point that Ctrl-C interrupted."""
    from .fork_kernel import forked_kernels

    scratch, kernels = Path(tempfile.mkdtemp(prefix="sweep")), ExitStack()
    try:
        if len(points) > 1:  # one point alone gains nothing from imports done ahead
            kernels.enter_context(forked_kernels([point.job.path for point in points], progress.line))
        for point in points:
            progress.start(point)
            outcome, tries = recovered(point), 1
            try:
                if outcome is None:
                    limits = {"retries": retries, "time_limit": time_limit}
                    outcome, tries = run_tries(point.job, point.key, point.folder, progress, **limits, scratch=scratch)
            except OSError as error:  # a full disk where the log goes
                why = f"{error.strerror or error}: {error.filename or point.folder.name}"
                outcome = Outcome(point.job.recipe, "failed", path=point.job.path, why=why)
            yield point, outcome, tries
            if outcome.state == "interrupted":
                return
    finally:
        kernels.close()
        shutil.rmtree(scratch, ignore_errors=True)


def quiet_papermill() -> None:
    """Papermill logs to the terminal unless somebody listens."""
    logger = logging.getLogger("papermill")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    logger.propagate = False

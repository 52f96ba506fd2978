"""What `sweep` shows while it works: bars on a terminal, a line a point elsewhere (a log file, CI)."""

from __future__ import annotations

from contextlib import nullcontext

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from .run import Outcome
from .sweep_points import Point, time_left, time_text


class SweepBars:
    """The engines call `start`, `cell` and `end`; use as a context manager.

    `before`: points done earlier; `seconds`: what finished points took, for the time left; `cells`: code cells of
    the executed recipe; `workers`: points that run at once.
    """

    def __init__(self, total: int, before: int, seconds: list[float], cells: int, console: Console | None = None):
        self.console = console or Console()
        self.total, self.done, self.failed, self.workers = total, before, 0, 1
        self.seconds, self.cells, self.started = list(seconds), cells, before
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=16), TextColumn("{task.fields[text]}"))
        on_terminal = self.console.is_terminal
        self.progress = (
            Progress(*columns, console=self.console, transient=True, refresh_per_second=2)
            if on_terminal
            else nullcontext()
        )
        self.all = self.one = None
        if on_terminal:
            self.all = self.progress.add_task("points", total=total, completed=before, text=self.counts())
            self.one = self.progress.add_task("cell", total=cells, text="", visible=False)

    def __enter__(self) -> SweepBars:
        self.progress.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.progress.__exit__(*error)

    @property
    def left(self) -> int:
        return self.total - self.done - self.failed

    def counts(self) -> str:
        """Such as "5 done, 1 failed, 6 left, about 4 min"."""
        left = time_left(self.seconds, self.left, self.workers)
        about = f", about {time_text(left)}" if left else ""
        return f"{self.done} done, {self.failed} failed, {self.left} left{about}"

    def start(self, point: Point) -> None:
        """A point begins."""
        self.started += 1
        if self.one is None:
            self.line(f"[{self.started}/{self.total}] {point.label} …")
        elif self.workers == 1:
            self.progress.reset(self.one, text=point.label, visible=True)

    def cell(self, done: int) -> None:
        """`done` code cells of the point that runs are through."""
        if self.one is not None:
            self.progress.update(self.one, completed=done)

    def end(self, point: Point, outcome: Outcome) -> None:
        """A point is over, for good."""
        self.done += outcome.state == "done"
        self.failed += outcome.state == "failed"
        if outcome.state == "done" and outcome.seconds:
            self.seconds.append(outcome.seconds)
        if self.one is not None:
            self.progress.update(self.one, visible=False)
            self.progress.update(self.all, completed=self.done + self.failed, text=self.counts())
        if outcome.state == "done":
            rows = f"{len(outcome.rows)} row{'s' * (len(outcome.rows) != 1)}"
            took = f", {time_text(outcome.seconds)}" if outcome.seconds else ""
            self.line(f"{point.label}: done, {rows}{took} ({self.counts()})")
        elif outcome.state == "failed":
            self.line(f"{point.label}: FAILED ({self.counts()})")

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

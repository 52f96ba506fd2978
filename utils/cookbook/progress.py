"""What `run` shows while it works: bars on a terminal, plain lines elsewhere (a log file, CI)."""

from __future__ import annotations

from contextlib import nullcontext

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Bars:
    """`start`, `cell` and `end` are called by `run_recipes`; use as a context manager."""

    def __init__(self, console: Console | None = None):
        self.console, self.task = console or Console(), None
        columns = (
            TextColumn("[{task.fields[place]}] {task.description}"),
            BarColumn(bar_width=20),
            TextColumn("cell"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self.progress = (
            Progress(*columns, console=self.console, transient=True, refresh_per_second=2)
            if self.console.is_terminal
            else nullcontext()
        )

    def __enter__(self) -> Bars:
        self.progress.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.progress.__exit__(*error)

    def start(self, recipe: str, place: str, cells: int) -> None:
        """A recipe of `cells` code cells begins; `place` is "2/5"."""
        if self.console.is_terminal:
            self.task = self.progress.add_task(recipe, total=cells, place=place)
        else:
            self.line(f"[{place}] {recipe} …")

    def cell(self, done: int) -> None:
        """`done` code cells of the recipe are through."""
        if self.task is not None:
            self.progress.update(self.task, completed=done)

    def end(self, line: str) -> None:
        """The recipe is over: its bar goes, `line` stays."""
        if self.task is not None:
            self.progress.remove_task(self.task)
            self.task = None
        self.line(line)

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

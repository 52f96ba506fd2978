"""What `prescribe` returns: a row for each step, the kept stack, its code, and a table of at most 80 columns."""

from __future__ import annotations

import html
import textwrap
from dataclasses import dataclass, field

from .figures import bytes_text
from .timing import BreakEven, ComparisonRow
from .timing.report import QUIETER, QUIETER_ADVICE
from .timing.results import UNPROVEN, WIDTH, digits, interval_of, seconds
from .unknown_ratio import UNKNOWN

MARGIN = 18  # columns of a step's name with its mark


@dataclass(frozen=True)
class StepRow:
    """One technique. `alone`: against the plain call. `on_best`: best stack so far with it, against without it.

    verdict: that of `on_best`; "not applicable", "not measurable here" or "not tried" where nothing was measured, with
    the reason. total: the stack with it against the plain call (kept steps). setup_s: what the first call of that
    stack takes beyond a later one. pays: calls until it has earned back its set-up. memory_bytes: peak of one call.
    """

    name: str
    verdict: str
    reason: str = ""
    kept: bool = False
    lossy: bool = False
    alone: ComparisonRow | None = None
    on_best: ComparisonRow | None = None
    total: ComparisonRow | None = None
    setup_s: float | None = None
    pays: BreakEven | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Prescription:
    """`rows` in the order of the trials, `kept` names, `code` that makes `run(*args, **kwargs)` of the kept stack.

    total: the kept stack against the plain call, None when nothing was kept. pays: its break-even.
    """

    rows: list[StepRow]
    kept: tuple[str, ...]
    code: str
    total: ComparisonRow | None
    plain_s: float
    plain_memory_bytes: int | None
    device: str
    threads: int
    min_effect: float
    pays: BreakEven | None = None
    control: str = ""
    notes: tuple[str, ...] = field(default=())

    def __getitem__(self, name: str) -> StepRow:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"{name!r}; steps: {', '.join(row.name for row in self.rows)}")

    def __str__(self) -> str:
        return "\n".join([*self._gains(), "", *self._costs(), "", *self._notes(), *self._result()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def _gains(self) -> list[str]:
        head = (
            f"{'step':{MARGIN}}{'alone':>6} {'on best':>7} {'95 % interval':<14} {'total':>6} {'verdict':<12}  answer"
        )
        threads = f", {self.threads} thread{'s' * (self.threads != 1)}" if self.device == "cpu" else ""
        plain = f"a plain call takes {seconds(self.plain_s)} on {self.device}{threads}"
        lines = [f"{plain}; margin {100 * self.min_effect:.3g} %", head, "-" * WIDTH]
        for row in self.rows:
            name = f"{'+' if row.kept else ' '} {row.name}"
            if row.on_best is None and row.alone is None:
                lines += _hung(name, f"{row.verdict}: {row.reason}")
                continue
            against = row.on_best or row.alone
            inside = interval_of(against) if row.on_best and against.speedup is not None else "-"
            rule = "-" if against.equivalence is None else against.equivalence.rule
            lines.append(
                f"{name:{MARGIN}}{_ratio(row.alone):>6} {_ratio(row.on_best):>7} {inside:<14} {_ratio(row.total):>6} "
                f"{row.verdict:<12} {rule}".rstrip()
            )
        return lines

    def _costs(self) -> list[str]:
        lines = [f"{'cost':{MARGIN}}{'set-up':>8}  {'pays after':<28}  peak memory a call"]
        lines.append(f"{'  plain':{MARGIN}}{'-':>8}  {'-':<28}  {_bytes(self.plain_memory_bytes)}")
        for row in self.rows:
            if row.on_best is None or row.setup_s is None:
                continue
            name = f"{'+' if row.kept else ' '} {row.name}"
            pays = _calls(row.pays) if row.pays is not None else "-"
            setup = "0 s" if row.setup_s < 0.005 else seconds(row.setup_s)
            lines.append(f"{name:{MARGIN}}{setup:>8}  {pays:<28}  {_bytes(row.memory_bytes)}".rstrip())
        return lines

    def _notes(self) -> list[str]:
        found = [f"control: {self.control}"] if self.control else []
        found += self.notes
        found += [f"{row.name}: {row.reason}" for row in self.rows if row.reason and (row.on_best or row.alone)]
        return [line for text in found for line in textwrap.wrap(text, WIDTH, subsequent_indent="  ")]

    def _result(self) -> list[str]:
        if not self.kept:
            return ["", *textwrap.wrap(f"kept: nothing. {_nothing(self.rows)}", WIDTH)]
        total = self.total
        said = f"kept: {', '.join(self.kept)}. Together {_together(total)}"
        if self.pays is not None:
            said += f", {self.pays}"
        return ["", *textwrap.wrap(f"{said}. The code that was measured:", WIDTH), "", self.code.rstrip()]


def _together(total: ComparisonRow) -> str:
    """The ratio and its interval; the verdict too where it is not faster."""
    if total.ratio_unknown:
        return f"{UNKNOWN}, noise hides the ratio"
    return f"{_ratio(total)} {interval_of(total)}" + f", {total.verdict}" * (total.verdict != "faster")


def _nothing(rows: list[StepRow]) -> str:
    """Why no step was kept. Where noise or an error left one open, it was not shown that it gains nothing."""
    if not any(row.alone for row in rows):
        return "No step was measured."
    open_ = [row for row in rows if row.verdict == "inconclusive"]
    failed = [row.name for row in rows if row.verdict == "error"]
    if not (open_ or failed):
        return "No step is faster with the same answer: call the model as it is."
    said = ["No step was shown to be faster with the same answer."]
    if open_:
        said.append(f"Inconclusive: {', '.join(row.name for row in open_)}; {_settles(open_)}.")
    if failed:
        said.append(f"Failed: {', '.join(failed)}; the reason is above.")
    return " ".join(said)


def _settles(rows: list[StepRow]) -> str:
    """What would decide inconclusive rows."""
    found = [row.on_best or row.alone for row in rows]
    if any(row.ratio_unknown for row in found):
        return "even the ratio is unknown, raise replicates and min_run_time of prescribe() on a quiet machine"
    if not all(row.needed_rounds and row.n_rounds for row in found):
        return "too few rounds, raise replicates and min_run_time of prescribe()"
    factor = max(row.needed_rounds / row.n_rounds for row in found)
    if factor >= QUIETER:
        return QUIETER_ADVICE
    rounds = max(row.needed_rounds for row in found)
    return (
        f"about {rounds:,} rounds would settle it, raise replicates and min_run_time of prescribe() {factor:.1f}-fold"
    )


def _proven(row: ComparisonRow | None) -> bool:
    return row is not None and row.verdict not in UNPROVEN and row.speedup is not None and not row.ratio_unknown


def _ratio(row: ComparisonRow | None) -> str:
    return f"{row.speedup:.{digits(row.speedup)}f}x" if _proven(row) else "-" if row is not None else ""


def _calls(pays: BreakEven) -> str:
    if pays.calls is None:
        return "never" if pays.calls_low is None else "perhaps never"
    low, high = ("never" if n is None else f"{n:,}" for n in (pays.calls_low, pays.calls_high))
    return f"{pays.calls:,} call{'s' * (pays.calls != 1)} [{low}, {high}]"


def _bytes(count: int | None) -> str:
    return "-" if count is None else bytes_text(count)


def _hung(name: str, text: str) -> list[str]:
    """A name, and a text beside it that goes on beneath itself."""
    first, *rest = textwrap.wrap(text, WIDTH - MARGIN)
    return [f"{name:{MARGIN}}{first}", *(" " * MARGIN + line for line in rest)]

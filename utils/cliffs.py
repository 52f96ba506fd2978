"""Find the operation that takes far more of the time than of the work.

A degenerate shape can send a library down a pathological path. The sign is one line of a profile whose share of the
time is far above its share of the work. `find` draws up that profile, names the suspects, and for those that it knows
another form of, measures that form on the very same shapes before it accuses.

    print(cliffs.find(model, pixel_values))
    print(cliffs.find(model.generate, input_ids, max_new_tokens=16))

Work is the least time that the measured limits of this machine allow (roofline): the longer of FLOPs over the rate of
matrix products and bytes over the rate of memory, plus a fixed cost per operation. Each weight counts once per call of
the model however often it is read, so a loop over small pieces shows as time without work.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .cliff_remedies import HELPS, TOO_LONG, Remedy, Trial, remedy_for, reproduce, try_out
from .cost import MachinePeaks, measure_peaks
from .op_profile import OUTSIDE, PYTHON, OpProfile, OpRow, profile_operations

__all__ = ["CliffReport", "CliffRow", "Suspect", "find", "judge"]

COST_PER_OPERATION = 2e-5  # seconds that no operation can go below, dispatch included
PLAIN_STEPS = (
    10  # arithmetic steps per output element of an operation without a FLOP formula (an exponential, a few taps)
)
PLAIN_RATE = 1 / 16  # how fast they go, as a part of the rate of matrix products: one lane instead of sixteen
COST_PER_MODULE = 1e-4  # seconds of Python that a module may take in a call
MIN_SHARE = 0.15  # of the time: a smaller line is not worth a look
MIN_GAIN = 1.1  # Amdahl: what the whole would gain at least if the line ran at its limit
WITH_REMEDY = 1.6  # times above the expected time, where another form of the operation can be measured
WITH_WIDE_TYPE = 1.2  # the same for float64: at its best it takes twice the time of float32
WITHOUT_REMEDY = {"counted": 6.0, "other": 12.0}  # operations with a FLOP formula, and the rest
SHOWN = 0.005  # of the time: shorter lines are not printed
LOOP_CALLS = 16  # calls of one kind of operation, in one call of the model, that make a loop
LOOP_RATIO = 3.0
LARGEST_SLOWDOWN = 5.0  # how much of a general slowness (a busy machine) is forgiven
DOUBTFUL_SLOWDOWN = 3.0  # twice what healthy models show on an idle machine: forgiving it can hide a cliff
UNSTEADY = 2.0  # times between the two fastest calls of a line: then no time of this run is believed
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class CliffRow:
    """One operation in one module, repeated layers together (`layers.*.mlp`).

    seconds: in one call; again: in the next fastest of the repeated calls. expected_s: the least that the limits allow.
    share_of_time: of the whole call; share_of_work: its expected time over that of all rows. share_of_limit: expected
    over real time (None without counted work).
    """

    path: str
    op: str
    calls: int
    seconds: float
    expected_s: float
    share_of_time: float
    share_of_work: float
    flops: int
    bytes: int
    share_of_limit: float | None
    dtype: torch.dtype | None
    again: float
    worst: OpRow | None = None  # the longest of the rows that were put together
    members: tuple[CliffRow, ...] = ()  # where whole lines were put together: a loop, an island of a type


@dataclass(frozen=True)
class Suspect:
    """A row that takes far more of the time than of the work.

    ratio: real over expected time, a general slowness of this run taken off. bound: Amdahl's, what the whole call would
    gain if this row took its expected time; it is computed, no remedy is in it. remedy: what the cookbook knows, in
    words. trial: the other form against this one, the operation alone on the same shapes, measured (None where no
    other form is known). decided: whether the trial could tell them apart.
    """

    row: CliffRow
    ratio: float
    bound: float
    remedy: str
    trial: Trial | None = None

    @property
    def decided(self) -> bool:
        return self.trial is None or self.trial.verdict != "inconclusive"

    def __str__(self) -> str:
        row = self.row
        said = (
            f"{row.path or '(the model)'} {row.op}: {row.share_of_time:.1%} of the time for {row.share_of_work:.1%} "
            f"of the work, {self.ratio:.1f}x its expected time. If it took its expected time, the whole call would be "
            f"{self.bound:.2f}x as fast (Amdahl's bound: computed, not measured). {self.remedy}"
        )
        if self.trial is None:
            return said
        said += f" Measured, the operation alone on this shape: that form is {self.trial} as fast"
        if not self.decided:
            return f"{said}: the machine was too busy to tell them apart."
        if self.trial.speedup is None or row.members:  # of several lines only the longest was measured
            return f"{said}."
        whole = 1 / (1 - row.share_of_time + row.share_of_time / self.trial.speedup)
        return f"{said}; that alone makes the whole call about {whole:.2f}x as fast."


@dataclass(frozen=True)
class CliffReport:
    """`rows`, longest first; `suspects`, worst first (empty for a healthy model); `total_s` of one call.

    undecided: what would be a suspect if its trial had not drowned in noise.

    slowdown: real over expected time of the rest of the run. spread: times between the two fastest calls, of the line
    where they differ most (see `doubt`).
    """

    rows: list[CliffRow]
    suspects: list[Suspect]
    total_s: float
    limits: str
    slowdown: float
    spread: float = 1.0
    undecided: tuple[Suspect, ...] = ()

    @property
    def doubt(self) -> str:
        """Why these times cannot say that the rest is healthy; empty when they can."""
        if self.spread >= UNSTEADY:
            return f"repeated calls differ by {self.spread:.1f}x, the machine was busy."
        if self.slowdown >= DOUBTFUL_SLOWDOWN:
            return f"everything took {int(self.slowdown)} times or more what the limits allow, is the machine busy?"
        if self.undecided:
            return "a line could not be told from its other form, the machine was busy."
        return ""

    def __str__(self) -> str:
        lines = []
        if self.doubt:
            head, hidden = ("no verdict beyond the suspects", "another") if self.suspects else ("no verdict", "a")
            lines += textwrap.wrap(f"{head}: {self.doubt} That can hide {hidden} cliff. Run it again.", 80)
        lines += textwrap.wrap(f"one call {self.total_s * 1e3:.1f} ms; limits: {self.limits}", 80)
        lines.append(f"{'ms':>9} {'time':>6} {'work':>6} {'GFLOP':>8} {'MB':>8} {'limit':>6}  operation")
        for row in [r for r in self.rows[:12] if r.share_of_time >= SHOWN]:
            limit = "-" if row.share_of_limit is None else f"{min(row.share_of_limit, 9.99):.0%}"
            name = f"{row.path or '(model)'} {row.op.removeprefix('aten::')}"
            lines.append(
                f"{row.seconds * 1e3:9.2f} {row.share_of_time:6.1%} {row.share_of_work:6.1%} {row.flops / 1e9:8.2f} "
                f"{row.bytes / 1e6:8.1f} {limit:>6}  {name if len(name) <= 30 else '..' + name[-28:]}"
            )
        for number, suspect in enumerate(self.suspects, 1):
            lines += textwrap.wrap(f"suspect {number}: {suspect}", 80, subsequent_indent="  ")
        for suspect in self.undecided:
            lines += textwrap.wrap(f"undecided: {suspect}", 80, subsequent_indent="  ")
        if not self.suspects and not self.doubt:
            lines.append("no suspect: no line takes far more of the time than of the work")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def find(model: nn.Module | Callable, *inputs: Any, **kwargs: Any) -> CliffReport:
    """Run `model(*inputs, **kwargs)` without gradients, and report where its time goes.

    Four calls: one to count, three to time (two where they are long and agree); of each line the fastest counts.
    model: a module, or a bound method of one (`model.generate`). The inputs must allow several calls: give no cache
    that a call fills. Ambient inference mode and autocast hold. No hook stays behind, whatever happens.

    Raises TypeError where `model` is neither, ValueError for a compiled model (give the eager one), and whatever the
    model raises.
    """
    owner = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    if not isinstance(owner, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected an nn.Module or a method of one (model.generate)")
    if any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in owner.modules()):
        raise ValueError(f"model {type(owner).__name__} is compiled, expected the eager model that was compiled")
    found = profile_operations(lambda: model(*inputs, **kwargs), owner)
    dtypes = {row.dtype for row in found.rows if row.flops and row.dtype in HALF}
    if found.device.type == "meta":
        raise ValueError("model is on the meta device: there is no time to measure")
    peaks = {dtype: measure_peaks(found.device, dtype) for dtype in (torch.float32, *dtypes)}
    return judge(found, peaks, try_out, reproduce)


def judge(
    found: OpProfile,
    peaks: dict[torch.dtype, MachinePeaks],
    trial: Callable[[OpRow, Remedy, torch.device], Trial] | None = None,
    alone: Callable[[OpRow, torch.device, float], float | None] | None = None,
) -> CliffReport:
    """The decision, from a profile and the limits: which rows are suspects.

    trial: measures the form of a remedy. alone: the smallest reproduction, an operation called alone, in times of a
    plain product of the FLOPs that its expected time would allow; what is not slow alone was slow by chance.
    """
    rows = _grouped(found, peaks)
    loops = _loops(rows, found)
    taken = {id(row) for _, members in loops for row in members}
    suspects, undecided = [suspect for suspect, _ in loops], []
    single = [row for row in rows if id(row) not in taken]
    for row in [*single, *_types(single)]:
        known = _covered(row, [*suspects, *undecided])
        suspect = None if known else _suspect(row, rows, found, peaks, trial, alone)
        if suspect is not None:
            (suspects if suspect.decided else undecided).append(suspect)
    suspects.sort(key=lambda s: -s.bound)
    limits, spread = str(peaks[torch.float32]), _spread(rows, found.total_s)
    return CliffReport(rows, suspects, found.total_s, limits, _slowdown(rows), spread, tuple(undecided))


def _grouped(found: OpProfile, peaks: dict[torch.dtype, MachinePeaks]) -> list[CliffRow]:
    groups: dict[tuple[str, str], list[OpRow]] = {}
    for row in found.rows:
        groups.setdefault((_pattern(row.path), row.op), []).append(row)
    work = {key: sum(_expected(row, found, peaks) for row in members) for key, members in groups.items()}
    total, all_work = found.total_s or 1.0, sum(work.values()) or 1.0
    rows = []
    for (path, op), members in groups.items():
        seconds = sum(row.seconds for row in members)
        flops, moved = sum(row.flops for row in members), sum(row.bytes for row in members)
        worst = max(members, key=lambda row: row.seconds)
        expected = work[path, op]
        limit = expected / seconds if seconds and (flops or moved) else None
        rows.append(
            CliffRow(
                path, op, sum(row.calls for row in members), seconds, expected, seconds / total,
                expected / all_work, flops, moved, limit, worst.dtype, sum(row.again for row in members), worst,
            )
        )  # fmt: skip
    return sorted(rows, key=lambda row: -row.seconds)


def _pattern(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _expected(row: OpRow, found: OpProfile, peaks: dict[torch.dtype, MachinePeaks]) -> float:
    """Seconds that the limits allow (roofline), plus the fixed cost of its kinds. The rate of float32 is the least
    that is asked of a narrower or wider type: where a type is slower, that is the cliff."""
    plain = peaks[torch.float32]
    rate = max(plain.gemm_flops_per_s, peaks.get(row.dtype, plain).gemm_flops_per_s)
    if _is_depthwise(row):
        rate *= PLAIN_RATE  # one channel at a time is no matrix product
    fixed = COST_PER_MODULE if row.op == PYTHON else COST_PER_OPERATION
    times = found.module_calls.get(row.path, 1) if row.op == PYTHON else row.kinds * found.outermost_calls
    if row.op == PYTHON:
        times = min(times, found.outermost_calls)
    if row.path == OUTSIDE:
        times = max(times, row.calls)
    steps = row.flops / rate if row.flops else row.elements * PLAIN_STEPS / (PLAIN_RATE * plain.gemm_flops_per_s)
    return max(steps, row.bytes / plain.memory_bytes_per_s) + fixed * times


def _is_depthwise(row: OpRow) -> bool:
    return row.op == "aten::convolution" and len(row.arguments) == 9 and row.arguments[1][0][1] == 1 < row.arguments[8]


def _slowdown(rows: list[CliffRow], without: CliffRow | None = None) -> float:
    """How much slower than expected the rest of this run was: a busy machine must not accuse anybody.

    The median over the rest, by expected time, so that other cliffs do not count as slowness.
    """
    left_out = {id(without), *map(id, without.members)} if without is not None else set()
    rest = sorted((r.seconds / r.expected_s, r.expected_s) for r in rows if r.expected_s and id(r) not in left_out)
    expected = sum(weight for _, weight in rest)
    if expected < 0.05 * sum(row.expected_s for row in rows):
        return 1.0
    passed, middle = 0.0, 1.0
    for ratio, weight in rest:
        passed, middle = passed + weight, ratio
        if passed >= expected / 2:
            break
    return min(max(middle, 1.0), LARGEST_SLOWDOWN)


def _spread(rows: list[CliffRow], total_s: float) -> float:
    """Times between the two fastest calls: of the whole, or of a line for which that is worth a look."""
    lines = [(row.seconds, row.again) for row in rows] + [(total_s, sum(row.again for row in rows))]
    return max((b / a for a, b in lines if a and b - a >= MIN_SHARE * total_s), default=1.0)


def _compared(row: CliffRow, rows: list[CliffRow], found: OpProfile) -> tuple[float, float]:
    """(real over expected time, Amdahl's bound), both with the slowness of the rest of the run taken off."""
    expected = row.expected_s * _slowdown(rows, without=row)
    return row.seconds / expected, found.total_s / max(found.total_s - row.seconds + expected, 1e-12)


def _suspect(
    row: CliffRow, rows: list[CliffRow], found: OpProfile, peaks: dict, trial: Callable | None, alone: Callable | None
) -> Suspect | None:
    ratio, bound = _compared(row, rows, found)
    undecided = None
    least = WITH_WIDE_TYPE if row.dtype is torch.float64 else WITH_REMEDY
    if row.share_of_time < MIN_SHARE or bound < MIN_GAIN or ratio < least or row.path == OUTSIDE:
        return None
    remedy = remedy_for(row.worst, found.device)
    if remedy is not None and remedy.name == "float32" and all(r.dtype is row.dtype for r in rows if r.flops):
        remedy = None if row.dtype is torch.float64 else remedy  # a model wholly in float64 is meant to be
    if remedy is not None and remedy.form is not None and trial is not None:
        tried = trial(row.worst, remedy, found.device)
        accused = Suspect(row, ratio, bound, remedy.text, tried)
        if tried.helps:
            return accused
        if tried.verdict == "inconclusive" and (tried.ci_high is None or tried.ci_high >= HELPS):
            undecided = accused  # unless it is a suspect without its remedy, too
        remedy = remedy if tried.verdict in (TOO_LONG, "inconclusive") else None
    strict = WITHOUT_REMEDY["counted" if row.flops else "other"]
    if ratio < strict or "linalg" in row.op:  # factorisations have no formula here
        return undecided
    worst = row.worst
    if alone is not None and worst.op != PYTHON:
        work = _expected(worst, found, peaks) / worst.calls * peaks[torch.float32].gemm_flops_per_s
        times = alone(worst, found.device, work)
        if times is not None and times < strict:
            return undecided
    text = remedy.text if remedy is not None else "No remedy known here: reproduce this shape alone (recipe 09)."
    return Suspect(row, ratio, bound, text)


def _together(members: list[CliffRow], path: str, op: str) -> CliffRow:
    """One row for several; its worst is the longest of theirs."""
    added = ("calls", "seconds", "again", "expected_s", "share_of_time", "share_of_work", "flops", "bytes")
    first = max(members, key=lambda row: row.seconds)
    sums = {name: sum(getattr(row, name) for row in members) for name in added}
    return replace(first, path=path, op=op, members=tuple(members), **sums)


def _types(rows: list[CliffRow]) -> list[CliffRow]:
    """All rows in float64 together, and all in float16: an island of a slow type may be many small rows."""
    found = []
    for dtype in (torch.float64, torch.float16):
        members = [row for row in rows if row.dtype is dtype and row.op != PYTHON]
        if len(members) > 1:
            longest = max(members, key=lambda row: row.seconds)
            found.append(_together(members, longest.path, f"(all in {str(dtype).removeprefix('torch.')})"))
    return found


def _covered(row: CliffRow, suspects: list[Suspect]) -> bool:
    """Whether a row of this sum is accused already."""
    accused = {id(s.row) for s in suspects}
    return any(id(member) in accused for member in row.members)


def _loops(rows: list[CliffRow], found: OpProfile) -> list[tuple[Suspect, list[CliffRow]]]:
    """Modules that run the same small operations many times in one call of the model, all their rows together."""
    owners: dict[str, list[CliffRow]] = {}
    for row in rows:
        worst = row.worst
        repeats = worst.calls / max(worst.kinds * found.outermost_calls, 1)
        if worst.path != OUTSIDE and worst.op != PYTHON and repeats >= LOOP_CALLS:
            owners.setdefault(_owner(worst.path, found), []).append(row)
    suspects = []
    for owner, members in owners.items():
        inner = {row.path for row in members} | {_pattern(owner)}
        members = members + [row for row in rows if row.op == PYTHON and row.path in inner]
        whole = _together(members, _pattern(owner), "(a loop)")
        ratio, bound = _compared(whole, rows, found)
        if whole.share_of_time >= MIN_SHARE and bound >= MIN_GAIN and ratio >= LOOP_RATIO:
            calls = max(row.worst.calls for row in members if row.op != PYTHON)
            text = f"The same operations run {calls} times on small pieces: give them all pieces in one call."
            suspects.append((Suspect(whole, ratio, bound, text), members))
    return suspects


def _owner(path: str, found: OpProfile) -> str:
    """The nearest module around `path` that is itself not called in the loop."""
    parts = path.split(".") if path else []
    while parts and found.module_calls.get(".".join(parts), 1) >= LOOP_CALLS * found.outermost_calls:
        parts.pop()
    return ".".join(parts)

"""What a measurement returns: plain data in seconds, and a table of at most 80 columns."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..unknown_ratio import UNKNOWN, is_unknown

WIDTH = 80
UNPROVEN = ("invalid", "error")  # verdicts that print no speed-up


@dataclass(frozen=True, repr=False)
class Measurement:
    """Seconds per call of one function.

    `samples_s` are all samples in the order taken, each the mean of `calls_per_sample` calls. The interval is the
    order-statistic interval of the median (None below six samples). A percentile is None where there are too few
    samples for it (p90: 29, p95: 59, p99: 299).
    """

    label: str
    median_s: float
    ci_low_s: float | None
    ci_high_s: float | None
    iqr_s: float
    mean_s: float
    min_s: float
    p90_s: float | None
    p95_s: float | None
    p99_s: float | None
    n: int
    calls_per_sample: int
    first_call_s: float | None
    warmup_calls: int
    samples_s: tuple[float, ...]
    warnings: tuple[str, ...]
    mode: str
    cache: str
    num_threads: int

    def __repr__(self) -> str:
        interval = ""
        if self.ci_low_s is not None:
            interval = f" [{seconds(self.ci_low_s)}, {seconds(self.ci_high_s)}]"
        first = "" if self.first_call_s is None else f", first call {seconds(self.first_call_s)}"
        head = f"{self.label}: {seconds(self.median_s)}{interval}, n = {self.n} x {self.calls_per_sample}{first}"
        how = f"  {self.mode}, {self.cache} cache, {plural(self.num_threads, 'thread')}"
        return "\n".join([head, how, *_wrapped(self.warnings)])


@dataclass(frozen=True)
class ComparisonRow:
    """One candidate against the baseline. `speedup` is baseline time over candidate time, None where not proven.

    `speedup`, `ci_low`, `ci_high`: ratio and its interval over all rebuilt instances. `within_halfwidth` and
    `between_sd`: half-width inside one instance (median) and standard deviation between instances, both of the natural
    logarithm of the ratio. `n_rounds`: paired ratios taken; `needed_rounds`: for an inconclusive row, about how many
    would settle it. `samples`: seconds per call, all replicates, in the order taken.
    """

    label: str
    baseline_label: str
    verdict: str
    speedup: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    equivalence: Any = None
    median_s: float | None = None
    baseline_median_s: float | None = None
    n_rounds: int = 0
    n_eff: float | None = None
    replicates: int = 0
    within_halfwidth: float | None = None
    between_sd: float | None = None
    min_effect: float | None = None
    needed_rounds: int | None = None
    warnings: tuple[str, ...] = ()
    error: str | None = None
    share_of_limit: float | None = None
    first_call_s: float | None = None
    calls_per_sample: int | None = None
    samples: tuple[float, ...] = field(default=(), repr=False)
    mode: str = "latency"
    cache: str = "hot"
    num_threads: int = 1
    confidence: float = 0.95

    @property
    def ratio_unknown(self) -> bool:
        """Did noise leave the ratio itself unknown? Then tables show neither the ratio nor the interval."""
        return is_unknown(self.verdict, self.ci_low, self.ci_high)


@dataclass(frozen=True, repr=False)
class Comparison:
    """All candidates against one baseline; `comparison[label]` is one row. str() is a table, and so is its HTML."""

    rows: list[ComparisonRow]
    baseline: Measurement
    min_effect: float
    replicates: int
    confidence: float = 0.95
    baseline_share_of_limit: float | None = None
    warnings: tuple[str, ...] = ()

    def __getitem__(self, label: str) -> ComparisonRow:
        for row in self.rows:
            if row.label == label:
                return row
        raise KeyError(f"{label!r}; rows: {', '.join(row.label for row in self.rows)}")

    def __iter__(self) -> Iterator[ComparisonRow]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return "\n".join([self.headline(), *_table(self.cells()), *_wrapped(self.notes())])

    def _repr_html_(self) -> str:
        head, *body = self.cells()
        style = ' style="text-align: left"'
        lines = [f"<p>{html.escape(self.headline())}</p>", "<table>"]
        lines.append("<tr>" + "".join(f"<th{style}>{html.escape(cell)}</th>" for cell in head) + "</tr>")
        for row in body:
            lines.append("<tr>" + "".join(f"<td{style}>{html.escape(cell)}</td>" for cell in row) + "</tr>")
        lines.append("</table>")
        if notes := self.notes():
            lines.append("<ul>" + "".join(f"<li>{html.escape(note)}</li>" for note in notes) + "</ul>")
        return "\n".join(lines)

    def headline(self) -> str:
        b = self.baseline
        return (
            f"{b.mode}, {b.cache} cache, {plural(b.num_threads, 'thread')}, {plural(self.replicates, 'replicate')}, "
            f"margin {100 * self.min_effect:.3g} %"
        )

    def cells(self) -> list[list[str]]:
        """Header and rows as text. The limit's column is there when a limit is known."""
        limit = any(row.share_of_limit is not None for row in self.rows) or self.baseline_share_of_limit is not None
        header = ["", "time", "speedup", f"{self.confidence:.0%} interval", "verdict", "same answer"]
        base = [self.baseline.label, seconds(self.baseline.median_s), "", "", "baseline", ""]
        lines = [header + ["limit"] * limit, base + [percent(self.baseline_share_of_limit)] * limit]
        for row in self.rows:
            proven = row.verdict not in UNPROVEN
            known = proven and row.speedup is not None and not row.ratio_unknown
            rule = "" if row.equivalence is None else row.equivalence.rule
            cells = [
                row.label,
                seconds(row.median_s) if proven else "-",
                f"{row.speedup:.{digits(row.speedup)}f}x" if known else "-",
                interval_of(row) if proven else "-",
                row.verdict,
                rule or "-",
            ]
            lines.append(cells + [percent(row.share_of_limit) if proven else "-"] * limit)
        return lines

    def notes(self) -> list[str]:
        """Errors, reasons and warnings, one line each; a warning that all rows share is said once."""
        found = [*self.baseline.warnings, *self.warnings]
        for row in self.rows:
            if row.error:
                found.append(f"{row.label}: {row.error}")
            if row.verdict == "invalid" and row.equivalence is not None:
                found.append(f"{row.label}: {row.equivalence.reason}")
            found += [f"{row.label}: {text}" for text in row.warnings if text not in self.baseline.warnings]
        return list(dict.fromkeys(found))


def _table(lines: list[list[str]]) -> list[str]:
    """Aligned columns, at most WIDTH wide: a label that does not fit stands on a line of its own."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    room = WIDTH - sum(widths[1:]) - 2 * len(widths[1:])
    widths[0] = min(widths[0], max(room, 2))
    out = []
    for line in lines:
        label, *rest = line
        if len(label) > widths[0]:
            out.append(label if len(label) <= WIDTH else label[: WIDTH - 1] + "…")
            label = ""
        aligned = [label.ljust(widths[0])]
        for index, (cell, width) in enumerate(zip(rest, widths[1:], strict=True), start=1):
            aligned.append(cell.rjust(width) if index in (1, 2, 6) else cell.ljust(width))
        out.append("  ".join(aligned).rstrip())
    out.insert(1, "-" * max(len(line) for line in out))
    return out


def _wrapped(notes: Any) -> list[str]:
    lines: list[str] = []
    for note in notes:
        lines += textwrap.wrap(note, WIDTH, initial_indent="! ", subsequent_indent="  ")
    return lines


def seconds(value: float | None) -> str:
    """Three significant digits with a fitting unit."""
    if value is None:
        return "-"
    units = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
    unit, scale = next((u for u in units if value >= 0.9995 * u[1]), units[-1])
    return f"{value / scale:#.3g}".rstrip(".") + f" {unit}"


def digits(value: float) -> int:
    """Decimals that show a ratio to two or three significant digits."""
    return next(decimals for limit, decimals in ((0.1, 3), (10, 2), (100, 1), (float("inf"), 0)) if value < limit)


def interval(low: float | None, high: float | None) -> str:
    """Both ends; with one more decimal where they would hardly differ."""
    if low is None or high is None:
        return "-"
    if high - low < 0.02 and high < 10:
        return f"[{low:.3f}, {high:.3f}]"
    return f"[{low:.{digits(low)}f}, {high:.{digits(high)}f}]"


def interval_of(row: ComparisonRow) -> str:
    """The interval of a row, or the sign for a ratio that noise left unknown."""
    return UNKNOWN if row.ratio_unknown else interval(row.ci_low, row.ci_high)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def plural(count: int, word: str) -> str:
    return f"{count} {word}" + ("" if count == 1 else "s")

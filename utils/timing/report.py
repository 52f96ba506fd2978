"""From samples to rows: ratios, verdicts, shares of a limit, advice."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..unknown_ratio import is_unknown
from . import statistics
from .builders import fixed
from .contender import Contender, Settings
from .measure import resolution_warning, summarize
from .results import Comparison, ComparisonRow, Measurement

FIXED_MIN_EFFECT = 0.05
IMPOSSIBLE_SHARE = 1.15  # a limit is a sample too: healthy runs reached 1.06 of it

QUIETER = 20  # from so many times the rounds on, time is no remedy
QUIETER_ADVICE = "a quieter machine would help more than time"


def report(
    contenders: list[Contender], settings: Settings, notes: list[str], flops: Any, bytes_moved: Any, peaks: Any
) -> Comparison:
    base = contenders[0]
    if resolution := resolution_warning(base.samples, base.calls or 1, settings.mode):
        base.warnings.append(resolution)
    measured = summarize(
        base.label,
        base.samples,
        base.calls or 1,
        base.first_call_s,
        base.warmup_calls,
        base.warnings,
        settings.mode,
        settings.cache,
        settings.threads,
        confidence=settings.confidence,
    )
    rows, shares = [], []
    for c in contenders:
        floor = floor_seconds(c.label, flops, bytes_moved, peaks)
        median = float(np.median(c.samples)) if c.samples else None
        share = floor / median if floor is not None and median else None
        if share is not None and share > IMPOSSIBLE_SHARE:
            c.warnings.append(f"impossible_rate: {share:.0%} of the measured limit; is all the work done?")
        shares.append(share)
    for c, share in zip(contenders[1:], shares[1:], strict=True):
        rows.append(_row(c, base, measured, settings, share))
    return Comparison(
        rows=rows,
        baseline=dataclasses.replace(measured, warnings=tuple(base.warnings)),
        min_effect=settings.min_effect,
        replicates=settings.replicates,
        confidence=settings.confidence,
        baseline_share_of_limit=shares[0],
        warnings=tuple(notes),
    )


def _row(
    c: Contender, base: Contender, measured: Measurement, settings: Settings, share: float | None
) -> ComparisonRow:
    common = {
        "label": c.label,
        "baseline_label": base.label,
        "equivalence": c.equivalence,
        "baseline_median_s": measured.median_s,
        "first_call_s": c.first_call_s,
        "mode": settings.mode,
        "cache": settings.cache,
        "num_threads": settings.threads,
        "confidence": settings.confidence,
    }
    rebuilt = not any(isinstance(x.builder, fixed) for x in (c, base))
    margin = settings.min_effect if rebuilt else max(settings.min_effect, FIXED_MIN_EFFECT)
    warnings = list(c.warnings)
    if not rebuilt:
        warnings.append(f"not_rebuilt: one instance only, so the margin is {margin:.0%}")
    if c.verdict is not None:  # no number without its proof
        return ComparisonRow(**common, verdict=c.verdict, error=c.error, min_effect=margin, warnings=tuple(warnings))
    estimate = statistics.combine(c.replicates, settings.confidence)
    verdict = statistics.verdict(estimate, margin)
    n_rounds = sum(r.n for r in c.replicates)
    needed = None
    if verdict == "inconclusive":
        needed = statistics.needed_rounds(estimate, n_rounds, margin)
        warnings.append(_advice(estimate, n_rounds, needed, margin))
    if resolution := resolution_warning(c.samples, c.calls, settings.mode):
        warnings.append(resolution)
    ci_low, ci_high = estimate.interval
    return ComparisonRow(
        **common,
        verdict=verdict,
        speedup=math.exp(estimate.center),
        ci_low=ci_low,
        ci_high=ci_high,
        median_s=float(np.median(c.samples)),
        n_rounds=n_rounds,
        n_eff=sum(r.n_eff for r in c.replicates),
        replicates=len(c.replicates),
        within_halfwidth=estimate.within_halfwidth,
        between_sd=estimate.between_sd,
        min_effect=margin,
        needed_rounds=needed,
        warnings=tuple(warnings),
        share_of_limit=share,
        calls_per_sample=c.calls,
        samples=tuple(c.samples),
    )


def _advice(estimate: statistics.Estimate, n_rounds: int, needed: int | None, margin: float) -> str:
    if estimate.halfwidth is None:
        return "too_few_rounds: no interval from so few rounds; give more replicates or min_run_time"
    if is_unknown("inconclusive", *estimate.interval):
        return (
            f"noise_exceeds_effect: the ratio itself is unknown after {n_rounds} rounds; "
            "is the machine busy? If not, raise replicates and min_run_time"
        )
    noise, factor = 100 * math.expm1(estimate.halfwidth), needed / n_rounds
    lever = "replicates" if estimate.halfwidth == estimate.between_halfwidth else "min_run_time"
    advice = f"raise {lever} {factor:.1f}-fold" if factor < QUIETER else QUIETER_ADVICE
    name = "noise_exceeds_effect" if estimate.halfwidth > math.log1p(margin) else "on_the_margin"
    return (
        f"{name}: ±{noise:.{1 if noise < 10 else 0}f} % after {n_rounds} rounds, margin {100 * margin:.3g} %; "
        f"about {needed} rounds would settle it ({advice})"
    )


def floor_seconds(label: str, flops: Any, bytes_moved: Any, peaks: Any) -> float | None:
    """Least seconds of one call by the machine's measured limits; None when work or limits are unknown."""
    if peaks is None:
        return None
    work = [value.get(label) if isinstance(value, Mapping) else value for value in (flops, bytes_moved)]
    limits = [peaks.gemm_flops_per_s, peaks.read_bytes_per_s]
    times = [w / limit for w, limit in zip(work, limits, strict=True) if w is not None and limit]
    return max(times) if times else None

"""Intervals without assumptions about the noise: order statistics within a run, Student's t across rebuilt instances.

Ratios are handled as logarithms, so that "1.25x faster" and "1.25x slower" are the same distance from 1.
scipy.special is used instead of scipy.stats because importing the latter costs every kernel a second.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr, stdtrit

MIN_INTERVAL_N = 6  # below six samples no order-statistic interval reaches 95 %
TAIL_MIN_N = {90: 29, 95: 59, 99: 299}  # smallest n with a one-sided 95 % bound on the percentile: 1 - p**n >= 0.95


@functools.lru_cache(maxsize=4096)
def order_rank(n: int, confidence: float) -> int:
    """Largest k with P(Bin(n, 1/2) <= k - 1) <= (1 - confidence) / 2; 0 where there is none.

    The k-th smallest and the k-th largest of n values then enclose the median with at least `confidence`
    (exact binomial interval, for example Hahn and Meeker, Statistical Intervals, section 5.2).
    """
    return int(np.count_nonzero(bdtr(np.arange(n // 2), n, 0.5) <= (1 - confidence) / 2))


def effective_n(values: np.ndarray) -> float:
    """Number of independent values that `values` [n] are worth, from the autocorrelation of their signs.

    n / (1 + 2 * sum of the first positive autocorrelations of sign(value - median)), never above n. Signs, because
    the interval below counts signs, and because a spike cannot hide or fake a correlation of signs.
    """
    n = len(values)
    if n < 2 * MIN_INTERVAL_N:
        return float(n)
    signs = np.sign(values - np.median(values))
    power = float(signs @ signs)
    if power == 0:
        return float(n)
    tau = 1.0
    for lag in range(1, n // 3):
        rho = float(signs[:-lag] @ signs[lag:]) / power
        if rho <= 1 / math.sqrt(n):  # indistinguishable from none
            break
        tau += 2 * rho
    return n / tau


def order_interval(values: np.ndarray, confidence: float, n_eff: float | None = None) -> tuple[float, float] | None:
    """Distribution-free interval of the median of `values` [n]; None where n (or n_eff) is too small for it.

    With n_eff < n the ranks of n_eff values are stretched to n, which widens the interval by about sqrt(n / n_eff).
    """
    n = len(values)
    m = n if n_eff is None else min(n, int(n_eff))
    rank = order_rank(m, confidence)
    if rank < 1:
        return None
    k = max(1, math.floor(rank * (n + 1) / (m + 1)))
    ordered = np.sort(values)
    return float(ordered[k - 1]), float(ordered[n - k])


@dataclass(frozen=True)
class Within:
    """One replicate: `values` [rounds] reduced to their median and its half-width (None: too few rounds)."""

    median: float
    halfwidth: float | None
    n: int
    n_eff: float


def within(values: np.ndarray, confidence: float) -> Within:
    n_eff = effective_n(values)
    interval = order_interval(values, confidence, n_eff)
    halfwidth = None if interval is None else (interval[1] - interval[0]) / 2
    return Within(float(np.median(values)), halfwidth, len(values), n_eff)


@dataclass(frozen=True)
class Estimate:
    """A log-ratio over all replicates. `halfwidth` is None when nothing supports an interval."""

    center: float
    halfwidth: float | None
    within_halfwidth: float | None
    between_halfwidth: float | None
    between_sd: float | None

    @property
    def interval(self) -> tuple[float, float] | tuple[None, None]:
        """Both ends as ratios."""
        if self.halfwidth is None:
            return None, None
        return math.exp(self.center - self.halfwidth), math.exp(self.center + self.halfwidth)


def t_halfwidth(values: np.ndarray, confidence: float) -> float:
    """Half-width of Student's interval of the mean of `values` [K], K >= 2."""
    k = len(values)
    return float(stdtrit(k - 1, (1 + confidence) / 2) * np.std(values, ddof=1) / math.sqrt(k))


def combine(replicates: list[Within], confidence: float) -> Estimate:
    """Mean of the replicates' medians; half-width = max(t-interval between replicates, median of those within).

    The interval within one instance says nothing about the next instance (other addresses, other cache sets): it is
    far too narrow. The one between a few instances can be narrow by luck. So the larger of the two.
    """
    medians = np.array([r.median for r in replicates])
    inner = [r.halfwidth for r in replicates if r.halfwidth is not None]
    inside = float(np.median(inner)) if inner else None
    between = t_halfwidth(medians, confidence) if len(medians) >= 2 else None
    known = [h for h in (inside, between) if h is not None]
    return Estimate(
        center=float(np.mean(medians)),
        halfwidth=max(known) if known else None,
        within_halfwidth=inside,
        between_halfwidth=between,
        between_sd=float(np.std(medians, ddof=1)) if len(medians) >= 2 else None,
    )


def verdict(estimate: Estimate, min_effect: float) -> str:
    """faster / slower / equivalent when the interval lies wholly beyond or inside the margin, else inconclusive."""
    if estimate.halfwidth is None:
        return "inconclusive"
    margin = math.log1p(min_effect)
    low, high = estimate.center - estimate.halfwidth, estimate.center + estimate.halfwidth
    if low > margin:
        return "faster"
    if high < -margin:
        return "slower"
    if -margin <= low and high <= margin:
        return "equivalent"
    return "inconclusive"


def needed_rounds(estimate: Estimate, rounds: int, min_effect: float) -> int | None:
    """Rounds that would settle an inconclusive estimate if its noise stays: rounds * (half-width / distance)**2.

    The distance is that of the estimate to the nearer edge of the margin, but at least a quarter of the margin: an
    effect that sits on the edge is never settled.
    """
    if estimate.halfwidth is None:
        return None
    margin = math.log1p(min_effect)
    distance = max(abs(abs(estimate.center) - margin), margin / 4)
    return max(rounds + 1, math.ceil(rounds * (estimate.halfwidth / distance) ** 2))


def tail(values: np.ndarray, percent: int) -> float | None:
    """A tail percentile (linear interpolation), or None where so few values say nothing about it."""
    return float(np.percentile(values, percent)) if len(values) >= TAIL_MIN_N[percent] else None

"""When did noise leave a ratio unknown? One rule for tables, warnings and headlines. Imports nothing, so that it is
cheap for commands that only read rows.
"""

from __future__ import annotations

UNKNOWN = "unknown"  # what every table shows in the place of such an interval; its ratio is a dash
UNKNOWN_RATIO = 4.0  # an interval that is wider, from end to end, names no ratio


def is_unknown(verdict: str | None, ci_low: float | None, ci_high: float | None) -> bool:
    """True for an inconclusive ratio whose interval is wider than a factor of UNKNOWN_RATIO.

    No point of such an interval means more than another: neither the ratio nor the interval is shown, and no per cent
    is named. A verdict that stands in spite of a wide interval (50x to 250x is faster) keeps its ratio. Without an
    interval: False.
    """
    known = ci_low is not None and ci_high is not None
    return verdict == "inconclusive" and known and ci_high > UNKNOWN_RATIO * ci_low

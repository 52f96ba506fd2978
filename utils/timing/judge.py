"""Does a candidate give the answer of the baseline? Asked before timing, and again on fresh inputs after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..equivalence import Equivalence, check_equivalence
from . import guards
from .contender import Builder, Contender, Settings, caught, draw_inputs
from .errors import NonFiniteOutputError, OutputMismatchError
from .measure import guarded

NON_FINITE = "non_finite"
RULE_STRENGTH = ("bitwise", "close", "rounding", "approximate", "different")


class Judge:
    """Decides whether a candidate's output is the baseline's, and remembers the weakest rule that was needed."""

    def __init__(
        self, settings: Settings, reference: Builder | None, lossy: Mapping[str, Callable], on_mismatch: str
    ) -> None:
        self.settings, self.reference, self.lossy, self.on_mismatch = settings, reference, lossy, on_mismatch

    def compare_outputs(self, contenders: list[Contender], inputs: tuple, where: dict[int, str]) -> None:
        base = contenders[0]
        reference: list[Any] = []  # computed once, and only when a tolerance did not settle it
        for c in contenders[1:]:
            if not c.live:
                continue
            with caught(c), self.settings.grad():
                found = guarded(lambda c=c: self._judge(c, base.output, inputs, reference), c.label, "the check")
                if not found.equivalent:
                    c.live, c.verdict = False, "invalid"
                    c.equivalence = dataclasses.replace(found, reason=where.get(c.index, "") + found.reason)
                elif c.equivalence is None or _weaker(found, c.equivalence):
                    c.equivalence = found
            if c.verdict == "invalid" and self.on_mismatch == "raise":
                kind = NonFiniteOutputError if NON_FINITE in c.equivalence.reason else OutputMismatchError
                raise kind(f"{c.label!r}: {c.equivalence.reason}")

    def _judge(self, c: Contender, expected: Any, inputs: tuple, reference: list[Any]) -> Equivalence:
        s = self.settings
        if c.label in self.lossy:
            found = self.lossy[c.label](c.output, expected)
        else:
            found = check_equivalence(c.output, expected, rtol=s.rtol, atol=s.atol)
            if not found.equivalent and self.reference is not None:
                if not reference:
                    guards.seed_all(s.seed)
                    exact = self.reference()
                    reference.append(guards.cloned(exact(*guards.to_float64(inputs))))
                found = check_equivalence(c.output, expected, reference=reference[0], rtol=s.rtol, atol=s.atol)
        if bad := guards.count_new_nonfinite(c.output, expected):
            reason = f"{NON_FINITE}: {bad} values are NaN or infinite where the baseline is finite"
            found = dataclasses.replace(found, equivalent=False, rule="different", reason=reason)
        return found


def _weaker(a: Equivalence, b: Equivalence) -> bool:
    return RULE_STRENGTH.index(a.rule) > RULE_STRENGTH.index(b.rule)


def check_fresh_inputs(
    contenders: list[Contender],
    make_inputs: Callable[[int], tuple],
    last_inputs: tuple,
    settings: Settings,
    judge: Judge,
) -> list[str]:
    """The same check on inputs that nobody has seen: a cached, lazy or replayed result does not follow them."""
    fresh = draw_inputs(make_inputs, settings.replicates, settings)
    where: dict[int, str] = {}
    baseline_follows = False
    for c in contenders:
        if c.live:
            old = c.output
            with caught(c), settings.grad():
                guards.seed_all(settings.seed)
                c.output = guards.cloned(guarded(lambda c=c: c.fn(*fresh), c.label, "fresh inputs"))
                stale = guards.same_values(old, c.output)
                baseline_follows = baseline_follows or (c.index == 0 and not stale)
                where[c.index] = "on fresh inputs after timing: "
                if stale and baseline_follows:
                    where[c.index] = "stale: the output did not follow fresh inputs, so a stored result was timed: "
    judge.compare_outputs(contenders, fresh, where)
    if guards.tensors(fresh) and guards.same_values(fresh, last_inputs):
        return ["same_inputs: make_inputs gives the same values for every number; a cached result would not be seen"]
    return []

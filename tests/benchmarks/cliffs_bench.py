"""utils.cliffs on twenty healthy models and on planted cliffs: nobody accused wrongly, every confirmed cliff found.

    ./cookbook bench cliffs                         all of them, a line each; some minutes on two cores
    python -m tests.benchmarks.cliffs_bench swin "float64 island"

A planted cliff counts as confirmed when the model with the healthy form of it, measured in the same run, is faster by
1.1 or more. Exit status 1 when a healthy model is accused or a confirmed cliff is missed.
"""

from __future__ import annotations

import sys

import torch

from tests.benchmarks.cliffs_zoo import HEALTHY, PLANTED
from utils import cliffs
from utils.timing import compare, fixed


def healthy(name: str) -> bool:
    torch.manual_seed(0)
    model, args, kwargs = HEALTHY[name]()
    report = cliffs.find(model.eval(), *args, **kwargs)
    verdict = "ACCUSED" if report.suspects else "silent"
    print(f"{name:28} {verdict}  {report.total_s:.2f} s, {report.slowdown:.1f}x its expected time", flush=True)
    for suspect in report.suspects:
        print(f"    {suspect}")
    return not report.suspects


def planted(name: str) -> bool:
    torch.manual_seed(0)
    case = PLANTED[name]
    slow, quick, x = case.models()
    report = cliffs.find(slow, x)
    found = [s for s in report.suspects if s.row.path == case.path and case.op in s.row.op]
    others = [f"{s.row.path} {s.row.op}" for s in report.suspects if s not in found]
    by_hand = compare(
        fixed(slow), {"healthy": fixed(quick)}, make_inputs=lambda i: (x,), min_run_time=1.0, rtol=5e-2, atol=5e-2
    )["healthy"]
    confirmed = by_hand.speedup is not None and by_hand.speedup >= cliffs.MIN_GAIN
    state = "found" if found else "MISSED" if confirmed else "not found, not confirmed"
    hand = by_hand.verdict if by_hand.speedup is None else f"{by_hand.speedup:.1f}x"
    bound = f", bound {found[0].bound:.1f}x" if found else ""
    doubt = f"; no verdict: {report.doubt}" if report.doubt else ""
    print(f"{name:28} {state}{bound}; by hand {hand}; named besides: {others or 'nothing'}{doubt}", flush=True)
    return bool(found) or not confirmed


def main() -> int:
    known = {**dict.fromkeys(HEALTHY, healthy), **dict.fromkeys(PLANTED, planted)}
    names = sys.argv[1:] or list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no model {unknown[0]!r}; expected some of: {', '.join(known)}", file=sys.stderr)
        return 2
    good = [known[name](name) for name in names]
    print(f"{sum(good)} of {len(good)} as they should be")
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())

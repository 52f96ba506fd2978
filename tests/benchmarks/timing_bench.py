"""How good is utils.timing on this machine? Run by `./cookbook bench timing`, never by pytest: every line is a time.

Each figure stands beside torch.utils.benchmark.Timer.blocked_autorange, run on A and then on B, on the same work.
About three minutes. The burners are two processes that keep two cores busy.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch.utils import benchmark

from utils.machine import describe
from utils.timing import clock, compare, measure, rounds, statistics

SIZE = 64  # one product of this size takes some 10 µs
TRUE_3 = (33, 34)  # +3.03 %
TRUE_5 = (20, 21)  # +5 %


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def products(count: int):
    """Builder of a function that does `count` equal products: its time is known relative to other counts."""

    def build():
        weight = torch.randn(SIZE, SIZE)

        def fn(x: torch.Tensor) -> torch.Tensor:
            for _ in range(count):
                y = x @ weight
            return y

        return fn

    return build


def inputs(index: int) -> tuple[torch.Tensor]:
    return (torch.randn(SIZE, SIZE),)


def ours(a: int, b: int, **options):
    """The row of `b` products against `a` products."""
    options = {"num_threads": 1, "min_run_time": 0.5, **options}
    return compare(products(a), {"b": products(b)}, make_inputs=inputs, **options)["b"]


def one_after_the_other(a: int, b: int, min_run_time: float = 0.25) -> float:
    """Ratio of medians of blocked_autorange on A, then on B: what most people do."""
    x, times = inputs(0)[0], []
    for count in (a, b):
        fn = products(count)()
        with torch.inference_mode():
            timer = benchmark.Timer("fn(x)", globals={"fn": fn, "x": x}, num_threads=1)
            times.append(timer.blocked_autorange(min_run_time=min_run_time).median)
    return times[0] / times[1]


@contextlib.contextmanager
def burners(count: int = 2) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


Line = tuple[str, str, str, str]  # figure, ours, blocked_autorange, goal


def overhead() -> list[Line]:
    """Seconds that a sample of an empty function takes."""
    nothing = clock.bind(lambda: None, (), {}, wait=False)
    options = {"mode": "latency", "cache": "hot", "timer": clock.default_timer(), "threads": 1}
    sample = clock.sampler(nothing, calls=1, **options)
    cost = np.median([_per_call(sample, 2000) for _ in range(15)])
    other = benchmark.Timer("fn()", globals={"fn": nothing}, num_threads=1)
    timer = np.median([_per_call(lambda: other.timeit(1), 200) for _ in range(15)])
    return [("overhead of a sample, empty function", f"{cost * 1e6:.2f} µs", f"{timer * 1e6:.2f} µs", "<= 0.35 µs")]


def _per_call(fn, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        fn()
    return (time.perf_counter() - start) / count


def bias() -> list[Line]:
    """Error of the median on a function that spins for a known time."""
    lines = []
    for seconds, goal in ((1e-5, 3.0), (1e-4, 0.5), (1e-3, 0.2), (1e-2, 0.1)):
        found = measure(spin, seconds, num_threads=1, min_run_time=0.5).median_s
        timer = benchmark.Timer("fn(s)", globals={"fn": spin, "s": seconds}, num_threads=1)
        other = timer.blocked_autorange(min_run_time=0.5).median
        cells = (f"{100 * (found / seconds - 1):+.2f} %", f"{100 * (other / seconds - 1):+.2f} %", f"<= {goal} %")
        lines.append((f"bias on a spin of {seconds * 1e6:g} µs", *cells))
    return lines


def coverage(trials: int = 500) -> list[Line]:
    """How often a nominal 95 % interval holds the truth on simulated noise, and the same with A before B."""
    rng, order = np.random.default_rng(0), random.Random(0)
    lines = []
    for name in ("iid", "spikes", "drift", "step"):
        shares = {True: [], False: []}
        for passes in (20, 52, 200):
            length = 2 * passes
            noise = rng.normal(0, 0.02, (trials, length))
            if name == "spikes":
                noise += (rng.random((trials, length)) < 0.05) * rng.exponential(1.0, (trials, length))
            elif name == "drift":
                for i in range(1, length):
                    noise[:, i] = 0.99 * noise[:, i - 1] + rng.normal(0, 0.015, trials)
            elif name == "step":
                noise += 0.2 * (np.arange(length) >= rng.integers(0, length, (trials, 1)))
            for interleaved in shares:
                shares[interleaved].append(np.mean([_holds(row, passes, interleaved, order) for row in noise]))
        cells = [f"{100 * min(found):.1f}-{100 * max(found):.1f} %" for found in (shares[True], shares[False])]
        lines.append((f"coverage under {name} (n = 20, 52, 200)", *cells, "93-99 %"))
    return lines


def _holds(noise: np.ndarray, passes: int, interleaved: bool, order: random.Random) -> bool:
    plan = rounds.schedule([0, 1], passes // 4, 2, order)
    taken = rounds.by_contender(plan if interleaved else sorted(plan), np.exp(noise))
    ratios = rounds.log_ratios(taken[0], taken[1])
    found = statistics.order_interval(ratios, 0.95, statistics.effective_n(ratios) if interleaved else None)
    return found is None or found[0] <= 0 <= found[1]


def same_against_same(pairs: int = 100) -> list[Line]:
    """Rebuilt pairs of equal functions: a verdict of faster or slower is wrong."""
    verdicts = [ours(10, 10, min_run_time=0.1, seed=i).verdict for i in range(pairs)]
    wrong = sum(v in ("faster", "slower") for v in verdicts)
    others = [abs(np.log(one_after_the_other(10, 10, 0.05))) > np.log(1.02) for _ in range(pairs)]
    told = f"{wrong} of {pairs} ({verdicts.count('equivalent')} equivalent)"
    return [("same against same, wrong verdicts", told, f"{sum(others)} off by > 2 %", "<= 1 of 100")]


def five_per_cent(trials: int = 20) -> list[Line]:
    rows = [ours(*TRUE_5, seed=i) for i in range(trials)]
    verdicts = [row.verdict for row in rows]
    ratios = [one_after_the_other(*TRUE_5) for _ in range(trials)]
    told = f"{verdicts.count('slower')} of {trials}, {verdicts.count('faster')} wrong sign"
    other = f"{sum(r < 1 / 1.02 for r in ratios)} of {trials}, {sum(r > 1 for r in ratios)} wrong sign"
    return [("+5 % found", told, other, ">= 95 %, none wrong")]


def three_per_cent(trials: int = 12) -> list[Line]:
    lines, true = [], TRUE_3[0] / TRUE_3[1]
    for name, loaded, goal in (("quiet", False, ""), ("two burners", True, "<= 0.3 %")):
        with burners() if loaded else contextlib.nullcontext():
            mine = [100 * abs(ours(*TRUE_3, seed=i).speedup / true - 1) for i in range(trials)]
            others = [100 * abs(one_after_the_other(*TRUE_3) / true - 1) for _ in range(trials)]
        cells = [f"{np.median(errors):.2f} (max {max(errors):.2f}) %" for errors in (mine, others)]
        lines.append((f"error on +3.03 %, {name}", *cells, goal))
    return lines


FIGURES = (overhead, bias, coverage, same_against_same, five_per_cent, three_per_cent)


def main() -> int:
    print(describe("cpu"))
    header = ("figure", "utils.timing", "blocked_autorange, A then B", "goal")
    widths = (39, 27, 27, 18)

    def show(line: Line) -> None:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)

    show(header)
    show(tuple("-" * width for width in widths))
    for figure in FIGURES:
        for line in figure():
            show(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())

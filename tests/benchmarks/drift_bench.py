"""The series behind the figure of recipe 00: one function against itself, in blocks and in pairs, on a busy machine.

    ./cookbook bench drift        prints the table and appends its rows to build/bench/drift.jsonl

A second process switches a load on and off, as a neighbour would. The right ratio is 1 in every trial.
"""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path

import numpy as np
import torch

from utils import figures
from utils.rows import append_rows, measured
from utils.timing import compare, fixed, measure

ROWS = Path(__file__).resolve().parents[2] / "build" / "bench" / "drift.jsonl"
TRIALS = 20


def neighbour(stop, seed: int) -> None:
    """Products and pauses of random length, until `stop` is set."""
    torch.set_num_threads(1)
    rng, a = random.Random(seed), torch.randn(700, 700)
    while not stop.is_set():
        for _ in range(rng.randrange(5, 60)):
            a @ a
        stop.wait(rng.uniform(0.05, 0.6))


def series() -> list[dict]:
    """Trials of one function against itself; the estimate of each trial, in blocks and in pairs, taken in turns."""
    a = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    ratios = {"all A, then all B": [], "in pairs": []}
    for trial in range(TRIALS):
        first, second = (measure(torch.mm, a, a, num_threads=1, min_run_time=0.05, warmup_time=0.01) for _ in range(2))
        ratios["all A, then all B"].append(first.median_s / second.median_s)
        pairs = compare(
            fixed(lambda x: x @ x),
            {"itself": fixed(lambda x: x @ x)},
            make_inputs=lambda i, trial=trial: (a + i + trial,),
            num_threads=1,
            min_run_time=0.1,
        )
        ratios["in pairs"].append(pairs["itself"].speedup)
    return [
        measured("00_measuring", series="drift", order=order, ratios=[round(r, 4) for r in values])
        for order, values in ratios.items()
    ]


def main() -> int:
    stop = multiprocessing.get_context("spawn").Event()
    others = [multiprocessing.get_context("spawn").Process(target=neighbour, args=(stop, i)) for i in range(2)]
    for process in others:
        process.start()
    try:
        rows = series()
    finally:
        stop.set()
        for process in others:
            process.join(10)
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    append_rows(ROWS, rows)
    figures.table(
        [
            {
                "order": row["order"],
                "trials": len(row["ratios"]),
                "median": f"{np.median(row['ratios']):.3f}",
                "5 % off or more": f"{np.mean(np.abs(np.log(row['ratios'])) > np.log(1.05)):.0%}",
            }
            for row in rows
        ]
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

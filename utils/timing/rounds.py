"""Order-balanced rounds: every contender meets the same machine, so that drift cancels in the ratio.

One round of baseline A and candidate B is ABBA then BAAB: four passes over both. With more contenders each half is a
palindrome of all of them, in a random order of the round. Stamps are stored raw; all bookkeeping happens after a
batch, because even one logarithm between two samples shifts the ratio.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .clock import Sample

MAX_BATCH_SAMPLES = 4000


def schedule(contenders: Sequence[int], rounds: int, halves: int, rng: random.Random) -> list[int]:
    """Contender of every sample: `rounds` rounds of `halves` palindromes (2: ABBA BAAB; 1: either of them)."""
    order = list(contenders)
    plan: list[int] = []
    for _ in range(rounds):
        rng.shuffle(order)
        for half in range(halves):
            there = order if half % 2 == 0 else order[::-1]
            plan += [*there, *there[::-1]]
    return plan


def take(
    plan: Sequence[int],
    samples: dict[int, Sample],
    calls: dict[int, Callable[[], Any]],
    prewarm: dict[int, int],
    current: list[int],
) -> list[float]:
    """One stamp per entry of `plan`: the contender's untimed calls, then its sample. `current[0]` names who runs."""
    stamps: list[float] = []
    append = stamps.append
    work = [(index, calls[index], range(prewarm[index]), samples[index]) for index in plan]
    collecting = gc.isenabled()
    gc.disable()
    try:
        for index, call, untimed, sample in work:
            current[0] = index
            for _ in untimed:
                call()
            append(sample())
    finally:
        if collecting:
            gc.enable()
    return stamps


def by_contender(plan: Sequence[int], stamps: Sequence[float]) -> dict[int, np.ndarray]:
    """Stamps of each contender [passes], in the order taken; entry p of all contenders is from the same pass."""
    plan_array, values = np.asarray(plan), np.asarray(stamps)
    return {int(i): values[plan_array == i] for i in np.unique(plan_array)}


def log_ratios(baseline: np.ndarray, candidate: np.ndarray) -> np.ndarray:
    """log(t_baseline / t_candidate) of each pass [passes].

    One ratio a pass, not one a round: on a loaded machine every tenth sample is a spike, and a mean over the eight
    samples of a round then holds one more often than not.
    """
    tiny = np.finfo(np.float64).tiny
    return np.log(np.maximum(baseline, tiny)) - np.log(np.maximum(candidate, tiny))


def batch_rounds(round_seconds: float, seconds_left: float, samples_per_round: int) -> int:
    """Rounds until the next look at the clock: about a quarter of the time left, at least one."""
    by_time = int(seconds_left / 4 / max(round_seconds, 1e-9))
    return max(1, min(by_time, MAX_BATCH_SAMPLES // samples_per_round))

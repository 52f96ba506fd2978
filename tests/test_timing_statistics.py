"""Intervals, tested on simulated noise: no clock, no sleeping."""

import math
import random

import numpy as np
import pytest

from utils.timing import rounds, statistics
from utils.timing.statistics import Estimate, Within

TRIALS = 400


# ------------------------------------------------------------------------------------------- simulated machines


def iid(rng, trials, length):
    return rng.normal(0, 0.02, (trials, length))


def spikes(rng, trials, length):
    """Every twentieth sample is pre-empted and takes up to several times as long."""
    return iid(rng, trials, length) + (rng.random((trials, length)) < 0.05) * rng.exponential(1.0, (trials, length))


def drift(rng, trials, length):
    """The machine's speed wanders: AR(1) with rho = 0.99, 10 % wide."""
    speed = np.empty((trials, length))
    speed[:, 0] = rng.normal(0, 0.1, trials)
    noise = rng.normal(0, 0.1 * math.sqrt(1 - 0.99**2), (trials, length))
    for i in range(1, length):
        speed[:, i] = 0.99 * speed[:, i - 1] + noise[:, i]
    return speed + rng.normal(0, 0.01, (trials, length))


def step(rng, trials, length):
    """Somewhere in the run the machine becomes 20 % slower."""
    where = rng.integers(0, length, (trials, 1))
    return iid(rng, trials, length) + 0.2 * (np.arange(length) >= where)


def covered(noise, passes, *, interleaved, true=0.03):
    """Share of trials in which the interval of log(t_baseline / t_candidate) holds the true value."""
    rng, order = np.random.default_rng(0), random.Random(0)
    machine = noise(rng, TRIALS, 2 * passes)
    hits = found = 0
    for trial in range(TRIALS):
        halves = 1 if passes % 4 else 2
        plan = rounds.schedule([0, 1], passes // (2 * halves), halves, order)
        if not interleaved:
            plan = sorted(plan)  # all of the baseline, then all of the candidate
        stamps = np.exp(machine[trial] - true * np.asarray(plan))
        taken = rounds.by_contender(plan, stamps)
        ratios = rounds.log_ratios(taken[0], taken[1])
        interval = statistics.order_interval(ratios, 0.95, statistics.effective_n(ratios) if interleaved else None)
        if interval is not None:
            found += 1
            hits += interval[0] <= true <= interval[1]
    assert found > 0.97 * TRIALS
    return hits / found


@pytest.mark.parametrize("passes", [20, 50, 200])
@pytest.mark.parametrize("noise", [iid, spikes, drift, step])
def test_interval_covers_the_truth_as_often_as_it_says(noise, passes):
    assert 0.93 <= covered(noise, passes, interleaved=True) <= 0.99


@pytest.mark.parametrize("passes", [20, 50, 200])
@pytest.mark.parametrize("noise", [drift, step])
def test_the_same_interval_fails_when_a_runs_before_b(noise, passes):
    """Guards the simulator: on a machine that changes, one after the other is wrong about half of the time."""
    assert covered(noise, passes, interleaved=False) < 0.60


@pytest.mark.parametrize("rho", [0.6, 0.8])
def test_autocorrelated_ratios_widen_the_interval(rho):
    rng = np.random.default_rng(3)
    n, trials = 200, 400
    values = np.empty((trials, n))
    values[:, 0] = rng.normal(size=trials)
    for i in range(1, n):
        values[:, i] = rho * values[:, i - 1] + math.sqrt(1 - rho**2) * rng.normal(size=trials)

    def coverage(n_eff):
        intervals = [statistics.order_interval(row, 0.95, n_eff(row)) for row in values]
        return np.mean([low <= 0 <= high for low, high in intervals])

    assert coverage(statistics.effective_n) >= 0.92
    assert coverage(lambda row: None) < 0.85  # what it would be without


# ------------------------------------------------------------------------------------------- exact pieces


@pytest.mark.parametrize(
    ("n", "rank"), [(5, 0), (6, 1), (7, 1), (8, 1), (9, 2), (10, 2), (20, 6), (50, 18), (100, 40), (200, 86)]
)
def test_order_rank_is_that_of_published_tables(n, rank):
    """Ranks of the 95 % interval of a median, as in tables of the sign test."""
    assert statistics.order_rank(n, 0.95) == rank


def test_order_rank_is_the_largest_that_keeps_the_confidence():
    for n in range(6, 80):
        rank = statistics.order_rank(n, 0.95)
        below = sum(math.comb(n, i) for i in range(rank)) / 2**n
        assert below <= 0.025 < below + math.comb(n, rank) / 2**n


def test_order_interval_takes_the_ranks_from_both_ends():
    values = np.arange(1.0, 21.0)[::-1]
    assert statistics.order_interval(values, 0.95) == (6.0, 15.0)
    assert statistics.order_interval(values[:5], 0.95) is None
    low, high = statistics.order_interval(values, 0.95, n_eff=10)
    assert low < 6.0 and high > 15.0
    assert low + high == 21.0


def test_effective_n_counts_independent_values():
    rng = np.random.default_rng(0)
    independent = rng.normal(size=400)
    assert statistics.effective_n(independent) > 300
    assert statistics.effective_n(np.repeat(rng.normal(size=40), 10)) < 100
    assert statistics.effective_n(np.tile([1.0, -1.0], 50)) == 100  # alternating values are not worth more than n
    assert statistics.effective_n(np.ones(50)) == 50


def worth(values):
    """effective_n written out: a sum over lags until a correlation of signs is no more than chance."""
    n = len(values)
    signs = [float(np.sign(v - np.median(values))) for v in values]
    power = sum(s * s for s in signs)
    tau = 1.0
    for lag in range(1, n // 3):
        rho = sum(signs[i] * signs[i + lag] for i in range(n - lag)) / power
        if rho <= 1 / math.sqrt(n):
            break
        tau += 2 * rho
    return n / tau


@pytest.mark.parametrize("n", [12, 13, 31, 60])
def test_effective_n_in_figures(n):
    rng = np.random.default_rng(n)
    walk = np.cumsum(rng.normal(size=n))
    for values in (np.arange(float(n)), walk, np.sin(np.arange(n) / 3.0), rng.normal(size=n)):
        assert statistics.effective_n(values) == pytest.approx(worth(values))
    assert statistics.effective_n(np.arange(float(n))) < n / 2


def test_few_values_are_taken_as_independent():
    assert statistics.effective_n(np.arange(11.0)) == 11.0
    assert statistics.effective_n(np.array([1.0] * 7 + [2.0] * 3 + [3.0] * 2)) < 12.0
    assert isinstance(statistics.effective_n(np.ones(3)), float)


@pytest.mark.parametrize(
    ("n_eff", "ends"),
    [
        (None, (6.0, 15.0)),
        (20.0, (6.0, 15.0)),
        (999.0, (6.0, 15.0)),
        (10.0, (3.0, 18.0)),
        (9.9, (4.0, 17.0)),
        (6.0, (3.0, 18.0)),
    ],
)
def test_ranks_are_stretched_from_n_eff_to_n(n_eff, ends):
    assert statistics.order_interval(np.arange(1.0, 21.0), 0.95, n_eff) == ends
    assert statistics.order_interval(np.arange(1.0, 21.0), 0.95, 5.9) is None


def test_the_smallest_sample_with_an_interval_spans_it():
    values = np.array([4.0, 1.0, 6.0, 2.0, 5.0, 3.0])
    assert statistics.order_interval(values, 0.95) == (1.0, 6.0)
    assert statistics.order_interval(values[:5], 0.95) is None


def test_confidence_sets_the_ranks():
    values = np.arange(1.0, 101.0)
    assert statistics.order_interval(values, 0.5) == (47.0, 54.0)
    assert statistics.order_interval(values, 0.95) == (40.0, 61.0)
    assert statistics.order_interval(values, 0.999) == (34.0, 67.0)


def test_one_replicate_in_figures():
    found = statistics.within(np.array([5.0, 1.0, 4.0, 2.0, 3.0, 9.0, 7.0, 8.0, 6.0]), 0.95)
    assert found == Within(5.0, 3.0, 9, 9.0)  # from the second to the eighth
    assert statistics.within(np.array([1.0, 2.0, 9.0]), 0.95) == Within(2.0, None, 3, 3.0)


def test_combined_in_figures():
    parts = [Within(0.0, 0.3, 9, 9.0), Within(0.2, None, 3, 3.0), Within(0.1, 0.1, 9, 9.0)]
    found = statistics.combine(parts, 0.9)
    assert found.center == pytest.approx(0.1) and found.between_sd == pytest.approx(0.1)
    assert found.within_halfwidth == pytest.approx(0.2)
    assert found.between_halfwidth == pytest.approx(2.919986 * 0.1 / math.sqrt(3))  # t(2, 95 %) = 2.919986
    assert found.halfwidth == found.within_halfwidth
    assert statistics.combine(parts[:1], 0.9) == Estimate(0.0, 0.3, 0.3, None, None)


def test_an_estimate_on_the_edge_of_the_margin_is_inside():
    edge = math.log1p(0.02)
    assert statistics.verdict(estimate(edge, 0.0), 0.02) == "equivalent"
    assert statistics.verdict(estimate(-edge, 0.0), 0.02) == "equivalent"


def test_needed_rounds_is_at_least_one_more():
    assert statistics.needed_rounds(estimate(0.5, 1e-9), 10, 0.02) == 11
    assert statistics.needed_rounds(estimate(-0.5, 1e-9), 10, 0.02) == 11
    margin = math.log1p(0.02)
    assert statistics.needed_rounds(estimate(-3 * margin, 4.01 * margin), 100, 0.02) == 403


def test_half_width_is_the_larger_of_between_and_within():
    same = [Within(0.10, 0.03, 20, 20.0)] * 4
    assert statistics.combine(same, 0.95).halfwidth == 0.03  # replicates agree by luck: the inner width stays
    apart = [Within(m, 0.001, 20, 20.0) for m in (0.0, 0.1, 0.2, 0.3)]
    estimate = statistics.combine(apart, 0.95)
    sd = math.sqrt(sum((m - 0.15) ** 2 for m in (0.0, 0.1, 0.2, 0.3)) / 3)
    assert estimate.center == pytest.approx(0.15)
    assert estimate.between_sd == pytest.approx(sd)
    assert estimate.halfwidth == pytest.approx(3.182446 * sd / 2)  # t(3, 97.5 %) = 3.182446
    assert estimate.within_halfwidth == 0.001


def test_one_replicate_has_no_between_and_too_few_rounds_no_interval():
    assert statistics.combine([Within(0.1, 0.02, 9, 9.0)], 0.95).halfwidth == 0.02
    assert statistics.combine([Within(0.1, None, 3, 3.0)], 0.95).halfwidth is None
    two = statistics.combine([Within(0.1, None, 3, 3.0), Within(0.2, None, 3, 3.0)], 0.95)
    assert two.halfwidth == pytest.approx(12.7062 * math.sqrt(0.005) / math.sqrt(2), rel=1e-4)


def estimate(center, half):
    return Estimate(center, half, half, None, None)


@pytest.mark.parametrize(
    ("center", "half", "expected"),
    [
        (0.10, 0.05, "faster"),
        (-0.10, 0.05, "slower"),
        (0.0, 0.01, "equivalent"),
        (0.005, 0.01, "equivalent"),
        (0.03, 0.02, "inconclusive"),
        (-0.03, 0.02, "inconclusive"),
        (0.0, 0.5, "inconclusive"),
        (0.10, None, "inconclusive"),
        (math.log1p(0.02) + 0.01, 0.0099, "faster"),
        (math.log1p(0.02) + 0.01, 0.0101, "inconclusive"),
        (-math.log1p(0.02) - 0.01, 0.0099, "slower"),
        (-math.log1p(0.02) - 0.01, 0.0101, "inconclusive"),
    ],
)
def test_verdict_needs_the_whole_interval(center, half, expected):
    assert statistics.verdict(estimate(center, half), 0.02) == expected


def test_needed_rounds_grows_with_the_square_of_the_noise():
    margin = math.log1p(0.02)
    assert statistics.needed_rounds(estimate(0.0, 2 * margin), 100, 0.02) == 400
    assert statistics.needed_rounds(estimate(2 * margin, 3 * margin), 10, 0.02) == pytest.approx(90, abs=1)
    assert statistics.needed_rounds(estimate(margin, margin), 10, 0.02) == 160  # on the edge: a quarter of the margin
    assert statistics.needed_rounds(estimate(0.0, None), 10, 0.02) is None


@pytest.mark.parametrize(("percent", "n"), [(90, 29), (95, 59), (99, 299)])
def test_tails_need_enough_samples(percent, n):
    values = np.arange(n, dtype=float)
    assert statistics.tail(values[1:], percent) is None
    assert statistics.tail(values, percent) == pytest.approx(percent / 100 * (n - 1))
    assert 1 - (percent / 100) ** n >= 0.95 > 1 - (percent / 100) ** (n - 1)


# ------------------------------------------------------------------------------------------- the schedule


def test_a_round_of_two_is_abba_baab():
    for seed in range(5):
        plan = rounds.schedule([0, 1], 1, 2, random.Random(seed))
        assert plan in ([0, 1, 1, 0, 1, 0, 0, 1], [1, 0, 0, 1, 0, 1, 1, 0])


@pytest.mark.parametrize("contenders", [2, 3, 5])
@pytest.mark.parametrize("halves", [1, 2])
def test_every_half_is_balanced_in_time(contenders, halves):
    """Each contender's mean position is the middle, so a linear drift cancels; and each pass holds everyone once."""
    plan = rounds.schedule(range(contenders), 6, halves, random.Random(1))
    size = 2 * contenders
    for start in range(0, len(plan), size):
        half = plan[start : start + size]
        for contender in range(contenders):
            places = [i for i, c in enumerate(half) if c == contender]
            assert sum(places) / 2 == (size - 1) / 2
        assert sorted(half[:contenders]) == list(range(contenders))
    assert len({tuple(plan[i : i + size]) for i in range(0, len(plan), size)}) > 1  # the order changes


def test_take_follows_the_plan_and_names_who_runs():
    log, current = [], [-1]
    calls = {i: (lambda i=i: log.append(("untimed", i, current[0]))) for i in (0, 1)}
    samples = {i: (lambda i=i: log.append(("timed", i, current[0])) or float(i)) for i in (0, 1)}
    stamps = rounds.take([0, 1, 1], samples, calls, {0: 2, 1: 0}, current)
    assert stamps == [0.0, 1.0, 1.0]
    assert log == [("untimed", 0, 0), ("untimed", 0, 0), ("timed", 0, 0), ("timed", 1, 1), ("timed", 1, 1)]


def test_log_ratio_of_zero_seconds_is_finite():
    assert np.isfinite(rounds.log_ratios(np.array([0.0, 1.0]), np.array([1.0, 0.0]))).all()


def test_batches_leave_time_to_look_at_the_clock():
    assert rounds.batch_rounds(0.01, 0.4, 8) == 10  # a quarter of what is left
    assert rounds.batch_rounds(10.0, 0.1, 8) == 1
    assert rounds.batch_rounds(1e-9, 100.0, 8) == rounds.MAX_BATCH_SAMPLES // 8
    assert rounds.batch_rounds(0.01, -1.0, 8) == 1


def test_a_batch_is_a_quarter_of_the_time_left():
    assert rounds.batch_rounds(1.0, 39.9, 8) == 9
    assert rounds.batch_rounds(0.0, 1.0, 16) == 250
    assert rounds.batch_rounds(1e-9, 100.0, 7) == 571
    assert rounds.batch_rounds(1.0, 7.0, 8) == 1


def test_stamps_of_each_contender_in_order():
    found = rounds.by_contender([0, 2, 2, 0], [1.0, 2.0, 3.0, 4.0])
    assert {index: values.tolist() for index, values in found.items()} == {0: [1.0, 4.0], 2: [2.0, 3.0]}
    assert all(type(index) is int for index in found)
    ratios = rounds.log_ratios(np.array([2.0, 0.0]), np.array([1.0, 1.0]))
    assert ratios[0] == pytest.approx(math.log(2)) and ratios[1] < -700


@pytest.mark.parametrize("collecting", [True, False])
def test_the_collector_is_as_it_was_after_a_batch(collecting):
    import gc

    seen = []
    (gc.enable if collecting else gc.disable)()
    try:
        rounds.take([0], {0: lambda: seen.append(gc.isenabled())}, {0: len}, {0: 0}, [-1])
        assert gc.isenabled() is collecting and seen == [False]
        with pytest.raises(ZeroDivisionError):
            rounds.take([0], {0: lambda: 1 / 0}, {0: len}, {0: 0}, [-1])
        assert gc.isenabled() is collecting
    finally:
        gc.enable()

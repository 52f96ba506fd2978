"""From samples to rows: what is advised, the floor of a limit, and every field of a row."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from timing_fakes import Machine, inputs, small_heap  # noqa: F401

from utils.timing import compare, fixed
from utils.timing.report import _advice, floor_seconds
from utils.timing.statistics import Estimate

PEAKS = SimpleNamespace(gemm_flops_per_s=1e9, read_bytes_per_s=1e8)


@pytest.mark.parametrize(
    ("half", "between", "rounds", "needed", "text"),
    [
        (
            None,
            None,
            4,
            None,
            "too_few_rounds: no interval from so few rounds; give more replicates or min_run_time",
        ),
        (
            0.70,
            0.70,
            7,
            9999,
            "noise_exceeds_effect: the ratio itself is unknown after 7 rounds; is the machine busy? "
            "If not, raise replicates and min_run_time",
        ),
        (
            0.05,
            0.05,
            100,
            350,
            "noise_exceeds_effect: ±5.1 % after 100 rounds, margin 2 %; about 350 rounds would settle it "
            "(raise replicates 3.5-fold)",
        ),
        (
            0.12,
            0.01,
            100,
            1999,
            "noise_exceeds_effect: ±13 % after 100 rounds, margin 2 %; about 1999 rounds would settle it "
            "(raise min_run_time 20.0-fold)",
        ),
        (
            0.015,
            None,
            100,
            2000,
            "on_the_margin: ±1.5 % after 100 rounds, margin 2 %; about 2000 rounds would settle it "
            "(a quieter machine would help more than time)",
        ),
    ],
)
def test_advice_names_the_noise_and_what_would_help(half, between, rounds, needed, text):
    assert _advice(Estimate(0.01, half, half, between, None), rounds, needed, 0.02) == text


def test_advice_at_the_edges():
    """Noise of exactly the margin is on the margin."""
    edge = math.log1p(0.02)
    assert _advice(Estimate(0.0, edge, edge, None, None), 10, 20, 0.02).startswith("on_the_margin")
    assert "±10 %" in _advice(Estimate(0.0, math.log(1.1 + 1e-9), 0.1, None, None), 10, 20, 0.02)


def test_the_floor_is_the_higher_of_two_limits():
    assert floor_seconds("c", 2e9, 1e8, PEAKS) == 2.0
    assert floor_seconds("c", 2e9, 3e8, PEAKS) == 3.0
    assert floor_seconds("c", 2e9, None, PEAKS) == 2.0
    assert floor_seconds("c", None, 3e8, PEAKS) == 3.0
    assert floor_seconds("c", {"c": 5e9, "d": 1e9}, {"d": 9e9}, PEAKS) == 5.0
    assert floor_seconds("c", {}, None, PEAKS) is None
    assert floor_seconds("c", 2e9, 3e8, None) is None
    no_products = SimpleNamespace(gemm_flops_per_s=None, read_bytes_per_s=1e8)
    assert floor_seconds("c", 2e9, 3e8, no_products) == 3.0


def run(candidates, baseline=None, machine=None, **options):
    machine = machine or Machine()
    made = {name: machine.builder(*spec) if isinstance(spec, tuple) else spec for name, spec in candidates.items()}
    options = {"make_inputs": inputs, "timer": machine.clock, "min_run_time": 0.3, **options}
    return compare(baseline or machine.builder(1e-3), made, **options)


def test_a_row_tells_how_it_was_measured():
    machine = Machine(0, noise=0.05)
    result = run({"c": (5e-4,)}, machine=machine, num_threads=1, label="plain", confidence=0.9, replicates=3)
    row = result["c"]
    assert (row.label, row.baseline_label, row.mode, row.cache) == ("c", "plain", "latency", "hot")
    assert (row.num_threads, row.confidence, row.replicates, row.min_effect) == (1, 0.9, 3, 0.02)
    assert result.confidence == 0.9 and result.replicates == 3 and result.min_effect == 0.02
    assert row.error is None and row.equivalence.rule == "bitwise" and row.needed_rounds is None
    assert row.baseline_median_s == result.baseline.median_s
    ratios = np.log(np.array(result.baseline.samples_s)) - np.log(np.array(row.samples))
    assert row.n_rounds == len(ratios)
    assert 0.5 * row.n_rounds < row.n_eff <= row.n_rounds
    assert row.ci_low < row.speedup < row.ci_high
    assert math.log(row.ci_high / row.speedup) == pytest.approx(math.log(row.speedup / row.ci_low))
    assert math.log(row.speedup) == pytest.approx(np.median(ratios), abs=0.02)
    assert row.first_call_s > 0 and row.calls_per_sample == 1
    assert row.share_of_limit is None and result.baseline_share_of_limit is None


def test_an_unproven_row_still_tells_how_it_was_measured():
    result = run({"bad": lambda: 1 / 0, "wrong": (5e-4, lambda x: x * 3)}, num_threads=1, label="plain")
    for row in result:
        assert (row.baseline_label, row.mode, row.cache, row.num_threads) == ("plain", "latency", "hot", 1)
        assert row.baseline_median_s == result.baseline.median_s and row.confidence == 0.95
        assert row.min_effect == 0.02 and row.warnings == ()
    assert result["bad"].verdict == "error" and "ZeroDivisionError" in result["bad"].error
    assert result["wrong"].verdict == "invalid" and result["wrong"].error is None
    assert not result["wrong"].equivalence.equivalent and result["wrong"].first_call_s == pytest.approx(5e-4)


def test_defaults_of_a_comparison():
    result = run({"c": (5e-4,)})
    assert (result.replicates, result.min_effect, result.confidence) == (6, 0.02, 0.95)
    assert result.baseline.label == "baseline" and result["c"].baseline_label == "baseline"
    assert (result.baseline.mode, result.baseline.cache) == ("latency", "hot")
    assert result.warnings == () and result.baseline.warnings == () and result["c"].warnings == ()


def test_a_fixed_contender_raises_a_small_margin_and_keeps_a_large_one():
    machine = Machine()
    instance = machine.builder(0.96e-3)()
    row = run({"c": fixed(instance)}, machine=machine)["c"]
    assert row.warnings == ("not_rebuilt: one instance only, so the margin is 5%",)
    assert row.min_effect == 0.05
    row = run({"c": fixed(instance)}, machine=machine, min_effect=0.1)["c"]
    assert row.min_effect == 0.1


def test_an_inconclusive_row_says_what_would_settle_it():
    machine = Machine(1, noise=0.3)
    row = run({"c": (1.01e-3,)}, machine=machine, min_run_time=0.1)["c"]
    assert row.verdict == "inconclusive" and len(row.warnings) == 1
    assert f"after {row.n_rounds} rounds" in row.warnings[0] and f"about {row.needed_rounds} rounds" in row.warnings[0]


def test_a_rate_above_the_limit_is_named_for_the_baseline_too():
    peaks = SimpleNamespace(gemm_flops_per_s=1e9, read_bytes_per_s=1e9)
    result = run({"same": (1e-3,), "edge": (1.02e-3,)}, flops=1.16e6, peaks=peaks)
    assert result.baseline_share_of_limit == pytest.approx(1.16)
    expected = "impossible_rate: 116% of the measured limit; is all the work done?"
    assert result.baseline.warnings == (expected,) and result["same"].warnings == (expected,)
    assert result["edge"].warnings == ()  # 114 %: a limit is a sample too

"""compare() on a simulated clock: schedules, verdicts, and everything that can be wrong with a candidate."""

import dataclasses
import gc
import math
import random

import numpy as np
import pytest
import torch
from timing_fakes import FakeClock, Machine, inputs, small_heap  # noqa: F401
from torch import nn

from utils.equivalence import declared_lossy
from utils.timing import (
    CallableFailedError,
    InputMutationError,
    MetaTensorError,
    MixedDeviceError,
    NondeterministicOutputError,
    NonFiniteOutputError,
    OutputMismatchError,
    compare,
    fixed,
)


def run(machine, baseline, candidates, **options):
    options = {"make_inputs": inputs, "timer": machine.clock, "min_run_time": 0.3, **options}
    return compare(baseline, candidates, **options)


def quiet(typical=1e-3, result=lambda x: x * 2):
    """A machine without noise and the builder of its baseline."""
    machine = Machine()
    return machine, machine.builder(typical, result)


def one(candidate_result, **options):
    """The row of a candidate that is twice as fast and returns `candidate_result(x)`; the baseline returns 2 x."""
    machine, baseline = quiet()
    return run(machine, baseline, {"c": machine.builder(5e-4, candidate_result)}, **options)["c"]


# ------------------------------------------------------------------------------------------- numbers and verdicts


def test_without_noise_the_ratio_is_exact():
    machine, baseline = quiet(1e-3)
    result = run(
        machine,
        baseline,
        {"half": machine.builder(5e-4), "same": machine.builder(1e-3), "5%": machine.builder(1.05e-3)},
    )
    assert result["half"].speedup == pytest.approx(2.0, rel=1e-6)
    assert [row.verdict for row in result] == ["faster", "equivalent", "slower"]
    assert result["5%"].speedup == pytest.approx(1 / 1.05, rel=1e-6)
    assert result["half"].median_s == pytest.approx(5e-4)
    assert result["half"].baseline_median_s == result.baseline.median_s == pytest.approx(1e-3)
    assert all(row.equivalence.rule == "bitwise" for row in result)
    assert all(row.replicates == 6 for row in result)


def test_fast_functions_are_timed_in_blocks_and_slow_ones_call_by_call():
    machine, baseline = quiet(1e-6)
    result = run(machine, baseline, {"slow": machine.builder(3e-3)}, min_run_time=0.1)
    assert result.baseline.calls_per_sample in (200, 201)  # 0.2 ms
    assert result["slow"].calls_per_sample == 1
    assert result.baseline.median_s == pytest.approx(1e-6, rel=1e-4)
    assert result["slow"].speedup == pytest.approx(1 / 3000, rel=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_a_against_a_is_never_a_difference(seed):
    machine = Machine(seed, noise=0.02, drift=0.5, spike=0.1, instance=0.003)
    row = run(machine, machine.builder(1e-3), {"null": machine.builder(1e-3)}, seed=seed)["null"]
    assert row.verdict in ("equivalent", "inconclusive")
    assert row.ci_low < 1 < row.ci_high


@pytest.mark.parametrize("seed", range(8))
def test_five_per_cent_slower_is_seen_through_drift_and_spikes(seed):
    machine = Machine(seed, noise=0.02, drift=0.5, spike=0.05, instance=0.003)
    row = run(machine, machine.builder(1e-3), {"c": machine.builder(1.05e-3)}, seed=seed, min_run_time=1.0)["c"]
    assert row.verdict == "slower"
    assert row.ci_low < 1 / 1.05 < row.ci_high


def test_noise_above_the_effect_is_inconclusive_and_says_what_would_help():
    machine = Machine(1, noise=0.3)
    row = run(machine, machine.builder(1e-3), {"c": machine.builder(1.01e-3)}, min_run_time=0.1)["c"]
    assert row.verdict == "inconclusive"
    assert row.needed_rounds > 2 * row.n_rounds
    text = " ".join(row.warnings)
    assert "noise_exceeds_effect" in text and f"about {row.needed_rounds} rounds" in text


def test_instances_that_differ_widen_the_interval():
    """Samples without noise, but every rebuilt instance has its own speed: only the replicates can show that."""
    machine = Machine(0, instance=0.05)
    row = run(machine, machine.builder(1e-3), {"c": machine.builder(1e-3)})["c"]
    assert row.within_halfwidth < 1e-9
    assert row.between_sd > 0.02
    assert row.ci_high - row.ci_low > 0.04
    assert row.verdict == "inconclusive"


def test_a_run_stops_on_width_not_on_significance():
    """Without noise the interval is narrow at once, for an enormous effect and for none alike."""
    counts = []
    for typical in (1e-3, 1e-4):
        machine, baseline = quiet()
        counts.append(run(machine, baseline, {"c": machine.builder(typical)}, min_run_time=60.0)["c"].n_rounds)
    assert max(counts) < 6 * 4000  # far from 60 simulated seconds
    noisy = Machine(0, noise=0.5)
    row = run(noisy, noisy.builder(1e-3), {"c": noisy.builder(1e-4)}, min_run_time=6.0)["c"]
    assert row.verdict == "faster"
    assert row.n_rounds > 1000  # significant after a handful of rounds, and yet the time was used


def test_the_time_is_kept():
    machine = Machine(0, noise=0.3)
    start = machine.clock.now
    run(machine, machine.builder(1e-3), {"a": machine.builder(1e-3), "b": machine.builder(1e-3)}, min_run_time=1.0)
    assert machine.clock.now - start < 1.5 * 2 * 1.0 + 0.5


def test_slow_functions_get_few_calls():
    machine, baseline = quiet(2.0)
    row = run(machine, baseline, {"c": machine.builder(1.0)}, replicates=3)["c"]
    assert row.verdict == "faster"
    assert row.speedup == pytest.approx(2.0)
    assert machine.calls <= 3 * 2 * 8  # per replicate and contender: first call, warm-up, two samples


def test_a_call_longer_than_the_warm_up_is_a_warm_up_of_its_own():
    machine, baseline = quiet(10.0)
    result = run(machine, baseline, {"c": machine.builder(5.0)}, replicates=1)
    assert result.baseline.warmup_calls == 1 and result["c"].speedup == pytest.approx(2.0)
    machine, baseline = quiet(0.01)
    assert run(machine, baseline, {"c": machine.builder(5e-3)}, replicates=1).baseline.warmup_calls > 2


def test_everything_is_rebuilt_for_every_replicate():
    machine, baseline = quiet()
    run(machine, baseline, {"a": machine.builder(1e-3), "b": machine.builder(1e-3)}, replicates=5)
    assert machine.built == 15


def test_builders_and_inputs_get_the_same_seed():
    seen = {"a": [], "b": [], "inputs": []}

    def builder(name):
        def build():
            seen[name].append((torch.rand(1).item(), np.random.rand(), random.random()))
            return lambda x: x

        return build

    def draw(index):
        seen["inputs"].append((index, torch.rand(1).item()))
        return (torch.ones(2),)

    clock = FakeClock()
    compare(builder("a"), {"b": builder("b")}, make_inputs=draw, replicates=2, min_run_time=1e-3, timer=Ticking(clock))
    assert len({*seen["a"], *seen["b"]}) == 1
    by_index = {index: value for index, value in seen["inputs"]}
    assert set(by_index) == {0, 1, 2} and len(set(by_index.values())) == 3


class Ticking:
    """A clock that moves at every reading, for functions that spend no simulated time."""

    def __init__(self, clock, tick=1e-4):
        self.clock, self.tick = clock, tick

    def __call__(self):
        self.clock.spend(self.tick)
        return self.clock()


def test_first_call_is_apart():
    machine, baseline = quiet()
    row = run(machine, baseline, {"lazy": machine.builder(1e-3, first=7.0)})["lazy"]
    assert row.first_call_s == pytest.approx(7.001)
    assert row.verdict == "equivalent"
    assert max(row.samples) == pytest.approx(1e-3)


def test_raw_samples_are_kept():
    machine = Machine(0, noise=0.1)
    result = run(machine, machine.builder(1e-3), {"c": machine.builder(1e-3)})
    row = result["c"]
    assert len(row.samples) == row.n_rounds == result.baseline.n == len(result.baseline.samples_s)
    assert row.median_s == pytest.approx(np.median(row.samples))


def test_fixed_is_not_rebuilt_and_needs_a_larger_effect():
    machine, baseline = quiet(1e-3)
    instance = machine.builder(0.96e-3)()
    result = run(machine, baseline, {"four": fixed(instance), "rebuilt": machine.builder(0.96e-3)})
    assert result["four"].verdict == "equivalent" and result["four"].min_effect == 0.05
    assert any("not_rebuilt" in text for text in result["four"].warnings)
    assert result["rebuilt"].verdict == "faster" and not result["rebuilt"].warnings
    ten = run(machine, fixed(baseline()), {"ten": machine.builder(0.9e-3)})["ten"]
    assert ten.verdict == "faster" and ten.min_effect == 0.05


def test_throughput_uses_blocks_of_calls():
    machine, baseline = quiet(1e-3)
    row = run(machine, baseline, {"c": machine.builder(5e-4)}, mode="throughput", num_threads=1)["c"]
    assert row.mode == "throughput"
    assert row.calls_per_sample == 20  # 10 ms
    assert row.speedup == pytest.approx(2.0)


def test_cold_flushes_before_every_sample(monkeypatch):
    from utils.timing import clock as clock_module

    flushes = []
    monkeypatch.setattr(clock_module, "flusher", lambda accelerator: lambda: flushes.append(1))
    machine, baseline = quiet(1e-6)
    row = run(machine, baseline, {"c": machine.builder(2e-6)}, cache="cold", replicates=2, min_run_time=1e-3)["c"]
    assert row.cache == "cold" and row.calls_per_sample == 1
    assert row.verdict == "slower"
    assert len(flushes) >= 2 * row.n_rounds
    assert any("below_resolution" in text for text in row.warnings)


def test_share_of_a_limit_and_an_impossible_rate():
    peaks = dataclasses.make_dataclass("Peaks", ["gemm_flops_per_s", "read_bytes_per_s"])(1e9, 1e9)
    machine, baseline = quiet(1e-3)
    result = run(
        machine,
        baseline,
        {"near": machine.builder(5.2e-4), "above": machine.builder(2.5e-4)},
        flops=5e5,
        bytes_moved={"baseline": 1e3, "near": 1e3, "above": 1e3},
        peaks=peaks,
    )
    assert result.baseline_share_of_limit == pytest.approx(0.5)
    assert result["near"].share_of_limit == pytest.approx(0.5 / 0.52)
    assert not result["near"].warnings
    assert result["above"].share_of_limit == pytest.approx(2.0)
    assert any("impossible_rate" in text for text in result["above"].warnings)
    assert "limit" in str(result) and "200 %" in str(result)


# ------------------------------------------------------------------------------------------- equivalence first


def test_a_wrong_answer_is_invalid_and_shows_no_number():
    row = one(lambda x: x * 2.1)
    assert row.verdict == "invalid" and row.equivalence.rule == "different"
    assert (row.speedup, row.ci_low, row.ci_high, row.median_s, row.samples) == (None, None, None, None, ())


def test_a_wrong_answer_is_not_even_timed():
    machine, baseline = quiet()
    run(machine, baseline, {"c": machine.builder(5e-4, lambda x: x * 3)})
    assert machine.built == 2  # one replicate, so that the table has a time for the baseline


def test_wrong_only_in_a_later_instance_is_invalid():
    machine, baseline = quiet()
    built = []

    def build():
        built.append(1)
        return machine.builder(1e-3, (lambda x: x * 2) if len(built) < 3 else (lambda x: x * 3))()

    row = run(machine, baseline, {"c": build})["c"]
    assert row.verdict == "invalid" and row.speedup is None
    assert len(built) == 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_where_the_baseline_is_finite_is_invalid(bad):
    row = one(lambda x: torch.cat([x[:1] * 2, torch.full((3,), bad)]))
    assert row.verdict == "invalid"
    assert "non_finite: 3 values" in row.equivalence.reason


def test_a_mismatch_raises_when_asked_to():
    with pytest.raises(OutputMismatchError, match="'c': output"):
        one(lambda x: x * 3, on_mismatch="raise")
    with pytest.raises(NonFiniteOutputError, match="'c': non_finite: 4 values"):
        one(lambda x: x / 0 * float("nan"), on_mismatch="raise")
    assert one(lambda x: x * 2, on_mismatch="raise").verdict == "faster"


def test_nan_is_invalid_even_when_the_declared_metric_does_not_see_it():
    blind = declared_lossy(lambda actual, expected: 1.0 if actual.any() else 0.0, at_least=0.9, name="blind")
    row = one(lambda x: torch.full_like(x, float("nan")), lossy={"c": blind})
    assert row.verdict == "invalid" and "non_finite" in row.equivalence.reason


def test_a_lossy_candidate_is_judged_by_its_metric():
    cosine = declared_lossy(lambda a, e: torch.cosine_similarity(a, e, dim=0).item(), at_least=0.999, name="cosine")
    close = one(lambda x: x * 2 + 0.01, lossy={"c": cosine})
    assert close.verdict == "faster" and close.equivalence.rule == "approximate"
    assert one(lambda x: x.flip(0), lossy={"c": cosine}).verdict == "invalid"


def test_float64_reference_settles_rounding():
    """Both are off by rounding; only a float64 run of the baseline can tell that neither is wrong."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=generator)

    def draw(index):
        return (torch.randn(8, 64, generator=torch.Generator().manual_seed(index)),)

    def exact():
        return lambda x: x @ weight.to(x.dtype)

    def other(x):  # the same product in another precision
        return (x.double() @ weight.double()).float()

    machine = Machine()
    tight = {"num_threads": 1, "make_inputs": draw, "rtol": 0.0, "atol": 1e-9, "replicates": 2}
    baseline = machine.builder(1e-3, lambda x: x @ weight)
    assert run(machine, baseline, {"c": machine.builder(5e-4, other)}, **tight)["c"].verdict == "invalid"
    row = run(machine, baseline, {"c": machine.builder(5e-4, other)}, reference=exact, **tight)["c"]
    assert row.verdict == "faster" and row.equivalence.rule == "rounding"


def test_a_stored_result_is_found_by_fresh_inputs():
    """Cached by the shape: every check on the inputs of a replicate passes, because each is built anew."""
    machine, baseline = quiet()

    def build():
        stored = {}

        def cached(x):
            if x.shape not in stored:
                stored[x.shape] = x * 2
            return stored[x.shape]

        return machine.builder(5e-4, cached)()

    row = run(machine, baseline, {"cached": build})["cached"]
    assert row.verdict == "invalid" and row.speedup is None
    assert "stale" in row.equivalence.reason


def test_wrong_on_fresh_inputs_is_invalid():
    machine, baseline = quiet()
    row = run(machine, baseline, {"c": machine.builder(5e-4, lambda x: x * 2 if x[0] < 6 else x * 3)})["c"]
    assert row.verdict == "invalid" and "fresh inputs after timing" in row.equivalence.reason


def test_inputs_that_never_change_are_named():
    machine, baseline = quiet()
    result = run(machine, baseline, {"c": machine.builder(1e-3)}, make_inputs=lambda index: (torch.arange(4.0),))
    assert any("same_inputs" in text for text in result.warnings)
    assert not run(machine, baseline, {"c": machine.builder(1e-3)}).warnings


def test_outputs_are_copied_before_the_next_call():
    """Static buffers, as CUDA graphs return them: the second call overwrites what the first returned."""
    machine, baseline = quiet()

    def build():
        buffer = torch.zeros(4)

        def fn(x):
            return buffer.copy_(x * 2)

        return machine.builder(1e-3, fn)()

    assert run(machine, baseline, {"static": build})["static"].verdict == "equivalent"


# ------------------------------------------------------------------------------------------- what can go wrong


def fails_at(machine, call, typical=1e-3):
    """A builder of functions that raise at the given call of each instance."""

    def build():
        count = []

        def result(x):
            count.append(1)
            if len(count) == call:
                raise RuntimeError("boom\nsecond line")
            return x * 2

        return machine.builder(typical, result)()

    return build


@pytest.mark.parametrize(
    ("call", "where"), [(1, "call 1"), (2, "call 2"), (3, "warm-up"), (4, "warm-up"), (150, "round")]
)
def test_a_failing_candidate_becomes_a_row_and_the_others_go_on(call, where):
    machine = Machine(0, noise=0.05)
    good = machine.builder(5e-4)
    result = run(machine, machine.builder(1e-3), {"bad": fails_at(machine, call), "good": good}, min_run_time=3.0)
    assert result["bad"].verdict == "error" and result["bad"].speedup is None
    assert "'bad' failed at" in result["bad"].error and where in result["bad"].error
    assert "RuntimeError: boom" in result["bad"].error and "second line" not in result["bad"].error
    assert result["good"].verdict == "faster" and result["good"].replicates == 6


@pytest.mark.parametrize("call", [1, 2, 3, 150])
def test_a_failing_baseline_raises_with_its_cause(call):
    machine = Machine(0, noise=0.05)
    with pytest.raises(CallableFailedError, match="'baseline' failed at") as caught:
        run(machine, fails_at(machine, call), {"c": machine.builder(1e-3)}, min_run_time=3.0)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_failing_builder_and_one_that_returns_no_function():
    machine, baseline = quiet()
    result = run(machine, baseline, {"raises": lambda: 1 / 0, "none": lambda: None, "good": machine.builder(1e-3)})
    assert "ZeroDivisionError" in result["raises"].error
    assert "NoneType, not a function" in result["none"].error
    assert result["good"].verdict == "equivalent"
    with pytest.raises(CallableFailedError, match="baseline"):
        run(machine, lambda: 1 / 0, {"c": machine.builder(1e-3)})


def test_all_candidates_fail_and_the_baseline_still_has_a_time():
    machine, baseline = quiet()
    result = run(machine, baseline, {"a": lambda: 1 / 0})
    assert result.baseline.median_s == pytest.approx(1e-3)
    assert [row.verdict for row in result] == ["error"]


def counter():
    count = []
    return lambda x: (count.append(1), x + len(count))[1]


def test_outputs_that_differ_between_equal_calls():
    machine, baseline = quiet()
    row = run(machine, baseline, {"c": lambda: counter()})["c"]
    assert row.verdict == "error" and "NondeterministicOutputError" in row.error
    with pytest.raises(NondeterministicOutputError):
        run(machine, lambda: counter(), {"c": baseline})


def test_random_outputs_are_deterministic_under_the_same_seed():
    machine, _ = quiet()
    noisy = machine.builder(1e-3, lambda x: x + torch.rand(4))
    assert run(machine, noisy, {"c": noisy}, min_run_time=0.01)["c"].verdict == "equivalent"


@pytest.mark.parametrize("call", [1, 2, 50])
def test_changed_inputs_are_found(call):
    machine, baseline = quiet()

    def build():
        count = []

        def result(x):
            count.append(1)
            out = x * 2
            if len(count) == call:
                x.add_(1)
            return out

        return machine.builder(1e-3, result)()

    if call < 50:
        row = run(machine, baseline, {"c": build})["c"]
        assert row.verdict == "error" and "InputMutationError" in row.error
    with pytest.raises(InputMutationError):
        run(machine, build, {"c": baseline})


def test_meta_and_mixed_devices():
    machine, baseline = quiet()
    meta = machine.builder(1e-3, lambda x: x.to("meta"))
    assert "MetaTensorError" in run(machine, baseline, {"c": meta})["c"].error
    with pytest.raises(MetaTensorError):
        run(machine, baseline, {"c": baseline}, make_inputs=lambda i: (torch.empty(4, device="meta"),))
    with pytest.raises(MixedDeviceError, match="CUDA"):
        run(machine, baseline, {"c": baseline}, mode="device")


def test_tensors_on_several_devices_are_refused():
    from utils.timing import guards

    class Elsewhere:  # no second device here: only the attribute is looked at
        device = torch.device("cuda:0")

    real = torch.ones(3)
    elsewhere = torch.ones(3).as_subclass(type("T", (torch.Tensor,), {"device": Elsewhere.device}))
    with pytest.raises(MixedDeviceError, match="cpu, cuda:0"):
        guards.check_devices((real, elsewhere), "latency")
    assert guards.check_devices((torch.tensor(1.0), elsewhere), "latency") == "cuda"  # a scalar goes anywhere


def test_train_mode_grad_and_constant_inputs_are_warned_about():
    class Net(nn.Linear):
        pass

    machine = Machine()

    def build(training):
        def make():
            module = Net(4, 4).train(training)
            timed = machine.builder(1e-3, lambda x: x)
            spend = timed()
            module.register_forward_hook(lambda *a: (spend(a[1][0]), None)[1])
            return module

        return make

    constant = {"make_inputs": lambda i: (torch.full((8, 4), float(i + 1)),)}
    result = run(machine, build(False), {"c": build(True)}, grad_mode="enabled", **constant)
    assert any("train_mode" in text for text in result["c"].warnings)
    assert not any("train_mode" in text for text in result.baseline.warnings)
    notes = " ".join(result.warnings)
    assert "grad_enabled" in notes and "constant_input" in notes
    quiet_result = run(machine, build(False), {"c": build(False)}, make_inputs=lambda i: (torch.rand(8, 4),))
    assert not quiet_result.warnings and not quiet_result["c"].warnings


def test_calls_run_in_inference_mode_and_builders_do_not():
    seen = []
    machine = Machine()

    def build():
        seen.append(("build", torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        return machine.builder(1e-3, lambda x: (seen.append(("call", torch.is_inference_mode_enabled())), x)[1])()

    run(machine, build, {"c": machine.builder(1e-3, lambda x: x)}, replicates=1)
    assert ("build", False, True) in seen and ("call", True) in seen and ("call", False) not in seen


# ------------------------------------------------------------------------------------------- state is put back


def state():
    return (
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        gc.isenabled(),
        torch.get_rng_state().tolist(),
        str(np.random.get_state()),
        random.getstate(),
    )


@pytest.mark.parametrize("failing", ["baseline", "candidate", "inputs", "nobody"])
def test_state_is_put_back(failing):
    def disturb(x):
        torch.manual_seed(99)
        np.random.seed(99)
        random.seed(99)
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        gc.disable()
        return x * 2

    def draw(index):
        disturb(torch.ones(1))
        if failing == "inputs" and index == 1:
            raise OSError("no more inputs")
        return inputs(index)

    machine = Machine()
    good = machine.builder(1e-3, disturb)
    bad = machine.builder(1e-3, lambda x: disturb(x) / None)
    torch.set_num_threads(2)
    before = state()
    try:
        if failing in ("baseline", "inputs"):
            with pytest.raises(CallableFailedError):
                run(machine, bad if failing == "baseline" else good, {"c": good}, make_inputs=draw, num_threads=1)
        else:
            run(machine, good, {"c": bad if failing == "candidate" else good}, make_inputs=draw, num_threads=1)
        assert state() == before
    finally:
        torch.set_grad_enabled(True)
        gc.enable()


def test_threads_are_set_and_recorded():
    machine, _ = quiet()
    seen = []
    build = machine.builder(1e-3, lambda x: (seen.append(torch.get_num_threads()), x)[1])
    row = run(machine, build, {"c": build}, num_threads=1, replicates=1)["c"]
    assert set(seen) == {1} and row.num_threads == 1


def test_garbage_that_was_frozen_before_is_frozen_after():
    machine, baseline = quiet()
    frozen = gc.get_freeze_count()
    run(machine, baseline, {"c": baseline}, replicates=1)
    assert gc.get_freeze_count() == frozen > 0
    gc.unfreeze()
    run(machine, baseline, {"c": baseline}, replicates=1)
    assert gc.get_freeze_count() == 0
    gc.freeze()


def test_garbage_collector_is_off_while_samples_are_taken():
    machine, _ = quiet()
    seen = []
    build = machine.builder(1e-3, lambda x: (seen.append(gc.isenabled()), x)[1])
    run(machine, build, {"c": build}, replicates=1)
    assert seen.count(False) > 50
    assert gc.isenabled()


# ------------------------------------------------------------------------------------------- wrong arguments


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"candidates": {}}, ValueError, "at least one"),
        ({"candidates": [lambda: abs]}, TypeError, "mapping"),
        ({"candidates": {"": lambda: abs}}, TypeError, "labels"),
        ({"candidates": {"baseline": lambda: abs}}, ValueError, "also the label of the baseline"),
        ({"candidates": {"c": 3}}, TypeError, "'c' is int"),
        ({"candidates": {"c": lambda x: x}}, TypeError, "fixed"),
        ({"candidates": {"c": nn.Linear(2, 2)}}, TypeError, "module"),
        ({"baseline": nn.Linear(2, 2)}, TypeError, "module"),
        ({"replicates": 0}, ValueError, "replicates"),
        ({"min_run_time": 0}, ValueError, "min_run_time"),
        ({"min_effect": 0}, ValueError, "min_effect"),
        ({"confidence": 1.0}, ValueError, "confidence"),
        ({"num_threads": 0}, ValueError, "num_threads"),
        ({"prewarm": -1}, ValueError, "prewarm"),
        ({"on_mismatch": "ignore"}, ValueError, "on_mismatch"),
        ({"mode": "speed"}, ValueError, "latency, throughput, device"),
        ({"cache": "warm"}, ValueError, "hot, cold"),
        ({"grad_mode": "off"}, ValueError, "inference"),
        ({"make_inputs": None}, TypeError, "make_inputs"),
        ({"make_inputs": lambda i: torch.ones(2)}, TypeError, "tuple"),
        ({"lossy": {"x": None}}, ValueError, "'x' is no candidate"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(change, error, message):
    built = []

    def build():
        built.append(1)
        return abs

    arguments = {"baseline": build, "candidates": {"c": build}, "make_inputs": inputs, **change}
    with pytest.raises(error, match=message) as caught:
        compare(arguments.pop("baseline"), arguments.pop("candidates"), **arguments)
    assert not built
    assert "\n" not in str(caught.value)


def test_inputs_that_end_too_early_are_noticed_before_any_work():
    machine, baseline = quiet()
    with pytest.raises(CallableFailedError, match="make_inputs"):
        run(machine, baseline, {"c": baseline}, make_inputs=lambda i: [inputs(0)] * 6 if i < 6 else [][i])
    assert machine.built == 0


def test_fixed_wants_a_function():
    with pytest.raises(TypeError, match="fixed"):
        fixed(3)
    assert fixed(math.sqrt)() is math.sqrt


# ------------------------------------------------------------------------------------------- order and time


def logging_builder(machine, name, log, typical=1e-3):
    """Builds functions that note who was built and called."""

    def build():
        log.append(("build", name))
        return machine.builder(typical, lambda x: (log.append(("call", name)), x * 2)[1])()

    return build


def test_the_baseline_is_built_first_and_later_the_order_changes():
    machine, log = Machine(), []
    names = [f"c{i}" for i in range(5)]
    candidates = {name: logging_builder(machine, name, log) for name in names}
    run(machine, logging_builder(machine, "b", log), candidates, replicates=4, min_run_time=0.01)
    built = [name for what, name in log if what == "build"]
    replicates = [built[i : i + 6] for i in range(0, 24, 6)]
    assert replicates[0] == ["b", *names]  # a baseline that fails does so before any other work
    assert all(sorted(one) == ["b", *names] for one in replicates)
    assert len({tuple(one) for one in replicates}) == 4


@pytest.mark.parametrize(
    ("typical", "options", "untimed"),
    [
        (1e-4, {}, 2),
        (1e-4, {"prewarm": 5}, 5),
        (1e-4, {"prewarm": 0}, 0),
        (1e-3, {}, 1),
        (1e-3, {"prewarm": 0}, 0),
        (3e-2, {}, 0),
        (1e-4, {"cache": "cold"}, 0),
    ],
)
def test_untimed_calls_before_a_sample(monkeypatch, typical, options, untimed):
    from utils.timing import clock as clock_module
    from utils.timing import rounds

    asked = []
    plain = rounds.take
    monkeypatch.setattr(
        rounds, "take", lambda plan, samples, calls, prewarm, current: (
            asked.append(dict(prewarm)), plain(plan, samples, calls, prewarm, current))[1]
    )  # fmt: skip
    monkeypatch.setattr(clock_module, "flusher", lambda accelerator: lambda: None)
    machine = Machine()
    run(machine, machine.builder(typical), {"c": machine.builder(typical)}, replicates=1, min_run_time=0.1, **options)
    assert {tuple(one.values()) for one in asked} == {(untimed, untimed)}


def test_throughput_has_no_untimed_calls_and_little_warm_up():
    machine = Machine()
    run(
        machine, machine.builder(1e-3), {"c": machine.builder(1e-3)}, mode="throughput", num_threads=1, replicates=1,
        min_run_time=0.5,
    )  # fmt: skip
    assert machine.clock.now - 100 < 0.5 + 1.0


def test_the_first_warm_up_is_longer(monkeypatch):
    """It also decides how many calls a sample holds. Later instances only need their caches."""
    from utils.timing import rounds

    calls, plain = [], rounds.take
    monkeypatch.setattr(rounds, "take", lambda *args: (calls.append(machine.calls), plain(*args))[1])
    machine, baseline = quiet(1e-3)
    result = run(machine, baseline, {"c": machine.builder(1e-3)}, replicates=2, min_run_time=1e-3)
    assert result.baseline.warmup_calls in (26, 31)  # a quarter of 0.1 s
    assert calls[0] == 2 * (2 + result.baseline.warmup_calls)
    before = [count for count in calls if count > calls[0]]
    assert before[-1] - calls[0] < 2 * 12 + 60  # call 1, and eleven to warm up


def test_more_candidates_get_more_time():
    spent = []
    for count in (1, 3):
        machine = Machine(3, noise=0.5)
        candidates = {f"c{i}": machine.builder(1e-3) for i in range(count)}
        run(machine, machine.builder(1e-3), candidates, min_run_time=2.0, replicates=2)
        spent.append(machine.clock.now - 100)
    assert 2 < spent[1] / spent[0] < 4  # seconds per candidate


def test_slow_functions_still_get_pairs():
    machine = Machine()
    row = run(machine, machine.builder(0.5), {"c": machine.builder(0.25)}, replicates=2, min_run_time=0.01)["c"]
    assert row.replicates == 2 and row.n_rounds == 4  # one palindrome each
    assert row.verdict == "faster" and row.speedup == pytest.approx(2.0)


def test_progress_is_written_to_stderr_only_when_asked_for(capsys):
    machine, baseline = quiet()
    run(machine, baseline, {"c": baseline}, replicates=2)
    assert capsys.readouterr() == ("", "")
    run(machine, baseline, {"c": baseline}, replicates=2, progress=True)
    assert capsys.readouterr() == ("", "\rreplicate 1 of 2\rreplicate 2 of 2\n")


def test_seeds_of_builders_and_inputs_are_not_the_same():
    """An input drawn with the seed of the weights would be correlated with them."""
    drawn = {"weights": set(), "inputs": []}

    def build():
        drawn["weights"].add(torch.rand(1).item())
        return lambda x: x

    def draw(index):
        drawn["inputs"].append(torch.rand(1).item())
        return (torch.ones(2),)

    options = {"make_inputs": draw, "replicates": 4, "min_run_time": 1e-3}
    compare(build, {"c": build}, timer=Ticking(FakeClock()), **options)
    assert len(drawn["weights"]) == 1 and not drawn["weights"] & set(drawn["inputs"])
    first = [*drawn["weights"], *drawn["inputs"]]
    drawn["weights"].clear(), drawn["inputs"].clear()
    compare(build, {"c": build}, timer=Ticking(FakeClock()), seed=1, **options)
    assert not {*drawn["weights"], *drawn["inputs"]} & set(first)


# ------------------------------------------------------------------------------------------- words of errors


def test_what_a_failing_candidate_says():
    machine, baseline = quiet()
    result = run(
        machine,
        baseline,
        {
            "raises": lambda: 1 / 0,
            "none": lambda: None,
            "call 1": fails_at(machine, 1),
            "call 2": fails_at(machine, 2),
            "warm-up": fails_at(machine, 3),
            "later": fails_at(machine, 10),
        },
    )
    boom = "RuntimeError: boom"
    assert [row.error for row in result] == [
        "CallableFailedError: 'raises' failed at build: ZeroDivisionError: division by zero",
        "CallableFailedError: 'none' failed at build: TypeError: the builder returned NoneType, not a function",
        f"CallableFailedError: 'call 1' failed at call 1: {boom}",
        f"CallableFailedError: 'call 2' failed at call 2: {boom}",
        f"CallableFailedError: 'warm-up' failed at warm-up: {boom}",
        f"CallableFailedError: 'later' failed at warm-up: {boom}",
    ]
    result = run(machine, baseline, {"c": fails_at(machine, 60), "good": baseline}, min_run_time=3.0)
    assert result["c"].error == f"CallableFailedError: 'c' failed at a timed round: {boom}"
    assert result["good"].verdict == "equivalent"


def test_a_candidate_that_fails_after_timing():
    """On fresh inputs only."""
    machine, baseline = quiet()
    row = run(machine, baseline, {"c": machine.builder(1e-3, lambda x: x * 2 if x[0] < 6 else x / None)})["c"]
    assert row.verdict == "error" and row.error.startswith("CallableFailedError: 'c' failed at fresh inputs: TypeError")


def test_inputs_that_fail():
    machine, baseline = quiet()

    def draw(index):
        if index == 1:
            raise OSError("gone")
        return inputs(index)

    with pytest.raises(CallableFailedError) as caught:
        run(machine, baseline, {"c": baseline}, make_inputs=draw)
    assert str(caught.value) == "'make_inputs' failed at number 1: OSError: gone"
    with pytest.raises(TypeError) as caught:
        run(machine, baseline, {"c": baseline}, make_inputs=lambda i: torch.ones(2))
    assert str(caught.value) == "make_inputs: expected a tuple of arguments, got Tensor; write `(x,)`"
    assert run(machine, baseline, {"c": baseline}, make_inputs=lambda i: [*inputs(i)])["c"].verdict == "equivalent"


def changes_at(machine, call):
    """A builder of functions that change their input at the given call of each instance, and then at every call."""

    def build():
        count = []

        def result(x):
            count.append(1)
            out = x * 2
            if len(count) >= call:
                x.add_(1)
            return out

        return machine.builder(1e-3, result)()

    return build


def test_who_changed_the_inputs_during_the_rounds():
    machine, baseline = quiet()
    result = run(machine, baseline, {"bad": changes_at(machine, 60), "good": baseline}, min_run_time=3.0)
    text = "InputMutationError: 'bad' changes its inputs, so every call does other work; clone them inside"
    assert result["bad"].verdict == "error" and result["bad"].error == text
    assert result["good"].verdict == "equivalent" and result["good"].replicates == 6


def test_inputs_that_change_once_leave_everybody_suspect():
    machine, baseline = quiet()

    def build():
        count = []

        def result(x):
            count.append(1)
            return (x * 2, x.add_(1) if len(count) == 60 else 0)[0]

        return machine.builder(1e-3, result)()

    with pytest.raises(InputMutationError) as caught:
        run(machine, baseline, {"once": build}, min_run_time=3.0)
    expected = "the inputs changed during the timed rounds, at some call of one of 'baseline', 'once'"
    assert str(caught.value) == expected


def test_a_contender_that_changes_inputs_does_not_spoil_the_others():
    machine, baseline = quiet()
    result = run(machine, baseline, {"bad": changes_at(machine, 1), "good": machine.builder(5e-4)})
    assert "InputMutationError" in result["bad"].error
    assert result["good"].verdict == "faster" and result["good"].equivalence.rule == "bitwise"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"make_inputs": None}, "make_inputs: expected a function of the replicate's number, got NoneType"),
        ({"replicates": 0}, "replicates: expected 1 or more, got 0"),
        ({"min_effect": 0}, "min_effect: expected a share between 0 and 1, got 0"),
        ({"min_effect": 1}, "min_effect: expected a share between 0 and 1, got 1"),
        ({"prewarm": -1}, "prewarm: expected 0 or more, got -1"),
        ({"on_mismatch": "x"}, "on_mismatch: expected one of invalid, raise, got 'x'"),
        ({"lossy": {"c": len, "z": len, "x": len}}, "lossy: 'x' is no candidate; expected one of c, d"),
    ],
)
def test_messages_about_arguments(change, message):
    arguments = {"make_inputs": inputs, **change}
    with pytest.raises((ValueError, TypeError)) as caught:
        compare(list, {"c": list, "d": list}, **arguments)
    assert str(caught.value) == message


# ------------------------------------------------------------------------------------------- the check in detail


def test_the_weakest_rule_of_all_replicates_is_kept():
    built = []

    def build():
        built.append(1)
        return machine.builder(1e-3, (lambda x: x * 2) if len(built) != 2 else (lambda x: x * 2 + 1e-6))()

    machine, baseline = quiet()
    row = run(machine, baseline, {"c": build}, make_inputs=lambda i: (torch.ones(4) + i,), replicates=4)["c"]
    assert row.verdict == "equivalent" and row.equivalence.rule == "close"


def test_reasons_of_invalid_rows():
    machine, baseline = quiet()
    stale = {}
    result = run(
        machine,
        baseline,
        {
            "wrong": machine.builder(1e-3, lambda x: x * 3),
            "late": machine.builder(1e-3, lambda x: x * 2 if x[0] < 6 else x * 3),
            "stored": lambda: (stale.clear(), machine.builder(1e-3, lambda x: stale.setdefault("y", x * 2))())[1],
            "nan": machine.builder(1e-3, lambda x: x * float("nan")),
        },
    )
    reasons = [row.equivalence.reason for row in result]
    assert reasons[0].startswith("output at (3,): 9, expected 6; 3 of 4 values differ")
    assert reasons[1].startswith("on fresh inputs after timing: output at (3,): 27, expected 18; 4 of 4 values differ")
    assert reasons[2].startswith(
        "stale: the output did not follow fresh inputs, so a stored result was timed: output at (0,): 10, expected 12"
    )
    assert reasons[3] == "non_finite: 4 values are NaN or infinite where the baseline is finite"
    assert [row.equivalence.equivalent for row in result] == [False] * 4


def test_a_baseline_that_ignores_its_inputs_makes_nobody_stale():
    machine, _ = quiet()
    same = machine.builder(1e-3, lambda x: torch.ones(2))
    assert run(machine, same, {"c": same})["c"].verdict == "equivalent"
    other = machine.builder(1e-3, lambda x: torch.ones(2) * (1 if x[0] < 6 else 2))
    row = run(machine, same, {"c": other})["c"]
    assert row.equivalence.reason.startswith("on fresh inputs after timing: ")


def test_inputs_without_tensors_are_not_called_the_same():
    machine, baseline = quiet()
    counting = machine.builder(1e-3, lambda n: torch.tensor([n]))
    result = run(machine, counting, {"c": counting}, make_inputs=lambda i: (i,))
    assert result.warnings == () and result["c"].verdict == "equivalent"
    constant = run(machine, baseline, {"c": baseline}, make_inputs=lambda index: (torch.arange(4.0),))
    assert constant.warnings == (
        "same_inputs: make_inputs gives the same values for every number; a cached result would not be seen",
    )


def test_the_reference_is_built_once_a_check_from_the_seed_and_given_float64():
    machine, baseline = quiet()
    given = []

    def exact():
        given.append(("seed", torch.rand(1).item()))
        return lambda x: (given.append((x.dtype, torch.is_inference_mode_enabled())), x * 2)[1]

    wrong = {name: machine.builder(1e-3, lambda x: x * 3) for name in "ab"}
    result = run(machine, baseline, wrong, reference=exact, seed=5)
    torch.manual_seed(5)
    assert given == [("seed", torch.rand(1).item()), (torch.float64, True)]
    assert [row.verdict for row in result] == ["invalid", "invalid"]
    given.clear()
    run(machine, baseline, {"c": baseline}, reference=exact)
    assert given == []  # the same bits need no reference


def test_tolerances_reach_the_check():
    assert one(lambda x: x * 2.02, rtol=0.02).verdict == "faster"
    assert one(lambda x: x * 2 + 0.01, atol=0.02).verdict == "faster"
    assert one(lambda x: x * 2.02).verdict == "invalid" and one(lambda x: x * 2 + 0.01).verdict == "invalid"


@pytest.mark.parametrize("atol, verdict", [(0.0, "invalid"), (1e-5, "faster")])
def test_a_given_tolerance_also_holds_beside_a_reference(atol, verdict):
    """Off by 1.05e-4 of 1: beyond rtol=1e-4 alone, within it and the atol that is the default of float32."""
    machine = Machine()
    baseline = machine.builder(1e-3, lambda x: x / x)
    off = machine.builder(5e-4, lambda x: x / x + 1.05e-4)
    given = {"make_inputs": lambda i: (torch.arange(1.0, 9.0) + i,), "reference": lambda: lambda x: x / x}
    assert run(machine, baseline, {"c": off}, rtol=1e-4, atol=atol, **given)["c"].verdict == verdict


def test_nondeterministic_contenders_may_be_allowed():
    machine, baseline = quiet()
    count = []
    drifting = machine.builder(1e-3, lambda x: (count.append(1), x * 2 + 1e-3 * len(count))[1])
    row = run(machine, baseline, {"c": drifting})["c"]
    assert row.error.startswith("NondeterministicOutputError: 'c': two equal calls differ: output at ")
    row = run(machine, baseline, {"c": drifting}, allow_nondeterministic=True, atol=1e9, rtol=0.0)["c"]
    assert row.verdict == "invalid"  # a tolerance that accepts zeros
    close = machine.builder(1e-3, lambda x: (count.append(1), x * 2 + 1e-9 * len(count))[1])
    assert run(machine, baseline, {"c": close}, allow_nondeterministic=True)["c"].verdict == "equivalent"

"""measure() on a simulated clock, and the pieces around a sample."""

import gc
import random
import timeit

import numpy as np
import pytest
import torch
from timing_fakes import FakeClock, Machine, small_heap  # noqa: F401
from torch import nn
from torch.utils import benchmark

from utils.timing import (
    BenchmarkError,
    CallableFailedError,
    InputMutationError,
    Measurement,
    MetaTensorError,
    MixedDeviceError,
    NondeterministicOutputError,
    clock,
    guards,
    measure,
)


def timed(seconds, result=lambda *args: 1, first=0.0, machine=None):
    """(function of that simulated duration, its clock)"""
    machine = machine or Machine()
    return machine.builder(seconds, result, first)(), machine.clock


def test_a_time_without_noise_is_exact():
    fn, timer = timed(1e-3, first=5.0)
    m = measure(fn, timer=timer, label="f")
    assert m.median_s == pytest.approx(1e-3)
    assert (m.ci_low_s, m.ci_high_s) == pytest.approx((1e-3, 1e-3))
    assert m.first_call_s == pytest.approx(5.001)
    assert (m.label, m.mode, m.cache, m.calls_per_sample) == ("f", "latency", "hot", 1)
    assert m.n == len(m.samples_s) == pytest.approx(500, abs=2)
    assert m.warmup_calls >= 20
    assert not m.warnings


def test_fast_functions_are_timed_in_blocks():
    fn, timer = timed(2e-6)
    m = measure(fn, timer=timer, min_run_time=0.05)
    assert m.calls_per_sample in (100, 101)
    assert m.median_s == pytest.approx(2e-6, rel=1e-3)


def test_throughput_mode():
    fn, timer = timed(1e-3)
    m = measure(fn, timer=timer, mode="throughput", num_threads=1, min_run_time=0.2)
    assert m.mode == "throughput" and m.calls_per_sample == 10
    assert m.median_s == pytest.approx(1e-3)


def test_statistics_of_the_samples():
    fn, timer = timed(1e-3, machine=Machine(0, noise=0.1, spike=0.02))
    m = measure(fn, timer=timer, min_run_time=1.0)
    samples = np.asarray(m.samples_s)
    assert m.median_s == pytest.approx(np.median(samples))
    assert m.mean_s == pytest.approx(samples.mean()) and m.min_s == samples.min()
    assert m.iqr_s == pytest.approx(np.subtract(*np.percentile(samples, [75, 25])))
    assert m.ci_low_s < m.median_s < m.ci_high_s < m.mean_s  # spikes wreck the mean, not the median
    assert m.p90_s < m.p95_s < m.p99_s
    assert abs(m.median_s / 1e-3 - 1) < 0.02


def test_percentiles_need_samples():
    fn, timer = timed(0.1)
    m = measure(fn, timer=timer, min_run_time=0.01, min_samples=40)
    assert m.n == 40
    assert m.p90_s is not None and m.p95_s is None and m.p99_s is None


def test_limits_of_time_and_samples():
    fn, timer = timed(1.0)
    assert measure(fn, timer=timer, min_samples=30).n == 10  # max_run_time
    assert measure(fn, timer=timer, min_samples=7).n == 7
    assert measure(fn, timer=timer, min_run_time=20.0, max_run_time=25.0, min_samples=6).n == 20


def test_warm_up_goes_on_until_the_time_is_stable():
    timer, calls = FakeClock(), []

    def settling():  # ten times slower at first, then settles
        calls.append(1)
        timer.spend(1e-3 * (1 + 9 * 0.97 ** len(calls)))
        return 1

    m = measure(settling, timer=timer, warmup_time=0.3)
    assert m.warmup_calls > 100
    assert m.median_s < 1.1e-3
    assert m.first_call_s > 5e-3


def test_warm_up_has_an_end():
    timer, calls = FakeClock(), []

    def never_stable():
        calls.append(1)
        timer.spend(1e-3 * (1 + len(calls)))
        return 1

    assert measure(never_stable, timer=timer, warmup_time=0.05, min_run_time=0.1).warmup_calls < 100


def test_warm_up_time_depends_on_the_device():
    assert clock.warm_up_time(1e-4, False) == 0.1
    assert [clock.warm_up_time(t, True) for t in (1e-4, 5e-3, 1.0)] == [0.1, 1.0, 3.0]


def test_arguments_reach_the_function():
    fn, timer = timed(1e-3, lambda a, b=0: a + b)
    assert measure(fn, 1, timer=timer, min_run_time=0.01)
    timer_2 = FakeClock()

    def keyword(a, *, scale):
        timer_2.spend(1e-3)
        assert (a, scale) == (1, 3)
        return 1

    assert measure(keyword, 1, scale=3, timer=timer_2, min_run_time=0.01).label == "keyword"


def test_labels():
    fn, timer = timed(1e-3, lambda x: x)
    assert measure(fn, torch.rand(2), timer=timer, min_run_time=0.01).label == "fn"
    assert (
        measure(nn.Identity().eval(), torch.rand(2), min_run_time=0.001, min_samples=6, warmup_time=0.0).label
        == "Identity"
    )


# ------------------------------------------------------------------------------------------- what can go wrong


@pytest.mark.parametrize(
    ("call", "where"), [(1, "call 1"), (2, "call 2"), (3, "warm-up"), (60, "warm-up"), (300, "sample")]
)
def test_a_failing_call(call, where):
    calls = []

    def result():
        calls.append(1)
        return 1 / (call - len(calls))

    fn, timer = timed(1e-3, result)
    with pytest.raises(CallableFailedError, match=f"'f' failed at {where}.*ZeroDivisionError") as caught:
        measure(fn, timer=timer, label="f", allow_nondeterministic=call > 2)
    assert isinstance(caught.value.__cause__, ZeroDivisionError) and isinstance(caught.value, BenchmarkError)


def test_nondeterministic_output():
    def run(**options):
        fn, timer = timed(1e-3, lambda: torch.tensor(len(calls)) if calls.append(1) is None else 0)
        return measure(fn, timer=timer, min_run_time=0.01, **options)

    calls = []
    with pytest.raises(NondeterministicOutputError):
        run()
    assert run(allow_nondeterministic=True)
    fn, timer = timed(1e-3, lambda: torch.rand(3))
    assert measure(fn, timer=timer, min_run_time=0.01)  # the same seed before both calls


def test_changed_inputs():
    for change in (lambda x: x.add_(1), lambda x: x.zero_(), lambda x: x[2:].fill_(float("nan"))):
        fn, timer = timed(1e-3, change)
        with pytest.raises(InputMutationError):
            measure(fn, torch.arange(1.0, 5.0), timer=timer)
    fn, timer = timed(1e-3, lambda x: x * 1)
    assert measure(fn, torch.tensor([1.0, float("nan")]), timer=timer, min_run_time=0.01)  # NaN is not a change


def test_meta_tensors_and_devices():
    fn, timer = timed(1e-3, lambda *a: torch.empty(3, device="meta"))
    with pytest.raises(MetaTensorError, match="output of 'fn'"):
        measure(fn, timer=timer)
    with pytest.raises(MetaTensorError, match="input"):
        measure(fn, torch.empty(3, device="meta"), timer=timer)
    with pytest.raises(MixedDeviceError, match="mode='device'"):
        measure(fn, torch.rand(3), timer=timer, mode="device")


def test_warnings():
    module = nn.Linear(2, 2)
    m = measure(module, torch.ones(10, 2), grad_mode="enabled", min_run_time=0.001, min_samples=6, warmup_time=0.0)
    assert [text.split(":")[0] for text in m.warnings[:3]] == ["train_mode", "grad_enabled", "constant_input"]
    fn, timer = timed(1e-6)
    cold = measure(fn, timer=timer, cache="cold", min_run_time=1e-5, max_run_time=1e-4, warmup_time=0.0)
    assert any("below_resolution" in text for text in cold.warnings)


@pytest.mark.parametrize("failing", [True, False])
def test_state_is_put_back(failing):
    def disturb():
        torch.manual_seed(1), np.random.seed(1), random.seed(1)
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        gc.disable()
        if failing:
            raise RuntimeError
        return 1

    def state():
        return (
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            gc.isenabled(),
            gc.get_freeze_count() > 0,
            torch.get_rng_state().tolist(),
            str(np.random.get_state()),
            random.getstate(),
        )

    torch.set_num_threads(2)
    before = state()
    fn, timer = timed(1e-3, disturb)
    try:
        if failing:
            with pytest.raises(CallableFailedError):
                measure(fn, timer=timer)
        else:
            measure(fn, timer=timer, min_run_time=0.01)
        assert state() == before
    finally:
        torch.set_grad_enabled(True)
        gc.enable()


@pytest.mark.parametrize(
    ("mode", "inference", "grad"), [("inference", True, False), ("no_grad", False, False), ("enabled", False, True)]
)
def test_grad_modes(mode, inference, grad):
    seen = set()
    fn, timer = timed(1e-3, lambda: seen.add((torch.is_inference_mode_enabled(), torch.is_grad_enabled())))
    measure(fn, timer=timer, grad_mode=mode, min_run_time=0.01)
    assert seen == {(inference, grad)}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fn": 3}, TypeError, "fn: expected a function, got int"),
        ({"mode": "x"}, ValueError, "mode"),
        ({"cache": "x"}, ValueError, "cache"),
        ({"grad_mode": "x"}, ValueError, "grad_mode"),
        ({"num_threads": 0}, ValueError, "num_threads"),
        ({"min_run_time": 0.0}, ValueError, "min_run_time"),
        ({"min_run_time": 20.0}, ValueError, "max_run_time"),
        ({"min_samples": 5}, ValueError, "min_samples"),
        ({"confidence": 0.0}, ValueError, "confidence"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(options, error, message):
    calls = []
    arguments = {"fn": lambda: calls.append(1), **options}
    with pytest.raises(error, match=message):
        measure(arguments.pop("fn"), **arguments)
    assert not calls


# ------------------------------------------------------------------------------------------- how often, how long


def test_every_call_is_accounted_for():
    machine = Machine()
    m = measure(machine.builder(1e-3, lambda: 1)(), timer=machine.clock, min_run_time=0.05, warmup_time=0.0)
    assert m.warmup_calls == 21  # one to choose the samples, two windows of ten that agree
    assert machine.calls == 2 + m.warmup_calls + m.n  # the first two calls are apart
    assert 49 <= m.n <= 51 and m.num_threads == torch.get_num_threads()


def test_defaults_of_a_measurement():
    machine = Machine()
    m = measure(machine.builder(0.1, lambda: 1)(), timer=machine.clock)
    assert (m.n, m.mode, m.cache, m.label) == (30, "latency", "hot", "fn")  # 30 samples, more than 0.5 s
    assert machine.clock.now - 100.0 == pytest.approx(0.1 * machine.calls)
    slow = Machine()
    assert measure(slow.builder(1.0, lambda: 1)(), timer=slow.clock).n == 10  # 10 s
    quick = Machine()
    m = measure(quick.builder(1e-3, lambda: 1)(), timer=quick.clock)
    assert m.n == pytest.approx(500, abs=1) and m.warmup_calls in (101, 111)  # 0.5 s; 0.1 s


def test_a_warm_up_is_never_endless():
    timer, calls = FakeClock(), []

    def slower_every_time():
        calls.append(1)
        timer.spend(1e-3 * 1.1 ** len(calls))
        return 1

    m = measure(slower_every_time, timer=timer, warmup_time=0.01, min_run_time=0.01, max_run_time=0.01)
    spent = sum(1e-3 * 1.1**k for k in range(4, 4 + m.warmup_calls - 1))
    assert 20 * 1e-3 * 1.1**3 <= spent < 25e-3 * 1.1**3 + 1e-2  # twenty calls' worth, when that is more


def test_where_a_sample_failed():
    calls = []

    def result():
        calls.append(1)
        return 1 / (30 - len(calls))

    fn, timer = timed(1e-3, result)
    with pytest.raises(CallableFailedError) as caught:
        measure(fn, timer=timer, label="f", warmup_time=0.0, allow_nondeterministic=True)
    assert str(caught.value) == "'f' failed at sample 8: ZeroDivisionError: division by zero"  # 1 + 1 + 20 + 8


def test_equal_calls_may_differ_by_rounding_only():
    calls = []

    def off_by(step):
        def result():
            calls.append(1)
            return torch.tensor([1.0 + step * len(calls)])

        return result

    fn, timer = timed(1e-3, off_by(1e-7))
    assert measure(fn, timer=timer, min_run_time=0.01).n
    calls.clear()
    fn, timer = timed(1e-3, off_by(0.5))
    with pytest.raises(NondeterministicOutputError) as caught:
        measure(fn, timer=timer, label="f")
    assert str(caught.value).startswith("'f': two equal calls differ: output at (0,): 2, expected 1.5; 1 of 1 values")


def test_keyword_arguments_are_looked_at_too():
    fn, timer = timed(1e-3)
    keyword = lambda *, x: (fn(), x.add_(1))[0]  # noqa: E731
    with pytest.raises(InputMutationError):
        measure(keyword, x=torch.ones(2), timer=timer)
    with pytest.raises(MetaTensorError):
        measure(keyword, x=torch.ones(2, device="meta"), timer=timer)
    m = measure(lambda *, x: fn(), x=torch.ones(16), timer=timer, min_run_time=0.01)
    assert [w.split(":")[0] for w in m.warnings] == ["constant_input"]


def test_inputs_are_looked_at_after_the_second_call_too():
    calls = []

    def second_call_changes(x):
        calls.append(1)
        if len(calls) == 2:
            x.add_(1)
        return 1

    fn, timer = timed(1e-3, second_call_changes)
    with pytest.raises(InputMutationError, match="'f' changes its inputs"):
        measure(fn, torch.ones(2), timer=timer, label="f")


def test_a_function_without_a_name_has_the_name_of_its_type():
    import functools

    timer = FakeClock()
    work = functools.partial(lambda: timer.spend(1e-3))
    assert measure(work, timer=timer, min_run_time=0.01).label == "partial"
    with pytest.raises(TypeError) as caught:
        measure(3)
    assert str(caught.value) == "fn: expected a function, got int"


class Elsewhere(torch.Tensor):
    """Says that it is on a GPU: only the attribute is looked at."""

    device = torch.device("cuda:0")


def test_an_accelerator_is_waited_for_and_warmed_up_longer(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(1))
    x = torch.rand(3).as_subclass(Elsewhere)
    machine = Machine()
    m = measure(machine.builder(4e-3, lambda x: 1)(), x, timer=machine.clock, min_run_time=0.05)
    assert len(waits) == machine.calls  # latency: each call alone
    assert 250 <= m.warmup_calls <= 262  # 1 s for calls above a millisecond
    waits.clear()
    m = measure(
        machine.builder(4e-3, lambda x: 1)(),
        x,
        timer=machine.clock,
        min_run_time=0.05,
        mode="throughput",
        num_threads=1,
    )
    assert not waits and m.calls_per_sample == 3


def test_device_mode_is_cold_and_counts_single_calls(monkeypatch):
    import sys
    import types

    testing = types.ModuleType("triton.testing")
    machine = Machine()
    testing.do_bench = lambda fn, **options: [(fn(), 4e-2)[1]]
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    x = torch.rand(3).as_subclass(Elsewhere)
    fn = machine.builder(1e-3, lambda x: 1)()
    m = measure(fn, x, timer=machine.clock, mode="device", min_run_time=0.05, warmup_time=0.0)
    assert (m.mode, m.cache, m.calls_per_sample) == ("device", "cold", 1)
    assert m.median_s == pytest.approx(4e-5) and not m.warnings


# ------------------------------------------------------------------------------------------- samples


def test_device_mode_takes_the_median_of_do_bench(monkeypatch):
    """There is no GPU here: triton's function is replaced, the call that reaches it is looked at."""
    import sys
    import types

    asked = []

    def do_bench(fn, warmup, rep, return_mode):
        asked.append((fn(), return_mode, warmup > 0, rep > 0))
        return [3.0, 1.0, 2.0]  # ms

    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    testing = types.ModuleType("triton.testing")
    testing.do_bench = do_bench
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    sample = clock.sampler(lambda: "out", mode="device", cache="cold", calls=1, timer=FakeClock(), threads=1)
    assert sample() == 2e-3
    assert asked == [("out", "all", True, True)]

    def too_short(fn, **options):
        raise ZeroDivisionError

    testing.do_bench = too_short
    with pytest.raises(CallableFailedError, match="latency"):
        sample()


def test_latency_waits_after_every_call_of_a_block(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waited.append(1))
    call = clock.bind(lambda a, b: a + b, (1,), {"b": 2}, wait=True)
    assert call() == 3 and len(waited) == 1
    assert clock.bind(lambda: 5, (), {}, wait=False)() == 5 and len(waited) == 1


def test_the_default_clock_waits_for_an_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert clock.default_timer() is benchmark.timer
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert clock.default_timer() is timeit.default_timer


def test_a_flush_buffer_is_larger_than_the_caches():
    flush = clock.flusher(False)
    size = next(cell.cell_contents for cell in flush.__closure__ if isinstance(cell.cell_contents, torch.Tensor)).nbytes
    assert size >= 2 * clock.last_level_cache_bytes() and size >= 64 * 2**20
    flush()


@pytest.mark.parametrize(
    ("seconds", "mode", "cache", "calls"),
    [
        (1e-6, "latency", "hot", 200),
        (1e-5, "latency", "hot", 20),
        (9e-5, "latency", "hot", 3),
        (1e-4, "latency", "hot", 1),
        (1.0, "latency", "hot", 1),
        (1e-6, "latency", "cold", 1),
        (1e-6, "device", "cold", 1),
        (1e-3, "throughput", "hot", 10),
        (1.0, "throughput", "hot", 2),
    ],
)
def test_calls_per_sample(seconds, mode, cache, calls):
    assert clock.calls_per_sample(seconds, mode, cache) == pytest.approx(calls, abs=1)


# ------------------------------------------------------------------------------------------- nested values


def test_tensors_inside_dataclasses_and_dicts_are_found_and_copied():
    import dataclasses

    @dataclasses.dataclass(frozen=True)
    class Out:
        a: torch.Tensor
        rest: dict

    out = Out(torch.ones(2), {"b": [torch.zeros(3)], "c": 1})
    assert [t.shape[0] for t in guards.tensors([out])] == [2, 3]
    copied = guards.cloned([out])[0]
    out.a.add_(1), out.rest["b"][0].add_(1)
    assert copied.a.tolist() == [1, 1] and copied.rest["b"][0].tolist() == [0, 0, 0]


def test_same_values():
    nan = torch.tensor([1.0, float("nan")])
    assert guards.same_values([nan], (nan.clone(),))
    assert not guards.same_values([nan], [torch.tensor([1.0, 2.0])])
    assert not guards.same_values([torch.ones(2)], [torch.ones(2, dtype=torch.float64)])
    assert not guards.same_values([torch.ones(2)], [torch.ones(1)])
    assert not guards.same_values([torch.ones(2)], [])


def test_repr_of_a_measurement_is_short():
    m = Measurement(
        "f",
        1.5e-3,
        1.4e-3,
        1.6e-3,
        1e-4,
        1.5e-3,
        1e-3,
        None,
        None,
        None,
        9,
        2,
        0.5,
        3,
        (1e-3,) * 9,
        ("careful: x",),
        "latency",
        "hot",
        1,
    )
    assert str(m) == repr(m)
    assert str(m).splitlines() == [
        "f: 1.50 ms [1.40 ms, 1.60 ms], n = 9 x 2, first call 500 ms",
        "  latency, hot cache, 1 thread",
        "! careful: x",
    ]

"""The pieces around a sample: blocks of calls, flushes, warm-up. Exact, on a clock that only moves when told."""

import gc
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from timing_fakes import FakeClock

from utils.timing import CallableFailedError, clock

MIB = 2**20


def spending(seconds):
    """(function that takes `seconds` of simulated time, its clock, list of its calls)"""
    timer, calls = FakeClock(), []

    def call():
        calls.append(torch.get_num_threads())
        timer.spend(seconds)

    return call, timer, calls


@pytest.mark.parametrize(
    ("seconds", "mode", "cache", "calls"),
    [
        (2e-4 / 150.5, "latency", "hot", 151),
        (2e-4 / 2.5, "latency", "hot", 3),
        (1e-4, "latency", "hot", 1),  # half a block
        (2e-4 / 2.5, "latency", "cold", 1),  # each call from memory
        (2e-4 / 2.5, "device", "hot", 1),
        (1e-2 / 2.5, "throughput", "hot", 3),
        (1e-2 / 150.5, "throughput", "cold", 151),
        (1.0, "throughput", "hot", 2),  # one call alone is latency
    ],
)
def test_calls_of_one_sample(seconds, mode, cache, calls):
    assert clock.calls_per_sample(seconds, mode, cache) == calls


def test_a_call_below_the_clock_s_resolution_has_finite_blocks():
    assert clock.calls_per_sample(0.0, "latency", "hot") == pytest.approx(200_000, abs=1)
    assert clock.calls_per_sample(0.0, "throughput", "hot") == pytest.approx(10_000_000, abs=1)


@pytest.mark.parametrize(("calls", "made"), [(1, 1), (7, 7)])
def test_a_latency_sample_is_the_mean_of_its_calls(calls, made):
    call, timer, seen = spending(3.0)
    sample = clock.sampler(call, mode="latency", cache="hot", calls=calls, timer=timer, threads=1)
    assert sample() == 3.0 and len(seen) == made


@pytest.mark.parametrize("cache", ["hot", "cold"])
@pytest.mark.parametrize("on", [True, False])
def test_no_garbage_is_collected_in_a_sample_of_one_call(monkeypatch, cache, on):
    seen = []
    monkeypatch.setattr(clock, "flusher", lambda accelerator: lambda: seen.append(gc.isenabled()))

    def call():
        seen.append(gc.isenabled())
        if len(seen) > 2:
            raise RuntimeError

    sample = clock.sampler(call, mode="latency", cache=cache, calls=1, timer=FakeClock(), threads=1)
    (gc.enable if on else gc.disable)()
    try:
        sample()
        assert gc.isenabled() is on and seen[-1] is False and seen[:-1] == [on] * (cache == "cold")
        with pytest.raises(RuntimeError):
            for _ in range(3):
                sample()
        assert gc.isenabled() is on
    finally:
        gc.enable()


def test_only_the_call_lies_between_the_readings_of_the_clock():
    """What a sample does besides takes no simulated time, and a result is dropped before the clock is read again."""
    timer = FakeClock()

    class Result:
        def __del__(self):
            timer.spend(5.0)

    sample = clock.sampler(
        lambda: (timer.spend(2.0), Result())[1], mode="latency", cache="hot", calls=1, timer=timer, threads=1
    )
    assert [sample() for _ in range(3)] == [7.0] * 3


def test_a_cold_sample_is_one_call_after_a_flush(monkeypatch):
    call, timer, seen = spending(3.0)
    monkeypatch.setattr(clock, "flusher", lambda accelerator: lambda: (timer.spend(50.0), seen.append("flush")))
    sample = clock.sampler(call, mode="latency", cache="cold", calls=1, timer=timer, threads=1)
    assert sample() == sample() == 3.0  # the flush is in none of them
    assert [x == "flush" for x in seen] == [True, False, True, False]


def test_a_throughput_sample_runs_with_the_threads_asked_for():
    threads = torch.get_num_threads()
    call, timer, seen = spending(3.0)
    sample = clock.sampler(call, mode="throughput", cache="hot", calls=5, timer=timer, threads=2)
    assert sample() == 3.0
    assert seen[-5:] == [2] * 5
    assert torch.get_num_threads() == threads


def test_device_samples_come_from_triton_in_milliseconds(monkeypatch):
    asked = []

    def do_bench(fn, warmup, rep, return_mode):
        asked.append((fn(), warmup, rep, return_mode))
        return [3.0, 1.0, 2.0]

    testing = types.ModuleType("triton.testing")
    testing.do_bench = do_bench
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    sample = clock.sampler(lambda: "out", mode="device", cache="cold", calls=1, timer=FakeClock(), threads=1)
    assert sample() == 2e-3
    assert asked == [("out", 1, clock.DEVICE_REP_MS, "all")]  # milliseconds: short, because samples are interleaved

    def too_short(fn, **options):
        raise ZeroDivisionError

    testing.do_bench = too_short
    with pytest.raises(CallableFailedError) as caught:
        sample()
    assert str(caught.value) == "device mode: the call is too short for CUDA events; use mode='latency'"
    assert caught.value.__suppress_context__


def test_the_result_of_a_timed_call_is_kept():
    timer = FakeClock()
    assert clock.timed_once(lambda: (timer.spend(2.0), "out")[1], timer) == (2.0, "out")


def test_calls_are_bound_with_their_arguments(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(1))
    for wait in (False, True):
        call = clock.bind(lambda *args, **kwargs: (args, kwargs), (1, 2), {"a": 3}, wait=wait)
        assert call() == ((1, 2), {"a": 3})
    assert len(waits) == 1


# ------------------------------------------------------------------------------------------- caches


def test_the_largest_cache_that_linux_reports(tmp_path, monkeypatch):
    for name, text in {"index0": "48K\n", "index1": "bad", "index2": "3M", "index3": "2G\n", "index4": "512"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "size").write_text(text)
    asked = []
    monkeypatch.setattr(clock, "Path", lambda path: (asked.append(path), tmp_path)[1])
    assert clock.last_level_cache_bytes() == 2 * 2**30
    assert asked == ["/sys/devices/system/cpu/cpu0/cache"]
    (tmp_path / "index3" / "size").unlink()
    assert clock.last_level_cache_bytes() == 3 * 2**20
    (tmp_path / "index2" / "size").unlink()
    assert clock.last_level_cache_bytes() == 48 * 2**10
    (tmp_path / "index0" / "size").unlink()
    assert clock.last_level_cache_bytes() == 512
    (tmp_path / "index4" / "size").unlink()
    assert clock.last_level_cache_bytes() == 0  # nothing that can be read


def buffer_of(flush):
    return next(cell.cell_contents for cell in flush.__closure__ if isinstance(cell.cell_contents, torch.Tensor))


@pytest.mark.parametrize(("cache", "buffer"), [(40 * MIB, 80 * MIB), (10 * MIB, 64 * MIB), (0, 64 * MIB)])
def test_a_flush_writes_twice_the_last_level_cache(monkeypatch, cache, buffer):
    monkeypatch.setattr(clock, "last_level_cache_bytes", lambda: cache)
    flush = clock.flusher(False)
    assert buffer_of(flush).nbytes == buffer and buffer_of(flush).device.type == "cpu"
    before = buffer_of(flush)[-1].item()
    flush()
    assert buffer_of(flush)[-1].item() != before


@pytest.mark.parametrize(
    ("device", "l2", "buffer"),
    [("cuda", 200 * MIB, 400 * MIB), ("cuda", MIB, 256 * MIB), ("xpu", 999 * MIB, 256 * MIB)],
)
def test_a_flush_on_an_accelerator(monkeypatch, device, l2, buffer):
    """There is none here: what would be allocated is looked at."""
    made, asked = [], []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(device))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda d: (asked.append(d), SimpleNamespace(L2_cache_size=l2))[1]
    )
    monkeypatch.setattr(torch, "ones", lambda count, dtype, device: made.append((count * 4, dtype, device)))
    clock.flusher(True)
    assert made == [(buffer, torch.int32, torch.device(device))]
    assert asked == [torch.device("cuda")] * (device == "cuda")


def test_a_device_that_reports_no_cache(monkeypatch):
    made = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    monkeypatch.setattr(torch, "ones", lambda count, **options: made.append(count * 4))
    clock.flusher(True)
    assert made == [256 * MIB]


# ------------------------------------------------------------------------------------------- warm-up


def warm_up(values, *, min_time=0.0, max_time=1e9, **options):
    """The result for a sample that takes these seconds one after the other, then the last for ever."""
    timer, left = FakeClock(), list(values)

    def sample():
        value = left.pop(0) if len(left) > 1 else left[0]
        timer.spend(value)
        return value

    return clock.warm_up(sample, timer=timer, calls=3, min_time=min_time, max_time=max_time, **options)


def test_two_windows_that_agree_end_the_warm_up():
    assert warm_up([1.0]) == (60, 1.0)
    assert warm_up([100.0] * 10 + [102.0]) == (60, 102.0)  # 2 % is agreement
    assert warm_up([100.0] * 10 + [98.0]) == (60, 98.0)
    assert warm_up([100.0] * 10 + [103.0]) == (90, 103.0)
    assert warm_up([100.0] * 10 + [97.0]) == (90, 97.0)
    assert warm_up([500.0] * 7 + [100.0]) == (90, 100.0)  # looked at when a window is full
    assert warm_up([500.0] * 4 + [100.0]) == (60, 100.0)  # medians: a few slow calls at first do not matter


def test_a_warm_up_lasts_at_least_and_at_most():
    assert warm_up([1.0], min_time=30.0) == (90, 1.0)
    assert warm_up([1.0], min_time=30.1) == (120, 1.0)
    assert warm_up([1.0], max_time=5.0) == (15, 1.0)
    assert warm_up([1.0], max_time=0.0) == (9, 1.0)
    assert warm_up([9.0, 1.0], max_time=0.0, min_samples=1) == (3, 9.0)
    assert warm_up([1.0], window=5) == (30, 1.0)
    assert warm_up([3.0, 2.0, 1.0], max_time=0.0) == (9, 2.0)  # the median of what there is


def test_the_time_of_a_warm_up():
    assert [clock.warm_up_time(t, False) for t in (1e-6, 9.0)] == [0.1, 0.1]
    times = (9.9e-4, 1e-3, 9.9e-3, 1e-2, 1e6)
    assert [clock.warm_up_time(t, True) for t in times] == [0.1, 1.0, 1.0, 3.0, 3.0]

"""Samples: how one number of seconds is taken. Clocks and loops over calls are those of torch, timeit and triton.

- latency: one call, the device idle before and after, read with torch's timer, which waits for the accelerator. Blocks
  of short calls: timeit.Timer.
- throughput: calls back to back, divided by their number; waits only at the ends. torch.utils.benchmark.Timer.
- device: time on the GPU between events, L2 flushed before every call. triton.testing.do_bench.
"""

from __future__ import annotations

import functools
import gc
import math
import timeit
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils import benchmark

from .errors import CallableFailedError

Clock = Callable[[], float]
Sample = Callable[[], float]  # seconds per call

BLOCK_SECONDS = 2e-4  # a latency sample of a fast function; longer blocks swallow pre-emptions, shorter ones the clock
THROUGHPUT_SECONDS = 1e-2
CLOCK_SECONDS = 3e-7  # cost of one sample of nothing on a machine of today
FLUSH_MIN_BYTES = 64 * 2**20
FLUSH_MIN_BYTES_CUDA = 256 * 2**20
WARMUP_ACCELERATOR = ((1e-3, 0.1), (1e-2, 1.0), (math.inf, 3.0))  # (call shorter than, seconds)
WARMUP_CPU = 0.1
DEVICE_REP_MS = 5.0
DEVICE_RESOLUTION_SECONDS = 2e-5


def default_timer() -> Clock:
    """torch's timer, which waits for the accelerator; without one the clock that it reads (a third of the cost)."""
    return benchmark.timer if on_accelerator() else timeit.default_timer


def bind(fn: Callable, args: tuple, kwargs: dict[str, Any], *, wait: bool) -> Callable[[], Any]:
    """`fn` with its arguments; with `wait` each call waits for the accelerator (latency inside a block of calls)."""
    if not wait:
        return functools.partial(fn, *args, **kwargs)
    synchronize = torch.accelerator.synchronize

    def call_and_wait():
        out = fn(*args, **kwargs)
        synchronize()
        return out

    return call_and_wait


def timed_once(call: Callable[[], Any], timer: Clock) -> tuple[float, Any]:
    """Seconds of one call, and what it returned (timeit throws the result away)."""
    start = timer()
    out = call()
    return timer() - start, out


def calls_per_sample(seconds: float, mode: str, cache: str) -> int:
    """How many calls one sample holds, so that it is about 0.1-1 ms for fast functions and one call otherwise."""
    if mode == "throughput":
        return max(2, math.ceil(THROUGHPUT_SECONDS / max(seconds, 1e-9)))
    if mode == "device" or cache == "cold" or seconds >= BLOCK_SECONDS / 2:
        return 1
    return math.ceil(BLOCK_SECONDS / max(seconds, 1e-9))


def sampler(call: Callable[[], Any], *, mode: str, cache: str, calls: int, timer: Clock, threads: int) -> Sample:
    """A function that takes one sample of `call` (seconds per call)."""
    if mode == "device":
        return functools.partial(_device_sample, call)
    if mode == "throughput":
        block = benchmark.Timer("call()", globals={"call": call}, timer=timer, num_threads=threads)
        return lambda: block.timeit(calls).median
    if cache == "cold":
        flush, cold_call = flusher(on_accelerator()), one_call(call, timer)

        def cold_sample() -> float:
            flush()
            return cold_call()

        return cold_sample
    if calls == 1:
        return one_call(call, timer)
    block = timeit.Timer(call, timer=timer).timeit
    return lambda: block(calls) / calls


def one_call(call: Callable[[], Any], timer: Clock) -> Sample:
    """A sample of one call, without garbage collection: timeit.Timer.timeit(1) less its loop over one call.

    The loop would cost more than the two readings of the clock, and part of it would lie between them.
    """

    def sample() -> float:
        collecting = gc.isenabled()
        gc.disable()
        try:
            start = timer()
            call()
            return timer() - start
        finally:
            if collecting:
                gc.enable()

    return sample


def _device_sample(call: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    try:
        times_ms = do_bench(call, warmup=1, rep=DEVICE_REP_MS, return_mode="all")
    except ZeroDivisionError:  # do_bench divides by its first estimate, which rounds to zero for tiny kernels
        raise CallableFailedError("device mode: the call is too short for CUDA events; use mode='latency'") from None
    return median(times_ms) / 1e3


def on_accelerator() -> bool:
    return torch.accelerator.is_available()


def last_level_cache_bytes() -> int:
    """Size of the largest CPU cache that Linux reports, 0 where it reports none."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        factor = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        sizes.append(int(digits) * factor if digits.isdigit() else 0)
    return max(sizes)


def flusher(accelerator: bool) -> Callable[[], None]:
    """A function that pushes everything out of the caches: it reads and writes a buffer larger than they are.

    Twice the last-level cache. On an accelerator at least 256 MiB, because some report far less than they have.
    """
    if accelerator:
        device = torch.accelerator.current_accelerator()
        reported = 0
        if device.type == "cuda":
            reported = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        size = max(2 * reported, FLUSH_MIN_BYTES_CUDA)
    else:
        device, size = torch.device("cpu"), max(2 * last_level_cache_bytes(), FLUSH_MIN_BYTES)
    buffer = torch.ones(size // 4, dtype=torch.int32, device=device)

    def flush() -> None:
        buffer.add_(1)  # not zero_: a plain fill may bypass the very caches that it should overwrite

    return flush


def warm_up_time(seconds: float, accelerated: bool) -> float:
    """Seconds that a warm-up lasts at least: clocks of a GPU ramp up slowly, those of a CPU fast."""
    return next(t for limit, t in WARMUP_ACCELERATOR if seconds < limit) if accelerated else WARMUP_CPU


def warm_up(
    sample: Sample,
    *,
    timer: Clock,
    calls: int,
    min_time: float,
    max_time: float,
    window: int = 10,
    min_samples: int = 3,
) -> tuple[int, float]:
    """Take samples until two consecutive medians of `window` agree within 2 %, or the time is over.

    Returns the number of calls made and the last median in seconds. At least `min_samples`.
    """
    start, taken = timer(), []
    while True:
        taken.append(sample())
        elapsed = timer() - start
        n = len(taken)
        if n >= min_samples and elapsed >= max_time:
            break
        if n >= 2 * window and n % window == 0 and elapsed >= min_time:
            before, last = median(taken[-2 * window : -window]), median(taken[-window:])
            if abs(last - before) <= 0.02 * before:
                break
    return n * calls, median(taken[-window:])

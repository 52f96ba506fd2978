"""Time one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..equivalence import check_equivalence
from . import clock, guards
from .clock import Clock
from .dynamo import DynamoWatch, check_compiled
from .errors import (
    BenchmarkError,
    CallableFailedError,
    EagerFallbackError,
    NondeterministicOutputError,
    RecompilationError,
)
from .results import Measurement
from .statistics import MIN_INTERVAL_N, effective_n, order_interval, tail

MODES = ("latency", "throughput", "device")
CACHES = ("hot", "cold")
OVERHEAD_LIMIT = 0.01


def measure(
    fn: Callable[..., Any],
    *args: Any,
    label: str | None = None,
    mode: str = "latency",
    cache: str = "hot",
    num_threads: int | None = None,
    min_run_time: float = 0.5,
    max_run_time: float = 10.0,
    min_samples: int = 30,
    warmup_time: float | None = None,
    grad_mode: str = "inference",
    confidence: float = 0.95,
    allow_nondeterministic: bool = False,
    timer: Clock | None = None,
    **kwargs: Any,
) -> Measurement:
    """Seconds per call of `fn(*args, **kwargs)`.

    The first call is timed apart; then calls until the time is stable; then samples until `min_run_time` seconds and
    `min_samples` samples, at most `max_run_time` seconds.

    mode: "latency" (one call, the device idle before and after), "throughput" (calls back to back) or "device" (time
    on the GPU between events; its cache is always cold, because triton's do_bench flushes L2). cache: "hot", or "cold"
    (a buffer of twice the last-level cache is written before every sample). num_threads: torch's intra-op threads
    (None: as they are; torch.utils.benchmark.Timer alone would take 1). timer: a clock for tests.

    Raises ValueError or TypeError for a wrong argument, MixedDeviceError, MetaTensorError, CallableFailedError,
    InputMutationError, NondeterministicOutputError (unless `allow_nondeterministic`), RecompilationError (Dynamo
    compiled during the samples), EagerFallbackError. Threads, grad mode, garbage collector and random generators are
    put back, after an exception too.
    """
    if not callable(fn):
        raise TypeError(f"fn: expected a function, got {type(fn).__name__}")
    check_options(mode, cache, num_threads, grad_mode, confidence, min_run_time)
    if min_samples < MIN_INTERVAL_N:
        raise ValueError(f"min_samples: expected {MIN_INTERVAL_N} or more, got {min_samples}")
    if max_run_time < min_run_time:
        raise ValueError(f"max_run_time: expected min_run_time ({min_run_time}) or more, got {max_run_time}")
    label = label or getattr(fn, "__name__", None) or type(fn).__name__
    inputs = (args, kwargs)
    device = guards.check_devices(inputs, mode, guards.module_tensors(fn))
    timer = timer or clock.default_timer()
    cache = "cold" if mode == "device" else cache
    warnings = guards.input_warnings(fn, inputs, grad_mode)

    with guards.preserved_state(num_threads) as threads, DynamoWatch() as watch, guards.GRAD_MODES[grad_mode]():
        call = clock.bind(fn, args, kwargs, wait=mode == "latency" and device != "cpu")
        first_call_s = _first_calls(call, inputs, label, timer, allow_nondeterministic)
        watch.arm()
        calls, warmup_calls = _warm_up(call, label, mode, cache, device, timer, threads, warmup_time)
        check_compiled(label, call, expected=guards.is_compiled(fn), at_least=0)
        sample = clock.sampler(call, mode=mode, cache=cache, calls=calls, timer=timer, threads=threads)
        with watch.sampling():
            samples = _samples(sample, label, timer, min_run_time, max_run_time, min_samples)
        if watch.hits:
            raise RecompilationError(f"{label!r}: Dynamo compiled during the samples; warm up every input shape")
    if resolution := resolution_warning(samples, calls, mode):
        warnings.append(resolution)
    return summarize(
        label, samples, calls, first_call_s, warmup_calls, warnings, mode, cache, threads, confidence=confidence
    )


def _first_calls(call: Callable[[], Any], inputs: Any, label: str, timer: Clock, allow_nondeterministic: bool) -> float:
    """First call apart, and a second one that must give the same from the same inputs and seed."""
    before, generators = guards.cloned(inputs), guards.rng_state()
    first_call_s, out = guarded(lambda: clock.timed_once(call, timer), label, "call 1")
    guards.check_real(out, f"the output of {label!r}")
    out = guards.cloned(out)
    guards.check_unchanged(inputs, before, label)
    if not allow_nondeterministic:
        guards.set_rng_state(generators)
        check_deterministic(guarded(call, label, "call 2"), out, label)
        guards.check_unchanged(inputs, before, label)
    return first_call_s


def check_deterministic(second: Any, first: Any, label: str) -> None:
    if guards.same_values(second, first):
        return
    if not (same := check_equivalence(second, first)):
        raise NondeterministicOutputError(f"{label!r}: two equal calls differ: {same.reason}")


def _warm_up(
    call: Callable[[], Any],
    label: str,
    mode: str,
    cache: str,
    device: str,
    timer: Clock,
    threads: int,
    warmup_time: float | None,
) -> tuple[int, int]:
    """(calls per sample, calls made)."""
    one, _ = guarded(lambda: clock.timed_once(call, timer), label, "warm-up")
    if warmup_time is None:
        warmup_time = clock.warm_up_time(one, device != "cpu")
    calls = clock.calls_per_sample(one, mode, cache)
    options = {"mode": mode, "cache": cache, "timer": timer, "threads": threads}
    sample = clock.sampler(call, calls=calls, **options)
    made, steady = guarded(
        lambda: clock.warm_up(
            sample, timer=timer, calls=calls, min_time=warmup_time, max_time=max(2 * warmup_time, 20 * one)
        ),
        label,
        "warm-up",
    )
    return clock.calls_per_sample(steady, mode, cache), made + 1


def _samples(
    sample: clock.Sample, label: str, timer: Clock, min_run_time: float, max_run_time: float, min_samples: int
) -> list[float]:
    samples: list[float] = []
    append = samples.append
    start = timer()
    try:
        while True:
            append(sample())
            elapsed = timer() - start
            if elapsed >= max_run_time or (elapsed >= min_run_time and len(samples) >= min_samples):
                return samples
    except BenchmarkError:
        raise
    except Exception as error:
        raise failed(label, f"sample {len(samples) + 1}", error) from error


def guarded(work: Callable[[], Any], label: str, when: str) -> Any:
    """The result of `work`; anything it raises becomes CallableFailedError with the label and the moment."""
    try:
        return work()
    except BenchmarkError:
        raise
    except Exception as error:
        raise failed(label, when, error) from error


def failed(label: str, when: str, error: Exception) -> BenchmarkError:
    if type(error).__name__ == "FailOnRecompileLimitHit":
        return EagerFallbackError(f"{label!r} reached Dynamo's recompile limit at {when}: from here it would run eager")
    first_line, *rest = str(error).strip().splitlines() or [""]
    if first_line.endswith(":"):  # "backend='inductor' raised:" and the reason on the next line
        first_line = " ".join([first_line, *rest[:1]])
    return CallableFailedError(f"{label!r} failed at {when}: {type(error).__name__}: {first_line}"[:300])


def check_options(
    mode: str, cache: str, num_threads: int | None, grad_mode: str, confidence: float, min_run_time: float
) -> None:
    for name, value, allowed in (
        ("mode", mode, MODES),
        ("cache", cache, CACHES),
        ("grad_mode", grad_mode, guards.GRAD_MODES),
    ):
        if value not in allowed:
            raise ValueError(f"{name}: expected one of {', '.join(allowed)}, got {value!r}")
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads: expected 1 or more, got {num_threads}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected a number between 0 and 1, got {confidence}")
    if not min_run_time > 0:
        raise ValueError(f"min_run_time: expected seconds above 0, got {min_run_time}")


def resolution_warning(samples: list[float], calls: int, mode: str) -> str | None:
    """Why a sample is too short to be read: events resolve about 0.5 µs, a wall-clock sample costs about 0.3 µs."""
    typical = float(np.median(samples))
    if mode == "device":
        if typical < clock.DEVICE_RESOLUTION_SECONDS:
            return "below_resolution: CUDA events are too coarse below 20 µs a call"
    elif OVERHEAD_LIMIT * typical * calls < clock.CLOCK_SECONDS:
        return "below_resolution: reading the clock takes more than 1 % of a sample"
    return None


def summarize(
    label: str,
    samples: list[float],
    calls: int,
    first_call_s: float | None,
    warmup_calls: int,
    warnings: list[str],
    mode: str,
    cache: str,
    threads: int,
    *,
    confidence: float,
) -> Measurement:
    values = np.asarray(samples)
    low, high = order_interval(values, confidence, effective_n(values)) or (None, None)
    quarter, middle, three = (float(q) for q in np.percentile(values, [25, 50, 75]))
    return Measurement(
        label=label,
        median_s=middle,
        ci_low_s=low,
        ci_high_s=high,
        iqr_s=three - quarter,
        mean_s=float(values.mean()),
        min_s=float(values.min()),
        p90_s=tail(values, 90),
        p95_s=tail(values, 95),
        p99_s=tail(values, 99),
        n=len(values),
        calls_per_sample=calls,
        first_call_s=first_call_s,
        warmup_calls=warmup_calls,
        samples_s=tuple(samples),
        warnings=tuple(warnings),
        mode=mode,
        cache=cache,
        num_threads=threads,
    )

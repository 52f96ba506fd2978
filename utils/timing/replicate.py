"""One replicate of a comparison: build every contender, warm it up, take interleaved rounds."""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from functools import partial

import numpy as np

from . import clock, guards, rounds, statistics
from .contender import Contender, Settings, caught, drop
from .dynamo import DynamoWatch, check_compiled, frames_seen
from .errors import BenchmarkError, InputMutationError, RecompilationError
from .measure import check_deterministic, failed, guarded

MIN_PASSES_TO_STOP = 24  # before an interval's width may end a replicate
MIN_PASSES = 12  # of a replicate, if they take at most OVERTIME times its share of the time
OVERTIME = 2
# (call shorter than, untimed calls at most): caches refill in a call or two, and longer calls do not notice
PREWARM_STEPS = ((2e-4, None), (2e-2, 1), (math.inf, 0))


def build(c: Contender, inputs: tuple, before: tuple, settings: Settings, watch: DynamoWatch, *, first: bool) -> None:
    """A fresh instance, its first call, and in the first replicate a second call that must give the same."""
    frames = frames_seen()
    with watch.building(c.index):
        guards.seed_all(settings.seed)
        c.fn = guarded(c.builder, c.label, "build")
        if not callable(c.fn):
            raise failed(c.label, "build", TypeError(f"the builder returned {type(c.fn).__name__}, not a function"))
        watch.arm()
        device = guards.check_devices(inputs, settings.mode, guards.module_tensors(c.fn))
        c.call = clock.bind(c.fn, inputs, {}, wait=settings.mode == "latency" and device != "cpu")
        with settings.grad(), _inputs_kept(inputs, before):
            guards.seed_all(settings.seed)
            seconds, output = guarded(lambda: clock.timed_once(c.call, settings.timer), c.label, "call 1")
            guards.check_real(output, f"the output of {c.label!r}")
            c.output = guards.cloned(output)
            guards.check_unchanged(inputs, before, c.label)
            if first:
                c.first_call_s = seconds
                c.warnings += [w for w in guards.input_warnings(c.fn, (), "inference") if w not in c.warnings]
                if not settings.allow_nondeterministic:
                    guards.seed_all(settings.seed)
                    check_deterministic(guarded(c.call, c.label, "call 2"), c.output, c.label)
                    guards.check_unchanged(inputs, before, c.label)
            compiled = guards.is_compiled(c.fn)
            again = partial(guarded, c.call, c.label, "a later call")
            c.graphs = check_compiled(c.label, again, expected=compiled, at_least=c.graphs)
    c.recompiles = not first and frames_seen() > frames


@contextlib.contextmanager
def _inputs_kept(inputs: tuple, before: tuple) -> Iterator[None]:
    """A contender that changes its inputs is out; the others get them as they were."""
    try:
        yield
    except InputMutationError:
        guards.restore(inputs, before)
        raise


def check_inputs_after(contenders: list[Contender], inputs: tuple, before: tuple, settings: Settings) -> None:
    """Were the inputs changed during the rounds, and by whom? One more call of each finds out."""
    if guards.same_values(inputs, before):
        return
    live = [c for c in contenders if c.live]
    for c in live:
        guards.restore(inputs, before)
        with caught(c), settings.grad():
            guarded(c.call, c.label, "a call after the rounds")
            guards.check_unchanged(inputs, before, c.label)
    guards.restore(inputs, before)
    if all(c.live for c in live):
        names = ", ".join(repr(c.label) for c in live)
        raise InputMutationError(f"the inputs changed during the timed rounds, at some call of one of {names}")


def warm_up(c: Contender, settings: Settings, *, first: bool) -> None:
    """Until the time is stable; the first replicate also decides how many calls a sample holds."""
    share = settings.min_run_time / settings.replicates
    accelerated = any(t.device.type != "cpu" for t in guards.tensors(c.output))
    options = {
        "mode": settings.mode,
        "cache": settings.cache,
        "timer": settings.timer,
        "threads": settings.threads,
    }
    with settings.grad():
        one, _ = guarded(lambda: clock.timed_once(c.call, settings.timer), c.label, "warm-up")
        min_time = clock.warm_up_time(one, accelerated) / (4 if first else 20)
        calls = c.calls or clock.calls_per_sample(one, settings.mode, settings.cache)
        max_time = max(2 * min_time, share / 2)
        if calls == 1 and one >= max_time:
            made, c.seconds = 0, one  # this call has used up the time of the warm-up
        else:
            sample = clock.sampler(c.call, calls=calls, **options)
            made, c.seconds = guarded(
                lambda: clock.warm_up(
                    sample,
                    timer=settings.timer,
                    calls=calls,
                    min_time=min_time,
                    max_time=max_time,
                    window=5,
                    min_samples=1,
                ),
                c.label,
                "warm-up",
            )
        if c.calls is None:
            c.calls = clock.calls_per_sample(c.seconds, settings.mode, settings.cache)
        c.sample = clock.sampler(c.call, calls=c.calls, **options)
    if first:
        c.warmup_calls = made + 1


def _prewarm(c: Contender, settings: Settings) -> int:
    if settings.cache == "cold" or settings.mode != "latency":
        return 0
    most = next(most for limit, most in PREWARM_STEPS if c.seconds < limit)
    return settings.prewarm if most is None else min(settings.prewarm, most)


def take_rounds(contenders: list[Contender], settings: Settings, watch: DynamoWatch, rng: random.Random) -> None:
    """Rounds of one replicate: batches until its share of the time is over or all its intervals are narrow."""
    share = settings.min_run_time * (len(contenders) - 1) / settings.replicates
    margin = math.log1p(settings.min_effect)
    taken: dict[int, list[np.ndarray]] = {c.index: [] for c in contenders}
    start = settings.timer()
    halves: int | None = None
    while True:
        live = [c for c in contenders if c.live]
        prewarm = {c.index: _prewarm(c, settings) for c in live}
        half_seconds = 2 * sum(c.seconds * (c.calls + prewarm[c.index]) for c in live)
        if halves is None:
            halves = 2 if half_seconds * 2 <= share else 1
            round_seconds = halves * half_seconds
        batch_start = settings.timer()
        plain = settings.mode == "latency" and settings.cache == "hot"  # else a sample costs more than its calls
        count = 1
        if plain or taken[0]:
            count = rounds.batch_rounds(round_seconds, share - (batch_start - start), 2 * halves * len(live))
        plan = rounds.schedule([c.index for c in live], count, halves, rng)
        stamps = _batch(plan, live, prewarm, settings, watch)
        round_seconds = (settings.timer() - batch_start) / count
        if stamps is None:  # somebody failed and is out; the others go on without this batch
            if taken[0] and not any(c.live for c in contenders[1:]):
                break
            continue
        for index, values in rounds.by_contender(plan, stamps).items():
            taken[index].append(values)
        elapsed = settings.timer() - start
        if len(np.concatenate(taken[0])) < MIN_PASSES and elapsed < OVERTIME * share:
            continue
        if elapsed >= share or _narrow(taken, contenders, margin, settings.confidence):
            break
    base = np.concatenate(taken[0])
    contenders[0].samples += base.tolist()
    for c in contenders[1:]:
        if c.live:
            values = np.concatenate(taken[c.index])
            c.samples += values.tolist()
            c.replicates.append(statistics.within(rounds.log_ratios(base, values), settings.confidence))


def _batch(
    plan: list[int], live: list[Contender], prewarm: dict[int, int], settings: Settings, watch: DynamoWatch
) -> list[float] | None:
    by_index = {c.index: c for c in live}
    samples, calls = {c.index: c.sample for c in live}, {c.index: c.call for c in live}
    stamps = None
    with settings.grad(), watch.sampling():
        try:
            stamps = rounds.take(plan, samples, calls, prewarm, watch.current)
        except Exception as error:
            c = by_index[watch.current[0]]
            wrapped = error if isinstance(error, BenchmarkError) else failed(c.label, "a timed round", error)
            wrapped.__cause__ = None if wrapped is error else error
            drop(c, wrapped)
    for index in set(watch.hits):
        if (c := by_index[index]).live:
            stamps = None
            drop(c, RecompilationError(f"{c.label!r}: Dynamo compiled, or recorded a CUDA graph, during timed rounds"))
    return stamps


def _narrow(taken: dict[int, list[np.ndarray]], contenders: list[Contender], margin: float, confidence: float) -> bool:
    """True when every live candidate's interval is narrower than a quarter of the margin. Says nothing of its place."""
    base = np.concatenate(taken[0])
    if len(base) < MIN_PASSES_TO_STOP:
        return False
    for c in contenders[1:]:
        if c.live:
            inside = statistics.within(rounds.log_ratios(base, np.concatenate(taken[c.index])), confidence)
            if inside.halfwidth is None or inside.halfwidth > margin / 4:
                return False
    return True

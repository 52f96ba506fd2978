"""Compare candidates with a baseline: interleaved, paired, over rebuilt instances, and only when the answers agree."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..equivalence import Equivalence, check_equivalence
from . import clock, guards, rounds, statistics
from .builders import check_builders, fixed
from .clock import Clock
from .dynamo import DynamoWatch, check_compiled, frames_seen
from .errors import BenchmarkError, RecompilationError
from .measure import check_deterministic, check_options, failed, guarded, resolution_warning, summarize
from .results import Comparison, ComparisonRow, Measurement

Builder = Callable[[], Callable[..., Any]]
FIXED_MIN_EFFECT = 0.05
MIN_PASSES_TO_STOP = 24  # before an interval's width may end a replicate
MIN_PASSES = 12  # of a replicate, if they take at most OVERTIME times its share of the time
OVERTIME = 2
IMPOSSIBLE_SHARE = 1.10  # healthy runs reached 1.06 of a limit that was itself sampled
PREWARM_STEPS = (
    (2e-4, None),
    (2e-2, 1),
    (math.inf, 0),
)  # (call shorter than, at most): a cache refills in a call or two
RULE_STRENGTH = ("bitwise", "close", "rounding", "approximate", "different")
SEED_STEP = 7919
PAD_BYTES = 2**20


@dataclass
class _Contender:
    index: int  # 0 is the baseline
    label: str
    builder: Builder
    live: bool = True
    verdict: str | None = None  # "invalid" or "error" once it is out
    error: str | None = None
    equivalence: Equivalence | None = None
    first_call_s: float | None = None
    warmup_calls: int = 0
    calls: int | None = None  # per sample, chosen in the first replicate
    graphs: int = 0  # compiled graphs that a call ran in the first replicate
    recompiles: bool = False  # every instance compiles anew, so its old code is of no use
    warnings: list[str] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    replicates: list[statistics.Within] = field(default_factory=list)
    # of the current replicate
    fn: Callable[..., Any] | None = None
    call: Callable[[], Any] | None = None
    sample: clock.Sample | None = None
    output: Any = None
    seconds: float = 0.0

    def release(self) -> None:
        self.fn = self.call = self.sample = self.output = None


@dataclass
class _Settings:
    replicates: int
    min_run_time: float
    min_effect: float
    confidence: float
    mode: str
    cache: str
    prewarm: int
    grad_mode: str
    rtol: float | None
    atol: float | None
    seed: int
    timer: Clock
    threads: int
    allow_nondeterministic: bool

    def grad(self) -> contextlib.AbstractContextManager:
        return guards.GRAD_MODES[self.grad_mode]()


def compare(
    baseline: Builder,
    candidates: Mapping[str, Builder],
    *,
    make_inputs: Callable[[int], tuple],
    label: str = "baseline",
    replicates: int = 6,
    min_run_time: float = 0.5,
    min_effect: float = 0.02,
    confidence: float = 0.95,
    mode: str = "latency",
    cache: str = "hot",
    prewarm: int = 2,
    num_threads: int | None = None,
    grad_mode: str = "inference",
    reference: Builder | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    lossy: Mapping[str, Callable[[Any, Any], Equivalence]] | None = None,
    flops: float | Mapping[str, float] | None = None,
    bytes_moved: float | Mapping[str, float] | None = None,
    peaks: Any = None,
    seed: int = 0,
    allow_nondeterministic: bool = False,
    progress: bool = False,
    timer: Clock | None = None,
) -> Comparison:
    """Is each candidate faster than the baseline, by how much, and does it give the same answer?

    baseline, candidates: builders, functions without arguments that return the function to time. They are called
    again for every replicate (fresh weights at fresh addresses, the same seed), because one instance can be some
    per cent faster than its own copy; `fixed(fn)` wraps what cannot be rebuilt. make_inputs(i): the tuple of
    arguments of replicate i, given to every contender; `make_inputs(replicates)` gives fresh inputs after timing.

    A replicate: build, first call apart, check the answer, warm up, then rounds ABBA BAAB over all contenders until
    the time is over or the interval is narrower than a quarter of the margin; never until something is significant.
    min_run_time: seconds per candidate over all replicates (warm-up excluded, at least one round each).
    min_effect: the margin; a speed-up counts when its interval lies beyond 1 + margin (5 % or more for `fixed`).
    prewarm: untimed calls before each sample in hot mode, fewer for calls above 0.2 ms.
    reference: builder of a float64 version of the baseline; floating inputs are given to it in float64.
    lossy: label -> function(actual, expected) for declared-lossy candidates (utils.equivalence.declared_lossy).
    flops, bytes_moved: work of one call (a number, or label -> number), peaks: an object with gemm_flops_per_s and
    read_bytes_per_s (utils.cost.measure_peaks); together they give `share_of_limit` = floor / median time, with
    floor = max(flops / gemm_flops_per_s, bytes / read_bytes_per_s) (roofline, Williams et al. 2009).

    Verdicts: faster, slower, equivalent, inconclusive (says how many rounds would settle it), invalid (another
    answer; no speed-up), error (the candidate failed, compiled during samples, fell back to eager, changed its inputs,
    or is not deterministic; the others go on).

    Raises before any work ValueError or TypeError for a wrong argument; then, for the baseline only, what a candidate
    gets as an `error`: CallableFailedError, InputMutationError, NondeterministicOutputError, RecompilationError,
    EagerFallbackError; MixedDeviceError and MetaTensorError for the inputs. Threads, grad mode, garbage collector,
    random generators and the options of Dynamo and Inductor are put back, after an exception too.
    """
    check_builders(baseline, candidates, label)
    check_options(mode, cache, num_threads, grad_mode, confidence, min_run_time)
    _check_arguments(make_inputs, replicates, min_effect, prewarm, lossy, candidates)
    contenders = [_Contender(0, label, baseline)]
    contenders += [_Contender(i, name, builder) for i, (name, builder) in enumerate(candidates.items(), start=1)]

    with guards.preserved_state(num_threads) as threads, DynamoWatch() as watch:
        settings = _Settings(
            replicates=replicates,
            min_run_time=min_run_time,
            min_effect=min_effect,
            confidence=confidence,
            mode=mode,
            cache="cold" if mode == "device" else cache,
            prewarm=prewarm,
            grad_mode=grad_mode,
            rtol=rtol,
            atol=atol,
            seed=seed,
            timer=timer or clock.default_timer,
            threads=threads,
            allow_nondeterministic=allow_nondeterministic,
        )
        judge = _Judge(settings, reference, lossy or {})
        notes = _run(contenders, make_inputs, settings, judge, watch, progress)
        for contender in contenders:
            contender.release()
        gc.collect()
    return _report(contenders, settings, notes, flops, bytes_moved, peaks)


def _check_arguments(
    make_inputs: Any, replicates: int, min_effect: float, prewarm: int, lossy: Any, candidates: Mapping
) -> None:
    if not callable(make_inputs):
        raise TypeError(f"make_inputs: expected a function of the replicate's number, got {type(make_inputs).__name__}")
    if replicates < 1:
        raise ValueError(f"replicates: expected 1 or more, got {replicates}")
    if not 0 < min_effect < 1:
        raise ValueError(f"min_effect: expected a share between 0 and 1, got {min_effect}")
    if prewarm < 0:
        raise ValueError(f"prewarm: expected 0 or more, got {prewarm}")
    if unknown := set(lossy or {}) - set(candidates):
        raise ValueError(f"lossy: {sorted(unknown)[0]!r} is no candidate; expected one of {', '.join(candidates)}")


def _run(
    contenders: list[_Contender],
    make_inputs: Callable[[int], tuple],
    settings: _Settings,
    judge: _Judge,
    watch: DynamoWatch,
    progress: bool,
) -> list[str]:
    """All replicates; fills the contenders. Returns warnings about the inputs."""
    rng = random.Random(settings.seed)
    notes: list[str] = []
    inputs: tuple = ()
    _make_inputs(make_inputs, settings.replicates, settings)  # for the last check; better to fail before any work
    for replicate in range(settings.replicates):
        if progress:
            print(f"\rreplicate {replicate + 1} of {settings.replicates}", end="", file=sys.stderr, flush=True)
        for contender in contenders:
            contender.release()
            if contender.recompiles:
                watch.forget(contender.index)
        gc.collect()
        padding = torch.empty(rng.randrange(64, PAD_BYTES, 64), dtype=torch.uint8)  # other addresses every time
        inputs = _make_inputs(make_inputs, replicate, settings)
        if replicate == 0:
            notes += guards.input_warnings(lambda: None, inputs, settings.grad_mode)
        before = guards.cloned(inputs)
        live = [c for c in contenders if c.live]
        if replicate > 0:
            if len(live) == 1:
                break  # nobody left to compare with
            rng.shuffle(live)
        for contender in live:
            with _caught(contender):
                _build(contender, inputs, before, settings, watch, first=replicate == 0)
        judge.compare_outputs(contenders, inputs, {})
        for contender in live:
            if contender.live:
                with _caught(contender):
                    _warm_up(contender, settings, first=replicate == 0)
        _take_rounds(contenders, settings, watch, rng)
        for contender in contenders:
            if contender.live:
                with _caught(contender):
                    guards.check_unchanged(inputs, before, contender.label)
        del padding
    if progress:
        print(file=sys.stderr)
    if any(c.live for c in contenders[1:]):
        notes += _check_fresh_inputs(contenders, make_inputs, inputs, settings, judge)
    return notes


def _make_inputs(make_inputs: Callable[[int], tuple], index: int, settings: _Settings) -> tuple:
    guards.seed_all(settings.seed + SEED_STEP * (index + 1))
    inputs = guarded(lambda: make_inputs(index), "make_inputs", f"number {index}")
    if not isinstance(inputs, (tuple, list)):
        raise TypeError(f"make_inputs: expected a tuple of arguments, got {type(inputs).__name__}; write `(x,)`")
    guards.check_devices(inputs, settings.mode)
    return tuple(inputs)


@contextlib.contextmanager
def _caught(contender: _Contender) -> Iterator[None]:
    """A failing candidate becomes an `error` row and is left out from here on; a failing baseline raises."""
    try:
        yield
    except BenchmarkError as error:
        _drop(contender, error)


def _drop(contender: _Contender, error: BenchmarkError) -> None:
    if contender.index == 0:
        raise error
    contender.live, contender.verdict = False, "error"
    contender.error = f"{type(error).__name__}: {error}"
    contender.release()


def _build(
    c: _Contender, inputs: tuple, before: tuple, settings: _Settings, watch: DynamoWatch, *, first: bool
) -> None:
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
        with settings.grad():
            generators = guards.rng_state()
            seconds, output = guarded(lambda: clock.timed_once(c.call, settings.timer), c.label, "call 1")
            guards.check_real(output, f"the output of {c.label!r}")
            c.output = guards.cloned(output)
            guards.check_unchanged(inputs, before, c.label)
            if first:
                c.first_call_s = seconds
                c.warnings += [w for w in guards.input_warnings(c.fn, (), "inference") if w not in c.warnings]
                if not settings.allow_nondeterministic:
                    guards.set_rng_state(generators)
                    check_deterministic(guarded(c.call, c.label, "call 2"), c.output, c.label)
                    guards.check_unchanged(inputs, before, c.label)
            compiled = guards.is_compiled(c.fn)
            c.graphs = check_compiled(c.label, c.call, expected=compiled, at_least=c.graphs)
    c.recompiles = not first and frames_seen() > frames


def _warm_up(c: _Contender, settings: _Settings, *, first: bool) -> None:
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
        sample = clock.sampler(c.call, calls=calls, **options)
        made, c.seconds = guarded(
            lambda: clock.warm_up(
                sample,
                timer=settings.timer,
                calls=calls,
                min_time=min_time,
                max_time=max(2 * min_time, share / 2),
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


def _prewarm(c: _Contender, settings: _Settings) -> int:
    if settings.cache == "cold" or settings.mode != "latency":
        return 0
    most = next(most for limit, most in PREWARM_STEPS if c.seconds < limit)
    return settings.prewarm if most is None else min(settings.prewarm, most)


def _take_rounds(contenders: list[_Contender], settings: _Settings, watch: DynamoWatch, rng: random.Random) -> None:
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
    plan: list[int], live: list[_Contender], prewarm: dict[int, int], settings: _Settings, watch: DynamoWatch
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
            _drop(c, wrapped)
    for index in set(watch.hits):
        if (c := by_index[index]).live:
            stamps = None
            _drop(c, RecompilationError(f"{c.label!r}: Dynamo compiled, or recorded a CUDA graph, during timed rounds"))
    return stamps


def _narrow(taken: dict[int, list[np.ndarray]], contenders: list[_Contender], margin: float, confidence: float) -> bool:
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


def _check_fresh_inputs(
    contenders: list[_Contender],
    make_inputs: Callable[[int], tuple],
    last_inputs: tuple,
    settings: _Settings,
    judge: _Judge,
) -> list[str]:
    """The same check on inputs that nobody has seen: a cached, lazy or replayed result does not follow them."""
    fresh = _make_inputs(make_inputs, settings.replicates, settings)
    where: dict[int, str] = {}
    baseline_follows = False
    for c in contenders:
        if c.live:
            old = c.output
            with _caught(c), settings.grad():
                c.output = guards.cloned(guarded(lambda c=c: c.fn(*fresh), c.label, "fresh inputs"))
                stale = guards.same_values(old, c.output)
                baseline_follows = baseline_follows or (c.index == 0 and not stale)
                where[c.index] = "on fresh inputs after timing: "
                if stale and baseline_follows:
                    where[c.index] = "stale: the output did not follow fresh inputs, so a stored result was timed: "
    judge.compare_outputs(contenders, fresh, where)
    if guards.tensors(fresh) and guards.same_values(fresh, last_inputs):
        return ["same_inputs: make_inputs gives the same values for every number; a cached result would not be seen"]
    return []


class _Judge:
    """Decides whether a candidate's output is the baseline's, and remembers the weakest rule that was needed."""

    def __init__(self, settings: _Settings, reference: Builder | None, lossy: Mapping[str, Callable]) -> None:
        self.settings, self.reference, self.lossy = settings, reference, lossy

    def compare_outputs(self, contenders: list[_Contender], inputs: tuple, where: dict[int, str]) -> None:
        base = contenders[0]
        reference: list[Any] = []  # computed once, and only when a tolerance did not settle it
        for c in contenders[1:]:
            if not c.live:
                continue
            with _caught(c), self.settings.grad():
                found = guarded(lambda c=c: self._judge(c, base.output, inputs, reference), c.label, "the check")
                if not found.equivalent:
                    c.live, c.verdict = False, "invalid"
                    c.equivalence = dataclasses.replace(found, reason=where.get(c.index, "") + found.reason)
                elif c.equivalence is None or _weaker(found, c.equivalence):
                    c.equivalence = found

    def _judge(self, c: _Contender, expected: Any, inputs: tuple, reference: list[Any]) -> Equivalence:
        s = self.settings
        if c.label in self.lossy:
            found = self.lossy[c.label](c.output, expected)
        else:
            found = check_equivalence(c.output, expected, rtol=s.rtol, atol=s.atol)
            if not found.equivalent and self.reference is not None:
                if not reference:
                    guards.seed_all(s.seed)
                    exact = self.reference()
                    reference.append(guards.cloned(exact(*guards.to_float64(inputs))))
                found = check_equivalence(c.output, expected, reference=reference[0], rtol=s.rtol, atol=s.atol)
        if bad := guards.count_new_nonfinite(c.output, expected):
            reason = f"non_finite: {bad} values are NaN or infinite where the baseline is finite"
            found = dataclasses.replace(found, equivalent=False, rule="different", reason=reason)
        return found


def _weaker(a: Equivalence, b: Equivalence) -> bool:
    return RULE_STRENGTH.index(a.rule) > RULE_STRENGTH.index(b.rule)


def _report(
    contenders: list[_Contender], settings: _Settings, notes: list[str], flops: Any, bytes_moved: Any, peaks: Any
) -> Comparison:
    base = contenders[0]
    measured = summarize(
        base.label,
        base.samples,
        base.calls or 1,
        base.first_call_s,
        base.warmup_calls,
        base.warnings,
        settings.mode,
        settings.cache,
        settings.threads,
        confidence=settings.confidence,
    )
    rows, shares = [], []
    for c in contenders:
        floor = floor_seconds(c.label, flops, bytes_moved, peaks)
        median = float(np.median(c.samples)) if c.samples else None
        share = floor / median if floor is not None and median else None
        if share is not None and share > IMPOSSIBLE_SHARE:
            c.warnings.append(f"impossible_rate: {share:.0%} of the measured limit; is all the work done?")
        shares.append(share)
    for c, share in zip(contenders[1:], shares[1:], strict=True):
        rows.append(_row(c, base, measured, settings, share))
    return Comparison(
        rows=rows,
        baseline=dataclasses.replace(measured, warnings=tuple(base.warnings)),
        min_effect=settings.min_effect,
        replicates=settings.replicates,
        confidence=settings.confidence,
        baseline_share_of_limit=shares[0],
        warnings=tuple(notes),
    )


def _row(
    c: _Contender, base: _Contender, measured: Measurement, settings: _Settings, share: float | None
) -> ComparisonRow:
    common = {
        "label": c.label,
        "baseline_label": base.label,
        "equivalence": c.equivalence,
        "baseline_median_s": measured.median_s,
        "first_call_s": c.first_call_s,
        "mode": settings.mode,
        "cache": settings.cache,
        "num_threads": settings.threads,
        "confidence": settings.confidence,
    }
    rebuilt = not any(isinstance(x.builder, fixed) for x in (c, base))
    margin = settings.min_effect if rebuilt else max(settings.min_effect, FIXED_MIN_EFFECT)
    warnings = list(c.warnings)
    if not rebuilt:
        warnings.append(f"not_rebuilt: one instance only, so the margin is {margin:.0%}")
    if c.verdict is not None:  # no number without its proof
        return ComparisonRow(**common, verdict=c.verdict, error=c.error, min_effect=margin, warnings=tuple(warnings))
    estimate = statistics.combine(c.replicates, settings.confidence)
    verdict = statistics.verdict(estimate, margin)
    n_rounds = sum(r.n for r in c.replicates)
    needed = None
    if verdict == "inconclusive":
        needed = statistics.needed_rounds(estimate, n_rounds, margin)
        warnings.append(_advice(estimate, n_rounds, needed, margin))
    if resolution := resolution_warning(c.samples, c.calls, settings.mode):
        warnings.append(resolution)
    half = estimate.halfwidth
    return ComparisonRow(
        **common,
        verdict=verdict,
        speedup=math.exp(estimate.center),
        ci_low=None if half is None else math.exp(estimate.center - half),
        ci_high=None if half is None else math.exp(estimate.center + half),
        median_s=float(np.median(c.samples)),
        n_rounds=n_rounds,
        n_eff=sum(r.n_eff for r in c.replicates),
        replicates=len(c.replicates),
        within_halfwidth=estimate.within_halfwidth,
        between_sd=estimate.between_sd,
        min_effect=margin,
        needed_rounds=needed,
        warnings=tuple(warnings),
        share_of_limit=share,
        calls_per_sample=c.calls,
        samples=tuple(c.samples),
    )


def _advice(estimate: statistics.Estimate, n_rounds: int, needed: int | None, margin: float) -> str:
    if estimate.halfwidth is None:
        return "too_few_rounds: no interval from so few rounds; give more replicates or min_run_time"
    if estimate.halfwidth > 1:
        return f"noise_exceeds_effect: the ratio itself is unknown after {n_rounds} rounds; is the machine busy?"
    noise = 100 * math.expm1(estimate.halfwidth)
    lever = "replicates" if estimate.halfwidth == estimate.between_halfwidth else "min_run_time"
    name = "noise_exceeds_effect" if estimate.halfwidth > math.log1p(margin) else "on_the_margin"
    return (
        f"{name}: ±{noise:.{1 if noise < 10 else 0}f} % after {n_rounds} rounds, margin {100 * margin:.3g} %; "
        f"about {needed} rounds would settle it (raise {lever} {needed / n_rounds:.1f}-fold)"
    )


def floor_seconds(label: str, flops: Any, bytes_moved: Any, peaks: Any) -> float | None:
    """Least seconds of one call by the machine's measured limits; None when work or limits are unknown."""
    if peaks is None:
        return None
    work = [value.get(label) if isinstance(value, Mapping) else value for value in (flops, bytes_moved)]
    limits = [peaks.gemm_flops_per_s, peaks.read_bytes_per_s]
    times = [w / limit for w, limit in zip(work, limits, strict=True) if w is not None and limit]
    return max(times) if times else None

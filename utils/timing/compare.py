"""Compare candidates with a baseline: interleaved, paired, over rebuilt instances, and only when the answers agree."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..equivalence import Equivalence
from . import clock, guards
from .builders import check_builders
from .clock import Clock
from .contender import Builder, Contender, Settings, caught, draw_inputs
from .dynamo import DynamoWatch
from .judge import Judge, check_fresh_inputs
from .measure import check_options
from .replicate import build, check_inputs_after, take_rounds, warm_up
from .report import report
from .results import Comparison

PAD_BYTES = 2**20


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
    on_mismatch: str = "invalid",
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

    on_mismatch: "invalid" makes a row of a candidate with another answer, "raise" raises OutputMismatchError at once
    (NonFiniteOutputError for NaN or infinity where the baseline is finite).

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
    if on_mismatch not in ("invalid", "raise"):
        raise ValueError(f"on_mismatch: expected one of invalid, raise, got {on_mismatch!r}")
    contenders = [Contender(0, label, baseline)]
    contenders += [Contender(i, name, builder) for i, (name, builder) in enumerate(candidates.items(), start=1)]

    with guards.preserved_state(num_threads) as threads, DynamoWatch() as watch:
        settings = Settings(
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
            timer=timer or clock.default_timer(),
            threads=threads,
            allow_nondeterministic=allow_nondeterministic,
        )
        judge = Judge(settings, reference, lossy or {}, on_mismatch)
        notes = run(contenders, make_inputs, settings, judge, watch, progress)
        for contender in contenders:
            contender.release()
        gc.collect()
    return report(contenders, settings, notes, flops, bytes_moved, peaks)


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


def run(
    contenders: list[Contender],
    make_inputs: Callable[[int], tuple],
    settings: Settings,
    judge: Judge,
    watch: DynamoWatch,
    progress: bool,
) -> list[str]:
    """All replicates; fills the contenders. Returns warnings about the inputs."""
    rng = random.Random(settings.seed)
    notes: list[str] = []
    inputs: tuple = ()
    draw_inputs(make_inputs, settings.replicates, settings)  # for the last check; better to fail before any work
    for replicate in range(settings.replicates):
        if progress:
            print(f"\rreplicate {replicate + 1} of {settings.replicates}", end="", file=sys.stderr, flush=True)
        for contender in contenders:
            contender.release()
            if contender.recompiles:
                watch.forget(contender.index)
        gc.collect()
        padding = torch.empty(rng.randrange(64, PAD_BYTES, 64), dtype=torch.uint8)  # other addresses every time
        inputs = draw_inputs(make_inputs, replicate, settings)
        if replicate == 0:
            notes += guards.input_warnings(lambda: None, inputs, settings.grad_mode)
        before = guards.cloned(inputs)
        live = [c for c in contenders if c.live]
        if replicate > 0:
            if len(live) == 1:
                break  # nobody left to compare with
            rng.shuffle(live)
        for contender in live:
            with caught(contender):
                build(contender, inputs, before, settings, watch, first=replicate == 0)
        judge.compare_outputs(contenders, inputs, {})
        for contender in live:
            if contender.live:
                with caught(contender):
                    warm_up(contender, settings, first=replicate == 0)
        take_rounds(contenders, settings, watch, rng)
        check_inputs_after(contenders, inputs, before, settings)
        del padding
    if progress:
        print(file=sys.stderr)
    if any(c.live for c in contenders[1:]):
        notes += check_fresh_inputs(contenders, make_inputs, inputs, settings, judge)
    return notes

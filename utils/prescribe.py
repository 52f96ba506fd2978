"""What makes *your* model faster: the techniques of this book, tried on it one after the other.

    found = prescribe(make_model, make_inputs)
    print(found)          # each step alone and on the best stack so far, its cost, and the code of what was kept
    found.code            # the text of a function `run(*args, **kwargs)`; it is what was measured

A step is kept only when `compare` says that the best stack so far is *faster* with it, and the outputs agree. So no
stack is slower than one that it grew from; its total against the plain call is measured too, and a step that the total
contradicts goes. Before anything is timed, outputs that are wrong on purpose must fail the same check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .cost import peak_memory
from .equivalence import Equivalence
from .prescribe_arguments import check_arguments
from .prescribe_checks import check_controls, signal_to_noise
from .prescribe_code import Stack, Step, execute, source, switches_of, target_of, with_step
from .prescribe_code import model_code as code_of_model
from .prescribe_report import Prescription, StepRow
from .prescribe_steps import NOT_TRIED, Facts, conflict, trials
from .prescribe_subject import PrescribeError, Subject, one_line
from .prescribe_switches import SWITCHES, everything_undone, turn
from .timing import BenchmarkError, BreakEven, ComparisonRow, break_even, compare, guards
from .timing.dynamo import DynamoWatch

__all__ = ["PrescribeError", "Prescription", "StepRow", "prescribe"]

PLAIN: Stack = ()


def prescribe(
    factory: Callable[[], nn.Module],
    make_inputs: Callable[..., Any],
    *,
    allow_lossy: bool = False,
    lossy: Callable[[Any, Any], Equivalence] | None = None,
    skip: Collection[str] = (),
    replicates: int = 5,
    min_run_time: float = 1.0,
    min_effect: float = 0.02,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    progress: bool = False,
    model_code: str | None = None,
) -> Prescription:
    """Try inference mode, linearize, SDPA, channels_last, torch.compile, numbers of threads, TF32, BF16, FP16,
    cudnn.benchmark and a CUDA graph on a model; keep what is faster and gives the same answer.

    factory: returns a new model in eval mode, on its device, the same weights at every call (torch's generators are
    seeded before; a checkpoint that is loaded is fine). make_inputs: returns what the model is called with, one tensor,
    a tuple of arguments or a mapping of keyword arguments; it may take a number and should give other values each time.
    allow_lossy: also try TF32, BF16 and FP16 (BF16 and FP16 after an audit of the range, utils.dynamic_range).
    lossy: what they must reach, from utils.equivalence.declared_lossy; None: a signal-to-noise ratio of 30 dB in every
    output tensor (an error of 3 %). skip: names of steps that are not tried, as in the table ("threads" is every number
    of them). rtol, atol: tolerances of the check.
    replicates, min_run_time (seconds per candidate and comparison), min_effect: as in utils.timing.compare.
    model_code: the lines that make `model` in the printed code; None: an import of the factory and a call.

    Two instances of the model are alive at a time, and for a moment one in float64. Every switch (threads, matmul
    precision, cudnn.benchmark, options of Dynamo and Inductor, grad mode, default dtype, random generators) is as
    before at the end, also after an error.

    Raises PrescribeError (a ValueError of one line) when factory, inputs or arguments are not usable, or when the check
    cannot tell a wrong output from a right one.
    """
    if isinstance(skip, str):
        skip = (skip,)
    check_arguments(
        skip=skip,
        lossy=lossy,
        rtol=rtol,
        atol=atol,
        allow_lossy=allow_lossy,
        replicates=replicates,
        min_run_time=min_run_time,
        min_effect=min_effect,
        seed=seed,
        model_code=model_code,
    )
    seed = int(seed)  # of numpy, say
    with everything_undone():
        subject = Subject(factory, make_inputs, seed)
        model, args, kwargs = subject.checked()
        held = [*guards.module_tensors(model), *guards.tensors((args, kwargs))]
        device = next((tensor.device for tensor in held), torch.device("cpu"))
        steps = trials(Facts(model, args, kwargs, device, torch.get_num_threads(), allow_lossy))
        del model, held
        options = {"replicates": replicates, "min_run_time": min_run_time, "min_effect": min_effect}
        bench = _Bench(
            subject, steps, lossy or signal_to_noise(), options | {"rtol": rtol, "atol": atol, "seed": seed}, progress
        )
        return bench.waterfall(skip, str(device), model_code or code_of_model(target_of(factory)))


class _Bench:
    """Stacks of one subject, compared two at a time; no pair is measured twice."""

    def __init__(
        self, subject: Subject, steps: list[tuple[Step, str]], lossy: Callable, options: dict, progress: bool
    ) -> None:
        self.subject, self.steps, self.lossy, self.options, self.progress = subject, steps, lossy, options, progress
        turned = {step.switch[0] for step, reason in steps if step.switch and not reason}
        self.defaults = {name: SWITCHES[name].get() for name in turned}
        self.known: dict[tuple[Stack, Stack], ComparisonRow] = {}
        self.setups: dict[Stack, float] = {}
        self.plain_s: float | None = None
        self.reference = self._float64 if self._float64_works() else None

    def waterfall(self, skip: Collection[str], device: str, model_code: str) -> Prescription:
        control = self._control()
        stack, total, rows = PLAIN, None, []
        for step, reason in self.steps:
            if not reason and (step.name in skip or (step.group == "threads" and "threads" in skip)):
                reason = f"{NOT_TRIED}: skip names it"
            row = _refused(step, reason) if reason else self._tried(step, stack, total)
            rows.append(row)
            if row.kept:
                stack, total = with_step(stack, step), row.total
        return Prescription(
            rows=_settled(rows, stack),
            kept=tuple(step.name for step in stack),
            code=source(stack, model_code),
            total=total,
            plain_s=self.plain_s,
            plain_memory_bytes=self._memory(PLAIN),
            device=device,
            threads=torch.get_num_threads(),
            min_effect=self.options["min_effect"],
            pays=None if total is None else self._pays(total, stack, PLAIN),
            control=control,
            notes=() if self.reference else ("no float64 reference: the model does not run in float64",),
        )

    def _tried(self, step: Step, stack: Stack, best: ComparisonRow | None) -> StepRow:
        """Alone, on the best stack, and, where that is faster, in total."""
        row = StepRow(step.name, "error", lossy=step.lossy)
        self._say(f"{step.name}: alone")
        alone = self._compared(PLAIN, with_step(PLAIN, step))
        row = replace(row, verdict=alone.verdict, reason=_why(alone), alone=alone)
        if alone.verdict in ("invalid", "error"):
            return row
        if reason := conflict(stack, step):
            verdict, _, why = reason.partition(": ")
            return replace(row, verdict=verdict, reason=why)
        larger = with_step(stack, step)
        if stack:
            self._say(f"{step.name}: on {', '.join(one.name for one in stack)}")
        on_best = self._compared(stack, larger)
        row = replace(row, verdict=on_best.verdict, reason=_why(on_best), on_best=on_best)
        if on_best.verdict in ("invalid", "error"):
            return row
        row = replace(row, setup_s=self.setups.get(larger))
        if on_best.verdict == "faster":
            row = replace(row, pays=self._pays(on_best, larger, stack))
            if stack:
                self._say(f"{step.name}: in total")
            total = self._compared(PLAIN, larger)
            against = _contradicted(total, best)
            row = replace(row, kept=not against, reason=against, total=None if against else total)
        compiled = any("torch.compile" in line for one in larger for line in one.model)
        return replace(row, memory_bytes=self._memory(larger)) if row.kept or not compiled else row

    # ------------------------------------------------------------------------------------------ contenders

    def builder(self, stack: Stack, after: Callable[[Any], Any] = lambda output: output) -> Callable[[], Callable]:
        """A builder for `compare`. The steps are applied at the first call, so that its time holds the set-up."""
        values = self.defaults | switches_of(stack)

        def build() -> Callable[..., Any]:
            model, run = self.subject.fresh(), None

            def call(args: tuple, kwargs: dict) -> Any:
                nonlocal run
                turn(values)
                if run is None:
                    run = execute(stack, model)
                return after(run(*args, **kwargs))

            return call

        return build

    def _float64(self) -> Callable[..., Any]:
        model = nn.Module.to(self.subject.fresh(), torch.float64)  # diffusers' own `to` logs a remark
        return lambda args, kwargs: model(*args, **kwargs)  # as a plain call: without any step

    def _float64_works(self) -> bool:
        try:
            guards.seed_all(self.options["seed"])
            self._float64()(*guards.to_float64(self.subject.inputs(0)))
        except PrescribeError:
            raise
        except Exception:  # an operation without float64, or no memory for it
            return False
        return True

    # ------------------------------------------------------------------------------------------ measurements

    def _compared(self, base: Stack, stack: Stack) -> ComparisonRow:
        """The row of `stack` against `base`; "error" where the comparison itself fails."""
        if (base, stack) in self.known:
            return self.known[base, stack]
        names = [" + ".join(step.name for step in one) or "plain" for one in (base, stack)]
        changes = [step for step in stack if step.lossy and step not in base]
        try:
            found = compare(
                self.builder(base),
                {names[1]: self.builder(stack)},
                make_inputs=self.subject.inputs,
                label=names[0],
                grad_mode="enabled",  # as in a plain call; the step "inference mode" enters its own
                reference=self.reference,
                lossy={names[1]: self.lossy} if changes else None,
                **self.options,
            )
        except BenchmarkError as problem:
            row = ComparisonRow(names[1], names[0], "error", error=one_line(problem))
        else:
            row, baseline = found[names[1]], found.baseline
            self._note_setup(base, baseline.first_call_s, baseline.median_s)
            if row.median_s is not None:
                self._note_setup(stack, row.first_call_s, row.median_s)
            if base == PLAIN and self.plain_s is None:
                self.plain_s = baseline.median_s
        turn(self.defaults)
        self.known[base, stack] = row
        return row

    def _note_setup(self, stack: Stack, first_s: float | None, later_s: float) -> None:
        """Only the first time counts: later instances find the caches of the first."""
        if first_s is not None:
            self.setups.setdefault(stack, max(0.0, first_s - later_s))

    def _pays(self, row: ComparisonRow, stack: Stack, base: Stack) -> BreakEven | None:
        if row.speedup is None or row.ci_low is None or row.ratio_unknown:
            return None
        return break_even(self.setups.get(stack, 0.0), self.setups.get(base, 0.0), row)

    def _memory(self, stack: Stack) -> int | None:
        """Peak bytes of one call after the first, in torch's allocator; None where it is not reported."""
        with DynamoWatch() as watch, watch.building(0):
            try:
                call = self.builder(stack)()
                watch.arm()
                given = self.subject.inputs(0)
                call(*given)
                return peak_memory(call, *given).peak_bytes
            except Exception:
                return None
            finally:
                turn(self.defaults)

    def _control(self) -> str:
        self._say("control: wrong outputs must be found")
        return check_controls(self.builder, self.subject.inputs, self.reference, self.lossy, self.options, self.steps)

    def _say(self, text: str) -> None:
        if self.progress:
            print(f"prescribe: {text}", file=sys.stderr, flush=True)


def _refused(step: Step, reason: str) -> StepRow:
    verdict, _, why = reason.partition(": ")
    return StepRow(step.name, verdict, why, lossy=step.lossy)


def _settled(rows: list[StepRow], stack: Stack) -> list[StepRow]:
    """The marks at the end: a later step may have replaced an earlier one, or have brought one with it."""
    names = {step.name for step in stack}
    bringers = {brought.name: step.name for step in stack for brought in step.brings}
    settled = []
    for row in rows:
        if row.kept and row.name not in names:
            row = replace(row, kept=False, reason="replaced by a later step of its kind")
        elif row.name in names and not row.kept:
            row = replace(row, kept=True, reason=f"comes with {bringers[row.name]}")
        settled.append(row)
    return settled


def _why(row: ComparisonRow) -> str:
    """In words, where a row has no speed-up, or what would settle it."""
    if row.verdict == "invalid" and row.equivalence is not None:
        return row.equivalence.reason
    if row.verdict == "inconclusive":
        return "; ".join(text.partition(": ")[2] or text for text in row.warnings)
    return row.error or ""


def _contradicted(total: ComparisonRow, best: ComparisonRow | None) -> str:
    """Why the total speaks against a step that was faster on the best stack ("" where it does not)."""
    if total.verdict in ("invalid", "error"):
        return f"not kept, in total: {_why(total)}"
    if best is not None and total.ci_high is not None and best.ci_low is not None and total.ci_high < best.ci_low:
        return f"not kept: in total {total.speedup:.2f}x, and {best.speedup:.2f}x without it"
    if total.verdict == "slower":
        return "not kept: in total slower than a plain call"
    return ""

"""One of the functions that are compared, and what is common to all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..equivalence import Equivalence
from . import clock, guards, statistics
from .clock import Clock
from .errors import BenchmarkError
from .measure import guarded

Builder = Callable[[], Callable[..., Any]]
SEED_STEP = 7919


@dataclass
class Contender:
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
class Settings:
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


@contextlib.contextmanager
def caught(contender: Contender) -> Iterator[None]:
    """A failing candidate becomes an `error` row and is left out from here on; a failing baseline raises."""
    try:
        yield
    except BenchmarkError as error:
        drop(contender, error)


def drop(contender: Contender, error: BenchmarkError) -> None:
    if contender.index == 0:
        raise error
    contender.live, contender.verdict = False, "error"
    contender.error = f"{type(error).__name__}: {error}"
    contender.release()


def draw_inputs(make_inputs: Callable[[int], tuple], index: int, settings: Settings) -> tuple:
    guards.seed_all(settings.seed + SEED_STEP * (index + 1))
    inputs = guarded(lambda: make_inputs(index), "make_inputs", f"number {index}")
    if not isinstance(inputs, (tuple, list)):
        raise TypeError(f"make_inputs: expected a tuple of arguments, got {type(inputs).__name__}; write `(x,)`")
    guards.check_devices(inputs, settings.mode)
    return tuple(inputs)

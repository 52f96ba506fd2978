"""What a technique costs before it pays: import, load and first call in a fresh process; calls to earn it back."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from .errors import CallableFailedError
from .guards import GRAD_MODES
from .results import UNPROVEN, ComparisonRow, seconds

CHILD = Path(__file__).with_name("cold_child.py")
_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(frozen=True)
class ColdRun:
    """Seconds of one fresh process, and what its caches held."""

    import_s: float
    load_s: float
    first_call_s: float
    steady_s: float
    cache_files_before: int
    cache_files_after: int
    counters: dict[str, int] = field(repr=False)

    @property
    def setup_s(self) -> float:
        """Everything before steady calls: import, load, and what the first call takes beyond a steady one."""
        return self.import_s + self.load_s + max(0.0, self.first_call_s - self.steady_s)


@dataclass(frozen=True)
class ColdStart:
    """Medians in seconds over `runs`, and Dynamo's counters of the last run ("inductor.fxgraph_cache_hit", ...)."""

    label: str
    import_s: float
    load_s: float
    first_call_s: float
    steady_s: float
    setup_s: float
    fresh_cache: bool
    counters: dict[str, int] = field(repr=False)
    runs: tuple[ColdRun, ...] = field(repr=False)

    def __str__(self) -> str:
        caches = "empty caches" if self.fresh_cache else "kept caches"
        return (
            f"{self.label}: import {seconds(self.import_s)}, load {seconds(self.load_s)}, first call "
            f"{seconds(self.first_call_s)}, then {seconds(self.steady_s)} a call ({caches}, median of {len(self.runs)})"
        )


def cold_start(
    factory: str | Callable[[], Callable[..., Any]],
    make_inputs: str | Callable[[], tuple] | None = None,
    *,
    label: str | None = None,
    fresh_cache: bool = True,
    cache_dir: str | Path | None = None,
    repeats: int = 3,
    steady_time: float = 0.5,
    num_threads: int | None = None,
    grad_mode: str = "inference",
    seed: int = 0,
    env: dict[str, str] | None = None,
    timeout: float = 600.0,
) -> ColdStart:
    """Time `factory` in fresh processes: import of its module, factory(), first call of what it returns, steady calls.

    The other process knows nothing of this one, so the factory must be importable there. It may be
    - "package.module:function" (also from a notebook, for what lies in a file: "utils.models.gpt:make_decoder");
    - source text that defines a function `factory()` and, with inputs, `make_inputs()`: the way for a notebook,
      because the reader sees all of it;
    - a function. One from a module is imported there. One from a notebook cell or from __main__ is sent as its
      source, so it must import all that it uses in its own body.
    make_inputs: the same kinds, without arguments, returns the tuple of arguments (None: no arguments, or the
    function `make_inputs` of the source text). Its time is in none of the results.

    fresh_cache: the caches of Inductor and Triton (TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR) are an empty folder in
    each process. False: one folder for all, `cache_dir` as it is, or a new one that an extra process, not counted,
    fills. repeats: processes; the results are their medians. env: more environment variables for them. timeout:
    seconds a process may take.

    Raises ValueError or TypeError for a wrong argument, CallableFailedError (stage and error) when the process fails
    or takes too long.
    """
    if repeats < 1:
        raise ValueError(f"repeats: expected 1 or more, got {repeats}")
    if grad_mode not in GRAD_MODES:
        raise ValueError(f"grad_mode: expected one of {', '.join(GRAD_MODES)}, got {grad_mode!r}")
    if fresh_cache and cache_dir is not None:
        raise ValueError("cache_dir: only with fresh_cache=False; a fresh cache is an empty folder of its own")
    order = _order(factory, make_inputs)
    label = label or order["factory"]
    order |= {"steady_time": steady_time, "num_threads": num_threads, "grad_mode": grad_mode, "seed": seed}
    runs: list[ColdRun] = []
    with contextlib.ExitStack() as stack:
        kept = cache_dir
        if not fresh_cache and kept is None:
            kept = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            _run(order, label, str(kept), env, timeout)
        for _ in range(repeats):
            with _folder(kept) as cache:
                runs.append(_run(order, label, cache, env, timeout))
    values = {
        name: median(getattr(run, name) for run in runs)
        for name in ("import_s", "load_s", "first_call_s", "steady_s", "setup_s")
    }
    return ColdStart(label, **values, fresh_cache=fresh_cache, counters=runs[-1].counters, runs=tuple(runs))


def _order(factory: Any, make_inputs: Any) -> dict[str, Any]:
    """What the other process needs to know: one module or source text, and names in it."""
    source, module, name = _target(factory, "factory")
    order = {"source": source, "module": module, "factory": name, "inputs_here": False, "inputs_module": None}
    if make_inputs is None:
        has_inputs = source is not None and re.search(r"^def make_inputs\(", source, re.MULTILINE)
        return order | {"make_inputs": "make_inputs" if has_inputs else None, "inputs_here": bool(has_inputs)}
    inputs_source, inputs_module, inputs_name = _target(make_inputs, "make_inputs")
    if inputs_source is not None:
        if source is None:
            raise ValueError("make_inputs: give it as 'package.module:function', like the factory")
        order["source"] = f"{source}\n\n{inputs_source}"
        return order | {"make_inputs": inputs_name, "inputs_here": True}
    return order | {
        "make_inputs": inputs_name,
        "inputs_module": inputs_module,
        "inputs_here": inputs_module == module and source is None,
    }


def _target(given: Any, what: str) -> tuple[str | None, str | None, str]:
    """(source text or None, module or None, name of the function)."""
    if isinstance(given, str):
        if _PATH.fullmatch(given.strip()):
            module, name = given.strip().split(":")
            return None, module, name
        text = textwrap.dedent(given)
        try:
            compile(text, f"<{what}>", "exec")
        except SyntaxError as error:
            raise ValueError(
                f"{what}: {given[:60]!r} is neither 'package.module:function' nor Python source ({error.msg})"
            ) from None
        if not re.search(rf"^(def {what}\(|{what}\s*=)", text, re.MULTILINE):
            raise ValueError(f"{what}: the source text defines no function {what!r}")
        return text, None, what
    if not callable(given):
        raise TypeError(f"{what}: expected 'package.module:function', source text or a function, got {given!r}"[:200])
    name, module = getattr(given, "__qualname__", ""), getattr(given, "__module__", None)
    if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
        raise ValueError(
            f"{what}: {name or given!r} has no name that another process could import; use def at top level"
        )
    if module not in (None, "__main__"):
        return None, module, name
    try:
        return textwrap.dedent(inspect.getsource(given)), None, name
    except (OSError, TypeError):
        raise ValueError(
            f"{what}: no source found for {name!r}; give it as text or 'package.module:function'"
        ) from None


@contextlib.contextmanager
def _folder(kept: str | Path | None) -> Iterator[str]:
    if kept is not None:
        Path(kept).mkdir(parents=True, exist_ok=True)
        yield str(kept)
        return
    with tempfile.TemporaryDirectory(prefix="cold_start_", ignore_cleanup_errors=True) as folder:
        yield folder


def _run(order: dict[str, Any], label: str, cache: str, env: dict[str, str] | None, timeout: float) -> ColdRun:
    """One process, in a group of its own, so that its compilers end with it."""
    paths = [str(Path(path or ".").resolve()) for path in sys.path]
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TRITON_CACHE_DIR": os.path.join(cache, "triton"),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        **(env or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        result, written = Path(folder) / "result.json", Path(folder) / "output.txt"
        text = json.dumps(order | {"cache": cache, "result": str(result)})
        with written.open("w") as output:  # not a pipe: a compiler that outlives the process would keep it open
            process = subprocess.Popen(
                [sys.executable, "-P", str(CHILD)],  # -P: this folder has a statistics.py of its own
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
                start_new_session=True,
            )
        try:
            process.communicate(text, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise CallableFailedError(f"{label!r}: the fresh process took more than {timeout:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if result.exists():
            found = json.loads(result.read_text())
        else:
            found = {"stage": "start", "error": _last_line(written.read_text(errors="replace"))}
    if "error" in found:
        raise CallableFailedError(f"{label!r} failed in a fresh process at {found['stage']}: {found['error']}"[:500])
    return ColdRun(**{name: found[name] for name in ColdRun.__dataclass_fields__})


def _last_line(output: str) -> str:
    lines = [line for line in output.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "it ended without a word"


@dataclass(frozen=True)
class BreakEven:
    """Calls after which the candidate has earned back its set-up. None: never, as far as the interval tells.

    `extra_s`: additional set-up in seconds, `saved_s`: seconds saved a call; both with (low, high).
    """

    calls: int | None
    calls_low: int | None
    calls_high: int | None
    extra_s: float
    extra_range_s: tuple[float, float]
    saved_s: float
    saved_range_s: tuple[float, float]

    def __str__(self) -> str:
        if self.extra_s < 0 and self.saved_s < 0:
            return f"starts sooner but is slower: ahead for the first {math.floor(self.extra_s / self.saved_s):,} calls"
        if self.calls is None and self.calls_low is None:
            return f"never pays: {seconds(max(0.0, self.extra_s))} more set-up and no time saved"
        low, high = ("never" if n is None else f"{n:,}" for n in (self.calls_low, self.calls_high))
        if self.calls is None:
            return f"may never pay [{low}, {high}]"
        return f"pays after {self.calls:,} call{'s' * (self.calls != 1)} [{low}, {high}]"


def break_even(cold_candidate: ColdStart | float, cold_baseline: ColdStart | float, row: ComparisonRow) -> BreakEven:
    """After how many calls a candidate has earned back its set-up: (extra set-up) / (seconds saved a call).

    cold_candidate, cold_baseline: from cold_start, or seconds of set-up (compilation, cache loading, autotuning, graph
    capture, a conversion of layouts; 0.0 for none). row: the candidate's row of a comparison. The interval is that of
    the row's speedup together with the range of the set-up over the processes.

    Raises ValueError for a row without a proven speedup (invalid, error, no interval).
    """
    if row.verdict in UNPROVEN or row.speedup is None or row.ci_low is None:
        raise ValueError(
            f"row: {row.label!r} is {row.verdict!r} and has no proven speedup; expected a row with an interval"
        )
    candidate, baseline = _setup(cold_candidate, "cold_candidate"), _setup(cold_baseline, "cold_baseline")
    extra = (candidate[0] - baseline[0], candidate[1] - baseline[2], candidate[2] - baseline[1])
    saved, saved_low, saved_high = (row.baseline_median_s * (1 - 1 / s) for s in (row.speedup, row.ci_low, row.ci_high))
    return BreakEven(
        calls=_calls(extra[0], saved),
        calls_low=_calls(extra[1], saved_high),
        calls_high=_calls(extra[2], saved_low),
        extra_s=extra[0],
        extra_range_s=extra[1:],
        saved_s=saved,
        saved_range_s=(saved_low, saved_high),
    )


def _setup(cold: ColdStart | float, what: str) -> tuple[float, float, float]:
    """(median, lowest, highest) seconds of set-up."""
    if isinstance(cold, ColdStart):
        values = [run.setup_s for run in cold.runs]
        return cold.setup_s, min(values), max(values)
    value = float(cold)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{what}: expected seconds of set-up, 0 or more, got {cold}")
    return value, value, value


def _calls(extra_s: float, saved_s: float) -> int | None:
    """Smallest number of calls that earns `extra_s` back: 0 when there is nothing to earn, None when never."""
    if extra_s <= 0 and saved_s >= 0:
        return 0
    return math.ceil(round(extra_s / saved_s, 6)) if saved_s > 0 else None

"""Arguments of `prescribe` that cannot be meant: each is refused in one line, before any work."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import torch

from .equivalence import Equivalence, check_equivalence
from .prescribe_steps import NAMES, thread_counts
from .prescribe_subject import PrescribeError, one_line

LARGEST_SEED = 2**62
LOSSY = "expected a check as utils.equivalence.declared_lossy(metric, at_least=…, name=…) makes it"


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


# Name of the argument → (what is expected, is it that?).
EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "allow_lossy": ("True or False", lambda value: isinstance(value, bool)),
    "replicates": ("a whole number, 1 or more", lambda value: _is(Integral, value) and value >= 1),
    "min_run_time": ("seconds, above 0", lambda value: _is(Real, value) and 0 < value < math.inf),
    "min_effect": ("a share between 0 and 1", lambda value: _is(Real, value) and 0 < value < 1),
    "seed": ("a whole number below 2**62", lambda value: _is(Integral, value) and abs(value) < LARGEST_SEED),
    "model_code": ("lines of code, or None", lambda value: value is None or isinstance(value, str)),
}


def check_arguments(
    *, skip: Collection[str], lossy: Any, rtol: float | None, atol: float | None, **others: Any
) -> None:
    """Raises PrescribeError, one line: the wrong value, what was expected, for `skip` the nearest name."""
    for name, value in others.items():
        expected, fits = EXPECTED[name]
        if not fits(value):
            raise PrescribeError(f"{name}={value!r}; expected {expected}")
    _check_skip(skip)
    if lossy is not None:
        _check_lossy(lossy)
    try:
        check_equivalence(torch.ones(1), torch.ones(1), rtol=rtol, atol=atol)
    except (TypeError, ValueError) as problem:
        raise PrescribeError(str(problem)) from problem


def _check_skip(skip: Any) -> None:
    if not isinstance(skip, Collection):
        raise PrescribeError(f"skip={skip!r}; expected names of steps, such as ('threads', 'SDPA')")
    names = [*NAMES, *thread_counts(torch.get_num_threads())]
    for name in skip:
        if name not in names:
            near = get_close_matches(str(name), names, n=1, cutoff=0.0)
            raise PrescribeError(f"skip={name!r} is no step; expected some of {', '.join(names)}; nearest: {near[0]!r}")


def _check_lossy(lossy: Any) -> None:
    if not callable(lossy):
        raise PrescribeError(f"lossy={lossy!r} is no check; {LOSSY}")
    try:
        inspect.signature(lossy).bind(None, None)
    except TypeError:
        raise PrescribeError(f"lossy takes no two arguments (actual, expected); {LOSSY}") from None
    except ValueError:  # some built-in functions have no signature
        pass
    try:
        answer = lossy(torch.full((3,), 1.1), torch.ones(3))
    except Exception:  # it may want an output of the model: check_on_output
        return
    _check_answer(answer)


def check_on_output(lossy: Callable[[Any, Any], Equivalence], actual: Any, expected: Any) -> None:
    """The same on an output of the model, and one that is off."""
    try:
        answer = lossy(actual, expected)
    except Exception as problem:
        raise PrescribeError(f"lossy raised {one_line(problem)} for an output of the model") from problem
    _check_answer(answer)


def _check_answer(answer: Any) -> None:
    if not isinstance(answer, Equivalence):
        raise PrescribeError(f"lossy gives {type(answer).__name__}, no Equivalence; {LOSSY}")

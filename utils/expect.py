"""What a value may be, looked at before any work: `expect.whole(1, width=width, depth=depth)`.

One line says the wrong value, what was expected and the nearest right name. A wrong kind is a TypeError, a value out of
range a ValueError; notebooks look at their parameters with these, and functions at their arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral, Real


def short(value: object) -> str:
    """What to show of a wrong value: one line of at most 60 characters."""
    return " ".join(repr(value).split())[:60]


def nearest(name: str, names: Iterable[str]) -> str:
    """What to say after a wrong name."""
    return f"nearest: {get_close_matches(str(name).lower(), list(names), n=1, cutoff=0.0)[0]!r}"


def whole(least: int | None, /, **given: int) -> None:
    """Every value is a whole number of at least `least` (None: any). A truth value is none."""
    wanted = "a whole number" if least is None else f"a whole number of at least {least}"
    for name, value in given.items():
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise TypeError(f"{name}={short(value)}; expected {wanted}")
        if least is not None and value < least:
            raise ValueError(f"{name}={value}; expected {wanted}")


def whole_list(least: int, /, **given: list[int]) -> None:
    """Every value is a list of one or more whole numbers of at least `least`."""
    wanted = f"a list of whole numbers of at least {least}"
    for name, values in given.items():
        if not isinstance(values, list | tuple) or any(
            not isinstance(n, Integral) or isinstance(n, bool) for n in values
        ):
            raise TypeError(f"{name}={short(values)}; expected {wanted}")
        if not values or min(values) < least:
            raise ValueError(f"{name}={short(values)}; expected {wanted}{'' if values else ', one or more'}")


def above(low: float, /, **given: float) -> None:
    """Every value is a finite number above `low`."""
    _numbers(f"a finite number above {low:g}", lambda value: low < value < math.inf, given)


def at_least(low: float, /, **given: float) -> None:
    """Every value is a finite number, `low` or more."""
    _numbers(f"a finite number of at least {low:g}", lambda value: low <= value < math.inf, given)


def one_of(known: Iterable[str], /, **given: str) -> str:
    """Every value is a name in `known`; returns the last one."""
    known = list(known)
    for name, value in given.items():
        if not isinstance(value, str):
            raise TypeError(f"{name}={short(value)}; expected one of {', '.join(known)}")
        if value not in known:
            raise ValueError(f"{name}={short(value)}; expected one of {', '.join(known)}; {nearest(value, known)}")
    return value


def _numbers(wanted: str, fits, given: dict[str, float]) -> None:
    for name, value in given.items():
        if not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{name}={short(value)}; expected {wanted}")
        if not fits(value):
            raise ValueError(f"{name}={value}; expected {wanted}")

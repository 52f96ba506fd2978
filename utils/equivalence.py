"""Are two outputs the same, and by which rule?

A speed-up counts only beside this answer. Rules, strongest first, for every tensor in a nested output:

- bitwise: the same bits.
- close: |actual - expected| <= atol + rtol * |expected| with the defaults of torch.testing.assert_close for the
  looser of the two dtypes. One change: atol is never more than 1 % of the largest expected value, because a fixed
  1e-5 accepts an output of zeros where the right values are small (a softmax over a large vocabulary).
- rounding: against a float64 reference, rmse(actual) <= k * rmse(expected) + 1e-5 with k = 2, or 3 for half types and
  for tensors too small for a steady RMSE. The rule of torch._dynamo.utils.same; the 1e-5 has the same 1 % cap.
- approximate: a declared lossy technique reached the score that was asked of it (declared_lossy).
- different: none of them.

Every rule must be able to fail: a tolerance under which zeros would pass is refused. NaN and inf are allowed only where
the expected output has the same, and the reason says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .tensor_difference import Difference, compare_tensors, dtype_name

RULES = ("bitwise", "close", "rounding", "approximate", "different")


@dataclasses.dataclass(frozen=True)
class Equivalence:
    """The verdict on two outputs; truthy when they agree.

    `max_abs`, `max_rel` and `rmse` are over all values of all tensors (None where nothing could be compared).
    `dtype` names the looser dtype, the one whose tolerance was used.
    """

    equivalent: bool
    rule: str
    reason: str
    max_abs: float | None = None
    max_rel: float | None = None
    rmse: float | None = None
    dtype: str = ""

    def __bool__(self) -> bool:
        return self.equivalent

    def __str__(self) -> str:
        if not self.equivalent:
            return f"different: {self.reason}"
        return f"same ({self.rule}{', ' + self.dtype if self.dtype else ''}): {self.reason}"


def check_equivalence(
    actual: Any, expected: Any, *, reference: Any = None, rtol: float | None = None, atol: float | None = None
) -> Equivalence:
    """Compare two outputs: tensors, numbers, strings, None, and tuples, lists, mappings, dataclasses of them.

    `reference` is the float64 result of the same structure; it opens the rule "rounding". `rtol` and `atol` replace
    the defaults. Integer and boolean values, shapes, devices and structure must agree exactly; a difference between
    floating dtypes is allowed, said, and judged at the looser dtype.

    Raises ValueError for a negative, non-finite or all-accepting tolerance, for tensors without values (meta, fake)
    and for a reference that is not float64; TypeError for objects that cannot be compared.
    """
    rtol, atol = _valid_tolerance("rtol", rtol), _valid_tolerance("atol", atol)
    leaves: list[Difference] = []
    problem = _walk(actual, expected, reference, "", rtol, atol, leaves)
    return _summary(leaves, problem)


def declared_lossy(
    metric: Callable[[Any, Any], float], *, at_least: float, name: str
) -> Callable[[Any, Any], Equivalence]:
    """A check for a technique that is allowed to change the result, for example a quantised model.

    `metric(actual, expected)` is a score, higher is better: a cosine, the agreement of top-1 tokens. The returned
    function gives the rule "approximate" when the score reaches `at_least`. It fails when the score is not finite,
    when the output is not finite where the expected one is, or when an output of zeros reaches the score as well.
    """
    if not callable(metric):
        raise TypeError(f"metric={metric!r} is not callable; expected a function of (actual, expected)")
    if not name or not isinstance(name, str):
        raise ValueError(f"name={name!r}; expected a short name of the metric, it is printed beside the score")
    floor = float(at_least)
    if not math.isfinite(floor):
        raise ValueError(f"at_least={at_least!r} is not finite; a score below it must be possible")

    def check(actual: Any, expected: Any) -> Equivalence:
        leaves: list[Difference] = []
        problem = _walk(actual, expected, None, "", None, None, leaves)
        found = _summary(leaves, problem)
        numbers = {field: getattr(found, field) for field in ("max_abs", "max_rel", "rmse", "dtype")}
        broken = next((leaf.non_finite for leaf in leaves if leaf.non_finite), None)
        if broken:
            return Equivalence(False, "different", broken, **numbers)
        score = float(metric(actual, expected))
        text = f"{name} {score:.6g}, asked for at least {floor:.6g}"
        if not score >= floor:
            return Equivalence(False, "different", text, **numbers)
        if _zeros_reach(metric, expected, floor):
            return Equivalence(False, "different", f"{text}; an output of zeros reaches it too: no proof", **numbers)
        return Equivalence(True, "approximate", text, **numbers)

    return check


# ---------------------------------------------------------------------------------------------------- the tree


def _walk(actual, expected, reference, path, rtol, atol, leaves) -> str | None:
    """Compare what lies below `path`, add to `leaves`; a difference of structure ends it and is returned."""
    here = path or "output"
    actual, expected = _plain(actual), _plain(expected)
    if isinstance(expected, torch.Tensor) or isinstance(actual, torch.Tensor):
        if not (isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor)):
            return f"{here} is {_kind(actual)}, expected {_kind(expected)}"
        if expected.is_nested or actual.is_nested:
            if not (expected.is_nested and actual.is_nested):
                return f"{here}: one is a nested tensor and the other is not"
            parts = None if reference is None else list(reference.unbind())
            return _walk(list(actual.unbind()), list(expected.unbind()), parts, path, rtol, atol, leaves)
        reference = _plain(reference)
        if reference is not None and not isinstance(reference, torch.Tensor):
            raise ValueError(f"reference at {here} is {_kind(reference)}; expected a float64 tensor")
        leaves.append(compare_tensors(actual, expected, reference, here, rtol, atol))
        return None
    children = _children(expected)
    if children is None:
        if _children(actual) is not None:
            return f"{here} is {_kind(actual)}, expected {_kind(expected)}"
        return _compare_plain(actual, expected, here, rtol, atol, leaves)
    found = _children(actual)
    if found is None or found[0] != children[0]:
        return f"{here} is {_kind(actual)}, expected {_kind(expected)}"
    (form, wanted), got = children, found[1]
    if form == "sequence" and len(got) != len(wanted):
        return f"{here} has {len(got)} entries, expected {len(wanted)}"
    for key in wanted.keys() - got.keys():
        return f"{here} has no {key!r}; it has {', '.join(map(repr, got)) or 'nothing'}"
    for key in got.keys() - wanted.keys():
        return f"{here} has {key!r}, which the expected output has not"
    references = _children(_plain(reference)) if reference is not None else None
    if reference is not None and (references is None or references[1].keys() != wanted.keys()):
        raise ValueError(f"reference at {here} is {_kind(reference)}; expected the structure of the expected output")
    for key, value in wanted.items():
        below = f"{path}.{key}" if form == "object" else f"{path}[{key!r}]"
        ref = references[1][key] if references else None
        problem = _walk(got[key], value, ref, below, rtol, atol, leaves)
        if problem:
            return problem
    return None


def _plain(value):
    """Arrays and images as tensors; everything else as it is."""
    if isinstance(value, torch.nn.Parameter):
        return value.detach()
    arrays = hasattr(value, "__array__") or hasattr(value, "__array_interface__")  # numpy's own, images of Pillow
    if arrays and not isinstance(value, torch.Tensor):
        import numpy

        array = numpy.array(value)  # a copy: torch refuses read-only memory
        if array.dtype.kind in "biufc":
            return torch.from_numpy(array)
        if array.dtype.kind in "US":
            return array.tolist()
    return value


def _children(value) -> tuple[str, dict] | None:
    """(form, entries by key) of a container; None for anything else."""
    if isinstance(value, Mapping):  # also ModelOutput of transformers and BaseOutput of diffusers
        return "mapping", dict(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | range):
        return "sequence", dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "object", {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if _holds_tensors(value):  # for example a key-value cache of transformers
        return "object", vars(value)
    return None


def _holds_tensors(value, depth: int = 3) -> bool:
    if isinstance(value, type | torch.nn.Module) or callable(value) or not hasattr(value, "__dict__"):
        return False
    inside = [part for item in vars(value).values() for part in (item if isinstance(item, list | tuple) else [item])]
    return any(isinstance(part, torch.Tensor) or (depth > 0 and _holds_tensors(part, depth - 1)) for part in inside)


def _kind(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {tuple(value.shape)} of {dtype_name(value.dtype)}"
    if value is None or isinstance(value, bool | int | float | complex | str):
        text = repr(value)
        return text if len(text) <= 40 else text[:37] + "..."
    return f"a {type(value).__name__}"


def _compare_plain(actual, expected, here, rtol, atol, leaves) -> str | None:
    """Numbers at float64; everything else by ==, where == means more than identity."""
    numbers = int | float | complex
    if isinstance(expected, numbers) and isinstance(actual, numbers):
        if isinstance(expected, bool) != isinstance(actual, bool):
            return f"{here} is {actual!r}, expected {expected!r}"
        both_whole = isinstance(expected, int) and isinstance(actual, int)
        if both_whole:
            if actual != expected:
                return f"{here} is {actual!r}, expected {expected!r}"
            leaves.append(Difference(here, "bitwise", dtype=type(expected).__name__, count=1))
            return None
        dtype = torch.complex128 if isinstance(expected, complex) or isinstance(actual, complex) else torch.float64
        pair = (torch.tensor(actual, dtype=dtype), torch.tensor(expected, dtype=dtype))
        leaves.append(compare_tensors(*pair, None, here, rtol, atol))
        return None
    if isinstance(actual, numbers) or isinstance(expected, numbers) or (actual is None) != (expected is None):
        return f"{here} is {_kind(actual)}, expected {_kind(expected)}"
    same = actual is expected or (type(actual) is type(expected) and actual == expected)
    by_identity = type(expected).__eq__ is object.__eq__ and not isinstance(expected, type)
    if by_identity and expected is not None and not callable(expected):
        raise TypeError(f"{here}: cannot compare {_kind(expected)}; expected tensors, numbers, strings or containers")
    if not same:
        return f"{here} is {_kind(actual)}, expected {_kind(expected)}"
    return None


# ---------------------------------------------------------------------------------------------------- summing up


def _summary(leaves: list[Difference], problem: str | None) -> Equivalence:
    """The weakest rule over all places; the first place that failed, if any."""
    total = sum(leaf.finite for leaf in leaves)
    figures = {"max_abs": None, "max_rel": None, "rmse": None}
    if total:
        figures["max_abs"] = max(leaf.max_abs for leaf in leaves)
        figures["max_rel"] = max(leaf.max_rel for leaf in leaves)
        figures["rmse"] = math.sqrt(sum(leaf.sum_squares for leaf in leaves) / total)
    figures["dtype"] = _loosest(leaves)
    if problem:
        return Equivalence(False, "different", problem, **figures)
    failed = next((leaf for leaf in leaves if leaf.rule == "different"), None)
    if failed:
        return Equivalence(False, "different", failed.reason, **figures)
    if not leaves:
        return Equivalence(True, "bitwise", "equal; no tensors or numbers were compared", **figures)
    weakest = max(leaves, key=lambda leaf: RULES.index(leaf.rule))
    if weakest.rule == "bitwise":
        count = sum(leaf.count for leaf in leaves)
        text = f"{count} values, the same bits" if count else "equal, and empty: no values were compared"
    else:
        text = weakest.reason or f"largest difference {figures['max_abs'] or 0.0:.3g}"
    notes = dict.fromkeys(f"{leaf.path}: {note}" for leaf in leaves for note in leaf.notes)
    return Equivalence(True, weakest.rule, "; ".join([text, *notes]), **figures)


def _loosest(leaves: list[Difference]) -> str:
    names = list(dict.fromkeys(leaf.dtype for leaf in leaves if leaf.dtype))
    inexact = [n for n in names if (d := getattr(torch, n, None)) and (d.is_floating_point or d.is_complex)]
    return max(inexact, key=lambda n: torch.finfo(getattr(torch, n)).eps) if inexact else (names or [""])[0]


def _valid_tolerance(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} is of type {type(value).__name__}; expected a number or None")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name}={value!r}; expected a finite number >= 0")
    if name == "rtol" and value >= 1:
        raise ValueError(f"rtol={value!r} would accept an output of zeros; expected a number below 1")
    return float(value)


def _zeros_reach(metric, expected, floor: float) -> bool:
    """Would an output of zeros get the score as well? Then the score proves nothing (unless zeros are right)."""
    zeros, all_zero = _zeros_like(expected)
    if all_zero:
        return False
    try:
        return float(metric(zeros, expected)) >= floor
    except Exception:  # a metric that refuses zeros does tell them apart
        return False


def _zeros_like(value) -> tuple[Any, bool]:
    """(the same structure filled with zeros, was it zero already)."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value), not bool(value.any())
    if isinstance(value, Mapping):
        parts = {key: _zeros_like(part) for key, part in value.items()}
        try:
            return type(value)(**{key: part[0] for key, part in parts.items()}), all(p[1] for p in parts.values())
        except TypeError:
            return {key: part[0] for key, part in parts.items()}, all(p[1] for p in parts.values())
    if isinstance(value, tuple | list):
        parts = [_zeros_like(part) for part in value]
        filled = [part[0] for part in parts]
        made = type(value)(*filled) if hasattr(value, "_fields") else type(value)(filled)
        return made, all(part[1] for part in parts)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return type(value)(0), value == 0
    return value, True

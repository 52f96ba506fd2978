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

RULES = ("bitwise", "close", "rounding", "approximate", "different")
_CHUNK = 1 << 22  # elements converted to float64 at a time
_NEAR_ZERO_SHARE = 0.01  # an absolute tolerance is at most this share of the largest expected value
_FP64_TOL = 1e-4  # the default `tol` of torch._dynamo.utils.same

# (rtol, atol) of torch.testing.assert_close; other dtypes (integers, float8) have no tolerance.
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
    torch.complex32: (1e-3, 1e-5),
    torch.complex64: (1.3e-6, 1e-5),
    torch.complex128: (1e-7, 1e-7),
}
_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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
    leaves: list[_Leaf] = []
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
        leaves: list[_Leaf] = []
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


@dataclasses.dataclass
class _Leaf:
    """What was found at one place of the output."""

    path: str
    rule: str
    reason: str = ""
    dtype: str = ""
    count: int = 0  # values compared
    finite: int = 0  # of them finite in both
    max_abs: float = 0.0
    max_rel: float = 0.0
    sum_squares: float = 0.0
    notes: tuple[str, ...] = ()
    non_finite: str = ""  # set when the output is not finite where the expected one is


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
        leaves.append(_compare_tensors(actual, expected, _plain(reference), here, rtol, atol))
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
    if not isinstance(value, torch.Tensor) and hasattr(value, "__array__"):  # numpy arrays and scalars, PIL images
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
        return f"a tensor {tuple(value.shape)} of {_name(value.dtype)}"
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
            leaves.append(_Leaf(here, "bitwise", dtype=type(expected).__name__, count=1))
            return None
        dtype = torch.complex128 if isinstance(expected, complex) or isinstance(actual, complex) else torch.float64
        pair = (torch.tensor(actual, dtype=dtype), torch.tensor(expected, dtype=dtype))
        leaves.append(_compare_tensors(*pair, None, here, rtol, atol))
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


# ---------------------------------------------------------------------------------------------------- one tensor


def _compare_tensors(actual, expected, reference, here, rtol, atol) -> _Leaf:
    for name, tensor in (("actual", actual), ("expected", expected), ("reference", reference)):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise ValueError(f"reference at {here} is {_kind(tensor)}; expected a float64 tensor")
        if tensor is not None and (tensor.is_meta or any(c.__name__ == "FakeTensor" for c in type(tensor).__mro__)):
            raise ValueError(f"{name} at {here} is a meta or fake tensor; it has no values to compare")
    if actual.shape != expected.shape:
        return _Leaf(here, "different", f"{here} has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.device != expected.device:
        return _Leaf(here, "different", f"{here} is on {actual.device}, expected {expected.device}")
    notes = [] if actual.dtype == expected.dtype else [f"{_name(actual.dtype)} against {_name(expected.dtype)}"]
    a, e = _dense(actual), _dense(expected)
    if _family(a) != _family(e) or (_family(a) == "exact" and a.dtype != e.dtype):
        return _Leaf(here, "different", f"{here} is of {_name(actual.dtype)}, expected {_name(expected.dtype)}")
    dtype = _looser(a.dtype, e.dtype)
    leaf = _Leaf(here, "bitwise", dtype=_name(dtype), count=a.numel())
    same_bits = a.dtype == e.dtype and _same_bits(a, e)
    exact = _family(a) == "exact"
    r = None if reference is None or exact else _valid_reference(reference, expected, here)
    largest = _largest(e)
    limits, absurd = _limits(dtype, rtol, atol, largest) if not exact else ((0.0, 0.0), "")
    if absurd:
        leaf.rule, leaf.reason = "different", f"{here}: {absurd}"
        return leaf
    if same_bits:
        leaf.finite = sum(int(torch.isfinite(chunk).sum()) for _, chunk in _chunks(e))
    worst = None if same_bits else _measure(leaf, a, e, limits)
    shared = leaf.count - leaf.finite
    if shared and not leaf.non_finite:
        notes.append(f"{shared} of {leaf.count} values are NaN or inf in both")
    leaf.notes = tuple(notes)
    if same_bits:
        return leaf
    if worst is None:
        leaf.rule = "close"
        return leaf
    failed = _failure(here, a, e, worst, limits, largest)
    if r is not None and not leaf.non_finite:
        passed, why = _rounding(a, e, r, dtype)
        leaf.rule, leaf.reason = ("rounding", why) if passed else ("different", f"{failed}; {why}")
        return leaf
    leaf.rule, leaf.reason = "different", failed
    return leaf


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor.resolve_conj().resolve_neg()


def _family(tensor: torch.Tensor) -> str:
    return "complex" if tensor.is_complex() else "float" if tensor.is_floating_point() else "exact"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _looser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    if a == b or not (a.is_floating_point or a.is_complex):
        return a
    return a if torch.finfo(a).eps >= torch.finfo(b).eps else b


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits everywhere; NaN equals NaN whatever its payload; 0.0 and -0.0 are not the same bits."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    equal = a.contiguous().view(_INT_OF_SIZE[a.element_size()]) == b.contiguous().view(_INT_OF_SIZE[b.element_size()])
    if a.is_floating_point():
        equal |= torch.isnan(a) & torch.isnan(b)
    return bool(equal.all())


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Flat, at the widest precision of its family; on the CPU where a device has no float64."""
    tensor = tensor.cpu() if tensor.device.type == "mps" else tensor
    return tensor.reshape(-1)


def _double(chunk: torch.Tensor) -> torch.Tensor:
    return chunk.to(torch.complex128 if chunk.is_complex() else torch.float64)


def _chunks(*tensors: torch.Tensor):
    flat = [_wide(tensor) for tensor in tensors]
    for start in range(0, flat[0].numel(), _CHUNK):
        yield start, *(_double(one[start : start + _CHUNK]) for one in flat)


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite |value|; 0.0 when there is none."""
    found = 0.0
    for _, chunk in _chunks(tensor):
        size = torch.where(torch.isfinite(chunk), chunk.abs(), 0.0)
        found = max(found, size.max().item())
    return found


def _limits(dtype, rtol, atol, largest) -> tuple[tuple[float, float], str]:
    """((rtol, atol) in force, why they are refused or "")."""
    default_rtol, default_atol = _TOLERANCES.get(dtype, (0.0, 0.0))
    used_rtol = default_rtol if rtol is None else rtol
    if atol is None:
        cap = _NEAR_ZERO_SHARE * largest if largest else math.inf
        return (used_rtol, min(default_atol, cap)), ""
    if largest > default_atol and largest <= atol + used_rtol * largest:
        return (used_rtol, atol), f"atol={atol:g} would accept zeros: the largest expected value is {largest:.3g}"
    return (used_rtol, atol), ""


def _measure(leaf: _Leaf, a, e, limits) -> tuple[int, int] | None:
    """Fill the leaf's figures; return (flat index of the worst value, number of values beyond the limits) or None."""
    exact, (rtol, atol) = not (a.is_floating_point() or a.is_complex()), limits
    beyond, worst, worst_excess, broken = 0, None, -1.0, None
    pairs = zip(_raw_chunks(a), _raw_chunks(e), _chunks(a, e), strict=True)
    for raw_a, raw_e, (start, x, y) in pairs:
        finite = torch.isfinite(x) & torch.isfinite(y)
        alike = (x == y) | (torch.isnan(x) & torch.isnan(y)) if not exact else raw_a == raw_e
        gap = torch.where(finite, x - y, 0.0).abs()
        size = torch.where(finite, y, 0.0).abs()
        bad = ~alike & (~finite | (gap > atol + rtol * size) | exact)
        leaf.finite += int(finite.sum())
        leaf.sum_squares += float((gap * gap).sum())
        leaf.max_abs = max(leaf.max_abs, gap.max().item())
        relative = torch.where(size > 0, gap / size, 0.0)
        leaf.max_rel = max(leaf.max_rel, relative.max().item())
        if bad.any():
            beyond += int(bad.sum())
            excess = torch.where(bad, torch.where(finite, gap - atol - rtol * size, math.inf), -1.0)
            top = int(excess.argmax())
            if worst is None or excess[top].item() > worst_excess:
                worst, worst_excess = start + top, excess[top].item()
            if broken is None and bool((bad & ~finite).any()):
                broken = start + int((bad & ~finite).to(torch.int8).argmax())
    if worst is None:
        return None
    if broken is not None:
        worst, leaf.max_abs = broken, math.inf
        index = _index(broken, a.shape)
        leaf.non_finite = f"{leaf.path} at {index}: {_value(a, broken)}, expected {_value(e, broken)}"
    return worst, beyond


def _raw_chunks(tensor: torch.Tensor):
    """The values at full precision: float64 cannot tell large int64 values apart."""
    flat = _wide(tensor)
    if not (flat.is_floating_point() or flat.is_complex()):
        flat = flat.contiguous().view(_INT_OF_SIZE[flat.element_size()])
    for start in range(0, flat.numel(), _CHUNK):
        yield flat[start : start + _CHUNK]


def _rounding(a, e, r, dtype) -> tuple[bool, str]:
    """The rule of torch._dynamo.utils.same: as near to the float64 result as the expected output is, by RMSE."""
    sums = [0.0, 0.0, 0.0]
    for _, x, y, z in _chunks(a, e, r):
        keep = torch.isfinite(z) & torch.isfinite(x) & torch.isfinite(y)
        for i, gap in enumerate((x - z, y - z, z)):
            sums[i] += float(torch.where(keep, gap, 0.0).abs().square().sum())
    error, baseline_error, scale = (math.sqrt(total / max(1, a.numel())) for total in sums)
    half = dtype in (torch.float16, torch.bfloat16, torch.complex32)
    pointwise = e.ndim == 4 and e.shape[-1] == e.shape[-2] == 1
    factor = 3.0 if half or r.numel() < 1000 or pointwise else 2.0
    bound = factor * baseline_error + min(_FP64_TOL / 10, _NEAR_ZERO_SHARE * scale)
    if scale and bound >= scale:
        return False, f"the expected output is too far from float64 (rmse {baseline_error:.3g}) to judge by rounding"
    text = f"rmse to float64 {error:.3g}, that of the expected output {baseline_error:.3g}, allowed {bound:.3g}"
    return error <= bound, text


def _valid_reference(reference, expected, here) -> torch.Tensor:
    r = _dense(reference)
    wanted = torch.complex128 if expected.is_complex() else torch.float64
    if r.dtype != wanted:
        raise ValueError(f"reference at {here} is of {_name(r.dtype)}; expected {_name(wanted)}")
    if r.shape != expected.shape:
        raise ValueError(f"reference at {here} has shape {tuple(r.shape)}; expected {tuple(expected.shape)}")
    return r.to(expected.device) if expected.device.type != "mps" else r


def _failure(here, a, e, worst, limits, largest) -> str:
    flat, beyond = worst
    text = f"{here} at {_index(flat, a.shape)}: {_value(a, flat)}, expected {_value(e, flat)}"
    text += f"; {beyond} of {a.numel()} values differ"
    if a.is_floating_point() or a.is_complex():
        text += f" beyond rtol={limits[0]:.2g}, atol={limits[1]:.2g}"
        if 0 < largest < 1e-6:
            text += f"; the expected values are at most {largest:.1g}: give reference= or atol= if they are noise"
    return text


def _index(flat: int, shape) -> tuple[int, ...]:
    place = []
    for size in reversed(shape):
        place.append(flat % size)
        flat //= size
    return tuple(reversed(place))


def _value(tensor: torch.Tensor, flat: int) -> str:
    value = tensor.reshape(-1)[flat].item()
    return repr(value) if isinstance(value, bool | int) else f"{value:.6g}"


# ---------------------------------------------------------------------------------------------------- summing up


def _summary(leaves: list[_Leaf], problem: str | None) -> Equivalence:
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


def _loosest(leaves: list[_Leaf]) -> str:
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

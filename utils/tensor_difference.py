"""How one tensor differs from another, and which rule of utils.equivalence covers the difference.

Everything is computed in float64, a piece at a time, on the tensors' own device.
"""

from __future__ import annotations

import dataclasses
import math

import torch

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


@dataclasses.dataclass
class Difference:
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


def compare_tensors(actual, expected, reference, here: str, rtol: float | None, atol: float | None) -> Difference:
    """The strongest rule that covers the difference at the place `here`; rtol, atol None: the defaults of the dtype.

    Raises ValueError for tensors without values and for a reference of the wrong dtype or shape.
    """
    for name, tensor in (("actual", actual), ("expected", expected), ("reference", reference)):
        if tensor is not None and (tensor.is_meta or any(c.__name__ == "FakeTensor" for c in type(tensor).__mro__)):
            raise ValueError(f"{name} at {here} is a meta or fake tensor; it has no values to compare")
    a, e = _dense(actual), _dense(expected)
    exact = _is_exact(e)
    for what, got, wanted, wrong in (
        ("has shape", tuple(actual.shape), tuple(expected.shape), actual.shape != expected.shape),
        ("is on", actual.device, expected.device, actual.device != expected.device),
        ("is of", dtype_name(actual.dtype), dtype_name(expected.dtype), _other_kind(a.dtype, e.dtype)),
    ):
        if wrong:
            return Difference(here, "different", f"{here} {what} {got}, expected {wanted}")

    dtype = _looser(a.dtype, e.dtype)
    found = Difference(here, "bitwise", dtype=dtype_name(dtype), count=a.numel())
    if actual.dtype != expected.dtype:
        found.notes += (f"{dtype_name(actual.dtype)} against {dtype_name(expected.dtype)}",)
    r = None if reference is None or exact else _valid_reference(reference, expected, here)
    largest = 0.0 if exact else _largest(e)
    limits, refused = ((0.0, 0.0), "") if exact else _limits(dtype, rtol, atol, largest)
    if refused:
        found.rule, found.reason = "different", f"{here}: {refused}"
        return found

    worst = None
    if a.data_ptr() and a.data_ptr() == e.data_ptr() and found.count:
        found.notes += ("both lie in the same memory, which proves nothing",)
    if a.dtype == e.dtype and _same_bits(a, e):
        found.finite = sum(int(torch.isfinite(chunk).sum()) for _, chunk in _chunks(e))
    else:
        worst = _measure(found, a, e, limits)
        found.rule = "close"
    if found.count > found.finite and not found.non_finite:
        found.notes += (f"{found.count - found.finite} of {found.count} values are NaN or inf in both",)
    if worst is None:
        return found
    found.rule, found.reason = "different", _failure(here, a, e, worst, limits, largest)
    if r is not None and not found.non_finite:
        passed, why = _rounding(a, e, r, dtype)
        found.rule, found.reason = ("rounding", why) if passed else ("different", f"{found.reason}; {why}")
    return found


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    return tensor.resolve_conj().resolve_neg()


def _is_exact(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _other_kind(a: torch.dtype, b: torch.dtype) -> bool:
    """Do the dtypes differ by more than the precision of floating or complex numbers?"""
    return a != b and not (a.is_floating_point and b.is_floating_point) and not (a.is_complex and b.is_complex)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _looser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    if a == b:
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


def _measure(found: Difference, a, e, limits) -> tuple[int, int] | None:
    """Fill in the figures; return (flat index of the worst value, number of values beyond the limits) or None."""
    exact, (rtol, atol) = _is_exact(a), limits
    beyond, worst, worst_excess, broken = 0, None, -1.0, None
    pairs = zip(_raw_chunks(a), _raw_chunks(e), _chunks(a, e), strict=True)
    for raw_a, raw_e, (start, x, y) in pairs:
        finite = torch.isfinite(x) & torch.isfinite(y)
        alike = (x == y) | (torch.isnan(x) & torch.isnan(y)) if not exact else raw_a == raw_e
        gap = torch.where(finite, x - y, 0.0).abs()
        size = torch.where(finite, y, 0.0).abs()
        bad = ~alike & (~finite | (gap > atol + rtol * size) | exact)
        found.finite += int(finite.sum())
        found.sum_squares += float((gap * gap).sum())
        found.max_abs = max(found.max_abs, gap.max().item())
        relative = torch.where(size > 0, gap / size, 0.0)
        found.max_rel = max(found.max_rel, relative.max().item())
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
        worst, found.max_abs = broken, math.inf
        index = _index(broken, a.shape)
        found.non_finite = f"{found.path} at {index}: {_value(a, broken)}, expected {_value(e, broken)}"
    return worst, beyond


def _raw_chunks(tensor: torch.Tensor):
    """The values at full precision: float64 cannot tell large int64 values apart."""
    flat = _wide(tensor)
    if _is_exact(flat):
        flat = flat.contiguous().view(_INT_OF_SIZE[flat.element_size()])
    for start in range(0, flat.numel(), _CHUNK):
        yield flat[start : start + _CHUNK]


def _rounding(a, e, r, dtype) -> tuple[bool, str]:
    """The rule of torch._dynamo.utils.same: as near to the float64 result as the expected output is, by RMSE."""
    sums = [0.0, 0.0, 0.0]
    for _, x, y, z in _chunks(a, e, r):
        keep = torch.isfinite(x) & torch.isfinite(y)
        if bool((keep & ~torch.isfinite(z)).any()):
            return False, "the reference is not finite where the expected output is"
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
        raise ValueError(f"reference at {here} is of {dtype_name(r.dtype)}; expected {dtype_name(wanted)}")
    if r.shape != expected.shape:
        raise ValueError(f"reference at {here} has shape {tuple(r.shape)}; expected {tuple(expected.shape)}")
    return r.to(expected.device) if expected.device.type != "mps" else r


def _failure(here, a, e, worst, limits, largest) -> str:
    flat, beyond = worst
    text = f"{here} at {_index(flat, a.shape)}: {_value(a, flat)}, expected {_value(e, flat)}"
    text += f"; {beyond} of {a.numel()} values differ"
    if not _is_exact(a):
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

"""Operations that another form computes faster, and the measurement that says whether it does so here.

Each remedy knows by the arguments of an operation whether it applies. A form is the same function of the same
arguments; it is tried on random tensors of the very same shapes, strides and dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .linearize import LinearizedConv1d, LinearizedConv2d, LinearizedConv3d, _patch_product, why_not
from .op_profile import OpRow
from .unknown_ratio import is_unknown

TOO_LONG = "takes too long to be tried"
LONGEST_TRIAL = 1.0  # seconds of one call of the operation as it is
HELPS = 1.3  # a form counts as a remedy when it is at least this much faster
_HALF = (torch.float16, torch.bfloat16)
_SUMMED = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution"}


@dataclass(frozen=True)
class Remedy:
    """text: what to do, in words. form: the same function, computed otherwise (None: nothing to measure)."""

    name: str
    text: str
    form: Callable[..., Tensor] | None = None
    rtol: float = 1e-3


@dataclass(frozen=True)
class Trial:
    """The form of a remedy against the operation itself, on the same shapes."""

    helps: bool
    speedup: float | None
    ci_low: float | None
    ci_high: float | None
    verdict: str

    def __str__(self) -> str:
        if self.speedup is None:
            return self.verdict
        if self.ci_low is None or is_unknown(self.verdict, self.ci_low, self.ci_high):
            return "an unknown number of times"
        return f"{self.speedup:.1f}x ({self.ci_low:.1f} to {self.ci_high:.1f})"


def remedy_for(row: OpRow, device: torch.device) -> Remedy | None:
    """What the cookbook knows about this operation with these arguments."""
    for known in (_matrix_product, _whole_mean, _wide_type, _slow_half, _grouped):
        remedy = known(row, device)
        if remedy is not None:
            return remedy
    return None


def try_out(row: OpRow, remedy: Remedy, device: torch.device) -> Trial:
    """Measure the form of `remedy` against the operation of `row` on its own shapes (utils.timing.compare)."""
    from .timing import BenchmarkError, compare

    if row.seconds / max(row.calls, 1) > LONGEST_TRIAL:
        return Trial(False, None, None, None, TOO_LONG)
    operation = getattr(torch.ops.aten, row.op.removeprefix("aten::"))
    tolerance = max(remedy.rtol, 3e-2 if row.dtype in _HALF else 0.0)  # of values near 1; the time is what is asked
    try:
        result = compare(
            lambda: operation,
            {"form": lambda: remedy.form},
            make_inputs=lambda replicate: tuple(_made(a, replicate, device) for a in row.arguments),
            label="as it is",
            min_run_time=0.6,
            min_effect=0.1,
            rtol=tolerance,
            atol=tolerance,
        )
    except (BenchmarkError, RuntimeError, ValueError, TypeError) as problem:
        return Trial(False, None, None, None, f"could not be tried: {problem}")
    found = result["form"]
    helps = found.verdict == "faster" and found.speedup >= HELPS
    return Trial(helps, found.speedup, found.ci_low, found.ci_high, found.verdict)


def reproduce(row: OpRow, device: torch.device, flops: float) -> float | None:
    """The smallest reproduction: the time of the operation alone over that of a plain float32 product of `flops`.

    The two take turns, so a busy machine slows both. None where the operation cannot be called alone.
    """
    from .timing import BenchmarkError, compare

    if row.keywords or row.seconds / max(row.calls, 1) > LONGEST_TRIAL:
        return None
    operation = getattr(torch.ops.aten, row.op.removeprefix("aten::"), None)
    edge = max(round((flops / 2) ** (1 / 3)), 1)
    a, nothing = torch.randn(edge, edge).to(device), torch.zeros(())

    def alone(*arguments):
        operation(*arguments)
        return nothing

    def product(*arguments):
        torch.mm(a, a)
        return nothing

    try:
        found = compare(
            lambda: alone,
            {"product": lambda: product},
            make_inputs=lambda replicate: tuple(_made(argument, replicate, device) for argument in row.arguments),
            min_run_time=0.3,
        )
    except (BenchmarkError, RuntimeError, ValueError, TypeError):
        return None
    return found["product"].speedup


def _made(argument: Any, seed: int, device: torch.device) -> Any:
    """A random tensor for a described one, scaled so that long sums stay small; anything else as it is."""
    if not (isinstance(argument, tuple) and len(argument) == 3 and isinstance(argument[2], torch.dtype)):
        return argument
    shape, stride, dtype = argument
    generator = torch.Generator().manual_seed(seed)
    drawn = (0.1 * torch.randn(shape, generator=generator)).to(device, dtype)
    if 0 in stride or not shape:
        return drawn
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(drawn)


# ---- the remedies: each looks at an operation and returns itself, or None -------------------------------------------


def _matrix_product(row: OpRow, device: torch.device) -> Remedy | None:
    if row.op != "aten::convolution":
        return None
    _, weight, _, stride, padding, dilation, transposed, _, groups = row.arguments
    kernel = weight[0][2:]
    spread = any(d != 1 and k != 1 for d, k in zip(dilation, kernel, strict=True))
    if transposed or groups != 1 or any(padding) or tuple(stride) != tuple(kernel) or spread:
        return None
    linearized = isinstance(row.module, (LinearizedConv1d, LinearizedConv2d, LinearizedConv3d))
    reason = None if row.module is None or linearized else why_not(row.module)
    text = "It is a matrix product (stride equals kernel): utils.linearize.linearize(model)."
    if row.module is None or reason is not None:
        text = "It is a matrix product (stride equals kernel): write it as F.linear on flattened patches (recipe 07)."

    def form(x, w, b, *arguments):
        return _patch_product(x, w, b)

    return Remedy("linearize", text, form)


def _whole_mean(row: OpRow, device: torch.device) -> Remedy | None:
    if row.op not in ("aten::avg_pool2d", "aten::avg_pool3d"):
        return None
    shape, kernel = row.arguments[0][0], tuple(row.arguments[1])
    n = 2 if row.op == "aten::avg_pool2d" else 3
    if tuple(kernel * n if len(kernel) == 1 else kernel) != tuple(shape[-n:]):
        return None
    dims = tuple(range(-n, 0))

    def form(x, *arguments):
        return x.mean(dims, keepdim=True)

    return Remedy("mean", f"The window is the whole map: x.mean({dims}, keepdim=True) is the same.", form)


def _in_float32(row: OpRow) -> Callable[..., Tensor]:
    operation, dtype = getattr(torch.ops.aten, row.op.removeprefix("aten::")), row.dtype

    def form(*arguments):
        return operation(*(a.float() if isinstance(a, Tensor) else a for a in arguments)).to(dtype)

    return form


def _wide_type(row: OpRow, device: torch.device) -> Remedy | None:
    if row.dtype is not torch.float64:
        return None
    text = "It computes in float64: find the input that is float64 and cast it (recipe 01)."
    return Remedy("float32", text, _in_float32(row), rtol=1e-2)


def _slow_half(row: OpRow, device: torch.device) -> Remedy | None:
    if row.dtype not in _HALF or row.op not in _SUMMED or device.type != "cpu":
        return None
    name = str(row.dtype).removeprefix("torch.")
    text = f"Products in {name} are slow on this device: keep this part in float32 (recipe 01)."
    return Remedy("float32", text, _in_float32(row))


def _grouped(row: OpRow, device: torch.device) -> Remedy | None:
    if row.op != "aten::convolution" or row.arguments[8] == 1 or row.arguments[6]:
        return None
    groups, n = row.arguments[8], len(row.arguments[0][0]) - 2
    text = f"A convolution in {groups} groups: try channels_last (recipe 04), or a dense one at {groups}x the FLOPs."
    if n == 1:
        return Remedy("grouped", text)
    order = torch.channels_last if n == 2 else torch.channels_last_3d
    convolution = F.conv2d if n == 2 else F.conv3d

    def form(x, w, b, stride, padding, dilation, transposed, output_padding, g):
        x, w = x.contiguous(memory_format=order), w.contiguous(memory_format=order)
        return convolution(x, w, b, stride, padding, dilation, g)

    return Remedy("channels_last", text, form)

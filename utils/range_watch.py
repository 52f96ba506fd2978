"""Run float32 numbers that say they are 16 bits, and look at the result of every operation.

The engine of `utils.dynamic_range.audit`, which says what it means and what it cannot see.
"""

from __future__ import annotations

import contextlib
import linecache
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

HALVES = (torch.float16, torch.bfloat16)
_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = (__file__, os.path.join(os.path.dirname(__file__), "dynamic_range.py"))
_CASTS = {"_to_copy", "copy_", "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "pow"}
_SAME = {"mm", "bmm", "addmm", "addmv", "mv", "dot", "baddbmm", "convolution"}  # raise for mixed formats
_DIVIDES = {"div": 1, "div_": 1, "reciprocal": 0, "rsqrt": 0, "log": 0, "log2": 0, "log10": 0}  # which argument


@dataclass(frozen=True)
class Finding:
    """One place where numbers are lost.

    kind: "overflow" (finite in float32, inf in `dtype`), "zero divisor" (not zero in float32, zero in `dtype`, and then
    divided by), "underflow" (becomes 0), "subnormal" (keeps fewer bits), "integers" and "rounded" (a value that later
    arithmetic needs exactly), "float64", "complex" (the cast drops the imaginary part), "dtype error" (the cast model
    would raise), "fused" (scores that a fused kernel keeps in float32 and an eager attention would not), "not finite"
    (already in float32).
    path: name in `model.named_modules()`, of the weight, or "input 0". op: the aten operation, or "cast".
    value: the worst magnitude there, limit: that of the format. margin: how far outside, in powers of two.
    count of total numbers. order: position in the run, -1 for weights and inputs. inherited: an argument was already
    outside, so the cause is earlier. code: the model's line of source.
    """

    kind: str
    path: str
    op: str
    value: float
    limit: float
    count: int
    total: int
    order: int = -1
    inherited: bool = False
    code: str = ""
    note: str = ""

    @property
    def margin(self) -> float:
        if not self.value or not self.limit or not math.isfinite(self.value):
            return math.inf if self.value else 0.0
        far = math.log2(self.value) - math.log2(self.limit)
        return -far if self.kind in ("underflow", "subnormal", "zero divisor") else far

    def __str__(self) -> str:
        text = f"{self.kind} at {self.path or '(model)'}, {self.op}: "
        if self.note:
            text += self.note
        else:
            text += f"{self.value:.6g} against {self.limit:.6g}, 2^{self.margin:+.2f}"
        return text + (f", {self.count:,} of {self.total:,}" if self.total > 1 else "")


class Claimed(Tensor):
    """A float32 tensor (`wide`) that says it is 16 bits. `over`: some value is outside the range already.

    `roots`: how often a square root was taken last. The root of a number that became 0 is 0, however large it looks.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, wide: Tensor, dtype: torch.dtype, over: bool = False, source: str = "", roots: int = 0):
        made = Tensor._make_wrapper_subclass(
            cls,
            wide.shape,
            strides=wide.stride(),
            storage_offset=wide.storage_offset(),
            dtype=dtype,
            device=wide.device,
        )
        made.wide, made.over, made.source, made.roots = wide, over, source, roots
        return made

    def __repr__(self, **_) -> str:
        return f"claimed {self.dtype} {self.wide!r}"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # left over after an audit: the float32 value
        return func(*tree_map(_wide, args), **tree_map(_wide, kwargs or {}))


class Watch(TorchDispatchMode):
    """Runs each operation on the float32 values, works out which results would be 16 bits, and looks at those."""

    def __init__(self, dtype: torch.dtype, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.dtype, self.format = dtype, Format(dtype)
        self.names = {id(module): name for name, module in modules.items()}
        self.stack: list[str] = [""]
        self.found: list[Finding] = []
        self.results, self.order, self.peak, self.peak_at = 0, 0, 0.0, "nothing in this format"

    # ------------------------------------------------------------------------------------------ where we are

    @contextlib.contextmanager
    def paths(self) -> Iterator[None]:
        """Follow which module is running, with two global hooks that are removed at the end."""

        def enter(module, _):
            self.stack.append(self.names.get(id(module), self.stack[-1]))

        def leave(module, _, __):
            self.stack.pop()

        hooks = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    # ------------------------------------------------------------------------------------------ one operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # then composite operations arrive whole
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        leaves = tree_leaves((args, kwargs))
        if not any(_is_half(leaf) for leaf in leaves):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        self.order += 1
        if name == "view" and func._overloadname == "dtype":  # bits are asked for: round for real
            return func(args[0].wide.to(args[0].dtype) if isinstance(args[0], Claimed) else args[0], *args[1:])
        self._look_at_arguments(func, args, leaves, kwargs)
        wide_args, wide_kwargs = tree_map(_wide, args), tree_map(_wide, kwargs)
        if name in ("_softmax", "_log_softmax"):
            wide_args = (*wide_args[:2], False)  # half_to_float: it is float32 already
        out = func(*wide_args, **wide_kwargs)
        if "empty" in name:
            out.zero_()  # what lies in fresh memory is no result
        if torch.Tag.inplace_view in func.tags:  # unsqueeze_ and the like: the claim changes its shape too
            with torch._C._DisableTorchDispatch():
                func(*args, **kwargs)
        originals = {id(_wide(leaf)): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        claims = iter(self._claims(func, name, args, kwargs, out))
        over = any(leaf.over for leaf in leaves if isinstance(leaf, Claimed))
        return tree_map(lambda leaf: self._result(leaf, func, name, originals, claims, over, leaves), out)

    def _result(self, leaf, func, name, originals, claims, over, leaves):
        if not isinstance(leaf, Tensor):
            return leaf
        claim = next(claims)
        known = originals.get(id(leaf))
        if known is not None:  # written in place
            if isinstance(known, Claimed):
                known.over = self._look(leaf, known.dtype, name, over, leaves)
                known.roots = known.roots + 1 if _is_root(name, leaves) else 0
            return known
        if claim not in HALVES:
            return leaf
        given = next((item for item in leaves if isinstance(item, Claimed)), None)
        if func.is_view or name == "_unsafe_view":
            kept = ("", 0) if given is None else (given.source, given.roots)
            return Claimed(leaf, claim, over, *kept)
        roots = 0 if given is None or not _is_root(name, leaves) else given.roots + 1
        return Claimed(leaf, claim, self._look(leaf, claim, name, over, leaves), roots=roots)

    def _claims(self, func, name, args, kwargs, out) -> list[torch.dtype]:
        """The dtypes that the results would have: this operation on meta tensors of the claimed dtypes."""
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if not any(leaf.is_floating_point() for leaf in outs):
            return [leaf.dtype for leaf in outs]
        try:
            meta_kwargs = {key: "meta" if key == "device" else _meta(value) for key, value in kwargs.items()}
            made = func(*tree_map(_meta, args), **tree_map(_meta, meta_kwargs))
            return [leaf.dtype for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        except (RuntimeError, NotImplementedError, TypeError):  # data-dependent, or no meta kernel
            dtypes = _float_dtypes(tree_leaves((args, kwargs)))
            claim = kwargs.get("dtype") or (reduce(torch.promote_types, dtypes) if dtypes else self.dtype)
            return [claim if leaf.is_floating_point() else leaf.dtype for leaf in outs]

    # ------------------------------------------------------------------------------------------ looking at numbers

    def take(self, name: str, value: Tensor, source: str) -> Claimed:
        """A weight, buffer or input as it enters: judged by what the cast does to it."""
        self.stack.append(name)
        over = self._look(value, self.dtype, "cast", False, [value])
        wild = value.numel() - int(value.isfinite().sum())
        if wild:
            self._add("not finite", "cast", math.inf, 0.0, wild, value.numel(), note="inf or NaN in float32 already")
        if value.dtype is torch.float64:
            self._add("float64", "cast", 0.0, 0.0, value.numel(), value.numel(), note=f"a float64 {source} is cast")
        if source == "input":
            self._rounding(value, "cast", source, tolerance=0.25 if value.ndim <= 1 else math.inf)
        self.stack.pop()
        return Claimed(value.float(), self.dtype, over, name if source == "buffer" else "")

    def lost(self, name: str, value: Tensor, source: str) -> None:
        """A complex weight or buffer: `model.to(dtype)` makes it real."""
        self.stack.append(name)
        gone, note = int((value.imag != 0).sum()), f"complex: the cast drops the imaginary part of this {source}"
        self._add("complex", "cast", 0.0, 0.0, gone, value.numel(), note=note)
        self.stack.pop()

    def _look(self, value: Tensor, claim: torch.dtype, op: str, inherited: bool, arguments: list) -> bool:
        """Record what of `value` leaves the range; True when something becomes inf."""
        if claim is not self.dtype or not value.numel() or value.is_complex() or value.layout is not torch.strided:
            return False
        self.results += 1
        form, size, total = self.format, value.detach().abs(), value.numel()
        least, peak = torch.stack(torch.aminmax(size)).tolist()
        wild = over = zeroed = small = 0
        if not math.isfinite(peak):
            finite = size[size.isfinite()]
            wild = total - finite.numel()
            least, peak = torch.stack(torch.aminmax(finite)).tolist() if finite.numel() else (math.inf, 0.0)
        if peak > self.peak and peak != form.max:  # that one is the usual filling of a mask
            self.peak, self.peak_at = peak, f"{self.stack[-1] or '(model)'}, {op}"
        if wild and all(_finite(leaf) for leaf in arguments):  # born here, in float32 already
            if bool(size.isnan().any()) or op in _DIVIDES:
                self._add("not finite", op, math.nan, 0.0, wild, total, note="inf or NaN in float32 already")
            else:
                self._add("overflow", op, math.inf, form.max, wild, total, note="float32 itself overflows here")
        if peak >= form.rounds_to_inf:
            over = ((size >= form.rounds_to_inf) & size.isfinite()).sum().item()
            self._add("overflow", op, peak, form.max, over, total, inherited)
        if least < form.smallest_normal:
            tiny = size[(size < form.smallest_normal) & (size > 0)]
            small, zeroed = tiny.numel(), (tiny <= form.rounds_to_zero).sum().item()
        if zeroed:
            self._add("underflow", op, tiny.min().item(), form.smallest, zeroed, total)
        elif small:
            self._add("subnormal", op, tiny.min().item(), form.smallest_normal, small, total)
        return bool(over)

    def _look_at_arguments(self, func, args, leaves, kwargs) -> None:
        name = func.overloadpacket.__name__
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                continue
            if leaf.dtype is torch.float64 and leaf.ndim:
                self._add("float64", name, 0.0, 0.0, 1, 1, note="meets a float64 tensor: the result is float64")
            if name in _CASTS and not leaf.is_floating_point() and leaf.dtype is not torch.bool:
                self._rounding(leaf, name, "integer")
        if name == "lift_fresh" and leaves[0].dtype is self.dtype and not bool(leaves[0].isfinite().all()):
            self._literal(leaves[0])
        wanted = kwargs.get("dtype")
        if name == "_to_copy" and wanted in (torch.float32, torch.float64) and getattr(args[0], "source", ""):
            lost = (args[0].wide.to(self.dtype).to(args[0].wide.dtype) != args[0].wide).sum().item()
            if lost:
                note = f"{args[0].source} goes back to {str(wanted)[6:]} here, and the cast has rounded it"
                self._add("rounded", name, 0.0, 0.0, lost, args[0].numel(), note=note)
        if name in _DIVIDES and len(args) > _DIVIDES[name] and isinstance(args[_DIVIDES[name]], Claimed):
            size = args[_DIVIDES[name]].wide.abs() ** (2 ** args[_DIVIDES[name]].roots)  # what became 0, or did not
            gone = (size > 0) & (size <= self.format.rounds_to_zero)
            if args[_DIVIDES[name]].dtype is self.dtype and bool(gone.any()):
                least = size[gone].min().item()
                self._add("zero divisor", name, least, self.format.smallest, int(gone.sum()), size.numel())
        if name in _SAME and len(dtypes := set(_float_dtypes(leaves))) > 1:
            note = f"would raise: {' and '.join(sorted(str(d)[6:] for d in dtypes))} in one operation"
            self._add("dtype error", name, 0.0, 0.0, 1, 1, note=note)
        if name in ("arange", "linspace"):
            exact = func(*tree_map(_wide, args), **{**kwargs, "dtype": torch.float64})
            self._rounding(exact, name, "table")
        if name.startswith("_scaled_dot_product") and all(isinstance(leaf, Tensor) for leaf in args[:2]):
            q, k = (_wide(leaf) for leaf in args[:2])
            bound = (q.norm(dim=-1).amax() * k.norm(dim=-1).amax()).item() if q.numel() and k.numel() else 0.0
            if bound >= self.format.rounds_to_inf and args[0].dtype is self.dtype:
                note = f"raw scores up to |q||k| = {bound:.4g}: float32 inside this kernel, inf in an eager attention"
                self._add("fused", name, bound, self.format.max, 1, 1, note=note)

    def _literal(self, value: Tensor) -> None:
        """A constant that the model writes down in 16 bits. -inf is the filling of a mask, other infinities are not."""
        wild, name = int((~value.isfinite()).sum()), str(self.dtype).removeprefix("torch.")
        worse = bool((value.isnan() | (value == math.inf)).any())
        note = f"a constant is {'inf or NaN' if worse else '-inf'} once it is written in {name}"
        kind = "overflow" if worse else "not finite"
        self._add(kind, "lift_fresh", math.inf, self.format.max, wild, value.numel(), note=note)

    def _rounding(self, value: Tensor, op: str, what: str, tolerance: float = math.inf) -> None:
        """Whole numbers that the format cannot hold, or values that move by `tolerance` or more."""
        exact = value.detach().double()
        rounded = exact.to(self.dtype).double()
        moved = (rounded != exact) & rounded.isfinite()
        if not value.numel() or not bool(moved.any()):
            return
        whole = bool((exact == exact.round()).all())
        if not whole and float((rounded - exact).abs()[moved].max()) < tolerance:
            return
        before, after = exact[moved].flatten()[-1].item(), rounded[moved].flatten()[-1].item()
        note = f"{what}: {before:.10g} becomes {after:.10g}"
        self._add("integers", op, abs(before), 2.0**self.format.digits, int(moved.sum()), value.numel(), note=note)

    def _add(self, kind, op, value, limit, count, total, inherited=False, note="") -> None:
        order = -1 if op == "cast" else self.order
        code = "" if op == "cast" else _source_line()
        path = self.stack[-1]
        new = Finding(kind, path, op, value, limit, int(count), int(total), order, inherited, code, note)
        if kind in ("float64", "rounded", "dtype error") and any(
            (old.kind, old.path, old.op, old.note) == (kind, path, op, note) for old in self.found
        ):
            return
        self.found.append(new)


class Format:
    """The limits of a 16-bit format, those of rounding included (round to nearest, ties to even)."""

    def __init__(self, dtype: torch.dtype) -> None:
        info = torch.finfo(dtype)
        self.max, self.smallest_normal = info.max, info.smallest_normal
        self.digits = 1 - round(math.log2(info.eps))  # fp16 11, bf16 8: whole numbers up to 2^digits are exact
        self.smallest = info.smallest_normal * info.eps  # the smallest subnormal
        self.rounds_to_zero = self.smallest / 2  # this and below become 0
        top = 2.0 ** math.floor(math.log2(info.max))  # the power of two below the largest number
        self.rounds_to_inf = top * (2 - info.eps / 2)  # 65,520 in fp16: this and above become inf


def _is_root(name: str, leaves: list) -> bool:
    return name in ("sqrt", "sqrt_") or (name in ("pow", "pow_") and any(type(x) is float and x == 0.5 for x in leaves))


def _is_half(leaf: Any) -> bool:
    return leaf in HALVES if isinstance(leaf, torch.dtype) else isinstance(leaf, Tensor) and leaf.dtype in HALVES


def _float_dtypes(leaves: list) -> list[torch.dtype]:
    return [leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _finite(leaf: Any) -> bool:
    if isinstance(leaf, float):
        return math.isfinite(leaf)
    return not isinstance(leaf, Tensor) or not leaf.is_floating_point() or bool(_wide(leaf).isfinite().all())


def _wide(leaf: Any) -> Any:
    """What the operation really gets: float32 instead of 16 bits."""
    if isinstance(leaf, Claimed):
        return leaf.wide
    if isinstance(leaf, torch.dtype):
        return torch.float32 if leaf in HALVES else leaf
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in HALVES else leaf


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.ndim == 0 and not isinstance(leaf, Claimed) and leaf.device.type == "cpu" and not leaf.is_floating_point():
        return leaf  # an index or a count whose value matters
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _source_line() -> str:
    """The line of the model that is running: "modeling_t5.py: hidden_states = self.wo(hidden_states)"."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_TORCH) and name not in _OURS and not name.startswith("<frozen"):
            return f"{os.path.basename(name)}: {linecache.getline(name, frame.f_lineno).strip()}"
        frame = frame.f_back
    return ""

"""What would leave the range of FP16 or BF16 inside a model, predicted from one float32 run.

    report = audit(model, inputs, dtype=torch.float16)
    print(report)                 # where first, by how much, what else
    report.first                  # Finding(path="decoder.3.mlp.wo", op="mm", value=66246.4, limit=65504.0, ...)

How: the model runs once, and every number that would be 16 bits wide after `model.to(dtype)` is carried as a float32
tensor that *says* it is `dtype`. So the model takes the branches that it would really take (a norm that asks for
float32 gets it, `torch.finfo(x.dtype).min` is the limit of `dtype`), and each operation's result is looked at before a
later one can hide it: `clamp`, `nan_to_num`, a mask or a softmax make a wrong output look healthy.

It is a prediction. Each result is judged at its float32 value, so rounding on the way is not in it: near a limit
(within a few per cent) reality may fall on the other side. Inside one kernel (a matrix product, a sum, a norm, fused
attention) wide accumulation is assumed, as on CPUs and current GPUs; a kernel that adds up in FP16 overflows earlier.
Look at `headroom`, not only at yes or no.

Not seen: what a Triton or C++ extension does inside, and arithmetic outside torch. The model must run eagerly.
"""

from __future__ import annotations

import contextlib
import linecache
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["Finding", "RangeReport", "audit"]

NAMES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16}
NAMES |= {"half": torch.float16}
HALVES = tuple(dict.fromkeys(NAMES.values()))
_TORCH = os.path.dirname(torch.__file__) + os.sep
_CASTS = {"_to_copy", "copy_", "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "div_", "pow"}
_SAME = {"mm", "bmm", "addmm", "addmv", "mv", "dot", "baddbmm", "convolution"}  # raise for mixed formats
_DIVIDES = {"div": 1, "div_": 1, "reciprocal": 0, "rsqrt": 0, "log": 0, "log2": 0, "log10": 0}  # which argument


@dataclass(frozen=True)
class Finding:
    """One place where numbers are lost.

    kind: "overflow" (finite in float32, inf in `dtype`), "zero divisor" (not zero in float32, zero in `dtype`, and then
    divided by), "underflow" (becomes 0), "subnormal" (keeps fewer bits), "integers" and "rounded" (a value that later
    arithmetic needs exactly), "float64", "dtype error" (the cast model would raise), "fused" (scores that a fused
    kernel keeps in float32 and an eager attention would not), "not finite" (already in float32).
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


@dataclass(frozen=True)
class RangeReport:
    """What `audit` found. It is true when nothing overflows.

    findings: everything, in the order of the run (weights and inputs first). operations: how many results in `dtype`
    were looked at. peak, peak_at: the largest finite magnitude among them, and where. limit: torch.finfo(dtype).max.
    """

    dtype: torch.dtype
    limit: float
    operations: int
    peak: float
    peak_at: str
    findings: tuple[Finding, ...]

    def of(self, *kinds: str) -> list[Finding]:
        return [found for found in self.findings if found.kind in kinds]

    @property
    def overflows(self) -> list[Finding]:
        """What becomes inf or NaN and is the cause itself, in order."""
        return [found for found in self.of("overflow", "zero divisor") if not found.inherited]

    @property
    def first(self) -> Finding | None:
        """The first number that becomes inf or NaN, or None."""
        return next(iter(self.overflows), None)

    @property
    def underflows(self) -> list[Finding]:
        return self.of("underflow")

    @property
    def precision(self) -> list[Finding]:
        """Integers, tables and float64 values that lose digits which later arithmetic needs."""
        return self.of("integers", "rounded", "float64", "dtype error")

    @property
    def headroom(self) -> float:
        """Powers of two between the largest number and the limit; negative when it is outside."""
        return math.log2(self.limit) - math.log2(self.peak) if self.peak else math.inf

    def __bool__(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        lines = [f"{name}: {self.operations:,} results looked at, headroom 2^{self.headroom:.1f} ({self.peak_at})"]
        shown = [("first", self.overflows[:1]), ("then", self.overflows[1:4]), ("precision", self.precision[:4])]
        shown += [("fused", self.of("fused")[:2]), ("float32 itself", self.of("not finite")[:1])]
        for heading, found in shown:
            lines += [f"  {heading}: {each}" for each in found]
        for kind in ("overflow", "underflow", "subnormal"):
            found = self.of(kind)
            if found:
                lines.append(f"  {kind}: {sum(f.count for f in found):,} numbers in {len(found)} places")
        return "\n".join(lines if len(lines) > 1 else [*lines, "  nothing leaves the range"])


def audit(
    model: Callable,
    *inputs: Any,
    dtype: torch.dtype | str,
    keep: Sequence[str] = (),
    autocast: bool = False,
    **kwargs: Any,
) -> RangeReport:
    """Predict from one float32 run of `model(*inputs, **kwargs)` what would leave the range of `dtype`.

    model: an nn.Module in float32 (float64 works too), or any function of tensors. It is run once without gradients, in
    its present mode, and is afterwards as before: no hook, no mode, no changed weight, buffer, attribute or input, and
    the random generators of torch where they were, also after an error. (A list or cache object that the model itself
    fills keeps what was put into it: hand over a fresh one.)
    dtype: torch.float16 or torch.bfloat16, or their names.
    keep: patterns (fnmatch) of parameters, buffers and inputs that stay in float32, for example ("*.inv_freq",
    "input 1", "input timestep").
    autocast: False predicts `model.to(dtype)` fed with inputs in `dtype`; autocast around the call is switched off.
    True predicts `torch.autocast(device, dtype)` around the float32 model: only what autocast casts is judged.

    Raises ValueError or TypeError, before the run, for another dtype, no inputs, weights that are 16 bits already,
    tensors on several devices or on the meta device, and a `keep` that matches nothing.
    """
    dtype = _checked_dtype(dtype)
    if not callable(model):
        raise TypeError(f"model is a {type(model).__name__}; expected an nn.Module or a function of tensors")
    model = getattr(model, "_orig_mod", model)  # of torch.compile: the eager model computes the same
    if not inputs and not kwargs:
        raise ValueError("inputs: none given; expected the arguments of one real call of the model")
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    weights = list(model.named_parameters()) if modules else []
    buffers = list(model.named_buffers()) if modules else []
    given = _named_inputs(inputs, kwargs)
    device = _checked_device([*weights, *buffers, *given], weights + buffers)
    for pattern in keep:
        names = [name for name, _ in (*weights, *buffers, *given)]
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=1, cutoff=0.0)
            raise ValueError(f"keep={pattern!r} matches no weight and no input; nearest: {near[0] if near else None!r}")

    watch = _Watch(dtype, modules)

    def claimed(name: str, value: Any, source: str) -> Any:
        if not isinstance(value, Tensor):
            return value
        copied = value if source == "weight" else value.clone()  # the run may write into buffers and inputs
        narrow = value.is_floating_point() and not autocast and not any(fnmatchcase(name, item) for item in keep)
        return watch.take(name, copied.detach(), source) if narrow else copied.detach()

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        cuda = [device] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stack.enter_context(_without_fast_path())
        new = {id(value): claimed(name, value, "weight") for name, value in weights}
        new |= {id(value): claimed(name, value, "buffer") for name, value in buffers}
        names = iter(given)
        args, named = tree_map(
            lambda leaf: claimed(next(names)[0], leaf, "input") if isinstance(leaf, Tensor) else leaf, (inputs, kwargs)
        )
        stack.enter_context(_swapped(modules.values(), new))
        stack.enter_context(watch.paths())
        stack.enter_context(
            torch.autocast(device.type, dtype, enabled=autocast, cache_enabled=False)
            if torch.amp.is_autocast_available(device.type)
            else contextlib.nullcontext()
        )
        stack.enter_context(watch)
        model(*args, **named)
    return RangeReport(dtype, watch.format.max, watch.results, watch.peak, watch.peak_at, tuple(watch.found))


class _Claimed(Tensor):
    """A float32 tensor (`wide`) that says it is 16 bits. `over`: some value is outside the range already."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, wide: Tensor, dtype: torch.dtype, over: bool = False, source: str = ""):
        made = Tensor._make_wrapper_subclass(
            cls,
            wide.shape,
            strides=wide.stride(),
            storage_offset=wide.storage_offset(),
            dtype=dtype,
            device=wide.device,
        )
        made.wide, made.over, made.source = wide, over, source
        return made

    def __repr__(self, **_) -> str:
        return f"claimed {self.dtype} {self.wide!r}"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # left over after an audit: the float32 value
        return func(*tree_map(_wide, args), **tree_map(_wide, kwargs or {}))


class _Watch(TorchDispatchMode):
    """Runs each operation on the float32 values, works out which results would be 16 bits, and looks at those."""

    def __init__(self, dtype: torch.dtype, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.dtype, self.format = dtype, _Format(dtype)
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
            return func(args[0].wide.to(args[0].dtype) if isinstance(args[0], _Claimed) else args[0], *args[1:])
        self._look_at_arguments(name, args, leaves, kwargs)
        wide_args, wide_kwargs = tree_map(_wide, args), tree_map(_wide, kwargs)
        if name in ("_softmax", "_log_softmax"):
            wide_args = (*wide_args[:2], False)  # half_to_float: it is float32 already
        out = func(*wide_args, **wide_kwargs)
        if torch.Tag.inplace_view in func.tags:  # unsqueeze_ and the like: the claim changes its shape too
            with torch._C._DisableTorchDispatch():
                func(*args, **kwargs)
        originals = {id(_wide(leaf)): leaf for leaf in leaves if isinstance(leaf, Tensor)}
        claims = iter(self._claims(func, name, args, kwargs, out))
        over = any(leaf.over for leaf in leaves if isinstance(leaf, _Claimed))
        return tree_map(lambda leaf: self._result(leaf, func, name, originals, claims, over, leaves), out)

    def _result(self, leaf, func, name, originals, claims, over, leaves):
        if not isinstance(leaf, Tensor):
            return leaf
        claim = next(claims)
        known = originals.get(id(leaf))
        if known is not None:  # written in place
            if isinstance(known, _Claimed):
                known.over = self._look(leaf, known.dtype, name, over, leaves)
            return known
        if claim not in HALVES:
            return leaf
        if func.is_view or name == "_unsafe_view":
            source = next((item.source for item in leaves if isinstance(item, _Claimed)), "")
            return _Claimed(leaf, claim, over, source)
        return _Claimed(leaf, claim, self._look(leaf, claim, name, over, leaves))

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

    def take(self, name: str, value: Tensor, source: str) -> _Claimed:
        """A weight, buffer or input as it enters: judged by what the cast does to it."""
        self.stack.append(name)
        over = self._look(value, self.dtype, "cast", False, [value])
        if value.dtype is torch.float64:
            self._add("float64", "cast", 0.0, 0.0, value.numel(), value.numel(), note=f"a float64 {source} is cast")
        if source == "input":
            self._rounding(value, "cast", source, tolerance=0.25 if value.ndim <= 1 else math.inf)
        self.stack.pop()
        return _Claimed(value, self.dtype, over, name if source == "buffer" else "")

    def _look(self, value: Tensor, claim: torch.dtype, op: str, inherited: bool, arguments: list) -> bool:
        """Record what of `value` leaves the range; True when something becomes inf."""
        if claim is not self.dtype or not value.numel() or value.is_complex() or value.layout is not torch.strided:
            return False
        self.results += 1
        form, size = self.format, value.detach().abs()
        finite = torch.where(size.isfinite(), size, 0)
        small = (size > 0) & (size < form.smallest_normal)
        zeroed = (size > 0) & (size <= form.rounds_to_zero)
        least = torch.where(size > 0, size, torch.inf).amin()
        wild = (~size.isfinite()).sum()
        sums = (wild, (finite >= form.rounds_to_inf).sum(), zeroed.sum(), small.sum())
        peak, least, wild, over, zeroed, small = torch.stack(
            [x.double() for x in (finite.amax(), least, *sums)]
        ).tolist()
        total = value.numel()
        if peak > self.peak and peak != form.max:  # that one is the usual filling of a mask
            self.peak, self.peak_at = peak, f"{self.stack[-1] or '(model)'}, {op}"
        if over:
            self._add("overflow", op, peak, form.max, over, total, inherited)
        if wild and all(_finite(leaf) for leaf in arguments):  # born here, in float32 already
            if bool(size.isnan().any()) or op in _DIVIDES:
                self._add("not finite", op, math.nan, 0.0, wild, total, note="inf or NaN in float32 already")
            else:
                self._add("overflow", op, math.inf, form.max, wild, total, note="float32 itself overflows here")
        if zeroed:
            self._add("underflow", op, least, form.smallest, zeroed, total)
        elif small:
            self._add("subnormal", op, least, form.smallest_normal, small, total)
        return bool(over)

    def _look_at_arguments(self, name: str, args, leaves, kwargs) -> None:
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                continue
            if leaf.dtype is torch.float64 and leaf.ndim:
                self._add("float64", name, 0.0, 0.0, 1, 1, note="meets a float64 tensor: the result is float64")
            if name in _CASTS and not leaf.is_floating_point() and leaf.dtype is not torch.bool:
                self._rounding(leaf, name, "integer")
        wanted = kwargs.get("dtype")
        if name == "_to_copy" and wanted in (torch.float32, torch.float64) and getattr(args[0], "source", ""):
            lost = (args[0].wide.to(self.dtype).to(args[0].wide.dtype) != args[0].wide).sum().item()
            if lost:
                note = f"{args[0].source} goes back to {str(wanted)[6:]} here, and the cast has rounded it"
                self._add("rounded", name, 0.0, 0.0, lost, args[0].numel(), note=note)
        if name in _DIVIDES and len(args) > _DIVIDES[name] and isinstance(args[_DIVIDES[name]], _Claimed):
            size = args[_DIVIDES[name]].wide.abs()
            gone = (size > 0) & (size <= self.format.rounds_to_zero)
            if args[_DIVIDES[name]].dtype is self.dtype and bool(gone.any()):
                least = size[gone].min().item()
                self._add("zero divisor", name, least, self.format.smallest, int(gone.sum()), size.numel())
        if name in _SAME and len(dtypes := set(_float_dtypes(leaves))) > 1:
            note = f"would raise: {' and '.join(sorted(str(d)[6:] for d in dtypes))} in one operation"
            self._add("dtype error", name, 0.0, 0.0, 1, 1, note=note)
        if name in ("arange", "linspace"):
            exact = getattr(torch.ops.aten, name).default(*args, dtype=torch.float64)
            self._rounding(exact, name, "table")
        if name.startswith("_scaled_dot_product") and all(isinstance(leaf, Tensor) for leaf in args[:2]):
            q, k = (_wide(leaf) for leaf in args[:2])
            bound = (q.norm(dim=-1).amax() * k.norm(dim=-1).amax()).item() if q.numel() and k.numel() else 0.0
            if bound >= self.format.rounds_to_inf and args[0].dtype is self.dtype:
                note = f"raw scores up to |q||k| = {bound:.4g}: float32 inside this kernel, inf in an eager attention"
                self._add("fused", name, bound, self.format.max, 1, 1, note=note)

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


class _Format:
    """The limits of a 16-bit format, those of rounding included (round to nearest, ties to even)."""

    def __init__(self, dtype: torch.dtype) -> None:
        info = torch.finfo(dtype)
        self.max, self.smallest_normal = info.max, info.smallest_normal
        self.digits = 1 - round(math.log2(info.eps))  # fp16 11, bf16 8: whole numbers up to 2^digits are exact
        self.smallest = info.smallest_normal * info.eps  # the smallest subnormal
        self.rounds_to_zero = self.smallest / 2  # this and below become 0
        top = 2.0 ** math.floor(math.log2(info.max))  # the power of two below the largest number
        self.rounds_to_inf = top * (2 - info.eps / 2)  # 65,520 in fp16: this and above become inf


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
    if isinstance(leaf, _Claimed):
        return leaf.wide
    if isinstance(leaf, torch.dtype):
        return torch.float32 if leaf in HALVES else leaf
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in HALVES else leaf


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.ndim == 0 and not isinstance(leaf, _Claimed) and leaf.device.type == "cpu" and not leaf.is_floating_point():
        return leaf  # an index or a count whose value matters
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


@contextlib.contextmanager
def _swapped(modules, new: dict[int, Tensor]) -> Iterator[None]:
    """Let the modules hold other tensors; put back everything that they held, whatever the run assigned to them."""
    modules = list(modules)
    saved = [(module, dict(module.__dict__), dict(module._parameters), dict(module._buffers)) for module in modules]
    try:
        for module in modules:
            for held in (module._parameters, module._buffers):
                held.update({name: new[id(value)] for name, value in held.items() if value is not None})
            if isinstance(module, nn.RNNBase):  # it keeps a second list of its weights
                module.__dict__["_flat_weights"] = [module._parameters.get(name) for name in module._flat_weights_names]
        yield
    finally:
        for module, attributes, parameters, buffers in saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for held, old in ((module._parameters, parameters), (module._buffers, buffers)):
                held.clear()
                held.update(old)


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """nn.MultiheadAttention has a fused path that would hide its scores."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _named_inputs(inputs: tuple, kwargs: dict) -> list[tuple[str, Tensor]]:
    """The tensors among the arguments, in tree order: "input 0", "input timestep"; parts of one share its name."""
    found = []
    for name, value in (*enumerate(inputs), *kwargs.items()):
        found += [(f"input {name}", leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _checked_dtype(dtype: torch.dtype | str) -> torch.dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=1, cutoff=0.0)
        raise ValueError(f"dtype={name!r}; expected torch.float16 or torch.bfloat16; nearest: {near[0]!r}")
    return NAMES[name]


def _checked_device(tensors: list[tuple[str, Tensor]], held: list[tuple[str, Tensor]]) -> torch.device:
    devices: dict[torch.device, str] = {}
    for name, value in tensors:
        devices.setdefault(value.device, name)
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"several devices: {places}; expected all weights and inputs on one")
    device = next(iter(devices), torch.device("cpu"))
    if device.type == "meta":
        raise ValueError(f"{devices[device]} is on the meta device and has no values; expected real weights and inputs")
    for name, value in held:
        if value.dtype in HALVES:
            kind = str(value.dtype).removeprefix("torch.")
            raise ValueError(f"{name} is {kind} already; expected a float32 model, as it was before the cast")
    return device


def _source_line() -> str:
    """The line of the model that is running: "modeling_t5.py: hidden_states = self.wo(hidden_states)"."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_TORCH) and name != __file__ and not name.startswith("<frozen"):
            return f"{os.path.basename(name)}: {linecache.getline(name, frame.f_lineno).strip()}"
        frame = frame.f_back
    return ""

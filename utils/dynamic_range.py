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
Look at `headroom`, not only at yes or no. An underflow is reported where it happens. What it does later is followed
when the number, its root or a view of them divides or goes through a logarithm, and not through other arithmetic: so
read `underflows` too.

Not seen: what a Triton or C++ extension does inside, and arithmetic outside torch. The model must run eagerly.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .range_watch import HALVES, Finding, Watch

__all__ = ["Finding", "RangeReport", "audit"]

NAMES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16}
NAMES |= {"half": torch.float16}


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
        """The first number that becomes inf or NaN, or None. What is so in float32 already does not count."""
        return next(iter(self.overflows), None)

    @property
    def underflows(self) -> list[Finding]:
        return self.of("underflow")

    @property
    def precision(self) -> list[Finding]:
        """Integers, tables, float64 and complex values that lose what later arithmetic needs."""
        return self.of("integers", "rounded", "float64", "complex", "dtype error")

    @property
    def headroom(self) -> float:
        """Powers of two between the largest number and the limit; negative when it is outside."""
        return math.log2(self.limit) - math.log2(self.peak) if self.peak else math.inf

    def __bool__(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        if not self.operations:
            return f"{name}: nothing looked at, no number of the run would be {name} (are the weights in a closure?)"
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
    keep: Collection[str] = (),
    autocast: bool = False,
    **kwargs: Any,
) -> RangeReport:
    """Predict from one float32 run of `model(*inputs, **kwargs)` what would leave the range of `dtype`.

    model: an nn.Module in float32 (float64 works too), a method of one, or any function of tensors. It is run once
    without gradients, in its present mode, and is afterwards as before: no hook, no mode, no changed weight, buffer,
    attribute or input, and the random generators of torch where they were, also after an error. (A list or cache object
    that the model itself fills keeps what was put into it: hand over a fresh one.)
    dtype: torch.float16 or torch.bfloat16, or their names.
    keep: patterns (fnmatch) of parameters, buffers and inputs that stay in float32, for example ("*.inv_freq",
    "input 1", "input timestep"). A pattern alone must stand in a list.
    autocast: False predicts `model.to(dtype)` fed with inputs in `dtype`; autocast around the call is switched off.
    True predicts `torch.autocast(device, dtype)` around the float32 model: only what autocast casts is judged.

    Raises ValueError or TypeError, before the run, for another dtype, no inputs (None and strings are none), weights
    that are 16 bits already, weights or inputs that are sparse or hold NaN or inf (-inf is the filling of a mask, and
    is only reported, as "not finite"), tensors on several devices or on the meta device, and a `keep` that is no
    list of patterns or matches nothing.
    """
    dtype = _checked_dtype(dtype)
    if not callable(model):
        raise TypeError(f"model is a {type(model).__name__}; expected an nn.Module or a function of tensors")
    model = getattr(model, "_orig_mod", model)  # of torch.compile: the eager model computes the same
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model is a TorchScript module; expected the eager nn.Module that it was made from")
    if all(leaf is None or isinstance(leaf, str | bytes) for leaf in tree_leaves((inputs, kwargs))):
        raise ValueError("inputs: none given; expected the arguments of one real call of the model")
    owner = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)  # of model.generate: the model
    modules = dict(owner.named_modules()) if isinstance(owner, nn.Module) else {}
    weights = list(owner.named_parameters()) if modules else []
    buffers = list(owner.named_buffers()) if modules else []
    given = _named_inputs(inputs, kwargs)
    if given and not any(value.numel() for _, value in given):
        raise ValueError(
            f"{given[0][0]} is empty, of shape {list(given[0][1].shape)}; expected the values of a real call"
        )
    device = _checked_device([*weights, *buffers, *given], weights + buffers)
    _check_values([*weights, *given])
    _check_keep(keep, [name for name, _ in (*weights, *buffers, *given)])

    watch = Watch(dtype, modules)

    def claimed(name: str, value: Any, source: str) -> Any:
        if not isinstance(value, Tensor):
            return value
        copied = value if source == "weight" else value.clone()  # the run may write into buffers and inputs
        cast = not autocast and not any(fnmatchcase(name, item) for item in keep)
        if cast and value.is_complex() and source != "input":
            watch.lost(name, value, source)
        return watch.take(name, copied.detach(), source) if cast and value.is_floating_point() else copied.detach()

    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        cuda = [device] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=cuda))
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
        if value.layout is not torch.strided or value.is_quantized:
            kind = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.")
            raise ValueError(f"{name} is {kind}; expected a dense (strided) tensor")
        if value.is_floating_point() and value.element_size() == 1:
            raise ValueError(f"{name} is {str(value.dtype).removeprefix('torch.')}; expected at least 16 bits")
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


def _check_values(tensors: list[tuple[str, Tensor]]) -> None:
    """What is NaN or inf in float32 hides what the cast would do. (-inf may stand in a mask.)"""
    for name, value in tensors:
        value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
        if value.is_floating_point() and value.numel() and not value.amax() < math.inf:
            wild = int((value.isnan() | (value == math.inf)).sum())
            what = "NaN" if bool(value.isnan().any()) else "inf"
            raise ValueError(f"{name} holds {what}: {wild:,} of {value.numel():,} values; expected finite values")


def _check_keep(keep: Any, names: list[str]) -> None:
    if isinstance(keep, str) or not isinstance(keep, Collection) or not all(isinstance(item, str) for item in keep):
        raise TypeError(f"keep={keep!r}; expected a list of patterns, for example ['*.inv_freq', 'input 1']")
    for pattern in keep:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=1, cutoff=0.0)
            raise ValueError(f"keep={pattern!r} matches no weight and no input; nearest: {near[0] if near else None!r}")

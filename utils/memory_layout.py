"""Where a memory format is kept, lost or converted inside a model.

    report = trace(model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last))
    print(report)              # one line for each module that a 4-D or 5-D tensor passes, and each copy
    report.kept                # True: from the first to the last such module nothing was lost or copied

`.to(memory_format=...)` changes a model's weights and an input. It does not promise that every operation in between
keeps the format: some return the plain one, and then each later operation may convert again. This module looks at the
strides of what really flows.

Terms: "channels_last" is NHWC for 4-D tensors and NDHWC for 5-D, "contiguous" is NCHW or NCDHW. A tensor with one
channel, or with one pixel, is both at once: it says nothing, and neither keeps nor loses a format.

A copy also counts when it is written as NHWC by hand: `x.permute(0, 2, 3, 1).contiguous()` moves the same bytes.

What is not seen: conversions inside one operation, such as a library that reorders a filter for itself; copies of fewer
than 4 dimensions (an image that became a sequence); and a copy by hand of an image of height 1, whose shape written as
NHWC is both formats at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CHANNELS_LAST, CONTIGUOUS, BOTH, OTHER = "channels_last", "contiguous", "both", "other"
_CHANNEL_DIM = 1
_COPIES = ("clone", "_to_copy", "copy_", "contiguous")
# What a layer expects: the attribute that holds the number, and the dimension of the input that must have it.
_SIZES: dict[type, tuple[str, int]] = {
    nn.Conv2d: ("in_channels", -3),
    nn.ConvTranspose2d: ("in_channels", -3),
    nn.Conv3d: ("in_channels", -4),
    nn.ConvTranspose3d: ("in_channels", -4),
    nn.BatchNorm2d: ("num_features", -3),
    nn.BatchNorm3d: ("num_features", -4),
    nn.GroupNorm: ("num_channels", _CHANNEL_DIM),
    nn.Linear: ("in_features", -1),
}


def memory_format(tensor: torch.Tensor) -> str:
    """ "channels_last", "contiguous", "both" or "other", from the strides of a 4-D or 5-D tensor.

    Dimensions of size one have no say, because their stride is never used. Raises ValueError for other ranks.
    """
    if tensor.dim() not in (4, 5):
        raise ValueError(
            f"a tensor with {tensor.dim()} dimensions has no memory format; expected 4 (NCHW) or 5 (NCDHW)"
        )
    if tensor.layout is not torch.strided:
        return OTHER
    plain = list(range(tensor.dim()))
    last = [0, *range(2, tensor.dim()), _CHANNEL_DIM]
    found = (_dense_in_order(tensor, plain), _dense_in_order(tensor, last))
    return {(True, True): BOTH, (True, False): CONTIGUOUS, (False, True): CHANNELS_LAST}.get(found, OTHER)


def _reordered(source: torch.Tensor, target: torch.Tensor) -> tuple[str, str] | None:
    """The formats (from, to) between which a copy of `source` into `target`, of one shape, moved the numbers."""
    names = memory_format(source), memory_format(target)
    if set(names) == {CHANNELS_LAST, CONTIGUOUS}:
        return names
    # Shapes written as NHWC: dense in this order is channels_last, and the channel outermost is contiguous.
    channel_outermost = [0, source.dim() - 1, *range(1, source.dim() - 1)]
    if source.layout is not torch.strided or target.layout is not torch.strided:
        return None
    if names[1] == CONTIGUOUS and _dense_in_order(source, channel_outermost):
        return CONTIGUOUS, CHANNELS_LAST
    if names[0] == CONTIGUOUS and _dense_in_order(target, channel_outermost):
        return CHANNELS_LAST, CONTIGUOUS
    return None


def _dense_in_order(tensor: torch.Tensor, order: list[int]) -> bool:
    """Do the strides describe a gapless tensor whose dimensions lie in memory in this order, outermost first?"""
    expected = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1:
            if tensor.stride(dim) != expected:
                return False
            expected *= tensor.shape[dim]
    return True


@dataclass(frozen=True)
class LayoutStep:
    """One module that a 4-D or 5-D tensor passed. `change`: kept, lost, converted, plain, or unclear (see trace)."""

    path: str
    module: str
    weight: str | None
    input: str
    output: str
    change: str


@dataclass(frozen=True)
class LayoutCopy:
    """One operation that wrote a tensor in another format than it read. `nbytes`: bytes written."""

    path: str
    operation: str
    source: str
    target: str
    nbytes: int


@dataclass(frozen=True)
class LayoutReport:
    """What `trace` saw, in the order of execution."""

    steps: list[LayoutStep]
    copies: list[LayoutCopy]

    @property
    def lost(self) -> list[LayoutStep]:
        """Modules that got channels_last and returned something else."""
        return [step for step in self.steps if step.change == "lost"]

    @property
    def kept(self) -> bool:
        """True when channels_last went in, and nothing lost or copied it on the way."""
        told = [step for step in self.steps if step.change != "unclear"]
        return bool(told) and all(step.change == "kept" for step in told) and not self.copies

    @property
    def copied_bytes(self) -> int:
        """Bytes that were written only to change the format, for one call."""
        return sum(copy.nbytes for copy in self.copies)

    def __str__(self) -> str:
        head = f"{'module':<34}{'class':<18}{'weight':<14}{'in':<14}{'out':<14}"
        lines = [head, "-" * 94]
        for s in self.steps:
            lines.append(f"{s.path:<34.33}{s.module:<18.17}{s.weight or '-':<14}{s.input:<14}{s.output:<14}{s.change}")
        for c in self.copies:
            lines.append(f"copy in {c.path}: {c.operation}, {c.source} -> {c.target}, {c.nbytes:,} bytes")
        verdict = "kept from first to last" if self.kept else f"{len(self.lost)} lost, {len(self.copies)} copies"
        return "\n".join([*lines, verdict])


def trace(model: nn.Module, *inputs: Any, **kwargs: Any) -> LayoutReport:
    """Run `model(*inputs, **kwargs)` once, without gradients, and report the memory format at every leaf module.

    A step is "kept" (channels_last in and out), "lost" (channels_last in, something else out), "converted"
    (something else in, channels_last out), "plain" (no channels_last on either side) or "unclear" (a tensor that is
    both formats at once). A copy is one of torch's copies (clone, copy_, contiguous, .to) that reads one of the two
    formats and writes the other, also between modules; it is named by the module that it ran in. An operation that
    mixes both (cat, +) picks one of them: no copy is listed, the next module shows which.

    The model's outputs, hooks, training flag and weights are left as they were, also after an error. Raises TypeError
    when `model` is no module or does not take these arguments; ValueError when no tensor is given, when tensors lie on
    several devices, when a layer of torch.nn gets another number of channels or another dtype than its weights have
    (the layer is named), or when no 4-D or 5-D tensor passes any module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}; expected an nn.Module")
    given = [leaf for leaf in tree_leaves((inputs, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not given:
        raise ValueError("no tensor among the inputs; expected the arguments of the model, as in trace(model, images)")
    devices = {str(t.device) for t in [*given, *model.parameters(), *model.buffers()]}
    if len(devices) > 1:
        raise ValueError(f"tensors on several devices ({', '.join(sorted(devices))}); expected one: model.to(device)")
    _refuse_other_arguments(model, inputs, kwargs)
    steps: list[LayoutStep] = []
    where: list[str] = []
    watch = _CopyWatch(where)
    with torch.no_grad(), _hooks(model, steps, where), watch:
        model(*inputs, **kwargs)
    if not steps:
        raise ValueError("no module got or returned a tensor of 4 or 5 dimensions; a memory format means nothing here")
    return LayoutReport(steps, watch.copies)


@contextmanager
def _hooks(model: nn.Module, steps: list[LayoutStep], where: list[str]) -> Iterator[None]:
    """Note every leaf's formats in `steps`, and keep the path of the running module at the end of `where`."""
    handles = []

    def enter(path: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            _refuse_misfit(path, module, args)
            where.append(path)

        return hook

    def leave(path: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if where:
                where.pop()
            if output is not None and next(module.children(), None) is None:
                _note(path, module, (args, kwargs), output, steps)

        return hook

    try:
        for path, module in model.named_modules():
            name = path or "(model)"
            handles.append(module.register_forward_pre_hook(enter(name)))
            handles.append(module.register_forward_hook(leave(name), with_kwargs=True, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _refuse_other_arguments(model: nn.Module, inputs: tuple, kwargs: dict) -> None:
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return  # written in C++: it has no signature to look at
    try:
        signature.bind(*inputs, **kwargs)
    except TypeError as error:
        raise TypeError(f"{type(model).__name__}: {error}; expected the arguments of forward{signature}") from None


def _refuse_misfit(path: str, module: nn.Module, args: Any) -> None:
    """Say which layer gets a tensor that its weights do not fit. Subclasses may convert by themselves: not judged."""
    given = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if type(module) not in _SIZES or given is None:
        return
    name, dim = _SIZES[type(module)]
    expected, layer = getattr(module, name), f"{path} ({type(module).__name__})"
    if given.dim() < abs(dim) + (dim > 0) or given.shape[dim] != expected:
        raise ValueError(f"{layer} got a tensor {tuple(given.shape)}; expected {name}={expected} in dimension {dim}")
    normalises = not name.startswith("in_")  # a normalisation takes 16 bits with float32 weights
    if not normalises and given.dtype != module.weight.dtype and not torch.is_autocast_enabled(given.device.type):
        raise ValueError(f"{layer} got {given.dtype}; expected {module.weight.dtype}, as its weight")


def _note(path: str, module: nn.Module, given: Any, output: Any, steps: list[LayoutStep]) -> None:
    before, after = _first_format(given), _first_format(output)
    if before is None or after is None:
        return
    if BOTH in (before, after):
        change = "unclear"
    elif before == CHANNELS_LAST:
        change = "kept" if after == CHANNELS_LAST else "lost"
    else:
        change = "converted" if after == CHANNELS_LAST else "plain"
    weight = getattr(module, "weight", None)
    has_format = isinstance(weight, torch.Tensor) and weight.dim() in (4, 5)
    steps.append(
        LayoutStep(path, type(module).__name__, memory_format(weight) if has_format else None, before, after, change)
    )


def _first_format(tree: Any) -> str | None:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.dim() in (4, 5):
            return memory_format(leaf)
    return None


class _CopyWatch(TorchDispatchMode):
    """Notes copies whose numbers lie in another order than what they read: NCHW to NHWC, or the other way round."""

    def __init__(self, where: list[str]) -> None:
        super().__init__()
        self.where, self.copies = where, []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if torch.is_inference_mode_enabled():  # then compound operations, such as `contiguous`, arrive whole
            with self:
                parts = func.decompose(*args, **(kwargs or {}))
            if parts is not NotImplemented:
                return parts
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dim() in (4, 5) and not func.is_view:
            # A copy has the shape of what it reads; a convolution or a pooling is work of its own, seen by its module.
            same = [t for t in args if isinstance(t, torch.Tensor) and t.shape == out.shape]
            if func.name().split("::")[1].split(".")[0] in _COPIES and same and (moved := _reordered(same[-1], out)):
                path = self.where[-1] if self.where else "(model)"
                self.copies.append(LayoutCopy(path, func.name(), *moved, out.nbytes))
        return out

"""Convolutions that are really matrix products: find them, and replace only what they compute with.

A convolution whose stride equals its kernel cuts the input into patches that neither overlap nor leave gaps. Each
output position is then the product of one patch with the weight: the whole convolution is one matrix product,

    out[n, :, p] = weight.reshape(O, C * prod(kernel)) @ patch[n, p] + bias        p over the grid of patches

`linearize(model)` changes the class of such a module (`nn.Conv3d` becomes `LinearizedConv3d`, a subclass) and nothing
else. The parameters stay where they are and keep their shapes, so state_dict, old checkpoints, tied weights,
optimizers, hooks, adapters, `.to()`, and code that reads `.weight.shape` or `.kernel_size` see no difference. The
weight is read at every call, so later changes of it count.

The rule: a module is converted only where the new forward is the same function for every input that the old one took.
`why_not` gives the reason where it is not. What can only be known at the call (a weight of another shape was assigned,
the input is too small, has the wrong channels or is no strided tensor) is checked at the call, and the convolution
itself answers, with its own result or its own error. TorchScript, `torch.fx`, and `torch.export` with dynamic sizes
other than the batch record the convolution too.

Layouts. Any strides are taken. The output has the memory format that the convolution would give it: contiguous, or
channels_last when the strides of the input or of the weight are those of channels_last; for Conv3d in float64, and in
float16 on a CPU, contiguous (a CPU without instructions for half types may differ). A channels_last weight is copied
into row order at every call: right, but slower.

Limits. Code that compares types exactly (`type(m) is nn.Conv2d`: some quantization tools, some FLOP counters) no longer
recognises the module: `restore` before it. In float32 on CUDA, cuDNN uses TF32 by default and matrix products do not:
set `torch.backends.cuda.matmul.allow_tf32` to compare like with like. A model pickled as a whole names the classes of
this file, which must be importable where it is loaded; a state_dict is free of them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["LinearizedConv1d", "LinearizedConv2d", "LinearizedConv3d", "Rewrite", "linearize", "restore", "why_not"]


@dataclass(frozen=True)
class Rewrite:
    """What was decided about one convolution.

    path: name in `model.named_modules()`, "" where the model itself is the convolution. kind: its class before.
    converted: whether it computes a matrix product now. reason: why, in words.
    measured: one `ComparisonRow` for each input shape that it was measured on (empty without example inputs).
    """

    path: str
    kind: str
    converted: bool
    reason: str
    measured: tuple = ()

    def __str__(self) -> str:
        done = "converted" if self.converted else "left alone"
        return f"{self.path or '(the model)'} [{self.kind}] {done}: {self.reason}"


class _PatchProduct:
    """Mixin before nn.ConvNd: the same convolution as a matrix product, wherever it is one."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None):
        if torch.jit.is_scripting():  # TorchScript knows no super(): these are the arguments of nn.ConvNd
            return self._scripted_conv(input, weight, bias)
        else:
            if not _is_patch_product(self, input, weight):
                return super()._conv_forward(input, weight, bias)
            return _patch_product(input, weight, bias)


class LinearizedConv1d(_PatchProduct, nn.Conv1d):
    """An nn.Conv1d that computes a matrix product where stride equals kernel. Same arguments, same state_dict."""

    def _scripted_conv(self, input: Tensor, weight: Tensor, bias: Tensor | None):
        return F.conv1d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class LinearizedConv2d(_PatchProduct, nn.Conv2d):
    """An nn.Conv2d that computes a matrix product where stride equals kernel. Same arguments, same state_dict."""

    def _scripted_conv(self, input: Tensor, weight: Tensor, bias: Tensor | None):
        return F.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class LinearizedConv3d(_PatchProduct, nn.Conv3d):
    """An nn.Conv3d that computes a matrix product where stride equals kernel. Same arguments, same state_dict."""

    def _scripted_conv(self, input: Tensor, weight: Tensor, bias: Tensor | None):
        return F.conv3d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


_LINEARIZED = {nn.Conv1d: LinearizedConv1d, nn.Conv2d: LinearizedConv2d, nn.Conv3d: LinearizedConv3d}
_ORIGINAL = {linearized: plain for plain, linearized in _LINEARIZED.items()}


def _patch_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [N, C, *size] or [C, *size], weight [O, C, *kernel] -> [N, O, *grid] or [O, *grid], grid = size // kernel."""
    kernel = weight.shape[2:]
    n = len(kernel)
    if x.dim() == n + 1:
        return _patch_product(x.unsqueeze(0), weight, bias).squeeze(0)
    batch, out = x.shape[0], weight.shape[0]
    grid = [size // k for size, k in zip(x.shape[2:], kernel, strict=True)]
    positions, patch = math.prod(grid), math.prod(weight.shape[1:])  # P, C*K
    channels_last = _gives_channels_last(x, weight)
    for dim, k in enumerate(kernel):
        x = x.unfold(
            dim + 2, k, k
        )  # [N, C, *grid, *kernel]: what is left over at the end is dropped, as a convolution does
    x = x.permute(0, *range(2, n + 2), 1, *range(n + 2, 2 * n + 2))  # [N, *grid, C, *kernel]
    x = x.reshape(batch, positions, patch)  # [N, P, C*K]: still a view where the kernel is the whole input
    y = F.linear(x, weight.reshape(out, patch), bias)  # [N, P, O]
    if channels_last:
        return y.reshape(batch, *grid, out).movedim(-1, 1)  # [N, O, *grid]
    return y.transpose(1, 2).reshape(batch, out * positions).reshape(batch, out, *grid)  # [N, O, *grid], contiguous


def _is_patch_product(conv: nn.Module, x: Tensor, weight: Tensor) -> bool:
    """Whether this call of `conv` is a matrix product. Everything that can change after `linearize` is read here."""
    if torch.jit.is_tracing() or not isinstance(x, Tensor) or x.layout is not torch.strided:
        return False
    if torch.compiler.is_exporting() and not _all_known(x.shape[-len(conv.kernel_size) :]):
        return False  # the grid would need guards that not every size meets, and an exported program has no second try
    n = weight.dim() - 2
    return (
        _arguments_forbid(conv) is None
        and n == len(conv.kernel_size)
        and tuple(weight.shape[2:]) == tuple(conv.stride)
        and not is_traceable_wrapper_subclass(weight)
        and x.dim() in (n + 1, n + 2)
        and x.shape[-n - 1] == weight.shape[1]
        and all(size >= k for size, k in zip(x.shape[-n:], weight.shape[2:], strict=True))
    )


def _all_known(sizes: torch.Size) -> bool:
    """Whether no size is symbolic in the program that is being exported."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return all(has_static_value(size) for size in sizes)


def _gives_channels_last(x: Tensor, weight: Tensor) -> bool:
    """Whether the convolution of `x` [N, C, *size] would return its output in channels_last order."""
    if x.dim() == 3:
        return False
    if x.dtype is torch.float64 and (x.dim() == 5 or x.is_cuda):
        return False
    if x.dtype is torch.float16 and x.dim() == 5 and x.device.type == "cpu":
        return False
    return _has_channels_last_strides(x) or _has_channels_last_strides(weight)


def _has_channels_last_strides(x: Tensor) -> bool:
    """The order that ATen reads from strides (c10/core/MemoryFormat.h): channels, sizes from the last, then batch."""
    if x.stride(1) != 1:
        return False
    needed = 0
    for dim in (1, *range(x.dim() - 1, 1, -1), 0):
        if x.shape[dim] == 0 or x.stride(dim) < needed:
            return False
        if dim == 0 and needed == x.stride(1):  # [N, 1, 1, 1]: both orders, and ATen says contiguous
            return False
        needed = x.stride(dim) * max(x.shape[dim], 1)
    return True


def _arguments_forbid(conv: nn.Module) -> str | None:
    """Why the arguments of a convolution rule out a matrix product, or None."""
    kernel, stride, padding = tuple(conv.kernel_size), tuple(conv.stride), conv.padding
    if conv.groups != 1:
        return f"groups={conv.groups}: each group sees only its own channels"
    if stride != kernel:
        kind = "overlap" if any(s < k for s, k in zip(stride, kernel, strict=True)) else "leave gaps"
        return f"stride {_short(stride)} is not kernel {_short(kernel)}: the patches {kind}"
    if conv.padding_mode != "zeros":
        return f"padding_mode={conv.padding_mode!r} runs a padding step of its own before the convolution"
    if padding not in ("valid", "same") and any(padding):  # 'same' needs stride 1, so here the kernel is 1: no padding
        return f"padding {_short(tuple(padding))}: the outer patches contain padding"
    if any(d != 1 and k != 1 for d, k in zip(conv.dilation, kernel, strict=True)):
        return f"dilation {_short(tuple(conv.dilation))} spreads the kernel over its neighbours' patches"
    return None


def _short(sizes: tuple) -> str:
    return "x".join(map(str, sizes))


def why_not(module: nn.Module) -> str | None:
    """The reason in words why `linearize` leaves this convolution alone, or None where it is a matrix product."""
    kind = type(module)
    if isinstance(module, LazyModuleMixin):
        return "lazy: its shapes are not known before its first call"
    if isinstance(module, _ConvTransposeNd):
        return "transposed: every input position is spread over a block of outputs"
    if torch.nn.utils.parametrize.is_parametrized(module):
        names = ", ".join(sorted(module.parametrizations))
        return f"parametrized ({names}): its class was replaced to compute them; remove the parametrization first"
    if kind not in _LINEARIZED and kind not in _ORIGINAL:
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return f"{kind.__name__} is a subclass of nn.{_plain(kind).__name__}: its forward may do something else"
        return f"{kind.__module__}.{kind.__name__} is not an nn.Conv1d, nn.Conv2d or nn.Conv3d"
    for name in ("forward", "_conv_forward"):
        if name in vars(module):
            return f"{name} was replaced on this instance"
    weight = module.weight
    if not isinstance(weight, Tensor) or weight.numel() == 0:
        return "the weight is empty (sharded, or not loaded yet): linearize after the weights are there"
    if is_traceable_wrapper_subclass(weight) or weight.layout is not torch.strided:
        return f"the weight is a {type(weight).__name__} ({weight.layout}), not a plain tensor"
    if not (weight.is_floating_point() or weight.is_complex()):
        return f"the weight is {weight.dtype}: not a floating-point product"
    expected = (module.out_channels, module.in_channels // module.groups, *module.kernel_size)
    if tuple(weight.shape) != expected:
        return f"the weight has shape {tuple(weight.shape)}, its arguments say {expected}"
    return _arguments_forbid(module)


def _plain(kind: type) -> type:
    return next(base for base in kind.__mro__ if base in _LINEARIZED)


def _looks_like_a_convolution(module: nn.Module) -> bool:
    """nn convolutions, and foreign modules (quantized ones, for example) that carry the same arguments."""
    return isinstance(module, _ConvNd) or all(
        hasattr(module, name) for name in ("kernel_size", "stride", "in_channels", "out_channels")
    )


def linearize(model: nn.Module, *, inputs: Any = None, keep: str = "all", **options: Any) -> list[Rewrite]:
    """Turn every convolution of `model` that is a matrix product into one, in place. One `Rewrite` per convolution.

    inputs: example inputs of `model` (one tensor, a tuple of arguments, or a mapping of keyword arguments). The model
    runs once on them, in its present mode and without gradients, and each converted convolution is then measured
    against its old forward on the inputs that reached it (`utils.timing.compare`; `options` go there, for example
    min_run_time).
    keep: "all", or "faster": a rewrite stays only if it is measured `faster` on one input shape and `slower` on none.

    Undone by `restore(model)`. A second call changes nothing. Raises TypeError where `model` is no module, ValueError
    where `keep` is unknown or asks for a measurement without inputs; the model is unchanged then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    if keep not in ("all", "faster"):
        raise ValueError(f"keep={keep!r}, expected 'all' or 'faster'")
    if inputs is None and (keep == "faster" or options):
        raise ValueError(
            f"{'keep=' + repr(keep) if keep == 'faster' else ', '.join(options)} needs inputs to measure on"
        )

    found = {path: module for path, module in model.named_modules() if _looks_like_a_convolution(module)}
    reasons = {path: why_not(module) for path, module in found.items()}
    seen = _inputs_of({p: found[p] for p, reason in reasons.items() if reason is None}, model, inputs)

    rewrites = []
    for path, module in found.items():
        kind, reason, measured = type(module), reasons[path], ()
        if reason is None and inputs is not None:
            measured = tuple(_measure(module, x, options) for x in seen[path])
            if keep == "faster":
                reason = _not_faster(measured)
        if reason is None:
            why = "a linearized convolution already" if kind in _ORIGINAL else "stride equals kernel, no padding"
            module.__class__ = _LINEARIZED.get(kind, kind)
        elif kind in _ORIGINAL:  # measured again, and not faster this time
            module.__class__ = _ORIGINAL[kind]
        rewrites.append(Rewrite(path, _ORIGINAL.get(kind, kind).__name__, reason is None, reason or why, measured))
    return rewrites


def restore(model: nn.Module) -> list[str]:
    """Undo `linearize`: every linearized convolution of `model` has its old class again. Returns their paths.

    A class that somebody derived from a linearized one since (parametrizations and sharding do that) is derived from
    the plain convolution again.
    """
    paths = []
    for path, module in model.named_modules():
        kind = type(module)
        if kind in _ORIGINAL:
            module.__class__ = _ORIGINAL[kind]
        elif any(base in _ORIGINAL for base in kind.__bases__):
            bases = tuple(_ORIGINAL.get(base, base) for base in kind.__bases__)
            body = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
            module.__class__ = type(kind.__name__.replace("Linearized", ""), bases, body)
        else:
            continue
        paths.append(path)
    return paths


def _inputs_of(convolutions: dict[str, nn.Module], model: nn.Module, inputs: Any) -> dict[str, list[Tensor]]:
    """Run `model` once and keep, for each convolution, one input of every shape, dtype and layout that reached it."""
    seen: dict[str, dict[tuple, Tensor]] = {path: {} for path in convolutions}
    if inputs is None:
        return {path: [] for path in seen}

    def keep_input(path: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
            x = args[0] if args else kwargs["input"]
            seen[path].setdefault(
                (tuple(x.shape), x.dtype, x.stride()), x.detach().clone(memory_format=torch.preserve_format)
            )

        return hook

    hooks = [m.register_forward_pre_hook(keep_input(path), with_kwargs=True) for path, m in convolutions.items()]
    try:
        with torch.no_grad():
            if isinstance(inputs, Mapping):
                model(**inputs)
            else:
                model(*(inputs if isinstance(inputs, (tuple, list)) else (inputs,)))
    finally:
        for hook in hooks:
            hook.remove()
    return {path: list(found.values()) for path, found in seen.items()}


def _measure(conv: nn.Module, x: Tensor, options: dict[str, Any]):
    """One ComparisonRow: the convolution as a matrix product against its own old forward, on `x`, without hooks."""
    from .timing import compare

    plain = _ORIGINAL.get(type(conv), type(conv))

    def build(kind: type):
        def forward_of_a_copy():
            fresh = copy.copy(conv)  # shares everything but the parameters
            fresh.__dict__["_parameters"] = {
                name: None if p is None else nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
                for name, p in conv._parameters.items()
            }
            fresh.__class__ = kind
            return fresh.forward

        return forward_of_a_copy

    result = compare(
        build(plain), {"linear": build(_LINEARIZED[plain])}, make_inputs=lambda replicate: (x,), label="conv", **options
    )
    return result["linear"]


def _not_faster(measured: tuple) -> str | None:
    """Why `keep="faster"` leaves a convertible convolution alone, or None."""
    if not measured:
        return "the inputs do not reach it, so it was not measured"
    verdicts = [row.verdict for row in measured]
    if "faster" in verdicts and set(verdicts) <= {"faster", "equivalent", "inconclusive"}:
        return None
    worst = next((row for row in measured if row.verdict != "faster"), measured[0])
    if worst.speedup is None:
        return f"measured {worst.verdict}: {worst.error}"
    return f"measured {worst.verdict}: {worst.speedup:.2f}x ({worst.ci_low:.2f} to {worst.ci_high:.2f})"

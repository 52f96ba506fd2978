"""What surrounds a measurement: state that is put back, and inputs and outputs that are looked at."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from .errors import InputMutationError, MetaTensorError, MixedDeviceError

GRAD_MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "enabled": torch.enable_grad}
CONSTANT_MIN_NUMEL = 16


@contextlib.contextmanager
def preserved_state(num_threads: int | None) -> Iterator[int]:
    """Set the threads, collect garbage once, and put everything back at the end, after an exception too.

    Put back: torch's intra-op threads, grad mode, the garbage collector's switch, and the random generators of torch
    (CPU and, once initialised, CUDA), numpy and random. Yields the number of threads in use.
    """
    threads, grad, collecting = torch.get_num_threads(), torch.is_grad_enabled(), gc.isenabled()
    generators, freeze = rng_state(), False
    try:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        gc.collect()
        freeze = gc.get_freeze_count() == 0
        if freeze:
            gc.freeze()  # later collections, one a replicate, look only at what is new
        yield torch.get_num_threads()
    finally:
        if freeze:
            gc.unfreeze()
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        (gc.enable if collecting else gc.disable)()
        set_rng_state(generators)


def rng_state() -> tuple:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()


def set_rng_state(state: tuple) -> None:
    cpu, cuda, numpy_state, python_state = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    np.random.set_state(numpy_state)
    random.setstate(python_state)


def seed_all(seed: int) -> None:
    if torch.accelerator.is_available():
        torch.manual_seed(seed)  # every device
    else:
        torch.default_generator.manual_seed(seed)  # the other takes 2 ms a call where there is only a CPU
    np.random.seed(seed % 2**32)
    random.seed(seed)


def tensors(tree: Any) -> list[torch.Tensor]:
    """All tensors in nested containers and dataclasses."""
    found: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif _is_dataclass(leaf):
            found += tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


def map_tensors(fn: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    def on_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return fn(leaf)
        if _is_dataclass(leaf):
            copied = copy.copy(leaf)
            for field in dataclasses.fields(leaf):
                object.__setattr__(copied, field.name, map_tensors(fn, getattr(leaf, field.name)))
            return copied
        return leaf

    return pytree.tree_map(on_leaf, tree)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def cloned(tree: Any) -> Any:
    """A copy that a later call cannot overwrite (CUDA graphs return the same static buffers every time)."""
    return map_tensors(lambda t: t.detach().clone(), tree)


def to_float64(tree: Any) -> Any:
    return map_tensors(lambda t: t.double() if t.is_floating_point() else t, tree)


def check_devices(inputs: Any, mode: str, module_tensors: list[torch.Tensor] = ()) -> str:
    """The one device type of all tensors ("cpu" without any). Scalars on the CPU go with every device."""
    found = [t for t in [*tensors(inputs), *module_tensors] if t.dim() > 0 or t.device.type != "cpu"]
    check_real(found, "an input")
    devices = sorted({str(t.device) for t in found})
    if len(devices) > 1:
        raise MixedDeviceError(f"tensors on several devices: {', '.join(devices)}; expected one")
    device = found[0].device.type if found else "cpu"
    if mode == "device" and device != "cuda":
        raise MixedDeviceError(f"mode='device' times CUDA events, but the inputs are on {device!r}; use mode='latency'")
    return device


def check_real(tree: Any, what: str) -> None:
    for tensor in tensors(tree):
        if tensor.is_meta or isinstance(tensor, FakeTensor):
            raise MetaTensorError(f"{what} is a meta or fake tensor of shape {tuple(tensor.shape)}; it holds no data")


def same_values(a: Any, b: Any) -> bool:
    """Same tensors bit for bit (NaN equals NaN), in the same order."""
    left, right = tensors(a), tensors(b)
    return len(left) == len(right) and all(_same(x, y) for x, y in zip(left, right, strict=True))


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    if torch.equal(x, y):
        return True
    if not (x.is_floating_point() or x.is_complex()):
        return False
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


def check_unchanged(inputs: Any, before: Any, label: str) -> None:
    if not same_values(inputs, before):
        raise InputMutationError(f"{label!r} changes its inputs, so every call does other work; clone them inside")


def restore(inputs: Any, before: Any) -> None:
    """Give changed inputs their values back, in place."""
    with torch.no_grad():
        for tensor, old in zip(tensors(inputs), tensors(before), strict=True):
            tensor.copy_(old)


def count_new_nonfinite(actual: Any, expected: Any) -> int:
    """Values that are NaN or infinite in `actual` where `expected` is finite."""
    count = 0
    for a, e in zip(tensors(actual), tensors(expected), strict=False):
        if a.shape == e.shape and (a.is_floating_point() or a.is_complex()):
            count += int((~a.isfinite() & e.isfinite().to(a.device)).sum())
    return count


def reachable_callables(fn: Callable) -> list[Any]:
    """`fn` and what it visibly calls: wrapped functions, partials, bound objects, closures, named globals."""
    found, todo = [], [fn]
    while todo and len(found) < 200:
        item = todo.pop()
        if any(item is seen for seen in found):
            continue
        found.append(item)
        if isinstance(item, functools.partial):
            todo += [item.func, *item.args]
        for name in ("__wrapped__", "__self__", "__func__"):
            if (inner := getattr(item, name, None)) is not None and callable(inner):
                todo.append(inner)
        for cell in getattr(item, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a cell that is still empty
                if callable(cell.cell_contents):
                    todo.append(cell.cell_contents)
        if (code := getattr(item, "__code__", None)) is not None:
            scope = getattr(item, "__globals__", {})
            named = [scope[name] for name in code.co_names if name in scope]
            todo += [x for x in named if isinstance(x, nn.Module) or hasattr(x, "_torchdynamo_orig_callable")]
    return found


def modules(fn: Callable) -> list[nn.Module]:
    return [item for item in reachable_callables(fn) if isinstance(item, nn.Module)]


def module_tensors(fn: Callable) -> list[torch.Tensor]:
    return [*fn.parameters(), *fn.buffers()] if isinstance(fn, nn.Module) else []


def is_compiled(fn: Callable) -> bool:
    """True when torch.compile is visible in `fn` or in what it calls."""
    for item in reachable_callables(fn):
        if hasattr(item, "_torchdynamo_orig_callable"):
            return True
        if isinstance(item, nn.Module):
            for module in item.modules():
                if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod"):
                    return True
                if hasattr(getattr(module, "forward", None), "_torchdynamo_orig_callable"):
                    return True
    return False


def input_warnings(fn: Callable, inputs: Any, grad_mode: str) -> list[str]:
    """Things that make a time mean something else than the reader expects."""
    found = []
    if any(module.training for module in modules(fn)):
        found.append("train_mode: a module is in training mode; call .eval() for inference")
    if grad_mode == "enabled":
        found.append("grad_enabled: gradients are recorded; inference does not do that")
    if any(is_constant(t) for t in tensors(inputs)):
        found.append("constant_input: an input holds one value only; power, clocks and shortcuts depend on values")
    return found


def is_constant(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.numel() < CONSTANT_MIN_NUMEL:
        return False
    return bool((tensor == tensor.flatten()[0]).all())

"""How many FLOPs a call costs, and which of its operations the count leaves out. Used through utils.cost."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

# Operations that move, create or index data and compute nothing; views are recognised by themselves.
_MOVES_DATA = re.compile(
    r"_?(local_scalar_dense|to_copy|reshape_copy|unsafe_view|clone|copy|detach|lift\w*|resize|constant_pad_nd|cat|stack"
    r"|empty|zeros?|ones|full|new_\w+|fill|rand\w*|arange|linspace|eye|scalar_tensor|complex|as_strided|unfold_copy"
    r"|embedding|gather|scatter|index(_select|_copy|_put)?|masked_(fill|scatter|select)|nonzero|where|tril|triu|flip|roll"
    r"|repeat\w*|pixel_(un)?shuffle|(select|slice)_scatter|split_with_sizes_copy)(_like|_strided|_permuted)?_?"
)


@dataclass(frozen=True)
class FlopCount:
    """FLOPs of one call: `total`, `by_op`, `by_module` (path below the outermost module), and `uncounted`.

    A multiplication and an addition are two. `uncounted` names the operations that compute something and are not in
    the sum: elementwise ones, softmax, norms, custom operations.
    """

    total: int
    by_op: dict[str, int]
    uncounted: list[str]
    by_module: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {flops:,}" for name, flops in self.by_op.items()) or "nothing counted"
        return f"{self.total:,} FLOP ({parts}); not counted: {', '.join(self.uncounted) or 'none'}"


def count_flops(fn: Callable, *args: Any, **kwargs: Any) -> FlopCount:
    """Run `fn(*args, **kwargs)` once, eagerly, and count the FLOPs of its matrix products, convolutions and attention.

    Formulas: torch.utils.flop_counter. A causal mask is not deducted there, and attention on the CPU, which it leaves
    out, is counted here by its formula for attention.
    Raises ValueError for a compiled function: counting would return nonsense and leave it uncompiled from then on
    (pytorch #140909). Count the function that was compiled.
    """
    for found in reachable(fn, args, kwargs):
        if _is_compiled(found):
            raise ValueError(
                f"fn={_named(fn)} runs compiled code ({_named(found)}), which counting would undo; "
                "expected the eager function that was compiled"
            )
    recorder, counter = _Recorder(), FlopCounterMode(display=False, depth=None, custom_mapping=_cpu_attention())
    with recorder, counter:  # the counter decomposes first, so the recorder sees what really runs
        fn(*args, **kwargs)
    counts = counter.get_flop_counts()
    by_op = {_op_name(op): int(flops) for op, flops in counts.get("Global", {}).items()}
    by_module = {name: int(sum(ops.values())) for name, ops in counts.items() if name != "Global"}
    uncounted = sorted({_op_name(op) for op in recorder.seen if not _counted(op, counter) and not _moves_data(op)})
    return FlopCount(sum(by_op.values()), by_op, uncounted, by_module)


class _Recorder(TorchDispatchMode):
    """Collects every operation that reaches the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


def _cpu_attention() -> dict:
    """Formulas for CPU attention where this torch has none: without them attention on a CPU counts as 0 FLOPs."""
    found = {}
    for name in ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_fused_attention_overrideable"):
        op = getattr(torch.ops.aten, name, None)
        if op is not None and op not in flop_registry:
            found[op] = lambda q, k, v, *args, out_shape=None, **kwargs: sdpa_flop_count(q, k, v)
    return found


def _counted(op, counter: FlopCounterMode) -> bool:
    return getattr(op, "overloadpacket", op) in counter.flop_registry


def _moves_data(op) -> bool:
    packet = getattr(op, "overloadpacket", op)
    is_aten = str(packet).startswith(("aten.", "prim."))
    return bool(getattr(op, "is_view", False)) or (is_aten and _MOVES_DATA.fullmatch(_op_name(op)) is not None)


def _op_name(op) -> str:
    """ "aten.mm.default" -> "mm"; operations of other libraries keep their name space."""
    return str(getattr(op, "overloadpacket", op)).removeprefix("aten.")


def _is_compiled(found: Any) -> bool:
    if isinstance(found, torch.nn.Module):
        return hasattr(found, "_orig_mod") or getattr(found, "_compiled_call_impl", None) is not None
    return hasattr(found, "_torchdynamo_orig_callable")


def _named(fn: Any) -> str:
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def reachable(*roots: Any, depth: int = 4) -> Iterator[Any]:
    """What a call can reach: functions and modules behind partials, methods, closures and the globals they name."""
    seen: set[int] = set()

    def walk(item: Any, left: int) -> Iterator[Any]:
        if id(item) in seen or left < 0:
            return
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, torch.nn.Module):
            yield from item.modules()
        elif isinstance(item, tuple | list | dict):
            for part in item.values() if isinstance(item, dict) else item:
                yield from walk(part, left)
        elif isinstance(item, functools.partial):
            yield from walk((item.func, item.args, item.keywords), left - 1)
        elif callable(item) and not isinstance(item, type):
            yield item
            code, inside = getattr(item, "__code__", None), [getattr(item, "__self__", None)]
            if code is not None and not (getattr(item, "__module__", None) or "").startswith("torch."):
                inside += [cell.cell_contents for cell in item.__closure__ or () if _filled(cell)]
                named = (item.__globals__.get(name) for name in code.co_names)
                inside += [value for value in named if callable(value) or isinstance(value, torch.Tensor | list | dict)]
            for part in inside:
                yield from walk(part, left - 1)

    yield from walk(roots, depth)


def _filled(cell) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that is not bound yet
        return False

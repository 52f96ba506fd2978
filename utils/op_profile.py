"""Where the time of a call goes, and how much work is done there: one row per module and operation.

The call runs once under a dispatch mode, which sees every operation with its tensors (FLOPs, bytes, shapes), and then
a few times under torch.profiler, which sees how long each took. Hooks on the modules say in both which module was
running. The two are joined by module and operation.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

os.environ.setdefault("KINETO_LOG_LEVEL", "99")

OUTSIDE = "(call)"  # what runs in the call but in no module: the loop of generate(), for example
PYTHON = "(python)"  # time in a module in which no operation ran
_MARK = "op_profile|"
_LONG_SECONDS = 2.0  # a call that takes longer is timed twice where both times agree
_AGREE = 0.25  # of the call: what the lines of two such passes may differ by, added up

_ROWS_ONLY = {"embedding", "gather", "index", "index_select", "_embedding_bag"}  # read as many rows as they return
_SOURCE_ONLY = {"scatter", "scatter_add", "index_put", "index_copy", "index_add", "slice_scatter"}  # write their source


@dataclass
class OpRow:
    """One operation in one module, over one call of the model.

    seconds: its time in the pass where it was fastest (on CUDA: of its kernels); again: in the next fastest. flops:
    counted ones (matrix products, convolutions, attention). bytes: read and written, each weight once per call of the
    outermost module. kinds: with how many different shapes and dtypes, per call of the outermost module. dtype: of its
    first output. shapes, arguments: of the call with the most work. module: where it ran (None outside).
    """

    path: str
    op: str
    calls: int = 0
    seconds: float = 0.0
    flops: int = 0
    bytes: int = 0
    elements: int = 0  # of its outputs
    kinds: int = 0
    dtype: torch.dtype | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    arguments: tuple = ()  # of that call: tensors as (shape, stride, dtype), the rest as it was
    keywords: tuple[str, ...] = ()  # names of its keyword arguments
    module: nn.Module | None = None
    again: float = 0.0


@dataclass
class OpProfile:
    rows: list[OpRow]
    total_s: float  # one call: the sum over the rows
    outermost_calls: int  # calls of the model itself in one call (generate: one per token)
    device: torch.device
    module_calls: dict[str, int] = field(default_factory=dict)  # path -> calls of that module in one call


def profile_operations(call: Callable[[], Any], model: nn.Module, *, passes: int = 3) -> OpProfile:
    """Run `call` once to count its work and `passes` times to time it (twice, when it is long), without gradients.

    Each line counts with its fastest pass, so a pause of the machine, which hits one pass, is in none. The hooks are
    gone afterwards, also when `call` raises. Whatever `call` raises is raised.
    """
    device = _device_of(model)
    hooks = _Hooks(model)
    with torch.no_grad(), hooks.attached():
        work = _Work(hooks, _storages(model))
        # outside inference mode, where compound operations would arrive whole
        with torch.inference_mode(False), torch.no_grad(), work, hooks.in_range(OUTSIDE):
            call()
        timed: list[tuple[float, dict[tuple[str, str], tuple[float, int]]]] = []
        while len(timed) < passes and not _enough(timed):
            timed.append(_timed_pass(call, hooks, work.names(), device))
    return _joined(work, timed, hooks, device)


class _Hooks:
    """Keeps the path of the running module; `marking` also marks it for the profiler."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = {m: p for p, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule)}
        self.stack: list[str] = []
        self.calls: Counter[str] = Counter()
        self.marking = False
        self._open: list[record_function] = []

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        handles = []
        try:
            for module in self.modules:
                handles.append(module.register_forward_pre_hook(self._enter, prepend=True))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            while self._open:
                self._open.pop().__exit__(None, None, None)

    @contextlib.contextmanager
    def in_range(self, path: str) -> Iterator[None]:
        self._push(path)
        try:
            yield
        finally:
            self._pop()

    def _enter(self, module: nn.Module, args: tuple) -> None:
        self.calls[self.modules[module]] += 1
        self._push(self.modules[module])

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self.stack and self.stack[-1] == self.modules[module]:
            self._pop()

    def _push(self, path: str) -> None:
        self.stack.append(path)
        if self.marking:
            self._open.append(record_function(_MARK + path))
            self._open[-1].__enter__()

    def _pop(self) -> None:
        self.stack.pop()
        if self._open:
            self._open.pop().__exit__(None, None, None)


class _Work(TorchDispatchMode):
    """Sees every operation: its FLOPs, its bytes, and in which module it ran."""

    def __init__(self, hooks: _Hooks, weights: set[int]) -> None:
        super().__init__()
        self.hooks, self.weights = hooks, weights
        self.formulas = FlopCounterMode(display=False, custom_mapping=_fused()).flop_registry
        self.rows: dict[tuple[str, str], OpRow] = {}
        self.kinds: dict[tuple[str, str], set] = defaultdict(set)
        self.read: set = set()  # weights read by an operation in this call of the outermost module
        self.most: dict[tuple[str, str], float] = defaultdict(lambda: -1.0)

    def names(self) -> dict[str, set[str]]:
        """The operations of each module, as the profiler calls them."""
        found: dict[str, set[str]] = defaultdict(set)
        for path, op in self.rows:
            found[path].add(op)
        return found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", func)
        if packet not in self.formulas and func is not torch.ops.prim.device.default:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        self._count(func, packet, args, kwargs, out)
        return out

    def _count(self, func, packet, args, kwargs, out) -> None:
        path, op = self.hooks.stack[-1], func._schema.name
        key = (path, op)
        row = self.rows.setdefault(key, OpRow(path, op))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        row.calls += 1
        call_number = self.hooks.calls[""]
        shapes = tuple(tuple(t.shape) for t in given)
        self.kinds[key].add((call_number, shapes, tuple(t.dtype for t in given)))
        if made and row.dtype is None:
            row.dtype = made[0].dtype
        flops = 0
        if packet in self.formulas:
            flops = int(self.formulas[packet](*args, **kwargs, out_val=out))
        row.flops += flops
        moved = 0 if getattr(func, "is_view", False) else self._bytes(packet, given, made, (call_number, *key))
        row.bytes += moved
        row.elements += sum(t.numel() for t in made) if moved else 0
        if flops + moved > self.most[key]:
            self.most[key] = flops + moved
            row.shapes = shapes
            row.arguments, row.keywords = tuple(_described(a) for a in args), tuple(kwargs)

    def _bytes(self, packet, given: list[Tensor], made: list[Tensor], scope: tuple) -> int:
        name = str(packet).rpartition(".")[2].rstrip("_")
        if name in _ROWS_ONLY:
            return 2 * sum(_size(t) for t in made)
        if name in _SOURCE_ONLY:
            return 2 * _size(given[-1]) if given else 0
        total = sum(_size(t) for t in made)
        for t in given:
            if t.layout is torch.strided and t.untyped_storage().data_ptr() in self.weights:
                seen = (*scope, t.data_ptr(), t.numel())
                if seen in self.read:
                    continue
                self.read.add(seen)
            total += _size(t)
        return total


def _fused() -> dict:
    """Formulas for fused operations that torch has none for; they get shapes in place of tensors."""

    def cpu_attention(q, k, v, *args, out_shape=None, **kwargs) -> int:
        return sdpa_flop_count(q, k, v)

    def grouped_product(a, b, *args, out_shape=None, **kwargs) -> int:  # a [M, K], b [groups, K, N]
        return 2 * math.prod(a) * b[-1]

    def attention(q, k, v, width, *args, out_shape=None, **kwargs) -> int:  # q [B, L, E]
        return 2 * math.prod(q) * (4 * width + 2 * k[1])

    def encoder_layer(x, width, *args, out_shape=None, **kwargs) -> int:  # x [B, L, E]; feed-forward 4 E
        return 2 * math.prod(x) * (4 * width + 2 * x[1] + 8 * width)

    def recurrent(x, w_in, w_hidden, *args, out_shape=None, **kwargs) -> int:  # x [T, B, I], weights [4 H, I], [4 H, H]
        return 2 * x[0] * x[1] * (math.prod(w_in) + math.prod(w_hidden))

    named = {
        "_scaled_dot_product_flash_attention_for_cpu": cpu_attention,
        "_scaled_dot_product_fused_attention_overrideable": cpu_attention,
        "_grouped_mm": grouped_product,
        "_native_multi_head_attention": attention,
        "_transformer_encoder_layer_fwd": encoder_layer,
        "mkldnn_rnn_layer": recurrent,
    }
    known = {getattr(torch.ops.aten, name): count for name, count in named.items() if hasattr(torch.ops.aten, name)}
    return {op: count for op, count in known.items() if op not in flop_registry}


def _enough(timed: list[tuple[float, dict[tuple[str, str], tuple[float, int]]]]) -> bool:
    """Two passes of a long call that agree line by line. One alone may hold a pause, and a pause alone may be long."""
    if len(timed) < 2:
        return False
    (total, lines), (other_total, others) = timed[-2:]
    apart = sum(abs(lines.get(key, (0.0, 0))[0] - others.get(key, (0.0, 0))[0]) for key in lines | others)
    return min(total, other_total) > _LONG_SECONDS and apart <= _AGREE * min(total, other_total)


def _timed_pass(
    call: Callable[[], Any], hooks: _Hooks, names: dict[str, set[str]], device: torch.device
) -> tuple[float, dict[tuple[str, str], tuple[float, int]]]:
    """Seconds of one call, and of each (module, operation) in it, with the number of calls."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    hooks.marking = True
    try:
        with profile(activities=activities) as prof, hooks.in_range(OUTSIDE):
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    finally:
        hooks.marking = False
    seconds: dict[tuple[str, str], tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    total, on_cuda = 0.0, device.type == "cuda"

    def add(path: str, op: str, micros: float) -> None:
        spent, calls = seconds[path, op]
        seconds[path, op] = (spent + micros / 1e6, calls + 1)

    for event in prof.events():
        if not event.name.startswith(_MARK) or _is_device_event(event):
            continue
        path = event.name.removeprefix(_MARK)
        if path == OUTSIDE:
            total += event.cpu_time_total / 1e6
        rest = event.cpu_time_total
        for child in event.cpu_children:
            rest -= child.cpu_time_total
            if child.name.startswith(_MARK):
                continue
            time_of = _device_time if on_cuda else _cpu_time
            for op, micros in _matched(child, names.get(path, set()), time_of):
                add(path, op, micros)
        if not on_cuda:
            add(path, PYTHON, max(rest, 0.0))
    return total, dict(seconds)


def _matched(event, names: set[str], time_of: Callable) -> list[tuple[str, float]]:
    """The counted operations inside one profiled operation, with their times; what is left goes to the longest."""
    found: list[tuple[str, float]] = []

    def walk(e) -> None:
        if e.name in names:
            found.append((e.name, time_of(e)))
            return
        for child in e.cpu_children:
            walk(child)

    walk(event)
    whole = time_of(event)
    if not found:
        return [(event.name, whole)]
    longest = max(range(len(found)), key=lambda i: found[i][1])
    found[longest] = (found[longest][0], found[longest][1] + max(whole - sum(t for _, t in found), 0.0))
    return found


def _cpu_time(event) -> float:
    return event.cpu_time_total


def _device_time(event) -> float:
    return event.device_time_total


def _is_device_event(event) -> bool:
    return "CUDA" in str(event.device_type)


def _joined(work: _Work, timed: list, hooks: _Hooks, device: torch.device) -> OpProfile:
    by_path = {path: module for module, path in hooks.modules.items()}
    calls = {path: count // (1 + len(timed)) for path, count in hooks.calls.items()}
    calls_of_model = max(calls.get("", 0), 1)
    rows = dict(work.rows)
    for key, row in rows.items():
        row.kinds = -(-len(work.kinds[key]) // calls_of_model)
    for path, op in {key for _, seconds in timed for key in seconds}:
        if (path, op) not in rows:
            seen = max(seconds.get((path, op), (0, 0))[1] for _, seconds in timed)
            rows[path, op] = OpRow(path, op, calls=seen, kinds=1)
    for key, row in rows.items():
        fastest = sorted(seconds.get(key, (0.0, 0))[0] for _, seconds in timed)
        row.seconds, row.again = fastest[0], fastest[min(1, len(fastest) - 1)]
        row.module = by_path.get(row.path)
    _give_work_to_time(rows)
    ordered = sorted(rows.values(), key=lambda row: -row.seconds)
    return OpProfile(ordered, sum(row.seconds for row in ordered), calls_of_model, device, calls)


def _give_work_to_time(rows: dict[tuple[str, str], OpRow]) -> None:
    """An operation may run under another name than the one it was dispatched as (batch norm does): in each module, work
    without time goes to the longest time without work."""
    idle: dict[str, list[OpRow]] = defaultdict(list)
    for row in list(rows.values()):
        if not row.seconds and (row.flops or row.bytes):
            idle[row.path].append(row)
    for path, unmatched in idle.items():
        free = [
            r for r in rows.values() if r.path == path and r.seconds and r.op != PYTHON and not (r.flops or r.bytes)
        ]
        if not free:
            continue
        target, main = max(free, key=lambda r: r.seconds), max(unmatched, key=lambda r: (r.flops, r.bytes))
        main.seconds, main.again = target.seconds, target.again
        for row in unmatched:
            if row is not main:
                main.flops, main.bytes = main.flops + row.flops, main.bytes + row.bytes
                main.elements, main.kinds = main.elements + row.elements, main.kinds + row.kinds
                del rows[row.path, row.op]
        del rows[target.path, target.op]


def _size(t: Tensor) -> int:
    """Bytes behind a tensor: an expanded one is no larger than its storage."""
    if t.layout is not torch.strided:
        return t.numel() * t.element_size()
    return min(t.numel() * t.element_size(), t.untyped_storage().nbytes())


def _storages(model: nn.Module) -> set[int]:
    tensors = [*model.parameters(), *model.buffers()]
    return {t.untyped_storage().data_ptr() for t in tensors if t.layout is torch.strided and t.device.type != "meta"}


def _described(value: Any) -> Any:
    return (tuple(value.shape), tuple(value.stride()), value.dtype) if isinstance(value, Tensor) else value


def _device_of(model: nn.Module) -> torch.device:
    found = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    return found

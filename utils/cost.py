"""What a computation costs without a clock (FLOPs, bytes), and the limits of this machine that its time stands against.

flops = count_flops(model, x)                       # eager only
memory = peak_memory(model, x)                      # a separate, untimed call
peaks = measure_peaks(dtype=torch.bfloat16)         # cached for this environment
print(roofline(seconds, flops=flops.total, bytes_moved=n, peaks=peaks))
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop_count

from .machine import machine_record, pick_device

IMPOSSIBLE_MARGIN = 0.15  # a limit is a sample too: shares up to 1.06 were seen for honest times
_CACHE_VARIABLE = "COOKBOOK_CACHE"
_CACHE_VERSION = 1
_LONGEST_PRODUCT = 0.1  # seconds that a product for a limit may take: float16 on a CPU can take minutes

# ---------------------------------------------------------------------------------------------------- FLOPs

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
    for found in _reachable(fn, args, kwargs):
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


def _reachable(*roots: Any, depth: int = 4) -> Iterator[Any]:
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
            if code is not None and not getattr(item, "__module__", "").startswith("torch."):
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


# ---------------------------------------------------------------------------------------------------- memory


@dataclass(frozen=True)
class MemoryStats:
    """Bytes of one call. `peak_bytes`: the most that was allocated at once above what was there before it."""

    peak_bytes: int
    output_bytes: int
    device: str
    reserved_bytes: int | None = None  # CUDA: growth of the allocator's reserve, what nvidia-smi sees

    def __str__(self) -> str:
        return f"peak {self.peak_bytes:,} B above the start, output {self.output_bytes:,} B, {self.device}"


def peak_memory(fn: Callable, *args: Any, device: str | torch.device | None = None, **kwargs: Any) -> MemoryStats:
    """Peak memory of `fn(*args, **kwargs)` in torch's allocator, inputs and weights not included.

    `device` None: where the tensors are that the call reaches. On the CPU the call runs once, under the profiler, and
    the sum of its allocation events is followed. On CUDA it runs twice, so that workspaces made once are not counted,
    and torch.cuda.max_memory_allocated is read. Private pools of CUDA graphs are not in either figure.
    """
    target = _target(fn, args, kwargs) if device is None else pick_device(device)
    if target.type == "cuda":
        return _cuda_peak(fn, args, kwargs, target)
    if target.type != "cpu":
        raise ValueError(f"device={str(target)!r}; expected cpu or cuda, others do not report their peak")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        out = fn(*args, **kwargs)
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if "CPU" in str(event.device_type()):
            current += event.nbytes()
            peak = max(peak, current)
    return MemoryStats(peak, _output_bytes(out), "cpu")


def _cuda_peak(fn, args, kwargs, device: torch.device) -> MemoryStats:
    fn(*args, **kwargs)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    out = fn(*args, **kwargs)
    torch.cuda.synchronize(device)
    return MemoryStats(
        torch.cuda.max_memory_allocated(device) - allocated,
        _output_bytes(out),
        str(device),
        torch.cuda.max_memory_reserved(device) - reserved,
    )


def _target(fn, args, kwargs) -> torch.device:
    devices = set()
    for found in _reachable(fn, args, kwargs):
        tensors = [found] if isinstance(found, torch.Tensor) else []
        if isinstance(found, torch.nn.Module):
            tensors = [*found.parameters(recurse=False), *found.buffers(recurse=False)]
        devices |= {tensor.device for tensor in tensors}
    busy = [device for device in devices if device.type != "cpu"]
    return busy[0] if busy else torch.device("cpu")


def _output_bytes(out: Any) -> int:
    """Bytes of all tensors in the output; a tensor that is there twice counts once."""
    tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    unique = {(t.data_ptr(), t.numel()) if t.layout == torch.strided else id(t): t for t in tensors}
    return sum(t.numel() * t.element_size() for t in unique.values())


# ---------------------------------------------------------------------------------------------------- limits


@dataclass(frozen=True)
class MachinePeaks:
    """The most that this machine was seen to do: matrix products in `dtype`, reading and copying `buffer_bytes`.

    A smaller buffer may lie in a cache and be read faster, so a limit counts only with the buffer it was measured on.
    """

    gemm_flops_per_s: float
    read_bytes_per_s: float
    copy_bytes_per_s: float  # bytes read plus bytes written
    buffer_bytes: int
    dtype: str
    num_threads: int
    device_name: str
    device: str
    gemm_size: int
    env_id: str

    @property
    def memory_bytes_per_s(self) -> float:
        """The faster of reading and copying."""
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)

    def __str__(self) -> str:
        mebibytes = self.buffer_bytes / 2**20
        return (
            f"{self.device_name}, {self.num_threads} threads: {self.gemm_flops_per_s / 1e9:,.0f} GFLOP/s "
            f"({self.dtype} products of {self.gemm_size}), read {self.read_bytes_per_s / 1e9:.1f} GB/s, "
            f"copy {self.copy_bytes_per_s / 1e9:.1f} GB/s (a buffer of {mebibytes:.0f} MiB)"
        )


def measure_peaks(
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    num_threads: int | None = None,
    buffer_bytes: int | None = None,
    *,
    refresh: bool = False,
) -> MachinePeaks:
    """Measure the limits of a device, or read them from the cache of this environment (`refresh` measures again).

    Square products of two sizes, the larger foreseen by a small one to take at most 0.1 s; the better rate counts.
    Reading is torch.sum over float32, whatever `dtype` is: the limit is the memory's, not the conversion's.
    `buffer_bytes` None: 256 MiB on the CPU, 1 GiB on CUDA. The fastest sample counts, because a limit is asked for.
    Cache: $COOKBOOK_CACHE, else build/cache beside the helpers, else ~/.cache/inference-acceleration-cookbook.
    """
    target = pick_device("auto" if device is None else device)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"dtype={dtype}; expected torch.float16, bfloat16, float32 or float64")
    threads = torch.get_num_threads() if num_threads is None else num_threads
    if threads < 1:
        raise ValueError(f"num_threads={num_threads}; expected 1 or more")
    size = buffer_bytes if buffer_bytes is not None else 2**28 if target.type == "cpu" else 2**30
    if size < 4096:
        raise ValueError(f"buffer_bytes={buffer_bytes}; expected at least 4096")
    record = machine_record(target)
    name = str(dtype).removeprefix("torch.")
    precision = (torch.get_float32_matmul_precision(), record["tf32_matmul"]) if dtype == torch.float32 else None
    key = (_CACHE_VERSION, record["env_id"], str(target), name, threads, size, precision)
    file = _cache_file(f"peaks-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.json")
    if not refresh and (known := _read_peaks(file)):
        return known
    rate, edge = _gemm_rate(target, dtype, threads)
    read, copy = _memory_rates(target, size, threads)
    found = MachinePeaks(
        rate, read, copy, size, name, threads, record["device_name"], str(target), edge, record["env_id"]
    )
    _write_peaks(file, found)
    return found


def _seconds(fn: Callable[[], Any], device: torch.device, threads: int, seconds: float) -> float:
    """Seconds per call at best: one call at a time on the CPU, calls back to back where they are queued."""
    from .timing import measure  # the only room with a clock

    on_cpu = device.type == "cpu"
    found = measure(
        fn,
        mode="latency" if on_cpu else "throughput",
        num_threads=threads,
        min_run_time=seconds,
        max_run_time=1.0,  # on a busy machine only a few of thirty samples run undisturbed
        warmup_time=seconds / 4 if on_cpu else None,  # a GPU needs longer to reach its clock rate
        allow_nondeterministic=True,
    )
    return found.min_s


def _gemm_rate(device: torch.device, dtype: torch.dtype, threads: int) -> tuple[float, int]:
    """(FLOP/s, edge of the product that reached it)."""

    def rate(edge: int, threads: int) -> float:
        a, b, out = (_noise(edge * edge, device).to(dtype).view(edge, edge) for _ in range(3))
        return 2 * edge**3 / _seconds(functools.partial(torch.mm, a, b, out=out), device, threads, 0.1)

    on_cpu = device.type == "cpu"
    edges = (128, 256, 512, 1024, 1536, 3072) if on_cpu else (1024, 2048, 4096, 8192)
    foreseen = rate(edges[0], 1)  # one thread: on a busy machine several wait for each other
    foreseen *= max(1, threads // 2) if on_cpu else 1
    fitting = [edge for edge in edges if 2 * edge**3 <= foreseen * _LONGEST_PRODUCT] or [edges[0]]
    rates = {edge: rate(edge, threads) for edge in fitting[::-2][:2]}  # the largest, and a smaller one
    best = max(rates, key=rates.get)
    return rates[best], best


def _memory_rates(device: torch.device, size: int, threads: int) -> tuple[float, float]:
    """(bytes read per second, bytes read and written per second)."""
    source = _noise(size // 4, device)
    target = torch.empty_like(source)
    moved = source.numel() * source.element_size()
    read = moved / _seconds(functools.partial(torch.sum, source), device, threads, 0.3)
    return read, 2 * moved / _seconds(functools.partial(target.copy_, source), device, threads, 0.3)


def _noise(count: int, device: torch.device) -> torch.Tensor:
    """Random float32 values: constant ones draw less power and run faster on some GPUs. At most 4 Mi are drawn."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(min(count, 2**22), generator=generator).to(device)
    return drawn.repeat(-(-count // drawn.numel()))[:count]


def _cache_file(name: str) -> Path | None:
    """Where to keep a limit: the first folder that can be written; None when there is none."""
    chosen = os.environ.get(_CACHE_VARIABLE)
    beside = Path(__file__).resolve().parent.parent / "build" / "cache"
    home = Path("~/.cache/inference-acceleration-cookbook").expanduser()
    for folder in [Path(chosen)] if chosen else [beside, home]:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder / name
    return None


def _read_peaks(file: Path | None) -> MachinePeaks | None:
    try:
        found = MachinePeaks(**json.loads(file.read_text(encoding="utf-8"))) if file else None
        rates = (found.gemm_flops_per_s, found.read_bytes_per_s, found.copy_bytes_per_s) if found else ()
        return found if all(math.isfinite(rate) and rate > 0 for rate in rates) else None
    except (OSError, ValueError, TypeError):  # absent, damaged or of another version: measured again
        return None


def _write_peaks(file: Path | None, peaks: MachinePeaks) -> None:
    if file is None:
        return
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_text(json.dumps(asdict(peaks)), encoding="utf-8")
        os.replace(part, file)
    except OSError:
        part.unlink(missing_ok=True)


@dataclass(frozen=True)
class Roofline:
    """A time beside the least time that the limits allow. `share_of_limit` is floor over time: 1 is the limit."""

    seconds: float
    floor_s: float
    bound: str
    share_of_limit: float
    warning: str | None

    def __str__(self) -> str:
        text = f"{self.share_of_limit:.0%} of the {self.bound} limit "
        text += f"(at least {self.floor_s:.3g} s, took {self.seconds:.3g} s)"
        if self.warning:
            text += f"; {self.warning}: faster than the limit; is the time, the count or the limit wrong (refresh it)?"
        return text


def roofline(seconds: float, *, flops: float, bytes_moved: float, peaks: MachinePeaks) -> Roofline:
    """Place a time against max(flops / GEMM rate, bytes_moved / memory rate), the model of Williams et al. (2009).

    `bound` is "compute" or "memory", whichever floor is higher. `warning` is "impossible_rate" when the time is more
    than 15 % below the floor: the clock missed work, the counts are too large, the data were in a cache (see
    peaks.buffer_bytes), or the limit was measured on a busy machine.
    """
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"seconds={seconds!r}; expected a finite number above 0")
    for name, value in (("flops", flops), ("bytes_moved", bytes_moved)):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}={value!r}; expected a finite number of at least 0")
    if not flops and not bytes_moved:
        raise ValueError("flops=0 and bytes_moved=0; expected at least one above 0")
    compute, memory = flops / peaks.gemm_flops_per_s, bytes_moved / peaks.memory_bytes_per_s
    floor, bound = max((compute, "compute"), (memory, "memory"))
    share = floor / seconds
    return Roofline(seconds, floor, bound, share, "impossible_rate" if share > 1 + IMPOSSIBLE_MARGIN else None)

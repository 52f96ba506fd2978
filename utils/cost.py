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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .flop_count import FlopCount, count_flops, reachable
from .machine import machine_record, pick_device

__all__ = [
    "FlopCount",
    "MachinePeaks",
    "MemoryStats",
    "Roofline",
    "count_flops",
    "measure_peaks",
    "peak_memory",
    "roofline",
]

IMPOSSIBLE_MARGIN = 0.15  # a limit is a sample too: shares up to 1.06 were seen for honest times
_CACHE_VARIABLE = "COOKBOOK_CACHE"
_CACHE_VERSION = 2
_LONGEST_PRODUCT = 0.05  # seconds that a product for a limit may take: float16 on a CPU can take minutes

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
    for found in reachable(fn, args, kwargs):
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

    Square products of up to three sizes, the largest foreseen by the smallest to take at most 0.05 s; the best rate
    counts. On a CPU one thread is tried beside `num_threads`, because on a busy machine it can be the faster.
    Reading is torch.sum over float32, whatever `dtype` is: the limit is the memory's, not the conversion's.
    `buffer_bytes` None: 128 MiB on the CPU, 1 GiB on CUDA. The fastest sample counts, because a limit is asked for.
    Cache: $COOKBOOK_CACHE, else build/cache beside the helpers, else ~/.cache/inference-acceleration-cookbook.
    """
    target = pick_device("auto" if device is None else device)
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"dtype={dtype}; expected torch.float16, bfloat16, float32 or float64")
    threads = torch.get_num_threads() if num_threads is None else num_threads
    if threads < 1:
        raise ValueError(f"num_threads={num_threads}; expected 1 or more")
    size = buffer_bytes if buffer_bytes is not None else 2**27 if target.type == "cpu" else 2**30
    if size < 4096:
        raise ValueError(f"buffer_bytes={buffer_bytes}; expected at least 4096")
    record = machine_record(target)
    name = str(dtype).removeprefix("torch.")
    precision = (torch.get_float32_matmul_precision(), record["tf32_matmul"]) if dtype == torch.float32 else None
    where = (record["env_id"], str(target), threads)
    products = functools.partial(_gemm_rate, target, dtype, threads)
    memory = functools.partial(_memory_rates, target, size, threads)
    rate, edge = _kept(("products", *where, name, precision), products, refresh)
    read, copy = _kept(("memory", *where, size), memory, refresh)  # the same for every dtype
    return MachinePeaks(
        rate, read, copy, size, name, threads, record["device_name"], str(target), int(edge), record["env_id"]
    )


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
    alone = rate(edges[0], 1)  # one thread: on a busy machine several wait for each other
    foreseen = alone * max(1, threads // 2) if on_cpu else alone
    fitting = [edge for edge in edges if 2 * edge**3 <= foreseen * _LONGEST_PRODUCT] or [edges[0]]
    rates = {edges[0]: alone} | {edge: rate(edge, threads) for edge in fitting[::-2][:2]}  # the largest, and a smaller
    best = max(rates, key=rates.get)
    return rates[best], best


def _memory_rates(device: torch.device, size: int, threads: int) -> tuple[float, float]:
    """(bytes read per second, bytes read and written per second)."""
    source = _noise(size // 4, device)
    target = torch.empty_like(source)
    moved = source.numel() * source.element_size()
    reading, copying = functools.partial(torch.sum, source), functools.partial(target.copy_, source)
    tried = {1, threads} if device.type == "cpu" else {threads}  # one thread may win on a busy machine
    read = max(moved / _seconds(reading, device, n, 0.2) for n in tried)
    return read, max(2 * moved / _seconds(copying, device, n, 0.2) for n in tried)


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


def _kept(key: tuple, measure_pair: Callable[[], tuple[float, float]], refresh: bool) -> tuple[float, float]:
    """Two numbers from the cache; measured and kept when absent, damaged or to be refreshed."""
    digest = hashlib.sha256(repr((_CACHE_VERSION, *key)).encode()).hexdigest()[:16]
    file = _cache_file(f"{key[0]}-{digest}.json")
    if file and not refresh and (known := _read_pair(file)):
        return known
    found = measure_pair()
    if file:
        part = file.with_suffix(f".{os.getpid()}.part")
        try:
            part.write_text(json.dumps(found), encoding="utf-8")
            os.replace(part, file)
        except OSError:
            part.unlink(missing_ok=True)
    return found


def _read_pair(file: Path) -> tuple[float, float] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        usable = len(found) == 2 and all(math.isfinite(number) and number > 0 for number in found)
        return tuple(found) if usable else None
    except (OSError, ValueError, TypeError):  # absent or damaged
        return None


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

"""Can utils.timing and utils.cost be believed on this card? Run by `./cookbook bench card [ROWS]`.

Device mode beside triton.testing.do_bench on the same kernels, the flush against the size of the card's L2, the limits
that times are held against, and pairs of equal builders that must not beat each other. Without a card only the last
two are run, on the CPU. Exit status 1 when a figure misses its goal.
"""

from __future__ import annotations

import sys
from statistics import median

import torch

from utils.cost import measure_peaks
from utils.machine import describe, missing, pick_device
from utils.rows import append_rows, measured
from utils.timing import clock, compare, measure

AGREE = 0.02  # device mode against do_bench, for kernels of at least LONG seconds
LONG = 50e-6
PAIRS = 20


def kernels(device: torch.device) -> dict:
    """Work from some 10 µs to some milliseconds: products, a copy, an operation on every element."""
    found = {}
    for edge in (1024, 4096, 8192):
        a, b = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
        found[f"product {edge}, bf16"] = lambda a=a, b=b: a @ b
    source = torch.randn(2**26, device=device)  # 256 MiB
    target = torch.empty_like(source)
    return found | {
        "copy 256 MiB": lambda: target.copy_(source),
        "gelu 256 MiB": lambda: torch.nn.functional.gelu(source),
    }


def device_mode(device: torch.device) -> list[dict]:
    """Device mode and do_bench in turns, five times; their medians and how far they are apart."""
    from triton.testing import do_bench

    rows = []
    for name, kernel in kernels(device).items():
        pairs = [
            (measure(kernel, mode="device", min_run_time=0.3, allow_nondeterministic=True).median_s,
             do_bench(kernel, warmup=50, rep=300, return_mode="median") / 1e3)
            for _ in range(5)
        ]  # fmt: skip
        ours, theirs = (median(times) for times in zip(*pairs, strict=True))
        apart = abs(ours / theirs - 1)
        good = theirs < LONG or apart <= AGREE
        print(
            f"{name:24}{1e6 * ours:10.1f} µs{1e6 * theirs:10.1f} µs{apart:9.2%}  {'ok' if good else 'APART'}",
            flush=True,
        )
        rows.append({"figure": "device mode", "kernel": name, "ours_s": ours, "do_bench_s": theirs, "good": good})
    return rows


def flush_against_l2(device: torch.device) -> list[dict]:
    """A buffer of half the L2, read from it and, after the flush, from memory."""
    size = torch.cuda.get_device_properties(device).L2_cache_size
    buffer = torch.randn(size // 8, device=device)
    hot = measure(lambda: buffer.sum(), mode="throughput", allow_nondeterministic=True).median_s
    cold = measure(lambda: buffer.sum(), mode="latency", cache="cold", allow_nondeterministic=True).median_s
    flushed = max(2 * size, clock.FLUSH_MIN_BYTES_CUDA)
    print(f"L2 {size / 2**20:.0f} MiB, flush {flushed / 2**20:.0f} MiB")
    print(f"half an L2: {1e6 * hot:.1f} µs, flushed {1e6 * cold:.1f} µs")
    good = flushed >= 2 * size
    return [{"figure": "flush", "l2_bytes": size, "flush_bytes": flushed, "hot_s": hot, "cold_s": cold, "good": good}]


def limits(device: torch.device) -> list[dict]:
    kinds = [torch.float32, torch.bfloat16] + ([torch.float16] if device.type == "cuda" else [])
    rows = []
    for dtype in kinds:
        peaks = measure_peaks(device, dtype, refresh=True)
        print(peaks, flush=True)
        rates = {name: getattr(peaks, name) for name in ("gemm_flops_per_s", "read_bytes_per_s", "copy_bytes_per_s")}
        rows.append({"figure": "limits", "dtype": str(dtype).removeprefix("torch."), **rates, "good": True})
    return rows


def equal_pairs(device: torch.device) -> list[dict]:
    """Builders of equal work: `faster` or `slower` is a wrong verdict."""
    edge = 2048 if device.type == "cuda" else 128

    def build():
        weight = torch.randn(edge, edge, device=device)
        return lambda x: x @ weight

    verdicts = [
        compare(build, {"same": build}, make_inputs=lambda i: (torch.randn(edge, edge, device=device),), seed=n,
                min_run_time=0.3)["same"].verdict
        for n in range(PAIRS)
    ]  # fmt: skip
    wrong = sum(verdict in ("faster", "slower", "invalid", "error") for verdict in verdicts)
    print(f"same against same: {wrong} wrong verdicts of {PAIRS}, {verdicts.count('equivalent')} equivalent")
    return [{"figure": "same against same", "pairs": PAIRS, "wrong": wrong, "good": wrong == 0}]


def main() -> int:
    device = pick_device("auto")
    print(describe(device))
    rows = []
    if device.type == "cuda":
        print(f"{'kernel':24}{'device mode':>13}{'do_bench':>13}{'apart':>9}")
        rows += device_mode(device) + flush_against_l2(device)
    else:
        print("device mode, L2 flush:", missing("cuda"))
    rows += limits(device) + equal_pairs(device)
    if sys.argv[1:]:
        append_rows(sys.argv[1], [measured("card_bench", {"device": str(device)}, **row) for row in rows])
    return 0 if all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())

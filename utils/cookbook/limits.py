"""What `./cookbook machine` shows: the device, the versions, and the limits that times are held against."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from .table import WIDTH, bytes_text, render


def machine_table(*, fresh: bool = False) -> str:
    """Device, versions and limits as text of at most 80 columns. Limits are measured once, or again if `fresh`."""
    import torch

    from ..cost import measure_peaks
    from ..machine import has_compiler, machine_record, missing, pick_device

    device = pick_device()
    record = machine_record(device)
    about = [
        ("device", f"{record['device']}: {record['device_name']}"),
        ("driver", record["driver"]),
        ("CPU threads", record["num_threads"]),
        ("Python", record["python"]),
        ("torch", record["torch"]),
        *[(name, _version(name)) for name in ("transformers", "diffusers")],
        *[(name, record[name.lower()]) for name in ("CUDA", "cuDNN", "Triton")],
        ("compiler", "found: torch.compile can build CPU code" if has_compiler() else missing("compiler")),
        ("CUDA device", "usable" if torch.cuda.is_available() else missing("cuda")),
        ("TF32", f"matmul {record['tf32_matmul']}, cuDNN {record['tf32_cudnn']}" if device.type == "cuda" else None),
        ("environment", record["env_id"]),
    ]
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for name, value in about:
        if value is not None:
            facts.add_row(Text(name), Text(str(value)))
    half = [torch.bfloat16, *([torch.float16] if device.type == "cuda" else [])]
    peaks = [measure_peaks(device, dtype, refresh=fresh) for dtype in (torch.float32, *half)]
    buffer = bytes_text(peaks[0].buffer_bytes)
    rates = [(f"matrix product, {peak.dtype}", f"{peak.gemm_flops_per_s / 1e9:,.0f} GFLOP/s") for peak in peaks]
    rates.append((f"read, buffer of {buffer}", f"{peaks[0].read_bytes_per_s / 1e9:,.1f} GB/s"))
    rates.append(("copy, read and written bytes", f"{peaks[0].copy_bytes_per_s / 1e9:,.1f} GB/s"))
    limits = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    limits.add_column(Text("limit measured here"))
    limits.add_column(justify="right")
    for name, rate in rates:
        limits.add_row(Text(name), Text(rate))
    return f"{render(facts, WIDTH)}\n\n{render(limits, WIDTH)}"


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

"""What `./cookbook machine` shows: the device, the versions, and the limits that times are held against."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from .table import WIDTH, bytes_text, render


def machine_table() -> str:
    """Device, versions and measured limits as text of at most 80 columns. The limits are measured once, then cached."""
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
    limits = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("limit", "matrix product", "read", "copy", "buffer"):
        limits.add_column(Text(name), justify="left" if name == "limit" else "right")
    dtypes = (
        (torch.float32, torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.float32, torch.bfloat16)
    )
    for dtype in dtypes:
        peaks = measure_peaks(device, dtype)
        limits.add_row(
            Text(str(dtype).removeprefix("torch.")),
            Text(f"{peaks.gemm_flops_per_s / 1e9:,.0f} GFLOP/s"),
            *[Text(f"{rate / 1e9:,.1f} GB/s") for rate in (peaks.read_bytes_per_s, peaks.copy_bytes_per_s)],
            Text(bytes_text(peaks.buffer_bytes)),
        )
    return f"{render(facts, WIDTH)}\n\n{render(limits, WIDTH)}"


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

"""The name of the device that a recipe will use, found without torch.

The driver must not open a CUDA context: it would take GPU memory beside the kernel whose memory is measured.
"""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path


def device_name(device: str) -> str:
    """Such as "NVIDIA H200" or the CPU's model. "auto" follows COOKBOOK_DEVICE, then an NVIDIA GPU, then the CPU."""
    if device == "auto":
        device = os.environ.get("COOKBOOK_DEVICE") or ("cuda" if _gpus() else "cpu")
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return _cpu() if kind == "cpu" else device
    gpus = _gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    order = [int(i) for i in visible.split(",") if i.strip().isdecimal()] if visible else list(range(len(gpus)))
    place = int(index) if index.isdecimal() else 0
    chosen = order[place] if place < len(order) else place
    return gpus[chosen] if chosen < len(gpus) else device


@cache
def _gpus() -> tuple[str, ...]:
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in listed.splitlines() if line.strip())


@cache
def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

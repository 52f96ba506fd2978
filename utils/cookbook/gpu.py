"""A GPU that the driver lists and that torch cannot use: noticed before an hour of rented time runs on the CPU.

Standard library only. torch is imported in a process of its own, and only when the driver, the torch or the chosen
devices differ from the last time that all was well.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

# One small operation too: a torch without code for this card reports the card and then fails on the first kernel.
_PROBE = """
import json, torch
seen = {"torch": torch.__version__, "cuda": torch.version.cuda or torch.version.hip, "error": None}
try:
    torch.zeros(1, device="cuda").add_(1).item()
except Exception as error:
    seen["error"] = str(error).strip().splitlines()[0]
print(json.dumps(seen))
"""


def wants_cpu(argv: list[str]) -> bool:
    """Did the user choose the CPU, by `-p device cpu`, the preset, COOKBOOK_DEVICE or CUDA_VISIBLE_DEVICES?"""
    chosen = any(pair in (("device", "cpu"), ("--preset", "cpu")) for pair in itertools.pairwise(argv))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return chosen or hidden or os.environ.get("COOKBOOK_DEVICE") == "cpu"


def _output(*command: str) -> tuple[bool, str]:
    """(did it succeed, what it wrote) of a short command."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return done.returncode == 0, (done.stdout or done.stderr).strip()


def _cards() -> tuple[bool, list[str]]:
    """(does nvidia-smi work, one `name, driver version` a card)."""
    worked, text = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return worked, text.splitlines()


def check(python: str, torch: str, own: bool, known: dict) -> tuple[str, str]:
    """(problem, note): a reason to stop or "", something to tell or "".

    `own`: the Python is our `.venv`. `known` remembers, under "gpu", the last combination that worked.
    """
    if shutil.which("nvidia-smi") is None:
        return "", ""
    kernel_module = Path("/proc/driver/nvidia/version")  # quicker than nvidia-smi, which can take seconds
    cards = None
    if kernel_module.exists():
        driver = kernel_module.read_text()
    else:
        worked, cards = _cards()
        driver = "\n".join(cards)
    key = [driver, torch, python, os.environ.get("CUDA_VISIBLE_DEVICES", "")]
    if known.get("gpu") == key:
        return "", ""

    if cards is None:
        worked, cards = _cards()
    if not worked:
        return "", f"nvidia-smi fails ({cards[-1] if cards else 'no output'}); going on without a GPU"
    if not cards:
        return "", ""
    worked, text = _output(python, "-c", _PROBE)
    last = text.splitlines()[-1] if text else "no output"
    seen = json.loads(last) if worked else {"torch": torch, "cuda": None, "error": f"import torch fails: {last}"}
    if seen["error"] is None:
        known["gpu"] = key
        return "", ""
    return _explain(cards, seen, own), ""


def _explain(cards: list[str], seen: dict, own: bool) -> str:
    name, _, driver = cards[0].rpartition(", ")
    newest = re.search(r"CUDA Version: *([\d.]+)", _output("nvidia-smi")[1])
    driver += f", up to CUDA {newest[1]}" if newest else ""
    built = f"built for CUDA {seen['cuda']}" if seen["cuda"] else "a build without CUDA"
    start = "remove .venv and start ./cookbook with" if own else "start ./cookbook with"
    return (
        f"nvidia-smi lists {name} (driver {driver}), "
        f"but torch {seen['torch']} ({built}) cannot use it: {seen['error']}; "
        f"{start} a Python whose torch fits the driver, or update the driver, "
        f"or go on without it: `-p device cpu`, or COOKBOOK_DEVICE=cpu for every command"
    )

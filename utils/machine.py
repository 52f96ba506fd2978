"""Which device a run uses, and what a reader must know about the machine to believe its rows.

No record holds a host name, a user name or a path: rows are shared.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cache
from pathlib import Path

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch 2.13's profiler else writes lines to stderr at every start

DEVICE_VARIABLE = "COOKBOOK_DEVICE"  # what "auto" means; set to cpu by pytest and refresh
_DEVICE_TYPES = ("auto", "cpu", "cuda", "mps")

# One fixed line each: notebooks print them in compared cells, so they must not depend on the machine.
_MISSING = {
    "cuda": "needs a CUDA device: on a machine with an NVIDIA GPU, ./cookbook run RECIPE -p device cuda",
    "compiler": "needs a C++ compiler and Python's headers for torch.compile: apt-get install g++ python3-dev",
    "triton": "needs Triton for torch.compile on CUDA: pip install triton (it comes with torch wheels for CUDA)",
}


def pick_device(device: str | torch.device = "auto") -> torch.device:
    """The device to run on: "auto", "cpu", "cuda", "cuda:1", "mps".

    "auto" is what the environment variable COOKBOOK_DEVICE says, else "cuda" when it is usable, else "cpu".
    Raises ValueError, one line, for a device that does not exist or cannot be used.
    """
    name, said_by = str(device).strip(), "device"
    if name == "auto" and os.environ.get(DEVICE_VARIABLE):
        name, said_by = os.environ[DEVICE_VARIABLE].strip(), DEVICE_VARIABLE
    if name == "auto":
        return torch.device("cuda" if _cuda_problem() is None else "cpu")
    kind, _, index = name.partition(":")
    if kind not in _DEVICE_TYPES[1:] or (":" in name and not index.isdecimal()):
        meant = {"gpu": "cuda", "nvidia": "cuda"}.get(kind.lower(), kind.lower())
        near = get_close_matches(meant, _DEVICE_TYPES, n=1, cutoff=0.4)
        hint = f"; nearest: {near[0]!r}" if near else ""
        raise ValueError(f"{said_by}={name!r} is no device; expected one of {', '.join(_DEVICE_TYPES)} or cuda:N{hint}")
    problem = {"cuda": _cuda_problem, "mps": _mps_problem}.get(kind, lambda: None)()
    if problem:
        raise ValueError(f"{said_by}={name!r} cannot be used: {problem}")
    found = torch.device(name)
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if found.index is not None and found.index >= count:
        raise ValueError(f"{said_by}={name!r} does not exist: {kind} has {count} device(s), counted from 0")
    return found


def describe(device: str | torch.device | None = None) -> str:
    """One line for a reader: device, its name, threads, versions."""
    found = pick_device("auto" if device is None else device)
    return (
        f"{found}: {_device_name(found)}, {torch.get_num_threads()} CPU threads, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def machine_record(device: str | torch.device | None = None) -> dict:
    """Provenance of a measurement: a flat, JSON-safe dict.

    `env_id` is a hash of what does not change between two runs on one set-up (device, driver, versions), so it can
    key a cache. `tree_hash` replaces the commit where git cannot answer or `utils` differs from the commit.
    """
    found = pick_device("auto" if device is None else device)
    cuda = found.type == "cuda"
    stable = {
        "device_name": _device_name(found),
        "driver": _driver() if cuda else None,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": _cpu_count(),
    }
    commit, dirty = _git_state()
    return {
        "device": str(found),
        **stable,
        "num_threads": torch.get_num_threads(),
        "tf32_matmul": _tf32(torch.backends.cuda.matmul),
        "tf32_cudnn": _tf32(torch.backends.cudnn),
        "git_commit": commit,
        "git_dirty": dirty,
        "tree_hash": _tree_hash() if commit is None or dirty else None,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "env_id": hashlib.sha256(repr((found.type, sorted(stable.items()))).encode()).hexdigest()[:16],
    }


def has_compiler() -> bool:
    """True when Inductor can build CPU code: a C++ compiler ($CXX, else g++ or clang++) and Python's headers."""
    default = "clang++" if sys.platform == "darwin" else "g++"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return shutil.which(os.environ.get("CXX") or default) is not None and headers.is_file()


def has_triton() -> bool:
    """True when Triton is installed (it is not imported)."""
    return importlib.util.find_spec("triton") is not None


def missing(what: str) -> str:
    """The line to print where a step cannot run: what it needs ("cuda", "compiler", "triton") and how to get it."""
    if what not in _MISSING:
        near = get_close_matches(str(what), _MISSING, n=1, cutoff=0.0)
        raise ValueError(f"what={what!r}; expected one of {', '.join(_MISSING)}; nearest: {near[0]!r}")
    return _MISSING[what]


@cache
def _cuda_problem() -> str | None:
    """Why CUDA cannot be used; None when a tensor can be made on it."""
    if not torch.cuda.is_available():
        built = f"torch {torch.__version__} was built for CUDA {torch.version.cuda}" if torch.version.cuda else ""
        return (f"{built} and finds no usable GPU or driver" if built else "this torch is a CPU build") + (
            "; see nvidia-smi, or use device='cpu'"
        )
    try:
        torch.zeros(1, device="cuda")
    except Exception as error:  # a driver too old or a card that this build has no code for
        return str(error).strip().splitlines()[0]
    return None


def _mps_problem() -> str | None:
    return None if torch.backends.mps.is_available() else "no Apple GPU here; use device='cpu'"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


@cache
def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.partition(":")[2].strip()
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine() or "unknown CPU"


def _cpu_count() -> int:
    """CPUs this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


@cache
def _driver() -> str | None:
    found = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0].strip() if found else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tf32(backend) -> bool | None:
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:  # torch >= 2.9 refuses the old flag once fp32_precision was set: read the new one
        return getattr(backend, "fp32_precision", None) == "tf32"


def _git_state() -> tuple[str | None, bool | None]:
    """(commit, does the folder of helpers differ from it), or (None, None) without usable git."""
    here = Path(__file__).resolve().parent
    commit = _output("git", "-C", str(here), "rev-parse", "HEAD")
    if not commit or not _output("git", "-C", str(here), "ls-files", "machine.py"):
        return None, None  # no git, or the folder lies untracked inside someone else's repository
    return commit, bool(_output("git", "-C", str(here), "status", "--porcelain", "--", "."))


def _tree_hash() -> str:
    """Hash of every source file of the helpers, by relative name and content."""
    here, digest = Path(__file__).resolve().parent, hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        digest.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _output(*command: str) -> str | None:
    """What the command prints; None when it is absent, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None

"""The kernel that `run` gives to papermill: this environment's Python, and nothing left when the driver is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

from .kernels import python_path

# Runs in the kernel's process before anything is imported. A small child in the same process group waits for the
# driver or the kernel to end, and then ends the group: neither SIGKILL of the driver nor a crash of the kernel
# leaves a kernel, a compile worker or a subprocess of a cell behind. pidfd needs Linux; elsewhere ipykernel's own
# look at its parent, once a second, has to do.
LAUNCHER = """
import os, select, signal
kernel = os.getpid()
if hasattr(os, "pidfd_open") and os.fork() == 0:
    signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        select.select([os.pidfd_open(int(os.environ["JPY_PARENT_PID"])), os.pidfd_open(kernel)], [], [])
    except OSError:
        pass
    os.killpg(kernel, signal.SIGKILL)
import runpy
runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
"""


class RunKernelManager(AsyncKernelManager):
    """Starts kernels with `sys.executable`, whatever kernel the notebook names and whichever kernelspecs there are."""

    last_started: RunKernelManager | None = None  # the kernel started last
    stderr_log: Path | None = None  # where that kernel's own stderr goes (a crash report; never a cell's output)

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-c", LAUNCHER, "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="this environment", language="python")

    async def _async_pre_start_kernel(self, **kw):
        # Figures come inline, and nothing of the user's own IPython profile decides what a recipe prints.
        env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
        env |= {"PYTHONPATH": python_path(), "IPYTHONDIR": str(Path(self.connection_file).parent)}
        RunKernelManager.last_started = self
        return await super()._async_pre_start_kernel(**kw | {"env": env})

    async def _async_launch_kernel(self, kernel_cmd, **kw):
        with open(RunKernelManager.stderr_log or os.devnull, "wb") as log:
            await super()._async_launch_kernel(kernel_cmd, **kw, stderr=log)


def kill_running() -> None:
    """End the kernel that runs now with all its children: at a time limit, when it may not listen any more."""
    provisioner = getattr(RunKernelManager.last_started, "provisioner", None)
    if provisioner is not None and provisioner.pgid:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(provisioner.pgid, signal.SIGKILL)


def last_signal() -> str:
    """How the kernel started last ended, in brackets, when a signal ended it: " (SIGSEGV)"; else ""."""
    process = getattr(getattr(RunKernelManager.last_started, "provisioner", None), "process", None)
    code = process.poll() if process is not None else None
    if code is None or code >= 0:
        return ""
    return f" ({signal.Signals(-code).name}{': memory full?' if code == -signal.SIGKILL else ''})"

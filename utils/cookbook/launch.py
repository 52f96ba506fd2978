"""The kernel that `run` gives to papermill: this environment's Python, and nothing left when the driver is killed.

It is a process of its own, or forked from one that has the imports done (fork_kernel.py).
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import sys
from pathlib import Path

from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

from .fork_kernel import Forks, register
from .fork_server import watch
from .kernels import python_path

# Runs in the process of a plain kernel before anything is imported. A forked kernel does the same.
LAUNCHER = f"""
{inspect.getsource(watch)}
import os, runpy
watch(int(os.environ["JPY_PARENT_PID"]))
runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)
"""


def kernel_environment(ipython_dir: str | Path) -> dict[str, str]:
    """The environment of a kernel: figures come inline, and no IPython profile of the user's decides what it prints."""
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    return env | {"PYTHONPATH": python_path(), "IPYTHONDIR": str(ipython_dir)}


class RunKernelManager(AsyncKernelManager):
    """Starts kernels with `sys.executable`, whatever kernel the notebook names and whichever kernelspecs there are."""

    last_started: RunKernelManager | None = None  # the kernel started last
    stderr_log: Path | None = None  # where that kernel's own stderr goes (a crash report; never a cell's output)
    forks: Forks | None = None  # where the next kernel is forked; None: a process of its own

    @property
    def kernel_spec(self) -> KernelSpec:
        argv = [sys.executable, "-c", LAUNCHER, "-f", "{connection_file}"]
        metadata = register() if self.forks else {}
        return KernelSpec(argv=argv, display_name="this environment", language="python", metadata=metadata)

    async def _async_pre_start_kernel(self, **kw):
        env = kernel_environment(Path(self.connection_file).parent)
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

"""Kernels that run notebooks for tests and refreshing.

The Python that runs now, on the CPU, over IPC (no port to race for), with nothing of the user's own IPython set-up.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from queue import Empty

from jupyter_client.manager import KernelManager
from nbval.kernel import CURRENT_ENV_KERNEL_NAME, NbvalKernelspecManager, RunningKernel

from .notebooks import ROOT

SLICE = 0.5  # seconds between two looks at whether the kernel is alive


class KernelDied(Exception):
    """The kernel's process is gone."""


def python_path(*folders: Path) -> str:
    """PYTHONPATH with these folders and the project's root in front of what it holds now."""
    now = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys(str(part) for part in (*folders, ROOT, *now) if part))


def environment(scratch: Path, *folders: Path) -> dict[str, str]:
    """The environment of a kernel: `auto` means the CPU, figures come inline, no profile of the user's."""
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    env |= {"COOKBOOK_DEVICE": "cpu", "PYTHONPATH": python_path(*folders), "IPYTHONDIR": str(scratch)}
    return env


def scratch_folder() -> Path:
    """A new folder for a kernel's connection file and sockets. Remove it when the kernel has stopped."""
    return Path(tempfile.mkdtemp(prefix="nb"))


def manager(kind: type[KernelManager], scratch: Path, kernel_name: str | None = None) -> KernelManager:
    """A kernel manager of this Python (or of the named kernel) that talks over IPC where the platform can."""
    where = {"connection_file": str(scratch / "kernel.json")}
    if sys.platform != "win32" and len(str(scratch)) < 80:  # a socket's path holds about 100 bytes
        where |= {"transport": "ipc", "ip": str(scratch / "ipc")}
    name = kernel_name or CURRENT_ENV_KERNEL_NAME
    return kind(kernel_name=name, kernel_spec_manager=NbvalKernelspecManager(), **where)


class Kernel(RunningKernel):
    """nbval's running kernel that notices within a second that its process is gone.

    Raises KernelDied from any wait, with the last lines that the process wrote; also when it does not start.
    """

    def __init__(self, cwd: str, *folders: Path, kernel_name: str | None = None, startup_timeout: float = 60):
        self.scratch = scratch_folder()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - stop() closes it
        self.kc = None
        try:
            self.km = manager(KernelManager, self.scratch, kernel_name)
            self.km.start_kernel(cwd=cwd, env=environment(self.scratch, *folders), stderr=self.log)
            self.kc = self.km.client()
            self.kc.start_channels()
            self.kc.wait_for_ready(timeout=startup_timeout)
            self._ensure_iopub_up()
        except Exception as error:
            reason = KernelDied(f"the kernel did not start: {error}{self.last_words()}")
            self.stop()
            raise reason from None

    def last_words(self) -> str:
        """The last lines of the kernel's own stderr, each on a line of its own."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()
        return "".join(f"\n  {line}" for line in lines[-8:])

    def get_message(self, stream: str, timeout: float | None = None) -> dict:
        waits = max(1, round((timeout or 1e9) / SLICE))
        for _ in range(waits):
            try:
                return super().get_message(stream, timeout=min(SLICE, timeout or SLICE))
            except Empty:
                if not self.is_alive():
                    raise KernelDied(f"the kernel died{self.last_words()}") from None
        raise Empty

    def run_quietly(self, source: str, timeout: float) -> str:
        """Run code, throw its outputs away. Returns "" or, when it failed, its error in one line."""
        msg_id = self.execute_cell_input(source, allow_stdin=False)
        try:
            while (reply := self.get_message("shell", timeout=timeout))["parent_header"].get("msg_id") != msg_id:
                pass
        except Empty:
            self.interrupt()
            return f"no answer within {timeout:g} s"
        self.await_idle(msg_id, timeout)
        content = reply["content"]
        return f"{content['ename']}: {content['evalue']}" if content["status"] == "error" else ""

    def stop(self) -> None:
        """End the kernel, dead or alive, and remove what it left."""
        if self.kc is not None:
            self.kc.stop_channels()
        if hasattr(self, "km"):
            if self.km.has_kernel:
                self.km.shutdown_kernel(now=True)
            self.km.cleanup_resources()
            del self.km
        self.log.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

"""Kernels that are forked from a process with the imports already done: a provisioner for jupyter_client.

`with forked_kernels(notebooks, say): ...` and every kernel that run.py's `execute` starts in the block is forked, from
the second on without waiting for an import. Each has a process, session, environment, folder, output files and random
seeds of its own. What it has loaded is what its notebook imports anyway, so first calls cost what they cost elsewhere.
Two things all kernels of one server share: where the libraries lie in memory, and the seed of Python's string hashes.
A recipe that must not share them, or that reads the memory of its own process (pages shared with the server count),
says `"kernel": "fresh"` in the `cookbook` part of its notebook's metadata and gets a new process.

Without install the provisioner is registered in the driving process. Installed, other tools can have it by
JUPYTER_DEFAULT_PROVISIONER_NAME=cookbook-fork, and COOKBOOK_PRELOAD="torch,transformers" is imported ahead.
COOKBOOK_KERNELS=fresh switches it off.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

from .preload import leading_imports, shared_imports

NAME = "cookbook-fork"
SERVER = Path(__file__).with_name("fork_server.py")
START = 120.0  # seconds that the imports of a server may take
# What may differ between a server and its kernels: nothing reads these while it is imported. For everything else
# (OMP_NUM_THREADS is read once, by import torch) another value gets another server.
OWN = {"JPY_SESSION_NAME", "IPYTHONDIR", "CUDA_VISIBLE_DEVICES"}


class CannotFork(Exception):
    """Why there is no forked kernel, in one line. `name` is set when a preload of the user's does not exist."""

    name: str | None = None


class ForkedKernel:
    """A forked kernel's process, as much like subprocess.Popen as LocalProvisioner needs. It leads its own group."""

    stdin = stdout = stderr = None

    def __init__(self, status: int):
        """`status`: the reading end of the pipe on which kernel and server tell about it."""
        self._status, self._text = status, b""
        self.pid = 0
        self.returncode: int | None = None

    def _read(self, timeout: float | None) -> dict | None:
        """The next thing told; None when nothing came in time, {} when nothing will come any more."""
        while b"\n" not in self._text:
            if not select.select([self._status], [], [], timeout)[0]:
                return None
            more = os.read(self._status, 65536)
            if not more:
                return {}
            self._text += more
        line, _, self._text = self._text.partition(b"\n")
        return json.loads(line)

    def started(self) -> None:
        """Wait until it runs. Raises CannotFork."""
        told = self._read(START)
        if told and "pid" in told:
            self.pid = told["pid"]
            return
        os.close(self._status)
        if told is None:
            raise CannotFork(f"the imports ahead took more than {START:g} s")
        if "exit" in told:
            raise CannotFork(f"the forked process ended at once, with status {told['exit']}")
        error = CannotFork(told.get("refused", "the fork server ended"))
        error.name = told.get("name")
        raise error

    def poll(self) -> int | None:
        """None while it runs, then its exit code (-N: signal N)."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired("kernel", timeout)
        return self.returncode

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and (told := self._read(timeout)) is not None:
            # {}: the server was killed. Its kernels have nobody who could say how they ended.
            self.returncode = told.get("exit", -signal.SIGKILL)
            if not told:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
            os.close(self._status)
        return self.returncode

    def send_signal(self, sign: int) -> None:
        if self.poll() is None:
            os.killpg(self.pid, sign)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class ForkServer:
    """A process of fork_server.py. It ends when it is stopped, or with this process."""

    def __init__(self, preload: Sequence[str], env: dict[str, str], cwd: str, *, strict: bool = False):
        self.kernels: list[ForkedKernel] = []
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = json.dumps({"names": list(preload), "strict": strict})
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, str(SERVER), str(theirs.fileno()), order],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # of imports; kernels have their own
                env=env,
                cwd=cwd,
                start_new_session=True,  # Ctrl-C is for the driver
            )

    def fork(self, arguments: list[str], env: dict[str, str], cwd: str, stdout: int, stderr: int) -> ForkedKernel:
        """A new kernel, started with the arguments of ipykernel_launcher. Raises CannotFork."""
        request = json.dumps({"arguments": arguments, "env": env, "cwd": cwd}).encode()
        ours, theirs = os.pipe()
        try:
            socket.send_fds(self.control, [request], [theirs, stdout, stderr])
        except OSError as error:  # it ended, or the environment is larger than a message may be
            os.close(ours)
            raise CannotFork(f"the fork server takes no request ({error.strerror})") from None
        finally:
            os.close(theirs)
        kernel = ForkedKernel(ours)
        kernel.started()
        self.kernels = [*self.running(), kernel]
        return kernel

    def running(self) -> list[ForkedKernel]:
        return [kernel for kernel in self.kernels if kernel.poll() is None]

    def stop(self) -> None:
        """End it and its kernels."""
        self.control.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for kernel in self.running():
            kernel.kill()


class Forks:
    """The servers of one block of work: one for each environment that its kernels ask for.

    After a fork that was not possible no other is tried; `say` gets the reason, once.
    """

    def __init__(self, preload: Sequence[str], say: Callable[[str], None] | None = None, *, strict: bool = False):
        self.preload, self.strict, self.off = list(preload), strict, unable()
        self._say, self._servers, self._lock = say or _to_stderr, {}, threading.Lock()

    def kernel(self, cmd: list[str], env: dict[str, str], cwd: str, stdout: Any, stderr: Any) -> ForkedKernel | None:
        """A forked kernel for the command of a plain one; None when it has to be a plain one.

        `stdout`, `stderr`: as subprocess.Popen takes them; None is this process's own.
        Raises ValueError for a preload of the user's that does not exist.
        """
        with self._lock:
            try:
                if not self.off:
                    arguments = arguments_of_kernel(cmd)
                    with contextlib.ExitStack() as stack:
                        out, err = (_descriptor(file, own, stack) for file, own in ((stdout, 1), (stderr, 2)))
                        return self._server(env, cwd).fork(arguments, env, cwd, out, err)
            except CannotFork as error:
                if error.name and self.strict:
                    raise ValueError(f"COOKBOOK_PRELOAD: {error}") from None
                self.off = str(error)
            if self._say:
                self._say(f"kernels start one by one, not forked: {self.off}")
                self._say = None
            return None

    def start(self, env: dict[str, str], cwd: str) -> None:
        """Start to import for kernels of this environment and folder, without waiting."""
        with self._lock:
            if not self.off:
                self._server(env, cwd)

    def _server(self, env: dict[str, str], cwd: str) -> ForkServer:
        key = json.dumps([sorted((name, value) for name, value in env.items() if name not in OWN), cwd])
        if key not in self._servers:
            for other, server in list(self._servers.items()):
                if not server.running():  # its memory is needed here
                    self._servers.pop(other).stop()
            self._servers[key] = ForkServer(self.preload, env, cwd, strict=self.strict)
        return self._servers[key]

    def stop(self) -> None:
        with self._lock:
            while self._servers:
                self._servers.popitem()[1].stop()


def _to_stderr(line: str) -> None:
    print(f"cookbook: {line}", file=sys.stderr)


def _descriptor(file: Any, own: int, stack: contextlib.ExitStack) -> int:
    """A file descriptor for what Popen takes as stdout or stderr."""
    if hasattr(file, "fileno"):
        return file.fileno()
    if isinstance(file, int) and file >= 0:
        return file
    try:
        if file is None and os.fstat(own):
            return own
    except OSError:  # this process runs without it
        pass
    return stack.enter_context(open(os.devnull, "r+b")).fileno()


def unable() -> str:
    """Why this process cannot have a fork server; "" when it can."""
    if os.environ.get("COOKBOOK_KERNELS") == "fresh":
        return "COOKBOOK_KERNELS=fresh"
    needed = hasattr(os, "pidfd_open") and hasattr(socket, "send_fds") and os.path.isdir("/proc/self/task")
    return "" if needed else f"a fork server needs Linux 5.3 or newer, this is {sys.platform}"


def arguments_of_kernel(cmd: list[str]) -> list[str]:
    """The arguments of ipykernel_launcher in the command of a kernel. Raises CannotFork for another kind of kernel."""
    place = next((place for place, part in enumerate(cmd) if "ipykernel_launcher" in part), None)
    if place is None or os.path.abspath(cmd[0]) != os.path.abspath(sys.executable):
        raise CannotFork(f"{Path(cmd[0]).name} is not the ipykernel of {sys.executable}")
    return cmd[place + 1 :]


class ForkProvisioner(LocalProvisioner):
    """LocalProvisioner that forks where it can. The kernel manager's `forks` are used, or those of this process."""

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> Any:
        forks = getattr(self.parent, "forks", None) or default_forks()
        env = dict(kwargs.get("env") or os.environ) | {"JPY_PARENT_PID": str(os.getpid())}
        cwd = str(kwargs.get("cwd") or os.getcwd())
        kernel = forks.kernel(cmd, env, cwd, kwargs.get("stdout"), kwargs.get("stderr"))
        if kernel is None:
            return await super().launch_kernel(cmd, **kwargs)
        self.process, self.pid, self.pgid, self.cwd = kernel, kernel.pid, kernel.pid, cwd
        return self.connection_info


def register() -> dict[str, Any]:
    """Make the provisioner known to jupyter_client, in this process. Returns kernelspec metadata that ask for it."""
    factory = KernelProvisionerFactory.instance()
    factory.provisioners[NAME] = EntryPoint(NAME, f"{__name__}:ForkProvisioner", factory.GROUP_NAME)
    return {"kernel_provisioner": {"provisioner_name": NAME, "config": {}}}


_default: Forks | None = None
_active: Forks | None = None


def default_forks() -> Forks:
    """Servers for kernels that no block started: they live as long as this process."""
    global _default
    if _default is None:
        names = [name.strip() for name in os.environ.get("COOKBOOK_PRELOAD", "torch").split(",")]
        _default = Forks([name for name in names if name], strict="COOKBOOK_PRELOAD" in os.environ)
        atexit.register(_default.stop)
    return _default


def asks_for_fresh(path: Path) -> bool:
    """True when the notebook's metadata say cookbook.kernel = "fresh". Raises ValueError for another word."""
    kernel = json.loads(path.read_text(encoding="utf-8")).get("metadata", {}).get("cookbook", {}).get("kernel")
    if kernel not in (None, "fresh"):
        raise ValueError(f"{path.stem}: metadata cookbook.kernel is {kernel!r}; expected 'fresh', or leave it out")
    return kernel == "fresh"


@contextlib.contextmanager
def forked_kernels(paths: Sequence[Path], say: Callable[[str], None]) -> Iterator[None]:
    """In this block `execute` (run.py) gives these notebooks forked kernels, one server for all of them.

    `say` is called with one line when kernels have to be plain ones. The imports start at once, beside what the caller
    does next. A notebook that asks for a fresh kernel, or that does not import what the others share, gets a plain one.
    """
    global _active
    from .launch import kernel_environment

    paths = [path for path in paths if not asks_for_fresh(path)]
    before, _active = _active, Forks(shared_imports(paths), say)
    try:
        if paths:
            env = kernel_environment(tempfile.gettempdir()) | {"JPY_PARENT_PID": str(os.getpid())}
            _active.start(env, str(paths[0].parent))
        yield
    finally:
        _active.stop()
        _active = before


def forks_for(path: Path) -> Forks | None:
    """The fork servers for a kernel of this notebook; None: it gets a plain one."""
    if _active is None or asks_for_fresh(path):
        return None
    return _active if set(_active.preload) <= set(leading_imports(path)) else None

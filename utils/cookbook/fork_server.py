"""A process that imports once and then forks a kernel for each request. Standard library only.

fork_kernel.py starts it as a file, `python fork_server.py SOCKET PRELOAD`, with the environment and the folder that its
kernels will have. What must not be there before a fork is looked for before every fork: a running thread (a lock that
it holds stays locked in the child) and a CUDA context (it does not survive). The child goes on where a plain kernel
begins, in `runpy` with ipykernel_launcher, so from there on the two are the same.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules are no top-level modules

import contextlib
import difflib
import importlib
import json
import os
import pkgutil
import random
import runpy
import select
import signal
import socket

LARGEST = 2**20  # bytes of a request
EVERY_KERNEL = ("ipykernel.kernelapp", "ipykernel.ipkernel", "ipykernel.zmqshell", "IPython.core.completer")
INLINE = "module://matplotlib_inline.backend_inline"


def watch(driver: int) -> None:
    """Leave a child in this process's group that ends the group when `driver` or this process ends.

    So neither SIGKILL of the driver nor a crash of the kernel leaves a kernel, a compile worker or a subprocess of a
    cell behind. Needs pidfd (Linux); elsewhere ipykernel's own look at its parent, once a second, has to do.
    """
    import contextlib
    import os
    import select
    import signal

    me = os.getpid()
    if not hasattr(os, "pidfd_open") or os.fork() != 0:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # one of them has ended already
        select.select([os.pidfd_open(driver), os.pidfd_open(me)], [], [])
    os.killpg(me, signal.SIGKILL)


def load(name: str) -> None:
    """Import a dotted name; where the last part is no module, look it up (lazy packages import at that moment)."""
    parent, _, last = name.rpartition(".")
    if not (parent in sys.modules and hasattr(sys.modules[parent], last)):
        importlib.import_module(name)


def preload(names: list[str], strict: bool) -> dict | None:
    """Import `names`. Returns None, or why no kernel can be forked now: {"refused": one line, "name": misspelt one}.

    A name that is not found is an error when `strict`; otherwise it is left to the notebook, whose folder may hold it.
    """
    missing: list[str] = []
    for name in (*EVERY_KERNEL, *names):
        if any(name.startswith(f"{gone}.") for gone in missing):
            continue
        before = threads()
        try:
            load(name)
        except ModuleNotFoundError as error:
            if strict:
                close = difflib.get_close_matches(name, [module.name for module in pkgutil.iter_modules()], n=1)
                nearest = f"; nearest: {close[0]}" if close else ""
                return {"refused": f"preload {name!r}: {error}{nearest}", "name": name}
            missing.append(name)
        except BaseException as error:  # a package that is broken here: the notebook will say so
            return {"refused": f"preload {name!r}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        if threads() > before:
            fork_and_forget()
            if threads() > 1:
                return {"refused": f"importing {name} starts a thread"}
    if fork_and_forget():
        return {"refused": "an import asked CUDA for its devices"}
    return None


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def fork_and_forget() -> bool:
    """Fork once, so that pools that know about forks (OpenBLAS) stop their threads. True when torch is spoilt by it."""
    child = os.fork()
    if child == 0:
        torch = sys.modules.get("torch")
        os._exit(bool(torch is not None and getattr(torch.cuda, "_is_in_bad_fork", bool)()))
    return os.waitpid(child, 0)[1] != 0


def obstacle() -> str:
    """Why this process must not be forked now; "" when it may."""
    torch = sys.modules.get("torch")
    if (torch is not None and torch.cuda.is_initialized()) or any(map(is_gpu, os.listdir("/proc/self/fd"))):
        return "CUDA is initialised in the fork server"
    return "" if threads() == 1 else f"{threads() - 1} threads run in the fork server"


def is_gpu(descriptor: str) -> bool:
    """The CUDA driver has a GPU's device file open once it was asked for anything."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri"))
    except OSError:  # closed since it was listed
        return False


def serve(control: socket.socket, refusal: dict | None) -> tuple[dict, list[int]]:
    """Fork a kernel for each request. Returns only in a kernel: its request, and its files (status, stdout, stderr).

    The status file gets one JSON object a line: {"pid"} from the kernel, {"exit"} from here, or {"refused"}.
    """
    poll = select.poll()
    poll.register(control, select.POLLIN)
    kernels: dict[int, tuple[int, int]] = {}  # pidfd: (pid, status)
    while True:
        for ready, _ in poll.poll():
            if ready != control.fileno():
                poll.unregister(ready)
                pid, status = kernels.pop(ready)
                tell(status, exit=reap(pid))
                os.close(ready), os.close(status)
                continue
            message, files, *_ = socket.recv_fds(control, LARGEST, 3)
            if not message:  # the driver is through
                for pid, _ in kernels.values():
                    end(pid)
                os._exit(0)
            if why := refusal or ({"refused": said} if (said := obstacle()) else None):
                tell(files[0], **why)
            elif (pid := os.fork()) == 0:
                control.close()
                for other in kernels:
                    os.close(other), os.close(kernels[other][1])
                return json.loads(message), files
            else:
                child = os.pidfd_open(pid)
                kernels[child] = (pid, os.dup(files[0]))
                poll.register(child, select.POLLIN)
            for file in files:
                os.close(file)


def tell(status: int, **fields: object) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for this kernel any more
        os.write(status, json.dumps(fields).encode() + b"\n")


def end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def reap(pid: int) -> int:
    """End what a dead kernel left in its group, then give its number free. Returns its exit code, -N for signal N."""
    end(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def become_kernel(request: dict, files: list[int]) -> None:
    """Give the forked process all that a new process would have: session, files, folder, environment, randomness."""
    status, stdout, stderr = files
    os.setsid()
    os.dup2(stdout, 1), os.dup2(stderr, 2)
    os.close(stdout), os.close(stderr)
    os.chdir(request["cwd"])
    changed = changes(request["before"])
    os.environ.clear()
    os.environ.update(request["env"] | changed)
    sys.argv[:] = ["-c", *request["arguments"]]
    sys.path.insert(0, "")  # ipykernel_launcher takes it away, as of every `python -c`
    reseed()
    tell(status, pid=os.getpid())
    os.close(status)
    watch(int(os.environ["JPY_PARENT_PID"]))


def changes(before: dict[str, str]) -> dict[str, str]:
    """Variables that imports have set in this process: in a new process they would set them too."""
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def reseed() -> None:
    """New seeds from the system for the global generators that importing has made, as in a new process."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()  # CUDA's start from a constant, also in a new process


def main() -> None:
    control, order = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    watch(int(os.environ["JPY_PARENT_PID"]))
    before = dict(os.environ)
    # A kernel sets this before the notebook imports matplotlib, which reads it once.
    inline = os.environ.setdefault("MPLBACKEND", INLINE) == INLINE
    refusal = preload(**order)
    if inline:
        os.environ.pop("MPLBACKEND", None)
    sys.stdout.flush(), sys.stderr.flush()
    request, files = serve(control, refusal)
    become_kernel(request | {"before": before}, files)


if __name__ == "__main__":
    main()
    runpy.run_module("ipykernel_launcher", run_name="__main__", alter_sys=True)

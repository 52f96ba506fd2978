"""Forked kernels: as new as a process of its own, gone when they should be, and plain ones where a fork is unsafe."""

import asyncio
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from toy_recipes import toy

from utils.cookbook import fork_kernel, launch
from utils.cookbook import run as run_module
from utils.cookbook.fork_kernel import Forks, asks_for_fresh, default_forks, forked_kernels, forks_for
from utils.cookbook.kernels import scratch_folder
from utils.cookbook.launch import RunKernelManager, kernel_environment
from utils.cookbook.preload import leading_imports, shared_imports
from utils.cookbook.run import Job, output_folder, run_recipes

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 60  # seconds until a wait that never ends fails the test
linux = pytest.mark.skipif(bool(fork_kernel.unable()), reason="needs Linux")
pytestmark = linux


class Silent:
    """Progress that keeps the lines it was given."""

    def __init__(self):
        self.lines = []

    def start(self, recipe, place, cells):
        pass

    def cell(self, done):
        pass

    def end(self, line):
        pass

    def line(self, line):
        self.lines.append(line)


def run(paths, out, **options):
    """(outcomes, what each printed, lines said) of a run of these notebooks."""
    jobs, progress = [Job(path, {}) for path in paths], Silent()
    with output_folder(out, jobs) as folder:
        outcomes = run_recipes(jobs, folder, progress, **options)
    return outcomes, [printed(outcome.copy) for outcome in outcomes], progress.lines


def printed(copy):
    cells = json.loads(copy.read_text())["cells"]
    return "".join("".join(output.get("text", [])) for cell in cells for output in cell.get("outputs", []))


def ask_for_fresh(path, word="fresh"):
    raw = json.loads(path.read_text())
    raw["metadata"]["cookbook"]["kernel"] = word
    path.write_text(json.dumps(raw))
    return path


def wait_for(file):
    """Block until there is something to read (of a pidfd: until the process ended)."""
    assert select.select([file], [], [], LIMIT)[0], "waited in vain"


def all_gone(processes):
    for process in processes:
        wait_for(process)
        os.close(process)


# ------------------------------------------------------------------------------------------------- as new as new ones

LOOK = """\
import sets_a_variable
import gc, json, os, signal, sys
here = {
    "names": sorted(name for name in globals() if name != "here"),
    "main": [name for name in ("__file__", "__spec__", "serve") if getattr(sys.modules["__main__"], name, None)],
    "ours": sorted(name for name in sys.modules if name.startswith("utils.cookbook") or "fork_server" in name),
    "path": sys.path, "argv": sys.argv, "flags": list(sys.flags), "cwd": os.getcwd(), "environment": dict(os.environ),
    "signals": [str(signal.getsignal(sign)) for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    "leads": [os.getpid() == os.getpgid(0), os.getpid() == os.getsid(0)],
    "collects": gc.isenabled(), "stdin": os.read(0, 1).decode(),
    "files": [os.readlink("/proc/self/fd/1"), os.readlink("/proc/self/fd/2")[-4:]],
    "backend": os.environ["MPLBACKEND"],
}
print(json.dumps(here) + "|" + str(os.getppid()))
"""


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """What a forked kernel, a plain one and again a forked one of a run print about themselves."""
    folder = tmp_path_factory.mktemp("three")
    paths = [toy(folder, name, ("", LOOK)) for name in ("01_a", "02_b", "03_c")]
    ask_for_fresh(paths[1])
    library = tmp_path_factory.mktemp("library")
    (library / "sets_a_variable.py").write_text("import os\nos.environ.setdefault('SET_BY_AN_IMPORT', '1')")
    with pytest.MonkeyPatch.context() as patch:  # the kernels' folder may also be the first of PYTHONPATH
        patch.setattr(launch, "python_path", lambda: os.pathsep.join([str(folder), str(library), str(ROOT)]))
        outcomes, texts, lines = run(paths, folder / "out")
    assert [outcome.state for outcome in outcomes] == ["done"] * 3 and lines == []
    return [text.strip().split("|") for text in texts]


def test_a_forked_kernel_looks_like_a_plain_one(three):
    forked, plain, again = (json.loads(state) for state, _ in three)
    assert forked == plain and again == plain
    assert plain["environment"]["SET_BY_AN_IMPORT"] == "1"
    assert plain["leads"] == [True, True] and plain["ours"] == [] and "inline" in plain["backend"]


def test_a_recipe_gets_the_fresh_kernel_that_it_asks_for(three):
    forked, plain, again = (int(parent) for _, parent in three)
    assert plain == os.getpid()
    assert forked == again != plain


def test_another_word_for_the_kernel_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"01_toy: metadata cookbook.kernel is 'frsh'; expected 'fresh'"):
        run_module.check_jobs([Job(ask_for_fresh(toy(tmp_path), "frsh"), {})])
    assert not asks_for_fresh(toy(tmp_path))


STATE = """\
import json, os, random, sys, threading
import numpy as np
import torch
import matplotlib.pyplot as plt
from utils.rows import measured
state = {"leaks": ["leaked" in globals(), os.environ.get("LEAKED"), "leaked" in sys.modules, torch.get_num_threads()],
         "dtype": str(torch.get_default_dtype()), "cuda": torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork()}
state["random"] = [random.random(), np.random.rand(), torch.rand(1).item(), torch.initial_seed()]
state["random"].append(measured("toy")["run_id"])
x = torch.ones(300, 300)
state["works"] = [(x @ x).sum().item(), (np.ones((300, 300)) @ np.ones((300, 300))).sum()]
print(json.dumps(state) + "|" + str(os.getppid()))
leaked, os.environ["LEAKED"], sys.modules["leaked"] = 1, "1", os
torch.set_num_threads(torch.get_num_threads() + 1), torch.set_default_dtype(torch.float64)
random.seed(0), np.random.seed(0), torch.manual_seed(0)
plt.plot([1, 2])
plt.show()
"""


def test_nothing_of_a_kernel_reaches_the_next_and_each_draws_its_own_numbers(tmp_path):
    outcomes, texts, lines = run([toy(tmp_path, name, ("", STATE)) for name in ("01_a", "02_b")], tmp_path / "out")
    assert lines == []
    assert all('"image/png"' in outcome.copy.read_text() for outcome in outcomes)  # matplotlib draws inline
    (first, parent), (second, same_parent) = (text.strip().split("|") for text in texts)
    first, second = json.loads(first), json.loads(second)
    assert parent == same_parent != str(os.getpid())  # both were forked, from one server
    numbers = first.pop("random"), second.pop("random")
    assert all(one != other for one, other in zip(*numbers, strict=True))
    assert first == second
    assert first["leaks"][:3] == [False, None, False] and not first["cuda"]
    assert first["works"] == [300.0**3] * 2


# ----------------------------------------------------------------------------------------------------- how they end

# A cell that says who it is (itself, its server, a child of its own) and waits for good.
WAITS = """\
import os, subprocess, threading
child = subprocess.Popen(["sleep", "1000"])
with open("pids", "w") as fifo:
    fifo.write(f"{os.getpid()} {os.getppid()} {child.pid}")
threading.Event().wait()
"""


@pytest.fixture
def told(tmp_path):
    """The reading end of the pipe that WAITS writes to."""
    os.mkfifo(tmp_path / "pids")
    pipe = os.open(tmp_path / "pids", os.O_RDONLY | os.O_NONBLOCK)
    yield pipe
    os.close(pipe)


def processes(pipe):
    """(kernel, server, child): numbers and pidfds, when WAITS has told them."""
    wait_for(pipe)
    numbers = [int(number) for number in os.read(pipe, 100).split()]
    return numbers, [os.pidfd_open(number) for number in numbers]


def run_with_limit_when_told(paths, out, monkeypatch, told, action):
    """A run whose first kernel waits in WAITS; then `action(at_limit, kernel, server)` is called: no clock decides.

    Returns what `run` does, and (number of the server, pidfds of kernel and child).
    """
    seen = []

    class Timer:
        def __init__(self, seconds, at_limit):
            self.at_limit = at_limit

        def start(self):
            if not seen:  # only the first notebook waits
                seen.append(threading.Thread(target=self.wait, daemon=True))
                seen[0].start()

        def wait(self):
            (kernel, server, _), (kernel_file, server_file, child_file) = processes(told)
            os.close(server_file)
            seen[:] = server, [kernel_file, child_file]
            action(self.at_limit, kernel, server)

        def cancel(self):
            pass

    monkeypatch.setattr(run_module.threading, "Timer", Timer)
    return run(paths, out, timeout=5), seen


WHO = ("", "import os; print(os.getppid())")


def test_a_hung_cell_ends_at_its_limit_with_its_children_and_the_server_goes_on(tmp_path, monkeypatch, told):
    paths = [toy(tmp_path, "01_hangs", ("", WAITS)), toy(tmp_path, "02_good", WHO)]
    at_limit = lambda at_limit, kernel, server: at_limit()  # noqa: E731
    (outcomes, texts, lines), (server, left) = run_with_limit_when_told(
        paths, tmp_path / "out", monkeypatch, told, at_limit
    )
    assert (outcomes[0].where, outcomes[0].why) == ("cell [2]", "stopped at its limit of 5 s")
    assert outcomes[1].state == "done" and lines == []
    assert int(texts[1]) == server != os.getpid()
    all_gone(left)


def test_a_killed_kernel_is_reported_dead_and_leaves_no_child(tmp_path, monkeypatch, told):
    paths = [toy(tmp_path, "01_dies", ("", WAITS)), toy(tmp_path, "02_good", WHO)]
    kill = lambda at_limit, kernel, server: os.kill(kernel, signal.SIGKILL)  # noqa: E731
    (outcomes, texts, lines), (server, left) = run_with_limit_when_told(
        paths, tmp_path / "out", monkeypatch, told, kill
    )
    assert (outcomes[0].where, outcomes[0].why) == ("cell [2]", "the kernel died (SIGKILL: memory full?)")
    assert outcomes[1].state == "done" and lines == [] and int(texts[1]) == server
    all_gone(left)


def test_a_killed_server_takes_its_kernel_along_and_the_rest_is_plain(tmp_path, monkeypatch, told):
    paths = [toy(tmp_path, "01_dies", ("", WAITS)), toy(tmp_path, "02_good", WHO)]
    kill = lambda at_limit, kernel, server: os.kill(server, signal.SIGKILL)  # noqa: E731
    (outcomes, texts, [line]), (_, left) = run_with_limit_when_told(paths, tmp_path / "out", monkeypatch, told, kill)
    assert outcomes[0].why.startswith("the kernel died") and outcomes[1].state == "done"
    assert line.startswith("kernels start one by one, not forked: the fork server takes no request")
    assert int(texts[1]) == os.getpid()
    all_gone(left)


def test_sigkill_of_the_driver_leaves_nothing(tmp_path, told):
    toy(tmp_path, "01_waits", ("", WAITS)), toy(tmp_path, "02_next")
    command = [sys.executable, "-m", "utils.cookbook.cli", "run", "--out", "out"]
    env = os.environ | {"COOKBOOK_NOTEBOOKS": str(tmp_path), "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    numbers, left = processes(told)
    assert numbers[1] != driver.pid  # it was forked
    driver.kill()
    driver.wait(LIMIT)
    all_gone(left)  # kernel, server, child


async def reply_to(client, asked):
    while (reply := await client.get_shell_msg(timeout=LIMIT))["parent_header"]["msg_id"] != asked:
        pass
    return reply["content"]


def test_interrupt_and_shutdown_reach_a_forked_kernel(monkeypatch):
    forks, scratch = Forks([]), scratch_folder()
    monkeypatch.setattr(RunKernelManager, "forks", forks)

    async def talk():
        manager = RunKernelManager(connection_file=str(scratch / "k.json"), transport="ipc", ip=str(scratch / "ipc"))
        manager.shutdown_wait_time = LIMIT  # before it would be sent a signal
        await manager.start_kernel(cwd=str(scratch))
        process, client = manager.provisioner.process, manager.client()
        client.start_channels()
        try:
            await client.wait_for_ready(timeout=LIMIT)
            hung = client.execute("import threading; print('up'); threading.Event().wait()", stop_on_error=False)
            while (await client.get_iopub_msg(timeout=LIMIT))["msg_type"] != "stream":
                pass
            await manager.interrupt_kernel()
            replies = [await reply_to(client, hung)]
            replies.append(await reply_to(client, client.execute("6 * 7")))
            alive = await manager.is_alive()
            await manager.shutdown_kernel(now=False)
        finally:
            client.stop_channels()
        return replies, alive, process

    try:
        (stopped, answered), alive, process = asyncio.run(talk())
    finally:
        forks.stop()
        shutil.rmtree(scratch)
    assert isinstance(process, fork_kernel.ForkedKernel)
    assert (stopped["ename"], answered["status"], alive) == ("KeyboardInterrupt", "ok", True)
    assert process.wait(0) == 0  # it went by itself, as it was asked to


# ------------------------------------------------------------------------------------------- where a fork is unsafe

FAKE_TORCH = """import types
cuda = types.SimpleNamespace(is_initialized=lambda: {initialised}, _is_in_bad_fork=lambda: {spoilt})
default_generator = types.SimpleNamespace(seed=lambda: 0)
"""
UNSAFE = [
    (FAKE_TORCH.format(initialised=True, spoilt=False), "CUDA is initialised in the fork server"),
    (FAKE_TORCH.format(initialised=False, spoilt=True), "an import asked CUDA for its devices"),
    (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
        "importing torch starts",
    ),
    ("raise RuntimeError('no driver')", "preload 'torch': RuntimeError: no driver"),
]


@pytest.mark.parametrize(("torch", "why"), UNSAFE)
def test_no_kernel_is_forked_where_that_is_unsafe_and_one_line_says_why(tmp_path, torch, why):
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "torch.py").write_text(torch)
    lines = []
    forks = Forks(["torch"], lines.append)
    environment = kernel_environment(tmp_path) | {"JPY_PARENT_PID": str(os.getpid()), "PYTHONPATH": str(folder)}
    command = RunKernelManager().kernel_spec.argv
    try:
        for _ in range(2):
            assert forks.kernel(command, environment, str(tmp_path), None, None) is None
    finally:
        forks.stop()
    [line] = lines
    assert line.startswith(f"kernels start one by one, not forked: {why}") and "\n" not in line


def test_a_gpu_that_the_server_holds_open_is_noticed(monkeypatch):
    from utils.cookbook import fork_server

    monkeypatch.setattr(os, "readlink", lambda path: "/dev/nvidiactl" if path.endswith("/0") else "/dev/null")
    assert fork_server.obstacle() == "CUDA is initialised in the fork server"


def test_switched_off_runs_the_same_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("COOKBOOK_KERNELS", "fresh")
    outcomes, texts, lines = run([toy(tmp_path, name, WHO) for name in ("01_a", "02_b")], tmp_path / "out")
    assert [outcome.state for outcome in outcomes] == ["done"] * 2
    assert [int(text) for text in texts] == [os.getpid()] * 2
    assert lines == ["kernels start one by one, not forked: COOKBOOK_KERNELS=fresh"]


def test_a_kernel_that_is_not_ours_is_not_forked():
    with pytest.raises(fork_kernel.CannotFork, match="Rscript is not the ipykernel of"):
        fork_kernel.arguments_of_kernel(["/usr/bin/Rscript", "-e", "IRkernel::main()", "file"])
    with pytest.raises(fork_kernel.CannotFork, match="python9 is not the ipykernel of"):
        fork_kernel.arguments_of_kernel(["/opt/python9", "-m", "ipykernel_launcher", "-f", "file"])
    ours = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "file"]
    assert fork_kernel.arguments_of_kernel(ours) == ["-f", "file"]


def test_a_misspelt_preload_of_the_users_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("COOKBOOK_PRELOAD", "json,colorsyss")
    monkeypatch.setattr(fork_kernel, "_default", None)
    environment = kernel_environment(tmp_path) | {"JPY_PARENT_PID": str(os.getpid())}
    forks = default_forks()
    try:
        with pytest.raises(ValueError, match=r"COOKBOOK_PRELOAD: preload 'colorsyss': .*nearest: colorsys"):
            forks.kernel([sys.executable, "-m", "ipykernel_launcher"], environment, str(tmp_path), None, None)
    finally:
        forks.stop()


def test_another_environment_gets_another_server(monkeypatch):
    made = []

    class Server:
        def __init__(self, preload, env, cwd, *, strict):
            made.append((env.get("OMP_NUM_THREADS"), cwd))

        def running(self):
            return []

        def stop(self):
            pass

    monkeypatch.setattr(fork_kernel, "ForkServer", Server)
    forks = Forks([])
    for environment, folder in (
        ({"OMP_NUM_THREADS": "1"}, "/a"),
        ({"OMP_NUM_THREADS": "1", "IPYTHONDIR": "/b", "CUDA_VISIBLE_DEVICES": "1"}, "/a"),
        ({"OMP_NUM_THREADS": "2"}, "/a"),
        ({"OMP_NUM_THREADS": "2"}, "/b"),
    ):
        forks.start(environment, folder)
    assert made == [("1", "/a"), ("2", "/a"), ("2", "/b")]


# ------------------------------------------------------------------------------------------------ what is imported


def test_only_imports_that_come_before_anything_else_are_done_ahead(tmp_path):
    figures = ("", "from utils.figures import axes")
    assert leading_imports(toy(tmp_path, "03_toy", figures))[:5] == [
        "utils",
        "utils.figures",
        "matplotlib",
        "matplotlib.pyplot",
        "utils.figures.axes",
    ]
    path = toy(
        tmp_path,
        "01_toy",
        ("", "from __future__ import annotations\nimport warnings\nwarnings.simplefilter('ignore')"),
        ("", "import torch.nn.functional as F\nfrom torch import nn\nimport mine, own\nfrom json import *"),
        ("", "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport numpy"),
    )
    (tmp_path / "mine.py").touch(), (tmp_path / "own").mkdir()
    wanted = ["warnings", "torch", "torch.nn", "torch.nn.functional", "json", "os"]
    assert leading_imports(path) == wanted
    assert leading_imports(toy(tmp_path, "02_toy", ("", "%env A=1"), ("", "import torch"))) == []


def test_a_kernel_has_nothing_loaded_that_its_notebook_does_not_import(tmp_path):
    first = toy(tmp_path, "01_a", ("", "import torch\nfrom email import message"))
    second = toy(tmp_path, "02_b", ("", "import torch, math\nfrom email import message, policy"))
    third = toy(tmp_path, "03_c", ("", "import json"))
    assert shared_imports([first, second, third]) == ["torch", "email", "email.message", "json"]  # toys end with json
    assert shared_imports([third]) == ["json"] and shared_imports([]) == []
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forks, "start", lambda self, env, cwd: None)
        with forked_kernels([first, second, third], lines.append):
            assert forks_for(first) is forks_for(second) is not None
            assert forks_for(third) is None
    assert forks_for(first) is None and lines == []


@pytest.mark.gpu
def test_forked_kernels_use_the_gpu(tmp_path):
    use = "import os\nimport torch\nprint(torch.ones(8, device='cuda').sum().item(), os.getppid())"
    outcomes, texts, lines = run([toy(tmp_path, name, ("", use)) for name in ("01_a", "02_b")], tmp_path / "out")
    assert [outcome.state for outcome in outcomes] == ["done"] * 2 and lines == []
    assert texts[0] == texts[1] and texts[0].startswith("8.0 ") and not texts[0].endswith(f" {os.getpid()}\n")

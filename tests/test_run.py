"""`run_recipes` on toy notebooks: what counts as success, what is kept, what is never lost."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from toy_recipes import ROW, papermill_here, toy

from utils.cookbook import run as run_module
from utils.cookbook.identity import device_name
from utils.cookbook.run import Job, check_jobs, job_key, output_folder, read_status, rows_between, run_recipes

ROOT = Path(__file__).resolve().parents[1]


class Silent:
    """Progress that keeps what it was told."""

    def __init__(self):
        self.cells, self.lines = [], []

    def start(self, recipe, place, cells):
        self.cells.append((recipe, place, cells))

    def cell(self, done):
        pass

    def end(self, line):
        self.lines.append(line)

    line = end


def run(jobs, out, **options):
    progress = Silent()
    with output_folder(out, jobs) as folder:
        outcomes = run_recipes(jobs, folder, progress, **options)
    return outcomes, progress


@pytest.fixture
def no_kernel(monkeypatch):
    """Papermill replaced by running the cells here: for what does not depend on a kernel."""
    monkeypatch.setattr(run_module, "_papermill", papermill_here)


def test_a_recipe_gets_real_values_and_is_done_with_a_row(tmp_path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")  # would hide the figures
    seen = (
        "import os, sys\nprint(os.getcwd(), sys.executable, [seed, fast, sizes, rate], os.environ['MPLBACKEND'][-6:])"
    )
    job = Job(toy(tmp_path / "nb {x}", "01_toy", ("check", seen)), {"seed": 3, "fast": False, "sizes": [4]})
    [outcome], progress = run([job], tmp_path / "out {y}")
    assert (outcome.state, outcome.why) == ("done", "")
    assert [row["speedup"] for row in outcome.rows] == [5.0]
    assert progress.cells == [("01_toy", "1/1", 4)]
    executed = json.loads((tmp_path / "out {y}" / "01_toy.ipynb").read_text())
    printed = "".join(executed["cells"][2]["outputs"][0]["text"])
    # The notebook names a kernel that exists nowhere; its folder is the working directory.
    assert printed == f"{tmp_path}/nb {{x}} {sys.executable} [3, False, [4], 0.5] inline\n"


def test_a_failing_cell_is_named_as_the_notebook_numbers_it_and_stops_nobody(tmp_path):
    jobs = [
        Job(
            toy(tmp_path, "01_fails", ("", "x = 1"), ("", ""), ("check", "assert seed, 'seed is nought'")), {"seed": 0}
        ),
        Job(toy(tmp_path, "02_silent", ("", "x = 1"), row=False), {}),
        Job(toy(tmp_path, "03_dies", ("limits", "import os; os.kill(os.getpid(), 9)")), {}),
        Job(toy(tmp_path, "04_good"), {}),
    ]
    outcomes, progress = run(jobs, tmp_path / "out")
    assert [o.state for o in outcomes] == ["failed", "failed", "failed", "done"]
    assert (outcomes[0].where, outcomes[0].why) == ("cell [3], tag `check`", "AssertionError: seed is nought")
    assert "without writing a row" in outcomes[1].why
    # Papermill's own notebook says "completed" of a dead kernel's cells: it is not asked.
    assert (outcomes[2].where, outcomes[2].why) == ("cell [2], tag `limits`", "the kernel died (SIGKILL: memory full?)")
    report = progress.lines[0].splitlines()
    assert report[0] == "FAILED 01_fails.ipynb, cell [3], tag `check`"
    assert "01_fails.ipynb" in report[2] and "./cookbook lab" in report[3]
    assert read_status(tmp_path / "out", "01_fails")["state"] == "failed"


def test_a_row_written_before_the_failure_does_not_make_it_a_success(tmp_path):
    job = Job(toy(tmp_path, "01_toy", ("measure", ROW), ("limits", "1 / 0"), row=False), {})
    [outcome], _ = run([job], tmp_path / "out")
    assert outcome.state == "failed" and outcome.why == "ZeroDivisionError: division by zero"
    assert len(rows_between(tmp_path / "out" / "01_toy.rows.jsonl", 0)) == 1  # and what was measured is not lost
    [outcome], _ = run([job], tmp_path / "out")
    assert outcome.state == "failed"  # nor kept


def test_a_hung_recipe_ends_at_its_limit(tmp_path):
    job = Job(toy(tmp_path, "01_hangs", ("", "import threading; threading.Event().wait()")), {})
    [outcome], _ = run([job], tmp_path / "out", timeout=2)
    assert (outcome.state, outcome.why) == ("failed", "stopped at its limit of 2 s")


def test_what_is_finished_is_kept_until_code_or_values_change(tmp_path, no_kernel):
    out, path = tmp_path / "out", toy(tmp_path)
    ran = lambda values, **options: run([Job(path, values)], out, **options)[0][0]  # noqa: E731
    assert ran({}).state == "done"
    again = ran({})
    assert again.state == "kept" and [row["speedup"] for row in again.rows] == [2.0]
    assert ran({"seed": 1}).state == "done"
    assert ran({"seed": 1}, fresh=True).state == "done"
    toy(tmp_path, why="other prose")
    assert ran({"seed": 1}).state == "kept"
    toy(tmp_path, "01_toy", ("", "new = 1"))
    assert ran({"seed": 1}).state == "done"
    # Rows are only ever appended, and each outcome has its own.
    assert [row["speedup"] for row in rows_between(out / "01_toy.rows.jsonl", 0)] == [2.0, 3.0, 3.0, 3.0]
    (out / "01_toy.rows.jsonl").unlink()
    assert ran({"seed": 1}).state == "done"


def test_the_key_holds_device_and_torch(tmp_path, monkeypatch):
    job = Job(toy(tmp_path), {})
    key = job_key(job)
    assert key == job_key(Job(job.path, {"seed": 0}))  # a default that is given is the same point
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "device_name", lambda device: "NVIDIA H200")
        assert job_key(job) != key
    with monkeypatch.context() as patch:
        patch.setattr(run_module.metadata, "version", lambda package: "9.9")
        assert job_key(job) != key


def test_an_unfinished_line_of_a_killed_writer_hides_no_new_row(tmp_path, no_kernel):
    out = tmp_path / "out"
    out.mkdir()
    rows = out / "01_toy.rows.jsonl"
    rows.write_text('{"speedup": 1.0}\n{"speedup": 9')
    repair = "data = open(rows).read()\nopen(rows, 'w').write(data[: data.rindex('\\n') + 1])"  # as append_rows does
    [outcome], _ = run([Job(toy(tmp_path, "01_toy", ("", repair)), {})], out)
    assert [row["speedup"] for row in outcome.rows] == [2.0]
    assert rows.read_text().startswith('{"speedup": 1.0}\n')


def test_rows_go_where_the_user_says(tmp_path, no_kernel, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [outcome], _ = run([Job(toy(tmp_path / "nb"), {"rows": "mine.jsonl"})], tmp_path / "out")
    assert outcome.state == "done" and len(rows_between(tmp_path / "mine.jsonl", 0)) == 1


def test_a_notebook_of_the_users_is_never_replaced(tmp_path, no_kernel):
    out, job = tmp_path / "out", Job(toy(tmp_path / "nb"), {})
    out.mkdir()
    (out / "01_toy.ipynb").write_text("mine")
    with pytest.raises(ValueError, match=r"01_toy.ipynb there was not written by run"), output_folder(out, [job]):
        pass
    assert (out / "01_toy.ipynb").read_text() == "mine"
    (out / "01_toy.ipynb").unlink()
    run([job], out)
    with open(out / "01_toy.ipynb", "a") as file:
        file.write("\n")  # as an editor would
    edited = (out / "01_toy.ipynb").read_text()
    run([job], out, fresh=True)
    assert (out / "01_toy.edited-1.ipynb").read_text() == edited


def test_a_bad_output_folder_is_one_line(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    for out, said in (
        (file, "not a folder"),
        (file / "under", "not a folder"),
        (Path("/proc/x"), "cannot write there"),
    ):
        with pytest.raises(ValueError, match=said), output_folder(out, []):
            pass
    in_use = pytest.raises(ValueError, match="another run is writing there")
    with output_folder(tmp_path / "out", []), in_use, output_folder(tmp_path / "out", []):
        pass
    monkeypatch.setattr(run_module, "FREE_BYTES", 10**18)
    with pytest.raises(ValueError, match="the disk is full"), output_folder(tmp_path / "out", []):
        pass


def test_a_disk_that_fills_up_is_a_failure_of_that_recipe(tmp_path, monkeypatch):
    def full(*args, **fields):
        raise OSError(28, "No space left on device", "01_toy.status.part")

    monkeypatch.setattr(run_module, "write_status", full)
    [outcome], _ = run([Job(toy(tmp_path), {})], tmp_path / "out")
    assert (outcome.state, outcome.why) == ("failed", "No space left on device: 01_toy.status.part")


def test_a_recipe_that_cannot_report_is_refused(tmp_path):
    path = toy(tmp_path)
    path.write_text(path.read_text().replace("rows: str", "lines: str"))
    with pytest.raises(ValueError, match="01_toy declares no parameter 'rows'"):
        check_jobs([Job(path, {})])


def test_device_names_come_without_torch(monkeypatch):
    from utils.cookbook import identity

    monkeypatch.setattr(identity, "_gpus", lambda: ("NVIDIA H200", "NVIDIA L4"))
    monkeypatch.delenv("COOKBOOK_DEVICE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [device_name(d) for d in ("auto", "cuda", "cuda:1", "mps")] == ["NVIDIA H200"] * 2 + ["NVIDIA L4", "mps"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert device_name("cuda") == "NVIDIA L4"
    monkeypatch.setenv("COOKBOOK_DEVICE", "cpu")
    assert device_name("auto") == device_name("cpu") != "NVIDIA L4"


# A cell that says that it runs, starts a child, and waits for good, unless the file `go` is there.
WAITS = """\
import os, pathlib, subprocess, threading
if not pathlib.Path("go").exists():
    child = subprocess.Popen(["sleep", "1000"])
    with open("pids", "w") as fifo:
        fifo.write(f"{os.getpid()} {child.pid}")
    threading.Event().wait()
"""
LIMIT = 60  # seconds until a wait that never ends fails the test


def wait_for(file) -> None:
    """Block until there is something to read (of a pidfd: until the process ended)."""
    assert select.select([file], [], [], LIMIT)[0], "waited in vain"


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
@pytest.mark.parametrize(("sign", "status"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_a_driver_that_is_ended_leaves_no_kernel_and_resumes(tmp_path, sign, status):
    toy(tmp_path, "01_first")
    toy(tmp_path, "02_waits", ("", WAITS))
    os.mkfifo(tmp_path / "pids")
    pids = os.open(tmp_path / "pids", os.O_RDONLY | os.O_NONBLOCK)
    command = [sys.executable, "-m", "utils.cookbook.cli", "run", "--out", "out"]
    env = os.environ | {"COOKBOOK_NOTEBOOKS": str(tmp_path), "PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    wait_for(pids)
    left = [os.pidfd_open(int(pid)) for pid in os.read(pids, 100).split()]  # the kernel, and a child of its own
    driver.send_signal(sign)
    said, _ = driver.communicate(timeout=LIMIT)
    assert driver.returncode == status
    for process in left:
        wait_for(process)
        os.close(process)
    os.close(pids)
    if sign == signal.SIGINT:
        assert "01_first" in said.partition("verdict")[2]  # the table of what was finished
        return
    (tmp_path / "go").touch()
    again = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "01_first: kept" in again.stdout and "02_waits: done" in again.stdout
    for name in ("01_first", "02_waits"):
        assert len(rows_between(tmp_path / "out" / f"{name}.rows.jsonl", 0)) == 1

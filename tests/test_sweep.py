"""`sweep`: every point once, whatever is killed when; failing points keep what they left and stop nobody."""

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from toy_recipes import toy

from utils import rows as rows_module
from utils.cookbook import cli, sweep_local, sweep_points
from utils.cookbook import run as run_module
from utils.cookbook.notebooks import find_recipes, resolve
from utils.cookbook.parameters import code_cells
from utils.cookbook.run import Job, Outcome
from utils.cookbook.sweep_command import check_engine
from utils.cookbook.sweep_points import Identity, here, points_of, read_done, time_text
from utils.cookbook.sweep_progress import SweepBars
from utils.cookbook.sweep_spec import load_spec
from utils.cookbook.whole_file import write_whole

ROOT = Path(__file__).resolve().parents[1]
DRIVER = ROOT / "tests" / "sweep_driver.py"
GRID = "recipe: 01_toy\ngrid:\n  seed: [0, 1, 2, 3, 4, 5]\n  fast: [true, false]\n"
# Says that the point started.
STARTS = "with open('starts', 'a') as file:\n    print(seed, fast, file=file)"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A toy recipe as the project's own, and a working folder with nothing in it."""
    toy(tmp_path / "nb", "01_toy")
    monkeypatch.setenv("COOKBOOK_NOTEBOOKS", str(tmp_path / "nb"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("s.yaml").write_text(GRID)
    return tmp_path


@pytest.fixture
def no_kernel(monkeypatch):
    """Cells executed here: for what does not depend on a kernel. Gives the list of the points that ran."""
    ran = []

    def papermill(path, copy, values, *rest):
        ran.append({name: value for name, value in values.items() if name != "rows"})
        space = {"os": os}
        try:
            for source, tags in code_cells(path):
                exec(source, space)
                space |= values if "parameters" in tags else {}
        except Exception as error:
            shutil.copy(path, copy)
            return "cell [2], tag `check`", f"{type(error).__name__}: {error}"
        shutil.copy(path, copy)
        return "", ""

    monkeypatch.setattr(run_module, "_papermill", papermill)
    monkeypatch.setattr(run_module, "check_jobs", lambda jobs: None)
    monkeypatch.setattr("utils.cookbook.fork_kernel.forked_kernels", lambda paths, say: Nothing())
    return ran


class Nothing:
    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


def sweep(*arguments: str) -> int:
    return cli.main(["sweep", "s.yaml", "--out", "out", *arguments])


def rows_in(folder: Path | str = "out") -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "rows.jsonl").read_text().splitlines()]


def test_a_sweep_ends_with_one_row_file_and_a_table(place, no_kernel, capsys):
    assert sweep() == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "5 False 7.00x — yes faster —" in " ".join(out.split())
    assert out.endswith(
        "12 points: 12 done, 0 failed\n12 rows: out/rows.jsonl\nnext: ./cookbook report out/rows.jsonl\n"
    )
    rows = rows_in()
    assert [row["speedup"] for row in rows] == [2.0 + seed for seed in range(6) for _ in range(2)]
    assert len({row["point"] for row in rows}) == 12
    assert [len(list((Path("out") / "points" / row["point"]).glob("01_toy.ipynb"))) for row in rows] == [1] * 12


def test_a_finished_sweep_runs_nothing_and_imports_little(place, no_kernel, capsys):
    assert sweep() == 0
    files = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    capsys.readouterr()
    code = (
        "import sys; from utils.cookbook import cli; status = cli.main(['sweep', 's.yaml', '--out', 'out']);"
        "heavy = {'torch', 'papermill', 'pandas', 'numpy', 'nbclient', 'ray'} & set(sys.modules);"
        "print(status, sorted(heavy))"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "12 points: 12 done (12 before), 0 failed\n12 rows: out/rows.jsonl\n" in done.stdout, done
    assert done.stdout.endswith("\n0 []\n"), done
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == files
    assert len(no_kernel) == 12


def test_a_point_that_always_fails_keeps_its_notebook_and_log_and_stops_nobody(place, no_kernel, capsys):
    toy(place / "nb", "01_toy", ("check", "assert seed != 3 or fast, 'three and slow'"))
    Path("s.yaml").write_text(GRID + "retries: 2\n")
    assert sweep() == 1
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    [failed] = {point.parent for point in Path("out/points").glob("*/log.txt")}
    assert "3 False — — — FAILED —" in " ".join(out.split())
    assert out.endswith(
        "FAILED seed=3 fast=False (3 tries)\n"
        "  cell [2], tag `check`: AssertionError: three and slow\n"
        f"  {failed}/ has 01_toy.ipynb and log.txt\n\n"
        "12 points: 11 done, 1 failed: the same command tries them again\n"
        "11 rows: out/rows.jsonl\nnext: ./cookbook report out/rows.jsonl\n"
    )
    log = (failed / "log.txt").read_text()
    assert "try 1 of 3" in log and "try 3 of 3: cell [2], tag `check`: AssertionError: three and slow" in log
    assert (failed / "01_toy.ipynb").exists() and not (failed / "row.json").exists()
    assert len(rows_in()) == 11 and len(no_kernel) == 14
    # The next start tries it again, and it alone; without `retries`, once.
    Path("s.yaml").write_text(GRID)
    assert sweep() == 1 and len(no_kernel) == 15
    assert "11 done (11 before), 1 failed" in capsys.readouterr().out


def test_a_point_that_fails_once_is_done_when_the_spec_retries(place, no_kernel):
    once = "if not os.path.exists('tried'):\n    open('tried', 'w').close()\n    raise OSError('busy')"
    toy(place / "nb", "01_toy", ("check", once))
    Path("s.yaml").write_text("recipe: 1\ngrid: {seed: [1]}\nretries: 1\n")
    assert sweep() == 0 and len(no_kernel) == 2
    [done] = [json.loads(path.read_text()) for path in Path("out/points").glob("*/row.json")]
    assert done["tries"] == 2 and [row["speedup"] for row in done["rows"]] == [3.0]


def test_killed_at_any_moment_every_point_is_there_once(place):
    toy(place / "nb", "01_toy", ("", STARTS))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done, killed = {}, 0
    moment = random.Random(7)
    for moments in (*(moment.randrange(22) for _ in range(3)), -1):
        for path, content in done.items():
            assert path.read_bytes() == content
        command = [sys.executable, str(DRIVER), str(moments), "sweep", "s.yaml", "--out", "out"]
        ended = subprocess.run(command, env=env, capture_output=True, text=True)
        killed += ended.returncode == -signal.SIGKILL
        done = {path: path.read_bytes() for path in Path("out/points").glob("*/row.json")}
    assert killed == 3 and ended.returncode == 0, ended.stderr
    rows = rows_in()
    assert len(rows) == 12 and len({row["point"] for row in rows}) == 12
    assert sorted(row["speedup"] for row in rows) == sorted([2.0 + seed for seed in range(6)] * 2)
    starts = Path("starts").read_text().splitlines()
    assert len(set(starts)) == 12 and len(starts) <= 12 + killed  # at most the point under way starts again


@pytest.mark.parametrize("moments", range(8))
def test_no_moment_within_a_point_loses_or_doubles_it(place, moments):
    """The moments of one point: status running, status done, row.json, rows.jsonl; before and after each."""
    Path("s.yaml").write_text("recipe: 1\ngrid: {seed: [4]}\n")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for number in (moments, -1):
        command = [sys.executable, str(DRIVER), str(number), "sweep", "s.yaml", "--out", "out"]
        ended = subprocess.run(command, env=env, capture_output=True, text=True)
        assert ended.returncode == (-signal.SIGKILL if number >= 0 else 0), ended.stderr
    assert [row["speedup"] for row in rows_in()] == [6.0]


# A cell that says that it runs, starts a child, and waits for good, unless the file `go` is there.
WAITS = """\
import os, pathlib, subprocess, threading
if seed == 1 and not pathlib.Path("go").exists():
    child = subprocess.Popen(["sleep", "1000"])
    with open("pids", "w") as fifo:
        fifo.write(f"{os.getpid()} {child.pid}")
    threading.Event().wait()
"""
LIMIT = 300  # seconds until a wait that never ends fails the test


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_real_kernels_end_with_a_killed_driver(place):
    toy(place / "nb", "01_toy", ("", WAITS))
    Path("s.yaml").write_text("recipe: 1\ngrid: {seed: [0, 1]}\n")
    os.mkfifo(place / "nb" / "pids")
    pids = os.open(place / "nb" / "pids", os.O_RDONLY | os.O_NONBLOCK)
    command = [sys.executable, "-m", "utils.cookbook.cli", "sweep", "s.yaml", "--out", "out"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    driver = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert select.select([pids], [], [], LIMIT)[0], "the second point never ran"
    left = [os.pidfd_open(int(pid)) for pid in os.read(pids, 100).split()]  # the kernel, and a child of its own
    driver.kill()
    driver.communicate(timeout=LIMIT)
    for process in left:
        assert select.select([process], [], [], LIMIT)[0], "a process is left"
        os.close(process)
    os.close(pids)
    [first] = Path("out/points").glob("*/row.json")
    before = first.read_bytes()
    (place / "nb" / "go").touch()
    again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "2 done (1 before), 0 failed" in again.stdout and first.read_bytes() == before
    assert [row["speedup"] for row in rows_in()] == [2.0, 3.0]


def test_real_kernels_that_hang_or_die_are_failed_points(place, capsys):
    toy(place / "nb", "01_toy", ("limits", "import os, threading\nif seed == 2:\n    os.kill(os.getpid(), 9)"))
    Path("s.yaml").write_text(f"recipe: 1\ngrid: {{seed: [2, 0]}}\ntime_limit: {LIMIT}\n")
    assert sweep() == 1
    out = capsys.readouterr().out
    assert "FAILED seed=2 (1 try)\n  cell [2], tag `limits`: the kernel died (SIGKILL: memory full?)\n" in out
    assert [row["speedup"] for row in rows_in()] == [2.0]
    toy(place / "nb", "01_toy", ("limits", "import threading\nthreading.Event().wait()"))
    Path("s.yaml").write_text("recipe: 1\ngrid: {seed: [1]}\ntime_limit: 3\n")
    assert sweep() == 1
    assert ": stopped at its limit of 3 s\n" in capsys.readouterr().out


def test_ctrl_c_ends_with_the_table_of_what_is_done(place, no_kernel, capsys):
    toy(place / "nb", "01_toy", ("check", "if seed == 1: raise KeyboardInterrupt"))
    assert sweep() == 130
    out = capsys.readouterr().out
    assert "2 done, 0 failed, 10 not run: the same command goes on" in out and len(rows_in()) == 2


def test_a_key_is_code_values_device_and_torch(place):
    spec = load_spec("s.yaml", resolve_toy)
    point = points_of(spec, place, here(spec.recipe))[0]

    def key(notebook: str = "01_toy", text: str = GRID, device: str | None = None, torch: str | None = None) -> str:
        Path("t.yaml").write_text(text)
        spec = load_spec("t.yaml", resolve_toy)
        found = here(spec.recipe)
        identity = Identity(
            (lambda name: device) if device else found.device_name, torch or found.torch, code=found.code
        )
        return points_of(spec, place, identity)[0].key

    assert key() == point.key == key(text=GRID + "parameters: {rate: 0.5}\nretries: 3\n")  # a default that is given
    assert key(text=GRID + "parameters: {rate: 0.6}\n") != point.key
    assert key(device="NVIDIA H200") != point.key and key(torch="9.9") != point.key
    toy(place / "nb", "01_toy", why="other prose")
    assert key() == point.key
    toy(place / "nb", "01_toy", ("", "new = 1"))
    assert key() != point.key
    assert read_done(point) is None


def resolve_toy(name: str) -> Path:
    return resolve(name, os.environ["COOKBOOK_NOTEBOOKS"])


def test_the_code_in_a_key_is_that_of_a_row():
    for path in find_recipes():
        assert here(path).code == rows_module.code_hash(path)


def test_a_row_file_of_something_else_is_not_a_done_point(place, no_kernel):
    assert sweep() == 0
    one, two, three, *_ = sorted(Path("out/points").glob("*/row.json"))
    one.write_text(one.read_text()[:-20])
    two.write_bytes(three.read_bytes())
    assert sweep() == 0 and len(no_kernel) == 12  # the status files of run still know both
    assert sorted(row["speedup"] for row in rows_in()) == sorted([2.0 + seed for seed in range(6)] * 2)
    for path in (one, two):
        path.write_text("{}")
        (path.parent / "01_toy.status.json").unlink()
    assert sweep() == 0 and len(no_kernel) == 14 and len(rows_in()) == 12


def test_a_file_is_the_old_one_until_it_is_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "row.json"
    write_whole(path, b"old")

    def killed(part, target):
        assert part.read_bytes() == b"new" and target.read_bytes() == b"old"
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"


def test_dry_run_shows_keys_what_is_done_and_what_is_left(place, no_kernel, capsys, monkeypatch):
    assert sweep("--dry-run", "--price", "3") == 0
    out = capsys.readouterr().out
    assert "12 to do; no finished point to estimate from: at most 12 h (the time limit)" in out
    assert "36.00 at 3 an hour" in out and not Path("out").exists() and no_kernel == []
    monkeypatch.setattr(run_module, "_duration", lambda copy: 600.0 if "a" in copy.parent.name else 1200.0)
    toy(place / "nb", "01_toy", ("check", "assert seed < 3, 'big'"))
    assert sweep() == 1
    capsys.readouterr()
    assert sweep("--dry-run", "--price", "3") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    spec = load_spec("s.yaml", resolve_toy)
    points = points_of(spec, Path.cwd() / "out", here(spec.recipe))
    for point in points:
        took = "10 min" if "a" in point.key else "20 min"
        seed, fast = point.parameters["seed"], point.parameters["fast"]
        state = f"done {took}" if seed < 3 else "failed before —"
        assert f"{seed} {fast} {point.key} {state}" in " ".join(out.split())
    mean = sum(600 if "a" in point.key else 1200 for point in points[:6]) / 6
    assert f"6 to do, about {time_text(6 * mean)}: mean of 6 finished points" in out
    assert f"{6 * mean / 3600 * 3:.2f} at 3 an hour" in " ".join(out.split())


def test_older_points_are_an_estimate_when_there_is_no_other(place, no_kernel, capsys, monkeypatch):
    monkeypatch.setattr(run_module, "_duration", lambda copy: 60.0)
    assert sweep() == 0
    toy(place / "nb", "01_toy", ("", "new = 1"))
    capsys.readouterr()
    assert sweep("--dry-run") == 0
    about = " ".join(capsys.readouterr().out.split())
    assert "12 to do, about 12 min: mean of 12 finished points of older code, other values or another machine" in about


def test_the_table_is_about_the_points_own_case(place, no_kernel, capsys):
    cell = (
        "import json\n"
        "for case, speedup in ((seed, 2.0), (99, 50.0)):\n"
        "    row = {'speedup': speedup, 'verdict': 'faster', 'same': True, 'rule': 'close', 'case.seed': case,\n"
        "           'case.kind': 'step', 'ci_low': 1.9, 'ci_high': 2.1}\n"
        "    other = row | {'case.kind': 'other', 'speedup': 9.0}\n"
        "    with open(rows, 'a') as file:\n"
        "        print(json.dumps(row), json.dumps(other), sep='\\n', file=file)"
    )
    toy(place / "nb", "01_toy", ("measure", cell), row=False)
    Path("s.yaml").write_text("recipe: 1\ngrid: {seed: [1, 2]}\nshow: {case.kind: step}\n")
    assert sweep() == 0
    out = capsys.readouterr().out
    assert (
        sum("2.00x  1.9–2.1" in line and " yes " in line for line in out.splitlines()) == 2
        and "8 rows" in out
        and "asks for" not in out
    )
    Path("s.yaml").write_text("recipe: 1\ngrid: {seed: [1, 2]}\nshow: {case.kind: stpe}\n")
    assert sweep() == 0
    assert "no row of 2 points has what `show` asks for (case.kind: stpe)" in capsys.readouterr().out


WRONG = [
    ("sweep", "Missing argument 'SPEC'"),
    ("sweep nope", "no sweep 'nope', and no such file; nearest: "),
    ("sweep bad.yaml", "bad.yaml, line 2: 01_toy has no parameter 'sede'; nearest: seed"),
    ("sweep s.yaml --engine rya", "--engine rya: no such engine; nearest: ray"),
    ("sweep s.yaml --address x:1", "--address x:1: is for --engine ray"),
    *[(f"sweep s.yaml --price {p}", f"--price {p}: expected money per hour") for p in ("-1", "inf", "-inf", "nan")],
    ("sweep s.yaml --price cheap", "Invalid value for '--price'"),
    ("sweep s.yaml --preset gup", "no preset 'gup', and no such file; nearest: gpu"),
    ("sweep s.yaml --out /proc/nowhere", "--out /proc/nowhere: cannot write there"),
    ("sweep s.yaml --out s.yaml", "--out s.yaml: not a folder"),
    ("sweep s.yaml --scratch /proc/nowhere", "--scratch /proc/nowhere: cannot write there"),
    ("sweep s.yaml --dry-run --out /proc/nowhere", "--out /proc/nowhere: cannot write there"),
    ("sweep s.yaml --dry-run --out s.yaml", "--out s.yaml: not a folder"),
    ("sweep s.yaml --dry-run --out s.yaml/in", "--out s.yaml/in: not a folder"),
    ("sweep s.yaml --dry-run --scratch s.yaml", "--scratch s.yaml: not a folder"),
]


@pytest.mark.parametrize(("command", "said"), WRONG, ids=[command for command, _ in WRONG])
def test_a_wrong_argument_is_one_line_and_status_2(place, capsys, monkeypatch, command, said):
    Path("bad.yaml").write_text("recipe: 1\ngrid: {sede: [1]}\n")
    monkeypatch.setattr(sweep_local, "run_local", lambda *args, **options: pytest.fail("something ran"))
    assert cli.main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("cookbook: ") and said in err and err.count("\n") == 1
    assert {path.name for path in Path.cwd().iterdir()} == {"s.yaml", "bad.yaml"}


def test_a_disk_too_small_is_said_before_work(place, no_kernel, capsys, monkeypatch):
    monkeypatch.setattr(sweep_points, "POINT_BYTES", 10**18)
    assert sweep() == 2 and no_kernel == []
    assert "MB needed for 12 points" in capsys.readouterr().err


def test_a_disk_that_fills_up_is_a_failed_point(place, no_kernel, capsys, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sweep_points, "write_done", full)
    assert sweep() == 1
    assert "row.json: No space left on device" in capsys.readouterr().out


def test_a_recipe_that_cannot_report_is_refused(place, capsys):
    path = place / "nb" / "01_toy.ipynb"
    path.write_text(path.read_text().replace("rows: str", "lines: str"))
    assert sweep() == 2
    assert "01_toy declares no parameter 'rows'" in capsys.readouterr().err


def test_without_ray_the_engine_says_how_to_get_it(place, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert sweep("--engine", "ray") == 2
    assert "ray is not installed here: " in capsys.readouterr().err


def test_a_dry_run_needs_no_ray_and_leaves_nothing_behind(place, no_kernel, capsys, monkeypatch):
    assert sweep("--dry-run") == 0
    keys = [point.key for point in points_of(load_spec("s.yaml", resolve_toy), place, here(place / "nb/01_toy.ipynb"))]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    capsys.readouterr()
    assert sweep("--engine", "ray", "--address", "10.0.0.5:1", "--dry-run", "--scratch", "new/caches") == 0
    out = capsys.readouterr().out
    assert all(key in out for key in keys) and "\nplanned for this machine: " in out
    assert [path.name for path in Path.cwd().iterdir()] == ["s.yaml"] and no_kernel == []


@pytest.mark.parametrize(
    ("installed", "address", "dry_run", "asked"),
    [
        (True, None, True, False),  # it would start a cluster
        (True, "10.0.0.5:1", True, True),
        (True, None, False, True),
        (False, "10.0.0.5:1", True, False),
    ],
)
def test_which_cluster_is_asked(monkeypatch, installed, address, dry_run, asked):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: "there" if installed else None)
    assert check_engine("ray", address, dry_run) is asked and check_engine("local", None, dry_run) is False


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_counts_done_failed_left_and_time(tmp_path, terminal):
    console = Console(force_terminal=terminal, width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    job = Job(tmp_path / "01_toy.ipynb", {})
    point = sweep_points.Point("key", job, tmp_path, {}, "CPU", "2", "code", "seed=1")
    with SweepBars(10, 2, [100.0], 4, console) as bars:
        assert bars.counts() == "2 done, 0 failed, 8 left, about 13 min"
        bars.start(point)
        bars.cell(3)
        bars.end(point, Outcome("01_toy", "done", [{}], 50.0))
        bars.start(point)
        bars.end(point, Outcome("01_toy", "failed"))
        assert bars.counts() == "3 done, 1 failed, 6 left, about 8 min"
    text = console.export_text()
    assert "seed=1: done, 1 row, 50 s (3 done, 0 failed, 7 left, about 9 min)" in text
    assert "seed=1: FAILED (3 done, 1 failed, 6 left, about 8 min)" in text
    assert ("[4/10] seed=1 …" in text) != terminal


def test_times_read_as_people_say_them():
    assert [time_text(s) for s in (0.2, 89, 95, 3600, 5400, 7800)] == [
        "1 s",
        "89 s",
        "2 min",
        "60 min",
        "1 h 30 min",
        "2 h 10 min",
    ]

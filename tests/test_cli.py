"""The command line: exit statuses, one-line errors, and what its commands show."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from toy_recipes import toy, write_notebook

from utils.cookbook import cli

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """Two toy recipes as the project's own, and a working folder apart from them."""
    toy(tmp_path / "nb", "01_toy")
    toy(tmp_path / "nb", "07_conv3d_to_linear")
    monkeypatch.setenv("COOKBOOK_NOTEBOOKS", str(tmp_path / "nb"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "nb"


WRONG = [
    ("rnu", "no command 'rnu'; nearest: run"),
    ("run nope", "no recipe 'nope'; there are: 01_toy, 07_conv3d_to_linear"),
    ("run 07_conv2d_to_linear", "no recipe '07_conv2d_to_linear'; nearest: 07_conv3d_to_linear"),
    (
        "run 07 -p sede 3",
        "07_conv3d_to_linear has no parameter 'sede'; nearest: seed; there are: device, fast, rate",
    ),
    (
        "run 07 -p lenght 3",
        "07_conv3d_to_linear has no parameter 'lenght'; nearest: ",
    ),
    ("run 07 -p seed three", "07_conv3d_to_linear: parameter 'seed' is int, got 'three' (for example 0)"),
    ("run 07 -p fast maybe", "parameter 'fast' is bool, got 'maybe' (for example True)"),
    ("run 07 -p sizes 3", "parameter 'sizes' is list[int], got '3' (for example [1, 2])"),
    ("run -p seed 1", "-p seed 1: for which recipe? name exactly one, such as: run 01 -p"),
    ("run 01 07 -p seed 1", "-p seed 1: for which recipe?"),
    ("run 07 -p seed", "-p seed: expected a name and a value, such as -p seed 1"),
    ("run 07 -p seed=2", "-p seed=2: expected a name and a value, such as -p seed 2"),
    ("run --preset missing.yaml", "no preset 'missing.yaml', and no such file; nearest: gpu"),
    ("run --preset ../wrong.yaml", "../wrong.yaml: 01_toy has no parameter 'sede'; nearest: seed"),
    ("run --out ../nb/01_toy.ipynb", "01_toy.ipynb: not a folder"),
    ("run --out /proc/nowhere", "--out /proc/nowhere: cannot write there"),
    ("run --ot x", "No such option: --ot"),
    ("run --timeout soon", "Invalid value for '--timeout'"),
    ("check nope", "no recipe 'nope'"),
    ("refresh nope", "no recipe 'nope'"),
    ("refresh", "Missing argument"),
    ("lab nope", "no recipe 'nope'"),
    ("bench nope", "no benchmark 'nope'"),
]


@pytest.mark.parametrize(("command", "said"), WRONG, ids=[command for command, _ in WRONG])
def test_a_wrong_argument_is_one_line_and_status_2(notebooks, tmp_path, capsys, monkeypatch, command, said):
    (tmp_path / "wrong.yaml").write_text("01_toy: {sede: 1}\n")
    monkeypatch.setattr("utils.cookbook.run.run_recipes", lambda *args, **options: pytest.fail("something ran"))
    monkeypatch.setattr(cli, "become", lambda command: pytest.fail("something ran"))
    assert cli.main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("cookbook: ") and said in err and err.count("\n") == 1
    assert list((tmp_path / "work").iterdir()) == []


def test_help_is_what_comes_without_a_command(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert "Usage: ./cookbook" in out and "refresh" in out
    assert max(map(len, out.splitlines())) <= 80 and "..." not in out.partition("Commands:")[2]


def test_help_and_errors_import_nothing_heavy():
    code = (
        "import sys; from utils.cookbook import cli; cli.main(['--help']); cli.main(['run', 'nope']);"
        "print([m for m in ('torch', 'papermill', 'pandas', 'transformers', 'nbclient') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_run_reports_rows_failures_and_status(notebooks, tmp_path, capsys):
    toy(notebooks, "09_fails", ("check", "assert False, 'not equal'"))
    assert cli.main(["run", "7", "9", "--out", "here"]) == 1
    out, err = capsys.readouterr()
    assert err == "" and (tmp_path / "work" / "here" / "07_conv3d_to_linear.status.json").exists()
    assert "07_conv3d_to_linear: done, 1 row" in out and "FAILED 09_fails.ipynb, cell [2], tag `check`" in out
    table = out[out.index("recipe ") :].splitlines()
    assert table[2].split()[:5] == ["07_conv3d_to_linear", "2.00x", "—", "yes", "faster"]
    assert table[3].split()[:5] == ["09_fails", "—", "—", "—", "failed"]
    assert max(map(len, table)) <= 80
    assert cli.main(["run", "07_conv3d", "-p", "seed", "0", "--out", "here", "--wide"]) == 0
    out = capsys.readouterr().out
    assert "kept from an earlier run" in out and "yes (bitwise)" in out and "break-even" in out


def test_values_from_the_command_line_win_over_the_preset(notebooks, tmp_path):
    (tmp_path / "mine.yaml").write_text("01: {seed: 4, rate: 0.25}\n07: {seed: 5}\n")
    preset = str(tmp_path / "mine.yaml")
    jobs = cli.plan([], [], preset)
    assert [(job.recipe, job.values["seed"]) for job in jobs] == [("01_toy", 4), ("07_conv3d_to_linear", 5)]
    assert cli.plan(["01"], ["seed", "6"], preset)[0].values == {"seed": 6, "rate": 0.25}
    assert [job.recipe for job in cli.plan(["1", "01_toy", str(notebooks / "01_toy.ipynb")], [], None)] == ["01_toy"]


def test_a_value_may_start_with_a_dash():
    given = cli.pair_parameters(["run", "1", "-p", "seed", "-1", "--fresh", "--", "-p"])
    assert given == ["run", "1", "-pseed", "-p-1", "--fresh", "--", "-p"]
    assert cli.pair_parameters(["test", "-p", "no:cacheprovider"]) == ["test", "-p", "no:cacheprovider"]


@pytest.fixture
def became(monkeypatch):
    """Commands that the process would have become."""
    commands = []
    monkeypatch.setattr(cli, "become", commands.append)
    monkeypatch.setattr(os, "chdir", lambda folder: commands.append(folder))
    return commands


def test_test_is_pytest_in_the_root(notebooks, became):
    Path("mine.py").touch()
    assert cli.main(["test"]) == 0 and became == [ROOT, [sys.executable, "-m", "pytest", "-n", "2"]]
    became.clear()
    assert cli.main(["test", "-x", "mine.py::test_a", "-k", "not slow", "tests/absent.py"]) == 0
    mine = f"{Path('mine.py').resolve()}::test_a"
    assert became == [ROOT, [sys.executable, "-m", "pytest", "-x", mine, "-k", "not slow", "tests/absent.py"]]


def test_lab_opens_the_recipe_on_this_environment(notebooks, became, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "0")  # so that it is put back
    assert cli.main(["lab", "7", "--no-browser"]) == 0
    [command] = became
    assert command[:3] == [sys.executable, "-m", "jupyterlab"] and os.environ["JUPYTER_PREFER_ENV_PATH"] == "1"
    assert command[-2:] == [str(notebooks / "07_conv3d_to_linear.ipynb"), "--no-browser"] and "--allow-root" in command
    assert os.environ["PYTHONPATH"] == f"{ROOT}{os.pathsep}before"
    assert cli.main(["lab", "--no-browser"]) == 0
    assert became[1][-2:] == [str(ROOT / "notebooks"), "--no-browser"]


def test_lab_without_jupyterlab_says_how_to_get_it(became, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["lab"]) == 2 and became == []
    assert "-m pip install jupyterlab" in capsys.readouterr().err


def test_check_and_refresh_go_to_their_modules(notebooks, monkeypatch, capsys):
    from utils.cookbook import check, refresh

    monkeypatch.setattr(check, "check", lambda path: ["no cell `control`: break it once"] * path.name.startswith("07"))
    assert cli.main(["check", "1"]) == 0 and cli.main(["check"]) == 1
    out = capsys.readouterr().out
    assert "07_conv3d_to_linear.ipynb: no cell `control`" in out and out.endswith("2 recipes checked, 1 problem\n")

    def refresh_one(path, measure):
        if path.stem == "01_toy":
            raise refresh.RefreshError("01_toy.ipynb, cell [2]: boom")
        return f"{path.name}: rewritten, {measure}"

    monkeypatch.setattr(refresh, "refresh", refresh_one)
    assert cli.main(["refresh", "1", "7", "--measure"]) == 1
    assert (
        capsys.readouterr().out == "FAILED 01_toy.ipynb, cell [2]: boom\n07_conv3d_to_linear.ipynb: rewritten, True\n"
    )


def test_machine_shows_device_versions_and_limits(monkeypatch, capsys):
    from utils import cost

    asked = []

    def measure_peaks(device, dtype, refresh):
        asked.append((str(device), dtype, refresh))
        numbers = (2e12, 5e10, 4e10, 2**28)
        names = ("gemm_flops_per_s", "read_bytes_per_s", "copy_bytes_per_s", "buffer_bytes")
        return SimpleNamespace(**dict(zip(names, numbers, strict=True)), dtype=str(dtype).removeprefix("torch."))

    monkeypatch.setattr(cost, "measure_peaks", measure_peaks)
    monkeypatch.setenv("COOKBOOK_DEVICE", "cpu")
    assert cli.main(["machine", "--fresh"]) == 0
    out = capsys.readouterr().out
    assert [refresh for _, _, refresh in asked] == [True, True]
    assert max(map(len, out.splitlines())) <= 80
    for shown in (
        "cpu: ",
        "torch ",
        "2,000 GFLOP/s",
        "50.0 GB/s",
        "matrix product, bfloat16",
    ):
        assert shown in out


def test_claims_collects_the_stored_verdicts(notebooks, capsys):
    lines = (
        "S1  confirmed            bytes grow with L in all 8 lengths\nS2  not measurable here  needs a CUDA device\n"
    )
    write_notebook(notebooks / "03_sdpa.ipynb", ("claims", "show(...)"), outputs={"claims": lines})
    assert cli.main(["claims"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "S1    confirmed           03" in out and "→ bytes grow with L in all 8" in out
    assert "S3    not settled yet" in out and "1 confirmed, 1 not measurable here" in out
    assert cli.main(["claims", "--md"]) == 0
    assert "| confirmed | bytes grow with L in all 8 lengths | 03_sdpa |" in capsys.readouterr().out


def test_a_verdict_on_an_unknown_claim_is_named(notebooks, capsys):
    write_notebook(notebooks / "03_sdpa.ipynb", ("claims", ""), outputs={"claims": "Z99 refuted              no\n"})
    assert cli.main(["claims"]) == 2
    assert "03_sdpa.ipynb settles 'Z99', which data/claims.yaml does not have" in capsys.readouterr().err


def test_the_module_runs_as_a_program(notebooks):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "utils.cookbook.cli", "run", "nope"], env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "cookbook: no recipe 'nope'; there are: 01_toy, 07_conv3d_to_linear\n"

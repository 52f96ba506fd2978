"""`./cookbook` on bare, half-furnished and complete machines, with fakes of Python, pip and nvidia-smi."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fake_python import SITE, add_package

from utils.cookbook.start import COMMANDS, wanted_extras
from utils.cookbook.versions import pins

ROOT = Path(__file__).resolve().parents[1]
SETUP = ["cookbook", "pyproject.toml", "requirements.txt", "utils/__init__.py"]
SETUP += [f"utils/cookbook/{name}.py" for name in ("__init__", "start", "environment", "install", "gpu", "versions")]
PINS = pins(ROOT)
# Stands in for utils.cookbook.cli: tells what it was started with.
CLI = """
import json, os, sys, utils
names = ("PYTHONPATH", "VIRTUAL_ENV", "JUPYTER_PREFER_ENV_PATH")
variables = {name: os.environ.get(name) for name in names}
seen = {"argv": sys.argv[1:], "python": sys.executable, "utils": utils.__file__, "cwd": os.getcwd()}
print(json.dumps(seen | variables))
"""


@dataclass
class Result:
    status: int
    out: str
    err: str
    calls: list[list[str]]  # what the fake Pythons were asked to do

    @property
    def cli(self) -> dict:
        assert self.status == 0, self.err
        return json.loads(self.out)

    @property
    def pip(self) -> list[str] | None:
        """The arguments of `pip install`, None when it did not run."""
        runs = [call[4:] for call in self.calls if call[1:4] == ["-m", "pip", "install"]]
        assert len(runs) <= 1
        return runs[0] if runs else None

    @property
    def error(self) -> str:
        """The one line that says what is wrong."""
        assert self.status == 2, (self.status, self.err)
        assert "Traceback" not in self.err
        return self.err.splitlines()[-1]


@dataclass
class Machine:
    """A project folder without git, and a Python with the packages that `have` names."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in SETUP:
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "utils/cookbook/cli.py").write_text(CLI)
        self.python = self.folder / "system" / "bin" / "python"
        (self.folder / "bin").mkdir()
        self.python.parent.mkdir(parents=True)
        self.python.write_text(f"#!{sys.executable} -IS\n{(ROOT / 'tests/fake_python.py').read_text()}")
        self.python.chmod(0o755)

    @property
    def root(self) -> Path:
        return self.folder / "project"

    def have(self, **versions: str) -> None:
        for name, version in versions.items():
            add_package(self.folder / "system" / "lib" / SITE.parent.name / "site-packages", name, version)

    def program(self, name: str, text: str) -> None:
        (self.folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.folder / "bin" / name).chmod(0o755)

    def start(
        self, *argv: str, python: Path | None = None, cwd: Path | None = None, script=None, **variables
    ) -> Result:
        log = self.folder / "log"
        log.unlink(missing_ok=True)
        env = {"PATH": str(self.folder / "bin"), "FAKE_LOG": str(log)} | self.variables | variables
        command = [python or self.python, script or self.root / "cookbook", *argv]
        done = subprocess.run(command, env=env, cwd=cwd or self.folder, capture_output=True, text=True, timeout=60)
        calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return Result(done.returncode, done.stdout, done.stderr, calls)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture
def complete(machine):
    machine.have(**PINS)
    return machine


# --- which environment ------------------------------------------------------------------------------------------------


def test_bare_python_gets_a_venv_from_the_pins(machine):
    first = machine.start("run", "07", "-p", "seed", "1")
    assert "2 GB" in first.err and str(machine.root / ".venv") in first.err
    assert first.pip[-2:] == ["-r", str(machine.root / "requirements.txt")]
    assert first.cli["python"] == str(machine.root / ".venv/bin/python")
    assert first.cli["argv"] == ["run", "07", "-p", "seed", "1"]
    assert first.cli["VIRTUAL_ENV"] == str(machine.root / ".venv")
    assert first.cli["JUPYTER_PREFER_ENV_PATH"] == "1"


def test_nothing_is_done_or_said_twice(machine):
    machine.start("machine")
    second = machine.start("machine")
    assert second.cli["python"] == str(machine.root / ".venv/bin/python")
    assert second.err == ""
    assert [call[1:] for call in second.calls[1:]] == [["-P", "-m", "utils.cookbook.cli", "machine"]]


def test_complete_python_is_used_as_it_is(complete):
    started = complete.start("run")
    assert started.cli["python"] == str(complete.python)
    assert started.cli["VIRTUAL_ENV"] is None
    assert not (complete.root / ".venv").exists()
    assert started.err == ""


def test_difference_from_the_pins_is_told_once_per_change(complete):
    site = complete.folder / "system" / "lib" / SITE.parent.name / "site-packages"
    (site / f"torch-{PINS['torch']}.dist-info").rename(site / "torch-2.11.0+cu130.dist-info")
    metadata = site / "torch-2.11.0+cu130.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace(PINS["torch"], "2.11.0+cu130"))
    first = complete.start("run")
    assert first.cli["python"] == str(complete.python)
    assert f"torch 2.11.0+cu130 (tested: {PINS['torch']})" in first.err and first.err.count("\n") == 1
    assert complete.start("run").err == ""
    metadata.write_text(metadata.read_text().replace("2.11.0", "2.10.0"))
    assert "torch 2.10.0" in complete.start("run").err


@pytest.mark.parametrize("torch", ["2.11.0+cu130", "2.8.0a0+5228986c39.nv25.6"])
def test_torch_in_range_is_kept(machine, torch):
    machine.have(torch=torch, transformers="5.17.0", numpy="1.26.4")
    started = machine.start("run")
    assert f"keeping torch {torch} of {machine.python}" in started.err and " MB" in started.err
    pip = started.pip
    assert Path(pip[pip.index("-c") + 1]).read_text() == f"torch=={torch}\n"
    assert "-r" not in pip and not [argument for argument in pip if argument.startswith("torch")]
    assert f"papermill=={PINS['papermill']}" in pip, "what is missing comes as pinned"
    assert f"numpy=={PINS['numpy']}" in pip, "what is out of range too"
    assert "transformers>=5.17,<6" in pip, "what is there is named, so that pip keeps what it needs"
    config = (machine.root / ".venv/pyvenv.cfg").read_text()
    assert "include-system-site-packages = true" in config
    assert started.cli["python"] == str(machine.root / ".venv/bin/python")
    kernel = json.loads((machine.root / ".venv/share/jupyter/kernels/python3/kernel.json").read_text())
    assert kernel["argv"][0] == "python"
    again = machine.start("run")
    assert again.pip is None and again.err == ""


def test_torch_out_of_range_is_replaced(machine):
    machine.have(torch="2.6.0+cu124")
    started = machine.start("run")
    assert "-r" in started.pip
    assert "include-system-site-packages = false" in (machine.root / ".venv/pyvenv.cfg").read_text()


def test_another_torch_beneath_a_light_venv_is_noticed(machine):
    machine.have(torch="2.11.0")
    machine.start("run")
    site = machine.folder / "system" / "lib" / SITE.parent.name / "site-packages"
    shutil.rmtree(site / "torch-2.11.0.dist-info")
    machine.have(torch="2.12.0")
    started = machine.start("run")
    assert "keeping torch 2.12.0" in started.err
    assert (machine.root / ".venv/keep-torch.txt").read_text() == "torch==2.12.0\n"


def test_venv_whose_python_is_gone_is_made_again(machine):
    machine.start("run")
    python = machine.root / ".venv/bin/python"
    python.unlink()
    python.symlink_to(machine.folder / "uninstalled" / "python")
    assert machine.start("--help").out.startswith("Usage: ./cookbook COMMAND")
    started = machine.start("run")
    assert started.pip is not None and started.cli["python"] == str(python)


def test_finished_venv_is_used_from_another_python(machine):
    machine.start("run")
    machine.have(torch="2.11.0")  # in range, but the rest is missing: no reason to make a light one
    started = machine.start("run")
    assert started.pip is None
    assert started.cli["python"] == str(machine.root / ".venv/bin/python")


def test_new_pins_bring_the_venv_up_to_date(machine):
    machine.start("run")
    requirements = machine.root / "requirements.txt"
    requirements.write_text(requirements.read_text() + "einops==0.8.1\n")
    started = machine.start("run")
    assert "completing" in started.err and started.pip is not None
    assert list(machine.root.glob(".venv/lib/*/site-packages/einops-*"))
    assert machine.start("run").pip is None


def test_lab_installs_jupyterlab_on_demand(complete):
    shutil.rmtree(next(complete.folder.glob("system/lib/*/site-packages/jupyterlab-*")))
    assert complete.start("run").pip is None
    started = complete.start("lab", "07")
    assert f"jupyterlab=={PINS['jupyterlab']}" in started.pip
    assert started.cli["python"] == str(complete.root / ".venv/bin/python")
    assert complete.start("lab").pip is None
    assert complete.start("run").cli["python"] == str(complete.python)


def test_extra_is_added_to_a_finished_venv(machine):
    requirements = machine.root / "requirements.txt"
    requirements.write_text(re.sub(r"jupyterlab==.*\n", "", requirements.read_text()))
    machine.start("run")
    machine.have(torch="2.11.0")
    started = machine.start("lab")
    assert started.pip[-1].startswith("jupyterlab>=")
    assert "include-system-site-packages = false" in (machine.root / ".venv/pyvenv.cfg").read_text()
    assert machine.start("lab").pip is None


@pytest.mark.parametrize(
    ("command", "extras"),
    [
        ("run 07", ()),
        ("lab", ("lab",)),
        ("book", ("book",)),
        ("sweep a.yaml", ()),
        ("sweep a.yaml --engine ray", ("ray",)),
        ("sweep a.yaml --engine ray --dry-run", ()),
    ],
)
def test_extras_of_a_command(command, extras):
    assert wanted_extras(command.split()) == extras


def test_active_unfinished_venv_is_finished_by_its_base(machine):
    machine.start("run", FAKE_PIP="interrupt")
    started = machine.start("run", python=machine.root / ".venv/bin/python")
    assert "-r" in started.pip
    assert started.cli["python"] == str(machine.root / ".venv/bin/python")
    assert machine.start("run", python=machine.root / ".venv/bin/python").pip is None


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_interrupted_install_goes_on(machine):
    interrupted = machine.start("run", FAKE_PIP="interrupt")
    assert interrupted.status == 130
    assert interrupted.err.splitlines()[-1] == "cookbook: interrupted; the same command goes on where it stopped"
    half = next(machine.root.glob(".venv/lib/*/site-packages/*.dist-info"))
    assert not (half / "INSTALLER").exists()
    resumed = machine.start("run")
    assert resumed.cli["argv"] == ["run"]
    assert (half / "INSTALLER").exists(), "a half-installed package must be installed again"
    assert not [call for call in resumed.calls if "venv" in call], "the .venv that is there is kept"


def test_failing_pip_is_one_line_and_goes_on(machine):
    failed = machine.start("run", FAKE_PIP="ERROR: No matching distribution found for torch==2.13.0")
    assert "pip failed: No matching distribution found for torch==2.13.0; check the network" in failed.error
    assert "it goes on" in failed.error
    assert machine.start("run").status == 0


def test_disk_full_while_pip_runs(machine):
    failed = machine.start("run", FAKE_PIP="ERROR: [Errno 28] No space left on device")
    assert "make room" in failed.error


def test_disk_too_small(machine):
    failed = machine.start("run", FAKE_FREE_MB="700")
    assert "700 MB free" in failed.error and "make room" in failed.error
    assert failed.pip is None


def test_no_write_access(machine):
    failed = machine.start("run", FAKE_READ_ONLY="1")
    assert f"cannot write to {machine.root}" in failed.error
    assert not (machine.root / ".venv").exists()


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_venv_missing(machine, module):
    failed = machine.start("run", FAKE_WITHOUT=module)
    assert f"apt-get install python3.{sys.version_info.minor}-venv" in failed.error
    assert "same command again" in failed.error


def test_python_too_old(machine):
    failed = machine.start("run", FAKE_VERSION="3.9.1")
    assert failed.error.startswith("cookbook: Python 3.9 is too old, Python 3.11 or newer is needed: install a newer")
    machine.program("python3.12", "exit 0")
    assert f"run `python3.12 {machine.root}/cookbook` instead" in machine.start("run", FAKE_VERSION="3.9.1").error


def test_script_parses_on_old_pythons():
    """No syntax newer than Python 2.7: otherwise an old Python prints a SyntaxError in place of the way out."""
    newer = (
        ast.JoinedStr | ast.NamedExpr | ast.AnnAssign | ast.Match | ast.Nonlocal | ast.AsyncFunctionDef | ast.Starred
    )
    for node in ast.walk(ast.parse((ROOT / "cookbook").read_text())):
        assert not isinstance(node, newer), ast.unparse(node)
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            assert node.returns is None and not arguments.kwonlyargs and not arguments.posonlyargs
            assert not any(argument.annotation for argument in arguments.args)
        assert not (isinstance(node, ast.Raise) and node.cause)


@pytest.mark.parametrize("name", ["python2.7", "python3.6", "python3.8", "python3.10"])
def test_old_python_for_real(machine, name):
    old = shutil.which(name)
    if old is None or subprocess.run([old, "-c", ""], capture_output=True).returncode != 0:
        pytest.skip(f"no {name} here")
    command = [old, str(machine.root / "cookbook"), "run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(rf"cookbook: Python {name[6:]} is too old, .*\n", done.stderr)


# --- help and wrong commands ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["--help"], ["run", "-h"]])
def test_help_installs_nothing(machine, argv):
    helped = machine.start(*argv)
    assert helped.status == 0 and helped.err == ""
    assert all(re.search(rf"^  {command} ", helped.out, re.MULTILINE) for command in COMMANDS)
    assert all(len(line) <= 80 for line in helped.out.splitlines()[:-2])
    assert not {path.name for path in machine.root.iterdir()} & {".venv", "build"}


def test_help_comes_from_the_cli_when_it_can(complete):
    assert complete.start("run", "--help").cli["argv"] == ["run", "--help"]
    assert not (complete.root / "build").exists()


def test_unknown_command_installs_nothing(machine):
    failed = machine.start("rnu")
    assert failed.error == "cookbook: no command 'rnu'; nearest: run"
    assert failed.pip is None


def test_builtin_help_names_the_commands_of_the_cli():
    from utils.cookbook.cli import app

    assert set(COMMANDS) == {command.name or command.callback.__name__ for command in app.registered_commands}


# --- where it is started from -----------------------------------------------------------------------------------------


def test_any_folder_and_through_a_link(complete, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "utils").mkdir(parents=True)
    (elsewhere / "utils" / "__init__.py").write_text("raise SystemExit('the wrong utils')")
    link = elsewhere / "link"
    link.symlink_to(complete.root / "cookbook")
    seen = complete.start("run", cwd=elsewhere, script=link).cli
    assert seen["utils"] == str(complete.root / "utils/__init__.py")
    assert seen["cwd"] == str(elsewhere)
    assert seen["PYTHONPATH"] == str(complete.root)


def test_broken_git_does_not_matter(complete):
    (complete.root / ".git").write_text("gitdir: /nowhere\n")
    assert complete.start("run").status == 0


def test_utils_of_a_venv_can_be_imported_and_the_folder_moved(machine):
    machine.start("run")
    pth = next(machine.root.glob(".venv/lib/*/site-packages/inference_acceleration_cookbook.pth"))
    assert (pth.parent / pth.read_text().strip()).resolve() == machine.root
    other = machine.folder / "moved project"
    machine.root.rename(other)
    started = machine.start("run", script=other / "cookbook")
    assert started.pip is None and started.cli["python"] == str(other / ".venv/bin/python")
    assert (other / ".venv/bin/papermill").read_text() == f"#!{other}/.venv/bin/python\n"


def test_linked_venv_of_another_copy_stays_as_it_is(machine, tmp_path):
    machine.start("run")
    copy = tmp_path / "copy"
    shutil.copytree(machine.root, copy, ignore=shutil.ignore_patterns(".venv"))
    (copy / ".venv").symlink_to(machine.root / ".venv")
    started = machine.start("run", script=copy / "cookbook")
    assert started.pip is None and started.cli["utils"] == str(copy / "utils/__init__.py")
    assert (machine.root / ".venv/bin/papermill").read_text() == f"#!{machine.root}/.venv/bin/python\n"


def test_foreign_utils_on_pythonpath_is_named_once(complete, tmp_path):
    other = tmp_path / "other"
    (other / "utils").mkdir(parents=True)
    (other / "utils" / "__init__.py").write_text("")
    started = complete.start("run", PYTHONPATH=str(other))
    assert started.cli["utils"] == str(complete.root / "utils/__init__.py")
    assert started.cli["PYTHONPATH"] == f"{complete.root}{os.pathsep}{other}"
    assert f"another `utils` is at {other}/utils/__init__.py" in started.err
    assert complete.start("run", PYTHONPATH=str(other)).err == ""


def test_foreign_utils_in_front_of_ours_stops(complete):
    front = complete.folder / "system" / "front" / "utils"
    front.mkdir(parents=True)
    (front / "__init__.py").write_text("")
    failed = complete.start("run")
    assert f"another `utils` hides the cookbook's own: {front}/__init__.py" in failed.error


# --- GPUs -------------------------------------------------------------------------------------------------------------

SMI = """case "$1" in
--query-gpu*) echo "NVIDIA H200, 550.54.15";;
*) echo "| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4 |";;
esac"""


@pytest.fixture
def rented(complete):
    """A machine with a card; FAKE_CUDA_ERROR makes torch unable to use it."""
    complete.program("nvidia-smi", SMI)
    torch = complete.folder / "system/lib" / SITE.parent.name / "site-packages/torch.py"
    assert torch.exists()
    return complete


BROKEN = {"FAKE_CUDA_ERROR": "The NVIDIA driver on your system is too old (found version 12040)."}


def probes(result: Result) -> int:
    return sum("import json, torch" in part for call in result.calls for part in call)


def test_gpu_that_torch_cannot_use_stops_with_the_way_out(rented):
    failed = rented.start("run", **BROKEN)
    for part in ("NVIDIA H200", "550.54.15", "up to CUDA 12.4", "CUDA 13.0", "too old", "-p device cpu"):
        assert part in failed.error
    assert "remove .venv" not in failed.error
    assert rented.start("run").status == 0, "a failure is not remembered"


def test_gpu_message_names_the_venv_that_is_in_the_way(machine):
    machine.program("nvidia-smi", SMI)
    failed = machine.start("run", **BROKEN)
    assert "remove .venv and start ./cookbook with a Python whose torch fits" in failed.error


@pytest.mark.parametrize(
    ("argv", "variables"),
    [
        (["run", "07", "-p", "device", "cpu"], {}),
        (["run", "--preset", "cpu"], {}),
        (["run"], {"COOKBOOK_DEVICE": "cpu"}),
        (["run"], {"CUDA_VISIBLE_DEVICES": ""}),
        (["claims"], {}),
    ],
)
def test_going_on_without_the_gpu(rented, argv, variables):
    started = rented.start(*argv, **BROKEN, **variables)
    assert started.cli["argv"] == argv
    assert probes(started) == 0


def test_usable_gpu_is_looked_at_once(rented):
    first, second = rented.start("run"), rented.start("run")
    assert first.status == 0 and probes(first) == 1
    assert second.status == 0 and probes(second) == 0 and second.err == ""
    assert probes(rented.start("run", CUDA_VISIBLE_DEVICES="0")) == 1


def test_torch_that_does_not_start_is_an_unusable_gpu(rented):
    torch = next(rented.folder.glob("system/lib/*/site-packages/torch.py"))
    torch.write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    assert "import torch fails: ImportError: libcudart.so.13" in rented.start("run").error


def test_nvidia_smi_without_a_card(complete):
    complete.program("nvidia-smi", "echo 'No devices were found'; exit 6")
    started = complete.start("run")
    assert started.status == 0 and probes(started) == 0
    assert "nvidia-smi fails (No devices were found); going on without a GPU" in started.err

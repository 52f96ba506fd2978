"""Stands in for a Python of a bare machine: `python`, `python -m venv` and `python -m pip`, without a network.

test_setup.py copies this file to PREFIX/bin/python, with a shebang that gives it no packages (-I -S). Its packages are
the folders NAME-VERSION.dist-info in PREFIX/lib/python3.*/site-packages; pip "installs" by making one. What it is told
to do wrong comes in the variables FAKE_*; what it was asked to do goes to the file FAKE_LOG.
"""

import collections
import json
import os
import re
import runpy
import shutil
import signal
import sys
from pathlib import Path

PREFIX = Path(__file__).resolve().parents[1]
SITE = PREFIX / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
TORCH = """
import os
__version__ = {version!r}
class version:
    cuda, hip = "13.0", None
class zeros:
    def __init__(self, *size, device):
        if "FAKE_CUDA_ERROR" in os.environ:
            raise RuntimeError(os.environ["FAKE_CUDA_ERROR"])
    def add_(self, other):
        return self
    def item(self):
        return 1
"""


def main(args: list[str]) -> None:
    be_this_python()
    with open(os.environ["FAKE_LOG"], "a") as log:
        log.write(json.dumps([PREFIX.name, *args]) + "\n")
    safe_path = args[:1] == ["-P"]
    args = args[safe_path:]
    if args[:2] == ["-m", "venv"]:
        make_venv(Path(args[-1]), "--system-site-packages" in args)
    elif args[:3] == ["-m", "pip", "install"]:
        pip_install(args[3:])
    elif args[:2] == ["-m", "pip"]:
        print("pip 1.0")
    else:
        front = PREFIX / "front"  # what a .pth file can do: be before everything
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [str(front)] * front.exists() + [""] * (not safe_path) + [part for part in path if part]
        if args[0] == "-c":
            exec(args[1], {"__name__": "__main__"})
        elif args[0] == "-m":
            sys.argv = args[1:]
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = args
            sys.path.insert(0, str(Path(args[0]).resolve().parent))
            runpy.run_path(args[0], run_name="__main__")


def be_this_python() -> None:
    sys.executable, sys.prefix, sys.base_prefix = str(PREFIX / "bin" / "python"), str(PREFIX), str(PREFIX)
    sys._base_executable = sys.executable
    sys.path.append(str(SITE))
    config = PREFIX / "pyvenv.cfg"
    if config.exists():
        settings = dict(line.split(" = ") for line in config.read_text().splitlines())
        outer = Path(settings["home"]).parent
        sys.base_prefix, sys._base_executable = str(outer), str(outer / "bin" / "python")
        if settings["include-system-site-packages"] == "true":
            sys.path.append(str(outer / SITE.relative_to(PREFIX)))
    if "FAKE_VERSION" in os.environ:
        sys.version_info = tuple(int(part) for part in os.environ["FAKE_VERSION"].split("."))
    if "FAKE_READ_ONLY" in os.environ:
        os.access = lambda *_: False
    if "FAKE_FREE_MB" in os.environ:
        usage = collections.namedtuple("usage", "free")
        shutil.disk_usage = lambda _: usage(int(os.environ["FAKE_FREE_MB"]) * 10**6)
    for module in os.environ.get("FAKE_WITHOUT", "").split():
        sys.modules[module] = None


def make_venv(venv: Path, light: bool) -> None:
    shutil.rmtree(venv, ignore_errors=True)
    (venv / "bin").mkdir(parents=True)
    (venv / SITE.relative_to(PREFIX)).mkdir(parents=True)
    shutil.copy(__file__, venv / "bin" / "python")
    (venv / "bin" / "papermill").write_text(f"#!{venv}/bin/python\n")
    settings = {"home": PREFIX / "bin", "include-system-site-packages": str(light).lower()}
    (venv / "pyvenv.cfg").write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))


def pip_install(args: list[str]) -> None:
    wanted = [arg for arg in args if re.match(r"[A-Za-z].*[=>]", arg)]
    if "-r" in args:
        lines = Path(args[args.index("-r") + 1]).read_text().splitlines()
        wanted += [line for line in lines if "==" in line]
    sabotage = os.environ.get("FAKE_PIP", "")
    if sabotage.startswith("ERROR"):
        sys.exit(f"WARNING: Retrying\n{sabotage}\n")
    for requirement in wanted:
        name, version = re.match(r"([\w.-]+)[=>]=([\d.]+)", requirement).groups()
        if list(SITE.glob(f"{name.replace('-', '_')}-*.dist-info")):
            continue
        add_package(SITE, name, version, whole=not sabotage)
        if sabotage == "interrupt":
            os.kill(os.getppid(), signal.SIGINT)
            sys.exit(1)


def add_package(site: Path, name: str, version: str, whole: bool = True) -> None:
    site.mkdir(parents=True, exist_ok=True)
    if name == "torch":
        (site / "torch.py").write_text(TORCH.format(version=version))
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if whole:
        (folder / "INSTALLER").write_text("pip\n")


if __name__ == "__main__":
    main(sys.argv[1:])

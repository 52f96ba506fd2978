"""Make `.venv` with pip: a light one over the running Python when its torch fits, otherwise all of requirements.txt.

An interrupted install goes on where it stopped; only the stamp, written last, makes it count. Standard library only.
"""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from .environment import Environment, SetupError, read_stamp, ready, say, stamp_path, wanted_hash, write_json
from .versions import installed, lacking, pins, ranges

# Rough MB on disk, with what each brings along, seen with the pins of requirements.txt. The others take little.
SIZES_MB = {"transformers": 170, "diffusers": 65, "numpy": 75, "scipy": 145, "pandas": 90, "matplotlib": 100}
SIZES_MB |= {"ipykernel": 75, "papermill": 25, "jupyterlab": 90, "ray": 290, "sphinx-book-theme": 120}
FULL_MB = 2500  # the least free space for a full install: 2 GB, and the download of torch


def install(root: Path, extras: tuple[str, ...]) -> Environment:
    """Make `.venv`, or bring it up to date, having said what is installed and how large it is."""
    if not os.access(root, os.W_OK):
        raise SetupError(f"cannot write to {root}: copy the folder to where you can, or start with a complete Python")
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        raise SetupError(
            f"`{sys.executable} -m venv` is missing: install it (Debian, Ubuntu: apt-get install {package}), "
            "or start with another Python, then run the same command again"
        )
    with _only_one(root), _disk_errors(root):
        if environment := ready(root, extras):  # another ./cookbook has just made it
            return environment
        missing = lacking(ranges(root, extras))
        stamp = read_stamp(root)
        light = "torch" not in missing and (stamp is None or stamp.light)
        _announce(root, missing, light)
        make_venv(root / ".venv", light)
        stamp_path(root).unlink(missing_ok=True)
        make_importable(root / ".venv", light)
        _remove_half_installed(root / ".venv")
        pip_install(root, light, missing, extras)
        if light:
            own_kernel(root / ".venv")
        return stamp_venv(root, light, extras)


def _announce(root: Path, missing: dict[str, str], light: bool) -> None:
    size = sum(SIZES_MB.get(name, 5) for name in missing) if light else FULL_MB
    free = shutil.disk_usage(root).free // 10**6
    resuming = (root / ".venv" / "pyvenv.cfg").exists()
    if free < size and not (resuming and not light):
        raise SetupError(f"{free} MB free on the disk of {root}, {size} MB needed: make room, or move the folder")
    verb = "completing" if resuming else "making"
    if light:
        say(
            f"keeping torch {installed('torch')} of {sys.executable}; "
            f"{verb} {root / '.venv'} with {', '.join(missing)} (about {size} MB)"
        )
    else:
        say(
            f"{verb} {root / '.venv'} with pip from requirements.txt: {len(pins(root))} packages and what they need, "
            "about 2 GB on disk with a CPU build of torch, several GB with a CUDA build; this takes some minutes"
        )


@contextlib.contextmanager
def _only_one(root: Path) -> Iterator[None]:
    """One ./cookbook at a time installs; the others wait."""
    (root / "build").mkdir(exist_ok=True)
    with open(root / "build" / "setup.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another ./cookbook that is installing")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(
            f"cannot set up {root / '.venv'}: {error}; mend that, then run the same command again"
        ) from None


def make_venv(venv: Path, light: bool) -> None:
    """Create `.venv`, or keep the one that is there when it is of the right kind and its pip starts."""
    python, config = venv / "bin" / "python", venv / "pyvenv.cfg"
    kind = f"include-system-site-packages = {str(light).lower()}"
    fits = config.exists() and kind in config.read_text().splitlines() and _starts(python, light)
    # A killed venv, or one that uv made, may lack pip.
    if fits and (_has_pip(python) or (_run(python, "-m", "ensurepip").returncode == 0 and _has_pip(python))):
        return
    made = _run(sys.executable, "-m", "venv", "--clear", *(["--system-site-packages"] if light else []), venv)
    if made.returncode != 0:
        last = last_line(made.stdout + made.stderr)
        raise SetupError(f"`python -m venv {venv}` failed: {last}; mend that, then run the same command again")


def _starts(python: Path, light: bool) -> bool:
    """Does the Python of `.venv` start, is it new enough, and, for a light one, does it stand on the running Python?"""
    if not python.exists():
        return False
    asked = _run(python, "-c", "import sys; print(sys.version_info >= (3, 11), sys.base_prefix)")
    new_enough, _, base = asked.stdout.strip().partition(" ")
    return new_enough == "True" and (not light or base == sys.base_prefix)


def _has_pip(python: Path) -> bool:
    return _run(python, "-m", "pip", "--version").returncode == 0


def _run(*command: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True)


def last_line(text: str) -> str:
    """The line that tells most: pip's last ERROR, else the last that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no message"])[-1]


def site_packages(venv: Path) -> Path:
    return next(venv.glob("lib/python3.*/site-packages"))


def _remove_half_installed(venv: Path) -> None:
    """A killed pip can leave metadata and not all the files: the next pip would take that for installed.

    pip writes INSTALLER after the files (RECORD comes with them, and is written again at the very end).
    """
    for folder in site_packages(venv).glob("*.dist-info"):
        if not (folder / "INSTALLER").exists():
            shutil.rmtree(folder)


def pip_install(root: Path, light: bool, missing: dict[str, str], extras: tuple[str, ...]) -> None:
    """pip install, with its progress on a terminal; on failure pip's last line and the way on."""
    shown = sys.stderr.isatty()
    options = ["--no-input", "--disable-pip-version-check", *([] if shown else ["--quiet"])]
    command = [str(root / ".venv" / "bin" / "python"), "-m", "pip", "install", *options]
    command += what_to_install(root, light, missing, extras)
    # Its progress goes to stderr (2): stdout belongs to the command that is to come.
    pip = subprocess.Popen(command, env=os.environ | {"PIP_USER": "0"}, stdout=2, stderr=subprocess.PIPE, text=True)
    lines = []
    try:
        for line in pip.stderr:
            lines.append(line)
            if shown:
                sys.stderr.write(line)
    finally:
        pip.wait()  # after Ctrl-C too: pip has received it as well, and cleans up
    if pip.returncode != 0:
        full = any("no space left" in line.lower() for line in lines)
        way_out = "make room (TMPDIR moves pip's temporary files)" if full else "check the network"
        raise SetupError(
            f"pip failed: {last_line(''.join(lines))}; {way_out}, then run the same command again: it goes on"
        )


def what_to_install(root: Path, light: bool, missing: dict[str, str], extras: tuple[str, ...]) -> list[str]:
    """pip's arguments: what is pinned as pinned.

    A light .venv may not touch torch. The other packages that are there already are named too, by their ranges: only
    then does pip keep what they need, instead of installing newer versions under their feet.
    """
    pinned = pins(root)
    if not light:
        others = [name + spec for name, spec in ranges(root, extras).items() if name not in pinned]
        return ["-r", str(root / "requirements.txt"), *others]
    constraint = root / ".venv" / "keep-torch.txt"
    constraint.write_text(f"torch=={installed('torch')}\n", encoding="utf-8")
    wanted = {n: f"=={pinned[n]}" if n in missing and n in pinned else s for n, s in ranges(root, extras).items()}
    return ["-c", str(constraint), *(name + spec for name, spec in wanted.items() if name != "torch")]


def make_importable(venv: Path, light: bool) -> None:
    """`utils` from any folder; in a light .venv also the packages of the Python that it stands on."""
    site = site_packages(venv)
    (site / "inference_acceleration_cookbook.pth").write_text("../../../..\n")  # relative: a moved folder still works
    if light and sys.prefix != sys.base_prefix:  # that Python is a venv itself, which --system-site-packages passes by
        outer = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in outer]
        (site / "zz_outer_environment.pth").write_text("".join(lines))


def own_kernel(venv: Path) -> None:
    """A kernel called python3 that is this .venv, also where ipykernel lies outside it.

    Jupyter reads `python` as the Python that it runs in itself.
    """
    kernel = venv / "share" / "jupyter" / "kernels" / "python3" / "kernel.json"
    if not kernel.exists():
        kernel.parent.mkdir(parents=True, exist_ok=True)
        argv = ["python", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        kernel.write_text(json.dumps({"argv": argv, "display_name": "Python 3 (ipykernel)", "language": "python"}))


def stamp_venv(root: Path, light: bool, extras: tuple[str, ...]) -> Environment:
    """Ask the new environment what it has, and write the stamp."""
    python = root / ".venv" / "bin" / "python"
    command = [str(python), "-P", "-m", "utils.cookbook.environment", *extras]
    asked = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True)
    again = "remove .venv, then run the same command again"
    if asked.returncode != 0:
        raise SetupError(f"{python} fails: {last_line(asked.stderr)}; {again}")
    has = json.loads(asked.stdout)
    if still := ", ".join(name + spec for name, spec in has.pop("lacking").items()):
        raise SetupError(f"pip is done, but .venv still lacks {still}; {again}")
    base = os.path.realpath(python)
    stamp = Environment(str(python), light=light, base=base, wanted=wanted_hash(root), root=str(root), **has)
    write_json(stamp_path(root), asdict(stamp))
    return stamp

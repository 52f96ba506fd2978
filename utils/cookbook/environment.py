"""Which Python runs the cookbook, and what to say before a command starts in it. Standard library only.

The running Python is taken when it satisfies the ranges of pyproject.toml, so a rented image keeps its torch; otherwise
`.venv`, whose stamp says that an install was finished (install.py makes it).
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import distribution
from pathlib import Path

from . import gpu
from .versions import installed, lacking, off_pins, pins, ranges

EXTRAS = ("lab", "dev", "ray", "book")
NO_DEVICE = {"report", "claims", "book", "new", "refresh", "check", "readme"}  # these commands never touch a GPU
FIND_UTILS = """
from importlib.util import find_spec
found = find_spec("utils")
print(found and (found.origin or list(found.submodule_search_locations)[0]))
"""


class SetupError(Exception):
    """One line: what is wrong, and the way out."""


@dataclass
class Environment:
    """A Python that has all that is needed. As JSON in `.venv` it is the stamp of a finished install."""

    python: str
    torch: str  # version
    differs: str = ""  # from the tested versions, in words
    light: bool = False  # borrows the packages of the Python that it stands on
    extras: list[str] = field(default_factory=list)
    base: str = ""  # the interpreter that .venv stands on; empty for the running Python
    torch_at: str = ""  # folder of torch's metadata: gone when a borrowed torch was replaced
    wanted: str = ""  # hash of what was to be installed
    root: str = ""


def say(text: str) -> None:
    print(f"cookbook: {text}", file=sys.stderr, flush=True)


def ready(root: Path, extras: tuple[str, ...]) -> Environment | None:
    """The environment that can be used at once: the running Python, or a finished `.venv`."""
    wanted = ranges(root, extras)
    if not lacking(wanted):
        return Environment(sys.executable, installed("torch"), off_pins(wanted, pins(root)))
    stamp = read_stamp(root)
    return stamp if stamp and stamp.wanted == wanted_hash(root) and set(extras) <= set(stamp.extras) else None


def read_stamp(root: Path) -> Environment | None:
    """The stamp of `.venv` where it still tells the truth about the Python and the torch beneath it."""
    try:
        stamp = Environment(**json.loads(stamp_path(root).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    old = Path(stamp.root, ".venv")
    if stamp.root != str(root) and not (old.exists() and old.samefile(root / ".venv")):  # a link to it has not moved
        _moved(root, stamp)
    stands = os.path.realpath(stamp.python) == stamp.base and os.path.exists(stamp.base)
    return stamp if stands and os.path.isdir(stamp.torch_at) else None


def stamp_path(root: Path) -> Path:
    return root / ".venv" / "cookbook-stamp.json"


def _moved(root: Path, stamp: Environment) -> None:
    """The folder was moved or copied: the stamp and the programs in `.venv/bin` hold its old name."""
    old, new = f"{stamp.root}/.venv", f"{root}/.venv"
    stamp.root = str(root)
    stamp.python = stamp.python.replace(old, new, 1)
    stamp.torch_at = stamp.torch_at.replace(old, new, 1)
    stamp.base = stamp.base.replace(old, new, 1)  # where .venv holds a copy of its Python
    with contextlib.suppress(OSError):
        for program in Path(new, "bin").iterdir():
            if program.is_file() and not program.is_symlink() and program.stat().st_size < 100_000:
                program.write_bytes(program.read_bytes().replace(old.encode(), new.encode()))
        write_json(stamp_path(root), asdict(stamp))


def wanted_hash(root: Path) -> str:
    text = json.dumps(ranges(root, EXTRAS)) + (root / "requirements.txt").read_text(encoding="utf-8")
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def inventory(root: Path, extras: tuple[str, ...]) -> dict:
    """What the running Python has and lacks. install.py asks a new `.venv` for it."""
    wanted = ranges(root, extras)
    missing = lacking(wanted)
    return {
        "lacking": missing,
        "torch": installed("torch"),
        "torch_at": "" if "torch" in missing else str(distribution("torch")._path),
        "extras": [name for name in EXTRAS if not lacking(ranges(root, (name,)))],
        "differs": off_pins(wanted, pins(root)),
    }


def write_json(path: Path, content: dict) -> None:
    """Write whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps(content, indent=1), encoding="utf-8")
    new.replace(path)


def child_environment(environment: Environment, root: Path) -> dict[str, str]:
    """The variables of the command: our `utils`, and the programs and kernels of this environment, come first."""
    programs = os.path.dirname(environment.python)
    env = os.environ | {"JUPYTER_PREFER_ENV_PATH": "1"}
    for name, first in {"PYTHONPATH": str(root), "PATH": programs}.items():
        rest = [part for part in env.get(name, "").split(os.pathsep) if part and part != first]
        env[name] = os.pathsep.join([first, *rest])
    return env | {"VIRTUAL_ENV": str(root / ".venv")} if environment.base else env


def look_around(environment: Environment, root: Path, argv: list[str]) -> None:
    """Stop where the command cannot be right; tell what is new, once: `build/setup.json` holds what was told."""
    memory = root / "build" / "setup.json"
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    before = json.dumps(known)

    notes = foreign_utils(environment, root, known)
    if environment.differs:
        notes.append(f"using {environment.python}, which differs from the tested versions: {environment.differs}")
    problem = ""
    if argv[0] not in NO_DEVICE and not gpu.wants_cpu(argv):
        problem, note = gpu.check(environment.python, environment.torch, bool(environment.base), known)
        notes += [note] if note else []
    for note in notes:
        if note not in known.get("notes", []):
            say(note)
    known["notes"] = notes

    if json.dumps(known) != before:
        with contextlib.suppress(OSError):  # a read-only copy is told every time
            write_json(memory, known)
    if problem:
        raise SetupError(problem)


def foreign_utils(environment: Environment, root: Path, known: dict) -> list[str]:
    """Another package `utils`: an error where it hides ours, a note where plain papermill and pytest would take it.

    Looked for again only when PYTHONPATH or the installed packages have changed.
    """
    folders = sorted(Path(environment.python).parents[1].glob("lib/python3.*/site-packages"))
    key = [environment.python, os.environ.get("PYTHONPATH", ""), *(folder.stat().st_mtime_ns for folder in folders)]
    if known.get("utils", {}).get("key") == key:
        return list(known["utils"]["notes"])

    def found(env: dict[str, str]) -> str:
        done = subprocess.run([environment.python, "-P", "-c", FIND_UTILS], env=env, capture_output=True, text=True)
        return done.stdout.strip()

    ours = str(root / "utils" / "__init__.py")
    for_us, for_others = found(child_environment(environment, root)), found(dict(os.environ))
    if for_us != ours:
        raise SetupError(f"another `utils` hides the cookbook's own: {for_us or 'unknown'}; rename or remove it")
    notes = []
    if for_others not in (ours, "None"):
        notes.append(
            f"another `utils` is at {for_others}: ./cookbook takes its own, "
            f"plain papermill and pytest take that one unless PYTHONPATH begins with {root}"
        )
    known["utils"] = {"key": key, "notes": notes}
    return list(notes)


if __name__ == "__main__":
    print(json.dumps(inventory(Path(__file__).resolve().parents[2], tuple(sys.argv[1:]))))

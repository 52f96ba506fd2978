"""What `./cookbook` does: help, the environment, then the command in it. Standard library only."""

import difflib
import os
import sys
from itertools import pairwise
from pathlib import Path

from .environment import SetupError, child_environment, look_around, ready
from .install import install
from .versions import lacking, ranges

# For a bare machine, which cannot ask utils.cookbook.cli yet.
COMMANDS = {
    "run": "execute recipes with papermill, end with the results table",
    "sweep": "a recipe over a grid of parameters, on one machine or a Ray cluster",
    "test": "everything that CI runs; pytest arguments are passed on",
    "lab": "read and run the notebooks in JupyterLab",
    "report": "rows of many runs and machines as tables, curves and files",
    "book": "the recipes as a site to read",
    "claims": "what became of each claim of the sources",
    "doctor": "find the cliffs of your own model",
    "prescribe": "try what makes your own model faster",
    "bench": "the benchmarks of the helpers themselves",
    "evidence": "record on a card what needs a card, in parts that resume",
    "machine": "this machine: device, limits, versions",
    "new": "start a recipe from the template",
    "refresh": "make the stored outputs of a notebook again",
    "check": "the structure check of the notebooks",
    "readme": "renew the results table of README.md",
}


def main(argv: list[str], root: Path | None = None) -> int:
    """Find or make the environment, then become `python -m utils.cookbook.cli` in it.

    Returns an exit status only when it does not get there: 0 after the built-in help, 2 on an error, 130 on Ctrl-C.
    """
    root = root or Path(__file__).resolve().parents[2]
    try:
        return _start(argv, root)
    except SetupError as error:
        print(f"cookbook: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ncookbook: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130


def _start(argv: list[str], root: Path) -> int:
    asks_help = not argv or bool({"--help", "-h"} & set(argv))
    extras = () if asks_help else wanted_extras(argv)
    if Path(sys.prefix) == root / ".venv" and lacking(ranges(root, extras)):
        # .venv is active and unfinished: let the Python that it stands on finish it.
        os.execv(sys._base_executable, [sys._base_executable, str(root / "cookbook"), *argv])

    environment = ready(root, extras)
    if environment is None and asks_help:
        print(help_text())
        return 0
    if environment is None:
        if argv[0] not in COMMANDS:
            near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
            raise SetupError(f"no command {argv[0]!r}; {f'nearest: {near[0]}' if near else 'see ./cookbook --help'}")
        environment = install(root, extras)
    if not asks_help:
        look_around(environment, root, argv)

    env = child_environment(environment, root)
    # -P: the folder that the user stands in may hold another `utils`.
    os.execve(environment.python, [environment.python, "-P", "-m", "utils.cookbook.cli", *argv], env)


def help_text() -> str:
    """The help of a bare machine: names the commands and installs nothing."""
    lines = [f"  {name:<11}{text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "Usage: ./cookbook COMMAND [ARGUMENTS]",
            "",
            "Inference acceleration as executable notebooks: no speed-up without its proof.",
            "",
            "Commands:",
            *lines,
            "",
            "The first command sets up an environment: the running Python where it has what is",
            "needed, otherwise .venv with pip. After that, COMMAND --help shows the options.",
        ]
    )


def wanted_extras(argv: list[str]) -> tuple[str, ...]:
    """The optional dependencies of pyproject.toml that this command needs."""
    if "--dry-run" in argv:  # it changes nothing, so it installs nothing
        return ()
    if argv[0] == "sweep" and ("--engine=ray" in argv or ("--engine", "ray") in pairwise(argv)):
        return ("ray",)
    return (argv[0],) if argv[0] in ("lab", "book") else ()

"""`./cookbook COMMAND`: everything the project does from a shell.

Heavy imports (torch, papermill, pandas) stay inside the commands, so help and errors come at once. A wrong argument
is one line on stderr and exit status 2, before any work.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from .book_command import book
from .evidence_command import evidence
from .prescribe_command import prescribe
from .report_command import Report, report
from .sweep_command import sweep
from .usage import UsageError, usage

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "run"

app = typer.Typer(
    help="Inference acceleration as executable notebooks: no speed-up without its proof beside it.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def recipes() -> list[Path]:
    """The recipes of the project."""
    from .notebooks import find_recipes

    return find_recipes()


def recipe(name: str) -> Path:
    """A recipe by number, prefix, name or path. Raises ValueError with the nearest name."""
    from .notebooks import resolve

    return resolve(name)


@app.command()
def run(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[RECIPE]...", help="number, prefix, name or path")
    ] = None,
    parameter: Annotated[
        list[str] | None, typer.Option("-p", metavar="NAME VALUE", help="a parameter of the one recipe named")
    ] = None,
    preset: Annotated[str | None, typer.Option(metavar="cpu|gpu|FILE", help="parameters for a kind of machine")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="where executed notebooks and rows go (build/run)")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="repeat what an earlier run finished")] = False,
    wide: Annotated[bool, typer.Option("--wide", help="more columns: intervals, memory, limit, set-up")] = False,
    timeout: Annotated[float | None, typer.Option(min=1, metavar="SECONDS", help="limit per recipe")] = None,
    scratch: Annotated[Path | None, typer.Option(metavar="FOLDER", help="for caches and temporary files")] = None,
) -> None:
    """Execute recipes, show the results table.

    All recipes when none is named. A second run keeps what an earlier one finished.
    """
    with ExitStack() as stack:
        with usage():
            jobs = plan(names or [], parameter or [], preset)
            from .run import Interrupted, check_jobs, output_folder, run_recipes
            from .scratch import use_scratch

            if note := use_scratch(scratch, preset):
                print(f"cookbook: {note}", file=sys.stderr)
            folder = stack.enter_context(output_folder(Path.cwd() / (out or OUT), jobs))
            check_jobs(jobs)
        from .progress import Bars
        from .table import results_table

        try:
            with Bars() as progress:
                outcomes = run_recipes(jobs, folder, progress, fresh=fresh, timeout=timeout)
            status = 1 if any(outcome.state == "failed" for outcome in outcomes) else 0
        except Interrupted as interrupted:
            outcomes, status = interrupted.outcomes, 130
        print(results_table(outcomes, wide=wide))
    raise typer.Exit(status)


def plan(names: list[str], given: list[str], preset: str | None) -> list[Any]:
    """The jobs that the arguments of `run` ask for, with every value checked."""
    from .parameters import validate
    from .presets import load_preset
    from .run import Job

    paths = list(dict.fromkeys(recipe(name) for name in names)) if names else recipes()
    if not paths:
        raise UsageError("there is no recipe to run: notebooks/ holds none (./cookbook new NN_name writes one)")
    if given and len(names) != 1:
        raise UsageError(
            f"-p {given[0]} {given[1]}: for which recipe? name exactly one, such as: run {paths[0].stem[:2]} -p …"
        )
    values = validate(paths[0], dict(zip(given[::2], given[1::2], strict=True))) if given else {}
    presets = load_preset(preset, recipe) if preset else {}
    return [Job(path, presets.get(path.stem, {}) | values) for path in paths]


@app.command(context_settings=PASS_ON)
def test(context: typer.Context) -> None:
    """Everything that CI runs.

    Unit tests, structure check, every notebook under nbval, on two workers. Arguments go to pytest; with any, there is
    one worker unless they say -n.
    """
    arguments = [] if context.args else ["-n", "2"]
    for argument in context.args:
        file, mark, rest = argument.partition("::")
        exists = not argument.startswith("-") and Path(file).exists()
        arguments.append(f"{Path(file).resolve()}{mark}{rest}" if exists else argument)
    os.chdir(ROOT)
    become([sys.executable, "-m", "pytest", *arguments])


@app.command(context_settings=PASS_ON)
def lab(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="number, prefix, name or path")] = None,
) -> None:
    """JupyterLab on this environment's kernel. More arguments go to JupyterLab."""
    import importlib.util

    path = None
    if name and name.startswith("-"):
        context.args.insert(0, name)
    elif name:
        with usage():
            path = recipe(name)
    if importlib.util.find_spec("jupyterlab") is None:
        raise UsageError(f"jupyterlab is not installed here: {sys.executable} -m pip install jupyterlab")
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={ROOT}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")  # rented machines: one user, root
    # The kernel called python3 is this environment's, whatever the user has installed elsewhere.
    os.environ |= {"JUPYTER_PREFER_ENV_PATH": "1", "PYTHONPATH": with_root()}
    become([*command, *([str(path)] if path else [str(ROOT / "notebooks")]), *context.args])


@app.command()
def machine(fresh: Annotated[bool, typer.Option("--fresh", help="measure the limits again")] = False) -> None:
    """This machine: device, versions, limits.

    The limits that times are held against are measured, then cached.
    """
    from .limits import machine_table

    print(machine_table(fresh=fresh))


@app.command()
def claims(md: Annotated[bool, typer.Option("--md", help="as a Markdown table")] = False) -> None:
    """Every claim of the sources, and its verdict."""
    from .verdicts import claims_table

    with usage():
        table = claims_table(recipes(), markdown=md)
    print(table)


@app.command()
def check(names: Annotated[list[str] | None, typer.Argument(metavar="[RECIPE]...")] = None) -> None:
    """The structure check of recipes (all, when none is named)."""
    with usage():
        paths = [recipe(name) for name in names] if names else recipes()
    from .check import check as problems_of
    from .notebooks import shown_path

    problems = [(path, problem) for path in paths for problem in problems_of(path)]
    for path, problem in problems:
        print(problem if path.name in problem else f"{shown_path(path)}: {problem}")
    print(f"{len(paths)} recipe{'s' * (len(paths) != 1)} checked, {len(problems)} problem{'s' * (len(problems) != 1)}")
    raise typer.Exit(1 if problems else 0)


@app.command()
def refresh(
    names: Annotated[list[str], typer.Argument(metavar="RECIPE...")],
    measure: Annotated[bool, typer.Option("--measure", help="also renew the outputs that are never compared")] = False,
) -> None:
    """Store fresh outputs in recipes.

    Each is executed at its defaults on the CPU. Outputs that nbval does not compare are kept while the code before
    them is the same.
    """
    with usage():
        paths = [recipe(name) for name in names]
    from .refresh import RefreshError
    from .refresh import refresh as refresh_one

    failed = False
    for path in paths:
        try:
            print(refresh_one(path, measure=measure))
        except RefreshError as error:
            failed = True
            print(f"FAILED {error}")
    raise typer.Exit(1 if failed else 0)


@app.command()
def new(name: Annotated[str, typer.Argument(metavar="NN_name")]) -> None:
    """Write a new recipe that runs and passes the check."""
    from .new import new as write
    from .notebooks import shown_path

    with usage():
        path = write(name)
    print(f"{shown_path(path)}: written. Next: ./cookbook lab {path.stem[:2]}, then ./cookbook refresh {path.stem[:2]}")


@app.command(context_settings=PASS_ON)
def bench(context: typer.Context, name: Annotated[str | None, typer.Argument(metavar="[NAME]")] = None) -> None:
    """Run a benchmark; without a name: list them."""
    folder = ROOT / "tests" / "benchmarks"
    found = {path.stem.removesuffix("_bench"): path for path in sorted(folder.glob("*_bench.py"))}
    if name is None:
        print("\n".join(found) or "no benchmark in tests/benchmarks")
        return
    if name not in found:
        raise UsageError(f"no benchmark {name!r}; {one_of(name, found)}")
    os.environ["PYTHONPATH"] = with_root()
    code = f"import runpy; raise SystemExit(runpy.run_path({str(found[name])!r})['main']())"
    become([sys.executable, "-c", code, *context.args])


@app.command()
def doctor(
    target: Annotated[str, typer.Argument(metavar="PACKAGE.MODULE:FACTORY")],
    inputs: Annotated[str | None, typer.Option(metavar="PACKAGE.MODULE:MAKE_INPUTS")] = None,
) -> None:
    """Find the cliffs of your own model."""
    from .doctor import run_doctor

    raise typer.Exit(run_doctor(target, inputs))


@app.command()
def readme(
    check_only: Annotated[bool, typer.Option("--check", help="write nothing; exit status 1 when it is stale")] = False,
) -> None:
    """Renew the results table of README.md.

    It comes from committed rows and stored verdicts alone, so it is the same on every machine.
    """
    from .readme import renew

    with usage():
        stale = renew(ROOT / "README.md", recipes(), write=not check_only)
    print(
        "README.md: the results table " + ("is stale: ./cookbook readme" if stale and check_only else "is up to date")
    )
    raise typer.Exit(1 if stale and check_only else 0)


app.command(cls=Report)(report)
app.command()(book)
app.command()(sweep)
app.command()(prescribe)
app.command()(evidence)


def with_root() -> str:
    """PYTHONPATH with the project's root in front."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def become(command: list[str]) -> NoReturn:
    """Replace this process by another: its exit status and its signals are the command's own."""
    sys.stdout.flush()
    os.execv(command[0], command)


def one_of(name: str, names: Any) -> str:
    """After a wrong name: the nearest right one, or all of them."""
    close = get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"nearest: {close[0]}" if close else f"there are: {', '.join(names) or 'none'}"


def pair_parameters(arguments: list[str]) -> list[str]:
    """`-p NAME VALUE` as the two options `-p NAME -p VALUE`: typer has no options of two values.

    Everything after a lone `--`, and arguments of commands other than `run`, stay as they are.
    """
    if arguments[:1] != ["run"]:
        return arguments
    paired, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*paired, argument, *rest]
        if argument not in ("-p", "--parameter"):
            paired.append(argument)
            continue
        if len(rest) < 2 or rest[0].startswith("-"):
            example = rest[0].replace("=", " ", 1) if rest and "=" in rest[0] else "seed 1"
            raise UsageError(f"{' '.join([argument, *rest[:1]])}: expected a name and a value, such as -p {example}")
        # "-p=…" would keep the "="; glued to the option, a value may start with "-" (-p shift -1).
        paired += [f"-p{rest.pop(0)}", f"-p{rest.pop(0)}"]
    return paired


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0, 1 (a recipe or check failed), 2 (usage), 130 (Ctrl-C)."""
    arguments = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    # click's base of all usage errors, wherever this version of typer keeps its click
    click_error = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show "×" still gets the table
    try:
        if not arguments[0].startswith("-") and arguments[0] not in commands:
            raise UsageError(f"no command {arguments[0]!r}; {one_of(arguments[0], commands)}")
        result = app(pair_parameters(arguments), prog_name="./cookbook", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except UsageError as error:
        return say(str(error))
    except click_error as error:
        return say(error.format_message())
    except typer.Abort:
        return 130
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `./cookbook claims | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def say(message: str) -> int:
    print("cookbook: " + " ".join(message.split()), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

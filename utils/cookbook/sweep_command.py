"""`./cookbook sweep SPEC`: a recipe over many parameters, resumable at any point."""

from __future__ import annotations

import math
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from .usage import UsageError, usage

OUT = Path(__file__).resolve().parents[2] / "build" / "sweep"
ENGINES = ("local", "ray")


def sweep(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="a .yaml file, or a name of data/sweeps")],
    engine: Annotated[str, typer.Option(metavar="local|ray", help="here, or on a Ray cluster")] = "local",
    address: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="the Ray cluster (ray only)")] = None,
    preset: Annotated[str | None, typer.Option(metavar="cpu|gpu|FILE", help="instead of the spec's own")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="where it goes (build/sweep/NAME)")] = None,
    scratch: Annotated[Path | None, typer.Option(metavar="FOLDER", help="for caches and temporary files")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only show points, keys, and the time left")] = False,
    price: Annotated[float | None, typer.Option(metavar="MONEY", help="of an hour of one device")] = None,
) -> None:
    """Run a recipe over a grid of parameters.

    One row file and a table at the end. Start it again after a kill: what is done stays done.
    """
    with ExitStack() as stack:
        with usage():
            on_cluster = check_engine(engine, address, dry_run)
            if price is not None and not 0 <= price < math.inf:
                raise UsageError(f"--price {price:g}: expected money per hour, such as 2.5")
            from .notebooks import resolve
            from .run import check_jobs, output_folder
            from .scratch import use_scratch
            from .sweep_points import (
                check_disk,
                check_folder,
                here,
                known_seconds,
                points_of,
                read_done,
                write_done,
                write_rows,
            )
            from .sweep_spec import load_spec
            from .sweep_table import Result, estimate, plan_table, results_of

            loaded = load_spec(spec, resolve, preset)
            folder = Path.cwd() / (out or OUT / loaded.name)
            if dry_run:
                check_folder(folder, "--out")
                check_folder(scratch, "--scratch")
            else:
                if note := use_scratch(scratch, loaded.preset, loaded.disk_gb):
                    print(f"cookbook: {note}", file=sys.stderr)
                folder = stack.enter_context(output_folder(folder, []))
            cluster = None
            if on_cluster:
                from .sweep_ray import connect

                cluster = stack.enter_context(connect(address, loaded, scratch))
            points = points_of(loaded, folder, cluster.identity if cluster else here(loaded.recipe))
            todo = [point for point in points if read_done(point) is None]
            workers = cluster.check(todo) if cluster else 1
            if todo:  # papermill takes a second to import, which a sweep that is done should not cost
                check_jobs([todo[0].job])
            known = known_seconds(folder, points)
            about = estimate(loaded, len(todo), known, price, workers)
            if dry_run:
                print(f"{plan_table(loaded, points)}\n\n{about}")
                if engine == "ray" and not cluster:
                    print("planned for this machine: on other devices the points have other keys")
                return
            check_disk(folder, len(todo))
        before = len(points) - len(todo)
        print(f"{loaded.name}: {len(points)} points of {loaded.recipe.stem}, {before} done before\n{about}", flush=True)

        from .sweep_progress import SweepBars

        interrupted = False
        results = {point.key: Result(point, "waiting" if point in todo else "kept") for point in points}
        with SweepBars(len(points), before, known[0], cells(loaded.recipe)) as progress:
            progress.workers = workers
            try:
                for point, outcome, tries in run(todo, progress, loaded, cluster):
                    if outcome.state == "done":
                        try:
                            write_done(point, outcome, tries)
                        except OSError as error:
                            outcome.state, outcome.why = "failed", f"row.json: {error.strerror or error}"
                    results[point.key] = Result(point, outcome.state, outcome, tries)
                    progress.end(point, outcome)
            except KeyboardInterrupt:
                interrupted = True
        print(results_of(loaded, list(results.values()), folder, *write_rows(folder, points)))
        states = [result.state for result in results.values()]
    interrupted |= "interrupted" in states
    raise typer.Exit(130 if interrupted else 1 if {"failed", "waiting"} & set(states) else 0)


def run(todo, progress, spec, cluster):
    """The engine's (point, outcome, tries) as points end."""
    limits = {"retries": spec.retries, "time_limit": spec.time_limit}
    if cluster:
        return cluster.run(todo, progress, **limits)
    from .sweep_local import run_local

    return run_local(todo, progress, **limits)


def check_engine(engine: str, address: str | None, dry_run: bool = False) -> bool:
    """Is there a cluster to connect to? A dry run starts none: it asks only one that runs, and where Ray is installed.

    Raises UsageError for an engine that is not there.
    """
    import importlib.util

    from .parameters import nearest

    if engine not in ENGINES:
        raise UsageError(f"--engine {engine}: no such engine; {nearest(engine, ENGINES)}")
    if address is not None and engine != "ray":
        raise UsageError(f"--address {address}: is for --engine ray")
    if engine != "ray":
        return False
    installed = importlib.util.find_spec("ray") is not None
    if not installed and not dry_run:
        raise UsageError(f"ray is not installed here: {sys.executable} -m pip install 'ray>=2.40,<3'")
    return installed and (address is not None or not dry_run)


def cells(notebook: Path) -> int:
    """Code cells of the executed copy: those of the notebook, and the injected parameters."""
    from .parameters import code_cells

    return sum(bool(source.strip()) for source, _ in code_cells(notebook)) + 1

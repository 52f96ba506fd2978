"""`./cookbook evidence`: the one command for a machine with a card."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from .usage import UsageError, usage

OUT = Path(__file__).resolve().parents[2] / "build" / "gpu"
TIME_IS_UP = 75  # as EX_TEMPFAIL of sysexits.h: try again


def evidence(
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="where rows and logs go (build/gpu)")] = None,
    minutes: Annotated[float, typer.Option(min=1, help="how long this call may take")] = 9.0,
    preset: Annotated[str, typer.Option(metavar="gpu|cpu", help="cpu rehearses it without a card")] = "gpu",
    plan: Annotated[bool, typer.Option("--list", help="only show the parts and what is done")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="repeat what is done")] = False,
) -> None:
    """Record everything that needs a card.

    In parts that resume: exit status 75 means that time is up and the same command goes on.
    """
    from ..timing.clock import default_timer
    from .evidence import (
        FAILED,
        PENDING,
        TOO_LONG,
        parts,
        plan_table,
        read_states,
        record,
        state_of,
        to_do,
        write_states,
    )
    from .notebooks import find_recipes
    from .run import output_folder

    if preset not in ("gpu", "cpu"):
        raise UsageError(f"--preset {preset}: expected gpu or cpu")
    folder = (Path.cwd() / (out or OUT)).resolve()
    known = parts(find_recipes(), folder, preset)
    if plan:
        print(plan_table(known, folder))
        return
    if preset == "gpu" and (problem := no_card()):
        raise UsageError(f"{problem}; --preset cpu rehearses it without a card")
    with usage(), ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        stack.enter_context(output_folder(folder / "evidence", []))
        if fresh:
            write_states(folder, {})
        seconds = 60 * minutes
        for part, state in record(to_do(known, read_states(folder), seconds), folder, seconds, tell, default_timer()):
            tell(f"{part.name}: {state}")
    print(plan_table(known, folder))
    ended = [state_of(part, read_states(folder)) for part in known]
    if left := ended.count(PENDING):
        print(f"{left} of {len(known)} parts left: the same command goes on")
        raise typer.Exit(TIME_IS_UP)
    if too_long := ended.count(TOO_LONG):
        print(f"{too_long} of {len(known)} parts did not end in {minutes:g} minutes: --minutes gives them more")
    print("rows: ./cookbook report --adopt FILE puts a row file into data/results")
    raise typer.Exit(1 if FAILED in ended or TOO_LONG in ended else 0)


def no_card() -> str:
    """Why nothing can be recorded here; empty where torch can use a GPU."""
    import torch

    return "" if torch.cuda.is_available() else "evidence records an NVIDIA GPU, and torch can use none here"


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

"""`./cookbook prescribe package.module:factory [--inputs package.module:make_inputs]`: utils.prescribe from a shell.

`factory()` returns a model in eval mode, or a tuple of a model and its inputs. `make_inputs()`, or `make_inputs(i)`,
returns the inputs: one tensor, a tuple of arguments, or a mapping of keyword arguments.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .usage import UsageError

# Those of utils.prescribe_steps, which needs torch; a test holds them together.
STEPS = '"inference mode", linearize, SDPA, channels_last, torch.compile, threads, TF32, BF16, FP16, '
STEPS += 'cudnn.benchmark, "CUDA Graph"'


def prescribe(
    target: Annotated[str, typer.Argument(metavar="PACKAGE.MODULE:FACTORY")],
    inputs: Annotated[str | None, typer.Option(metavar="PACKAGE.MODULE:MAKE_INPUTS")] = None,
    allow_lossy: Annotated[bool, typer.Option("--allow-lossy", help="also try TF32, BF16 and FP16")] = False,
    skip: Annotated[list[str] | None, typer.Option(metavar="STEP", help=f"do not try it; one of {STEPS}")] = None,
) -> None:
    """Try what makes your own model faster."""
    raise typer.Exit(run_prescribe(target, inputs, allow_lossy=allow_lossy, skip=skip or ()))


def run_prescribe(
    target: str, inputs: str | None = None, *, allow_lossy: bool = False, skip: list[str] | tuple[str, ...] = ()
) -> int:
    """Print the prescription of a user's model; 0, or 2 after one line on stderr when something of theirs is wrong."""
    from torch import nn

    from ..prescribe import PrescribeError
    from ..prescribe import prescribe as prescribed
    from ..prescribe_code import model_code
    from .user_code import called, resolved

    try:
        factory = resolved(target, "factory")
        made = called(target, "factory")
        pair = isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)
        del made
        if inputs is None and not pair:
            raise UsageError(
                f"{target!r} returned no (model, inputs): give --inputs package.module:make_inputs for its inputs"
            )
        found = prescribed(
            (lambda: factory()[0]) if pair else factory,
            resolved(inputs, "inputs") if inputs is not None else lambda: factory()[1],
            allow_lossy=allow_lossy,
            skip=skip,
            model_code=model_code(target, gives_inputs=pair),
            progress=sys.stderr.isatty(),
        )
    except (UsageError, PrescribeError) as problem:
        print(f"prescribe: {problem}", file=sys.stderr)
        return 2
    print(found)
    return 0

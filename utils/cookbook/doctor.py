"""`./cookbook doctor package.module:factory [--inputs package.module:make_inputs]`: the report of utils.cliffs.

`factory()` returns a model, or a tuple of a model and its inputs. `make_inputs()` returns the inputs: one tensor, a
tuple of arguments, or a mapping of keyword arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from .. import cliffs
from ..linearize import linearize, restore
from ..prescribe_subject import where
from .usage import UsageError
from .user_code import called


def run_doctor(target: str, inputs: str | None = None) -> int:
    """Print the report for a user's model; 0, or 2 after one line on stderr when something of theirs does not work."""
    try:
        model, args, kwargs = _model_and_inputs(target, inputs)
        try:
            report = cliffs.find(model, *args, **kwargs)
        except Exception as problem:
            raise UsageError(f"the inputs do not fit the model of {target!r}: {where(problem)}") from problem
    except UsageError as refusal:
        print(f"doctor: {refusal}", file=sys.stderr)
        return 2
    print(report)
    found = linearize(model)
    restore(model)
    convertible = [rewrite.path for rewrite in found if rewrite.converted]
    if found:
        print(f"{len(convertible)} of {len(found)} convolutions are matrix products (utils.linearize)")
    return 0


def _model_and_inputs(target: str, inputs: str | None) -> tuple[nn.Module, tuple, dict]:
    made = called(target, "factory")
    given: Any = None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        made, given = made
    if not isinstance(made, nn.Module):
        raise UsageError(f"{target!r} returned {type(made).__name__}, expected an nn.Module or (nn.Module, inputs)")
    if inputs is not None:
        given = called(inputs, "inputs")
    elif given is None:
        raise UsageError(f"{target!r} returned a model without inputs: give --inputs package.module:make_inputs")
    if isinstance(given, Mapping):
        return made.eval(), (), dict(given)
    return made.eval(), tuple(given) if isinstance(given, (tuple, list)) else (given,), {}

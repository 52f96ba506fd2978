"""`./cookbook doctor package.module:factory [--inputs package.module:make_inputs]`: the report of utils.cliffs.

`factory()` returns a model, or a tuple of a model and its inputs. `make_inputs()` returns the inputs: one tensor, a
tuple of arguments, or a mapping of keyword arguments.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from torch import nn

from .. import cliffs
from ..linearize import linearize, restore


class _Refusal(Exception):
    """One line for the user."""


def run_doctor(target: str, inputs: str | None = None) -> int:
    """Print the report for a user's model; 0, or 2 after one line on stderr when something of theirs does not work."""
    try:
        model, args, kwargs = _model_and_inputs(target, inputs)
        try:
            report = cliffs.find(model, *args, **kwargs)
        except Exception as problem:
            raise _Refusal(f"the inputs do not fit the model of {target!r}: {_line(problem)}") from problem
    except _Refusal as refusal:
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
    made = _called(target, "factory")
    given: Any = None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        made, given = made
    if not isinstance(made, nn.Module):
        raise _Refusal(f"{target!r} returned {type(made).__name__}, expected an nn.Module or (nn.Module, inputs)")
    if inputs is not None:
        given = _called(inputs, "inputs")
    elif given is None:
        raise _Refusal(f"{target!r} returned a model without inputs: give --inputs package.module:make_inputs")
    if isinstance(given, Mapping):
        return made.eval(), (), dict(given)
    return made.eval(), tuple(given) if isinstance(given, (tuple, list)) else (given,), {}


def _called(target: str, what: str) -> Any:
    function = _resolved(target, what)
    try:
        return function()
    except Exception as problem:
        raise _Refusal(f"{what} {target!r} raised {_line(problem)}") from problem


def _resolved(target: str, what: str) -> Callable[[], Any]:
    """The function behind package.module:name; modules of the working directory are found too."""
    name, colon, attribute = target.partition(":")
    if not (colon and name and attribute):
        raise _Refusal(f"{what} {target!r} is no path to a function, expected package.module:function")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(name)
    except Exception as problem:
        raise _Refusal(f"{what} {target!r}: cannot import {name!r}: {_line(problem)}") from problem
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), n=1)
            hint = f"; nearest: {near[0]!r}" if near else ""
            raise _Refusal(f"{what} {target!r}: {name!r} has no {attribute!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise _Refusal(f"{what} {target!r} is a {type(found).__name__}, expected a function without arguments")
    return found


def _line(problem: BaseException) -> str:
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text[:300]}" if text else type(problem).__name__

"""`package.module:function`: the user's own functions, for commands that work on a model of theirs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from ..prescribe_subject import where
from .usage import UsageError


def resolved(target: str, what: str) -> Callable[[], Any]:
    """The function behind package.module:name; modules of the working directory are found too.

    Raises UsageError, one line with the nearest name, where there is none.
    """
    name, colon, attribute = target.partition(":")
    if not (colon and name and attribute):
        raise UsageError(f"{what} {target!r} is no path to a function, expected package.module:function")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(name)
    except (Exception, SystemExit) as problem:  # a script may end the process: that is an answer too
        raise UsageError(f"{what} {target!r}: cannot import {name!r}: {where(problem)}{suffix_hint(name)}") from problem
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), n=1)
            hint = f"; nearest: {near[0]!r}" if near else ""
            raise UsageError(f"{what} {target!r}: {name!r} has no {attribute!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"{what} {target!r} is a {type(found).__name__}, expected a function without arguments")
    return found


def called(target: str, what: str) -> Any:
    """What that function returns. Raises UsageError where it raises."""
    function = resolved(target, what)
    try:
        return function()
    except (Exception, SystemExit) as problem:
        raise UsageError(f"{what} {target!r} raised {where(problem)}") from problem


def suffix_hint(name: str) -> str:
    return f"; name the module without the suffix: {name.removesuffix('.py')!r}" if name.endswith(".py") else ""

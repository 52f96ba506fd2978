"""Contenders are given as builders: called again for every replicate, so that no single allocation decides."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class fixed:
    """Wrap a function that cannot be rebuilt (a loaded library, a kernel, a model too large to build twice).

    Its replicates share one instance, so part of the noise between instances stays hidden. A row with a fixed
    contender has a margin of at least 5 % and the warning `not_rebuilt`.
    """

    fn: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"fixed: expected a function, got {type(self.fn).__name__}")

    def __call__(self) -> Callable[..., Any]:
        return self.fn


def check_builders(baseline: Any, candidates: Any, label: str) -> None:
    """TypeError or ValueError, before any work, for what cannot be a set of builders."""
    if not isinstance(candidates, Mapping):
        raise TypeError(f"candidates: expected a mapping of label to builder, got {type(candidates).__name__}")
    if not candidates:
        raise ValueError("candidates: expected at least one, got none")
    for name in candidates:
        if not isinstance(name, str) or not name:
            raise TypeError(f"candidates: expected non-empty strings as labels, got {name!r}")
    if label in candidates:
        raise ValueError(f"candidates: {label!r} is also the label of the baseline; expected another label")
    check_builder(label, baseline)
    for name, builder in candidates.items():
        check_builder(name, builder)


def check_builder(name: str, builder: Any) -> None:
    wanted = "expected a builder, a function without arguments that returns the function to time"
    if isinstance(builder, nn.Module):
        raise TypeError(f"{name!r} is a module; {wanted}: `lambda: make_module()`, or fixed(module)")
    if not callable(builder):
        raise TypeError(f"{name!r} is {type(builder).__name__}; {wanted}")
    try:
        inspect.signature(builder).bind()
    except TypeError:
        raise TypeError(f"{name!r} needs arguments; {wanted}, or fixed(fn)") from None
    except ValueError:  # some built-in functions have no signature
        pass

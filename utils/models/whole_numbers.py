"""Arguments that are whole numbers: sizes, counts and token ids. Wrong ones are refused in one line, never cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def short(value: object) -> str:
    """What to show of a wrong value: one line of at most 60 characters."""
    return " ".join(repr(value).split())[:60]


def whole(name: str, value: int, at_least: int | None = None) -> None:
    """TypeError where `value` is no whole number, ValueError where it is below `at_least`; one line each."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {short(value)}; expected a whole number")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name} is {value}; expected {'0 or more' if at_least == 0 else f'at least {at_least}'}")


def real(name: str, value: float, above: float) -> None:
    """TypeError where `value` is no number, ValueError where it is not finite or not above `above`; one line each."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} is {short(value)}; expected a number above {above:g}")
    if not above < value < math.inf:
        raise ValueError(f"{name} is {value}; expected a number above {above:g}")


def with_values(name: str, given: object) -> None:
    """TypeError where `given` is a tensor without readable values: sparse, or on meta."""
    if isinstance(given, Tensor) and (given.layout is not torch.strided or given.is_meta):
        kind = "on meta" if given.is_meta else given.layout
        raise TypeError(f"{name} is {kind}; expected a dense tensor with values")


def whole_numbers(name: str, given: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """`given` as an int64 tensor. TypeError, one line: fractions, truth values, text, anything else; nothing is cut."""
    with_values(name, given)
    mixed = isinstance(given, list | tuple) and any(isinstance(one, bool) for one in given)  # torch takes True for 1
    try:
        found = None if mixed or isinstance(given, str) else torch.as_tensor(given, device=device)
    except (TypeError, ValueError, RuntimeError):  # no numbers, or lists of different length
        found = None
    empty = found is not None and found.numel() == 0  # an empty list is a float tensor
    if not empty and (found is None or found.dtype not in WHOLE):
        raise TypeError(f"{name} is {short(given)}; expected whole numbers")
    return found.to(torch.int64)


def prompt_ids(prompt: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """One prompt as int64 [L]. TypeError: no whole numbers. ValueError: another shape."""
    found = whole_numbers("prompt", prompt, device)
    if found.ndim != 1:
        raise ValueError(f"prompt {short(prompt)} has shape {tuple(found.shape)}; expected [length], the ids of a text")
    return found

"""Token ids and counts as tensors. Wrong ones are refused in one line, never cut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..expect import short

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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

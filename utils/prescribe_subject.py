"""A user's model as `prescribe` needs it: a factory that gives the same new model at every call, and its inputs."""

from __future__ import annotations

import copy
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .timing import guards

SEED_OF_PROBE = 12345
# What is not the user's own code: where nothing else is in a traceback, its last line counts.
OURS = ("<frozen", f"{Path(__file__).parent}/")
INSTALLED = (f"{sysconfig.get_path('stdlib')}/", "/site-packages/", "/dist-packages/")


class PrescribeError(ValueError):
    """What of the user's does not work, in one line."""


def one_line(problem: BaseException) -> str:
    text = " ".join(str(problem).split())
    return f"{type(problem).__name__}: {text[:300]}" if text else type(problem).__name__


def where(problem: BaseException) -> str:
    """The error in one line, and the last line of the user's code on the way to it."""
    frames = [f for f in traceback.extract_tb(problem.__traceback__) if not f.filename.startswith(OURS)]
    own = [f for f in frames if not any(part in f.filename for part in INSTALLED)]
    return one_line(problem) + "".join(f" ({Path(f.filename).name}:{f.lineno})" for f in (own or frames)[-1:])


@dataclass
class Subject:
    """factory() -> model in eval mode. make_inputs(i) or make_inputs() -> tensor, tuple of arguments, or mapping."""

    factory: Callable[[], nn.Module]
    make_inputs: Callable[..., Any]
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.factory, nn.Module):
            raise PrescribeError(
                f"factory is a model ({type(self.factory).__name__}); expected a function that makes one at every call"
            )
        for name in ("factory", "make_inputs"):
            if not callable(getattr(self, name)):
                kind = type(getattr(self, name)).__name__
                raise PrescribeError(f"{name} is a {kind}; expected a function that returns {_WANTED[name]}")
        if not _accepts(self.factory):
            raise PrescribeError("factory needs arguments; expected a function without any: lambda: factory(...)")
        self._numbered = _accepts(self.make_inputs, 0)
        if not (self._numbered or _accepts(self.make_inputs)):
            raise PrescribeError("make_inputs needs arguments; expected none, or one: the number of the inputs")

    def fresh(self) -> nn.Module:
        """A new model, from the seed, with configuration objects of its own (a step may write into them)."""
        guards.seed_all(self.seed)
        try:
            model = self.factory()
        except (Exception, SystemExit) as problem:
            raise PrescribeError(f"factory raised {where(problem)}") from problem
        if not isinstance(model, nn.Module):
            raise PrescribeError(f"factory returned {type(model).__name__}, expected an nn.Module")
        copies: dict[int, Any] = {}
        for part in model.modules():
            if hasattr(config := vars(part).get("config"), "_attn_implementation"):
                part.config = copy.deepcopy(config, copies)
        return model

    def inputs(self, number: int) -> tuple[tuple, dict[str, Any]]:
        """(arguments, keyword arguments) number `number`."""
        try:
            given = self.make_inputs(number) if self._numbered else self.make_inputs()
        except (Exception, SystemExit) as problem:
            raise PrescribeError(f"make_inputs raised {where(problem)}") from problem
        named = isinstance(given, Mapping)
        args = () if named else tuple(given) if isinstance(given, (tuple, list)) else (given,)
        kwargs = dict(given) if named else {}
        found = guards.tensors((args, kwargs))
        if given is None or not (args or kwargs) or (found and not any(tensor.numel() for tensor in found)):
            what = f"an empty tensor {tuple(found[0].shape)}" if found else repr(given)
            raise PrescribeError(f"make_inputs gives {what}; expected a tensor, a tuple of arguments or a mapping")
        return args, kwargs

    def checked(self) -> tuple[nn.Module, tuple, dict[str, Any]]:
        """One model and its inputs, after everything that could make a comparison mean something else."""
        model, again = self.fresh(), self.fresh()
        _check_mode(model)
        _check_same(model, again)
        del again
        guards.seed_all(SEED_OF_PROBE)
        args, kwargs = self.inputs(0)
        try:
            output = model(*args, **kwargs)
        except Exception as problem:
            raise PrescribeError(f"the inputs do not fit the model: {where(problem)}") from problem
        if not guards.tensors(output):
            raise PrescribeError(f"the model returned {type(output).__name__} without a tensor: no answer to compare")
        return model, args, kwargs


_WANTED = {"factory": "an nn.Module", "make_inputs": "the model's inputs"}


def _accepts(function: Callable, *args: Any) -> bool:
    try:
        inspect.signature(function).bind(*args)
    except TypeError:
        return False
    except ValueError:  # some built-in functions have no signature
        return not args
    return True


def _check_mode(model: nn.Module) -> None:
    training = [path for path, part in model.named_modules() if part.training]
    if training:
        where = f"{training[0]!r}" if training[0] else type(model).__name__
        raise PrescribeError(f"factory returned a model in train mode ({where}); expected model.eval()")
    if any(hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) for part in model.modules()):
        raise PrescribeError("factory returned a compiled model; expected the eager one, compiling is one of the steps")
    if any(tensor.is_meta for _, tensor in _weights(model)):
        raise PrescribeError("factory returned a model on the meta device; expected real weights")


def _check_same(model: nn.Module, again: nn.Module) -> None:
    """Two calls from one seed give two models with the same weights, and nothing is shared between them."""
    if model is again:
        raise PrescribeError("factory returned the same model twice; expected a new one at every call")
    first, second = dict(_weights(model)), dict(_weights(again))
    for name in first.keys() ^ second.keys():
        raise PrescribeError(f"factory gives another model each time: {name!r} is in one of two only")
    for name, weight in first.items():
        if weight is second[name] and isinstance(weight, nn.Parameter):  # a step would convert it for both
            raise PrescribeError(f"factory shares {name!r} between two models; expected new weights at every call")
        if not guards.same_values(weight.detach(), second[name].detach()):
            raise PrescribeError(
                f"factory gives other weights each time: {name!r} differs between two calls from one seed; "
                "draw them from torch's generator, or load them"
            )


def _weights(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]

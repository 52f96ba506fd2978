"""Process-wide switches that `prescribe` turns, and everything that is put back when it ends.

A switch holds for the whole process, so two contenders that differ in one cannot run side by side. Each contender
therefore sets its own values before each of its calls; where they hold already that takes well under a microsecond.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .timing.dynamo import PATCHED, scoped_config
from .timing.guards import rng_state, set_rng_state


@dataclass(frozen=True)
class Switch:
    """How to read and set one process-wide option, and the line of code that sets it."""

    get: Callable[[], Any]
    set: Callable[[Any], None]
    line: str


def matmul_precision() -> str | None:
    """None where it was set through the newer `fp32_precision`: torch then refuses to answer the older question."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


SWITCHES = {
    "threads": Switch(torch.get_num_threads, torch.set_num_threads, "torch.set_num_threads({!r})"),
    "float32 products": Switch(
        matmul_precision,
        torch.set_float32_matmul_precision,
        'torch.set_float32_matmul_precision("{}")',
    ),
    "cudnn.benchmark": Switch(
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
        "torch.backends.cudnn.benchmark = {!r}",
    ),
}


def turn(values: Mapping[str, Any]) -> None:
    """Set the switches that have another value; None: it could not be read, so it is left alone."""
    for name, value in values.items():
        switch = SWITCHES[name]
        if value is not None and switch.get() != value:
            switch.set(value)


@contextmanager
def everything_undone() -> Iterator[None]:
    """Put back, after an exception too: the switches, the options of Dynamo and Inductor, grad mode, default dtype,
    deterministic mode and the random generators of torch, numpy and random.

    Inside, gradients are recorded as in a plain call, and torch.compile finds empty caches on disk.
    """
    generators, dtype = rng_state(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    grad, switches = torch.is_grad_enabled(), {name: switch.get() for name, switch in SWITCHES.items()}
    try:
        with ExitStack() as stack:
            stack.enter_context(_attributes_kept())
            stack.callback(turn, switches)  # before the attributes: it writes into some of them
            stack.enter_context(scoped_config())
            stack.enter_context(_limits_kept())
            stack.enter_context(_empty_compile_caches())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(dtype)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        set_rng_state(generators)


@contextmanager
def _attributes_kept() -> Iterator[None]:
    """Options behind the switches: `set_float32_matmul_precision` writes into several of them."""
    backends = torch.backends
    owners = [backends.cudnn, backends.cuda.matmul, getattr(backends.cudnn, "conv", None), backends.mkldnn]
    owners += [getattr(backends.mkldnn, "matmul", None), getattr(backends.mkldnn, "conv", None)]
    names = ("fp32_precision", "deterministic", "enabled", "allow_fp16_reduced_precision_reduction")
    saved = []
    for owner in filter(None, owners):
        for name in names:
            try:
                saved.append((owner, name, getattr(owner, name)))
            except (AttributeError, RuntimeError, AssertionError):
                continue  # this version of torch, or this build, has it not
    try:
        yield
    finally:
        for owner, name, value in saved:
            if getattr(owner, name) != value:
                setattr(owner, name, value)


@contextmanager
def _limits_kept() -> Iterator[None]:
    """The options of Dynamo that `scoped_config` leaves to its caller."""
    name = "torch._dynamo.config"
    saved = {key: getattr(sys.modules[name], key) for key in PATCHED} if name in sys.modules else {}
    try:
        yield
    finally:
        if config := sys.modules.get(name):
            for key in PATCHED:
                setattr(config, key, saved.get(key, config._config[key].default))


@contextmanager
def _empty_compile_caches() -> Iterator[None]:
    """The disk caches of Inductor and Triton are an empty folder, so that set-up is what a new machine pays."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    saved = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="prescribe_", ignore_cleanup_errors=True) as folder:
        try:
            os.environ |= {names[0]: folder, names[1]: os.path.join(folder, "triton")}
            yield
        finally:
            for name, value in saved.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

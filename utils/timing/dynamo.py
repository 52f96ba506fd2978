"""torch.compile under measurement: nothing compiles inside a sample, and nothing falls back to eager unseen.

Dynamo keeps compiled code per code object, that is per class or function, and that has two traps for a comparison:

- After `recompile_limit` (eight) entries it gives up: from then on the class runs eager, with one log line. Builders
  that are called again for every replicate reach that limit. Here the limit is higher, and reaching it is an error.
- Two models of one class share entries when the guards allow it, and global options (Inductor's `freezing`) are not
  guarded: the second contender would run the code of the first. Here every contender finds only its own entries.

At the end the entries of the contenders are dropped; other compiled functions of the session stay compiled. Dynamo is
only looked at when something has already imported it: importing it takes longer than most measurements.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .errors import EagerFallbackError

LIMIT = 64  # entries per code object while we measure; see forget
REGION = "Torch-Compiled Region"
PATCHED = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit", "suppress_errors")
OPTIONS = ("torch._dynamo.config", "torch._inductor.config")


def loaded() -> bool:
    return "torch._dynamo" in sys.modules


class DynamoWatch:
    """Use as a context manager around a whole measurement; `arm()` may be called as soon as Dynamo may be loaded."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._armed = False
        self._start_entries: dict[Any, int] = {}
        self.current: list[int] = [-1]  # index of the contender that is being called
        self.hits: list[int] = []  # contenders that compiled while samples were taken

    def __enter__(self) -> DynamoWatch:
        self.arm()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._armed:
            self.forget()
            self._stack.close()
            self._make_room()

    def arm(self) -> None:
        """Raise Dynamo's limit and make reaching it an error. Does nothing before Dynamo is imported, or twice."""
        if self._armed or not loaded():
            return
        self._armed = True
        config = torch._dynamo.config
        self._start_entries = {code: len(entries) for code, entries in _entries()}
        self._stack.enter_context(
            config.patch(
                recompile_limit=max(LIMIT, 8 * config.recompile_limit),
                accumulated_recompile_limit=max(4096, config.accumulated_recompile_limit),
                fail_on_recompile_limit_hit=True,
                suppress_errors=False,
            )
        )
        self._stack.enter_context(_patched(_inductor(), "__eq__", _same_owner))

    @contextlib.contextmanager
    def building(self, index: int) -> Iterator[None]:
        """Around a builder and the first call: what is compiled, and the options that are set, belong to `index`.

        Options of Dynamo and Inductor count when a function compiles, so they are put back after the first call.
        """

        def tag(plain_init: Callable, backend: Any, *args: Any, **kwargs: Any) -> None:
            plain_init(backend, *args, **kwargs)
            backend._contender = (id(self), index)

        with _patched(_inductor(), "__init__", tag), scoped_config():
            yield

    def forget(self, index: int | None = None) -> None:
        """Release the compiled code of one contender, or of all."""
        from torch._dynamo.guards import DeletedGuardManagerWrapper

        for _, entries in _entries():
            for entry in entries:
                owner, number = getattr(getattr(entry, "backend", None), "_contender", (None, None))
                if owner == id(self) and index in (None, number):
                    dead = DeletedGuardManagerWrapper("the comparison that compiled it is over")
                    entry.guard_manager.extra_state.invalidate(entry, dead)

    def _make_room(self) -> None:
        """Dead entries still count for the limit. Empty every code object that we filled, unless it also holds code
        of the session and the limit is far: what is emptied compiles anew at its next call."""
        for code, entries in _entries():
            before = self._start_entries.get(code, 0)
            if len(entries) > before and (before == 0 or 2 * len(entries) >= torch._dynamo.config.recompile_limit):
                torch._dynamo.reset_code(code)

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Note in `hits` every contender (`current`) for which Dynamo starts to compile, or CUDA graphs to record."""
        self.hits.clear()
        if not loaded():
            yield
            return
        from torch._dynamo.callback import callback_handler

        def note(*_: object) -> None:
            self.hits.append(self.current[0])

        attempts = frames_seen()
        callback_handler.register_start_callback(note)
        try:
            yield
        finally:
            if note in callback_handler.start_callbacks:  # torch._dynamo.reset() inside a call removes it
                callback_handler.remove_start_callback(note)
            if frames_seen() > attempts and not self.hits:
                self.hits.append(self.current[0])


def _inductor() -> type:
    return torch._TorchCompileInductorWrapper


def _same_owner(plain_eq: Callable, a: Any, b: Any) -> bool:
    """Dynamo compares backends to choose an entry; contenders are made to differ."""
    return plain_eq(a, b) and getattr(a, "_contender", None) == getattr(b, "_contender", None)


@contextlib.contextmanager
def _patched(cls: type, name: str, replacement: Callable) -> Iterator[None]:
    """Replace a method for a while; `replacement` gets the plain method first."""
    plain = getattr(cls, name)
    setattr(cls, name, lambda self, *args, **kwargs: replacement(plain, self, *args, **kwargs))
    try:
        yield
    finally:
        setattr(cls, name, plain)


def _entries() -> list[tuple[Any, list[Any]]]:
    """(code object, compiled entries) of everything that Dynamo has looked at; nothing where torch hides it."""
    from torch._dynamo import convert_frame, eval_frame

    if not hasattr(eval_frame, "_debug_get_cache_entry_list"):
        return []
    codes = [ref() for ref in convert_frame.input_codes.seen]
    return [(code, eval_frame._debug_get_cache_entry_list(code)) for code in codes if code is not None]


def frames_seen() -> int:
    """Frames that Dynamo has tried to compile in this process."""
    return torch._dynamo.utils.counters["frames"]["total"] if loaded() else 0


@contextlib.contextmanager
def scoped_config() -> Iterator[None]:
    """Undo what is set in the global options of Dynamo and Inductor, so that it reaches no other contender."""
    saved = {name: sys.modules[name].get_config_copy() for name in OPTIONS if name in sys.modules}
    try:
        yield
    finally:
        for name in OPTIONS:
            if (config := sys.modules.get(name)) is None:
                continue
            before = saved.get(name) or {key: entry.default for key, entry in config._config.items()}
            for key, now in config.get_config_copy().items():
                if key in before and key not in PATCHED and before[key] is not now and before[key] != now:
                    setattr(config, key, before[key])


def compiled_regions(call: Callable[[], Any]) -> int:
    """Number of Dynamo graphs that one call runs. Each leaves a named range in torch's own profiler."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # some builds write two lines to stderr at every start
    with torch.autograd.profiler.profile() as profile:
        call()
    return sum(event.name.startswith(REGION) for event in profile.function_events)


def check_compiled(label: str, call: Callable[[], Any], *, expected: bool, at_least: int) -> int:
    """Graphs that a call runs; EagerFallbackError when a compiled function runs none, or fewer than before."""
    if not loaded() or not (expected or at_least):
        return 0
    regions = compiled_regions(call)
    if regions < max(at_least, 1 if expected else 0):
        raise EagerFallbackError(
            f"{label!r} is compiled but a call ran {regions} compiled graphs (expected {max(at_least, 1)} or more): "
            "it fell back to eager; see torch._dynamo's log, or call torch.compiler.reset() first"
        )
    return regions

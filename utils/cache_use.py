"""Did the compiler's caches hit? Torch's own counters, read as one answer.

with hits() as use:
    compiled(x)
print(use)       # hit: Inductor 1 hit, 0 missed, 0 bypassed; AOT Autograd 1 hit, 0 missed, 0 bypassed
"""

from __future__ import annotations

import contextlib
import logging
import sys
from dataclasses import dataclass
from typing import Any

# (group, counter) of torch._dynamo.utils.counters -> field of CacheUse
_COUNTERS = {
    ("inductor", "fxgraph_cache_hit"): "fx_hits",
    ("inductor", "fxgraph_cache_miss"): "fx_misses",
    ("inductor", "fxgraph_cache_bypass"): "fx_bypasses",
    ("aot_autograd", "autograd_cache_hit"): "aot_hits",
    ("aot_autograd", "autograd_cache_miss"): "aot_misses",
    ("aot_autograd", "autograd_cache_bypass"): "aot_bypasses",
    ("stats", "unique_graphs"): "graphs",
}
_LOGGERS = ("torch._inductor.codecache", "torch._functorch._aot_autograd.autograd_cache")
loaded: set[tuple[str, str]] = set()  # (kind, key) of the artifacts that were loaded into this process


@dataclass(frozen=True)
class CacheUse:
    """What the caches answered while something compiled.

    A graph asks two caches: that of AOT Autograd (`aot_*`) and, behind it, that of Inductor (`fx_*`).
    `graphs` is how many graphs Dynamo handed to a backend, `compiler_runs` how often the C++ compiler ran.
    """

    fx_hits: int = 0
    fx_misses: int = 0
    fx_bypasses: int = 0
    aot_hits: int = 0
    aot_misses: int = 0
    aot_bypasses: int = 0
    graphs: int = 0
    compiler_runs: int = 0
    loaded: bool = False  # artifacts were loaded into this process before
    reasons: tuple[str, ...] = ()  # why a cache was bypassed, in torch's words

    @property
    def verdict(self) -> str:
        """hit: every lookup hit; partial: some did; miss: none did; bypass: none did, and torch would not use a cache;
        not asked: graphs were compiled without a lookup (caches off, or a backend without one); nothing compiled.
        """
        found, missed = self.fx_hits + self.aot_hits, self.fx_misses + self.aot_misses
        bypassed = self.fx_bypasses + self.aot_bypasses
        if found:
            return "partial" if missed or bypassed else "hit"
        if missed or bypassed:
            return "bypass" if bypassed else "miss"
        return "not asked" if self.graphs else "nothing compiled"

    def __bool__(self) -> bool:
        """True when all that was compiled came from the cache."""
        return self.verdict == "hit"

    def __str__(self) -> str:
        unused = self.loaded and not self.fx_hits + self.aot_hits
        text = f"{self.verdict}{', artifacts loaded but not hit' if unused else ''}: "
        text += f"Inductor {self.fx_hits} hit, {self.fx_misses} missed, {self.fx_bypasses} bypassed; "
        text += f"AOT Autograd {self.aot_hits} hit, {self.aot_misses} missed, {self.aot_bypasses} bypassed"
        text += f"; C++ compiler ran {self.compiler_runs} times" if self.compiler_runs else ""
        return text + (f"; bypassed because: {'; '.join(self.reasons)}" if self.reasons else "")


class Counters:
    """How far torch's counters went since this object was made, in all threads. Cleared ones count from zero."""

    def __init__(self) -> None:
        self.start = self._now()

    @staticmethod
    def _now() -> dict[str, int]:
        utils = sys.modules.get("torch._dynamo.utils")  # importing it takes long, and nothing was compiled without it
        groups = utils.counters if utils else {}
        found = {field: groups.get(group, {}).get(name, 0) for (group, name), field in _COUNTERS.items()}
        built = getattr(utils, "compilation_time_metrics", {}).get("compile_file", ())
        return found | {"compiler_runs": len(built)}

    def use(self, reasons: tuple[str, ...] = ()) -> CacheUse:
        now = self._now()
        seen = {name: count - self.start[name] if count >= self.start[name] else count for name, count in now.items()}
        return CacheUse(**seen, loaded=bool(loaded), reasons=reasons)


class hits:
    """What the caches answer inside a block; afterwards it keeps the answer. All of CacheUse can be read from it.

    Also hears why torch bypassed a cache, which it logs below the level that is shown.
    """

    def __enter__(self) -> hits:
        self._reasons, self._undo, self._final = [], contextlib.ExitStack(), None
        for name in _LOGGERS:
            logger = logging.getLogger(name)
            listener = _Listener(self._reasons, logger.getEffectiveLevel())
            self._undo.callback(logger.setLevel, logger.level)
            self._undo.callback(logger.removeFilter, listener)
            logger.addFilter(listener)
            logger.setLevel(min(logging.INFO, listener.level))
        self._counters = Counters()
        return self

    def __exit__(self, *exc: object) -> None:
        self._final = self.use
        self._undo.close()

    @property
    def use(self) -> CacheUse:
        return self._final or self._counters.use(tuple(dict.fromkeys(self._reasons)))

    def __getattr__(self, name: str) -> Any:
        if name == "use":  # its property found nothing yet
            raise AttributeError("nothing was counted yet; expected `with hits() as use:` around the calls")
        if name.startswith("_"):
            raise AttributeError(name)  # before __enter__, or asked for by copy and pickle
        return getattr(self.use, name)

    def __bool__(self) -> bool:
        return bool(self.use)

    def __repr__(self) -> str:
        return str(self.use)


class _Listener(logging.Filter):
    """Hears what a logger says below its own level, and lets through only what it let through before."""

    def __init__(self, reasons: list[str], level: int) -> None:
        super().__init__()
        self.reasons, self.level = reasons, level

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if text.startswith("Bypassing"):
            why = text.partition("due to: ")[2] or text.partition("because ")[2]
            self.reasons.append(why.strip(" '").partition("\n")[0].strip())
        return record.levelno >= self.level

"""Keep what torch.compile built for the next process, and prove that the next process really used it.

    model = torch.compile(model)
    model(x)                                       # warm up everything first: only what was compiled is saved
    save("cache/model.bin")                        # a fresh process then starts with

    report = load("cache/model.bin")               # never a crash: says why when it starts cold
    torch.compile(model)(x)
    print(report, report.proof(), sep="\\n")        # loaded is not hit: torch's own counters tell

A layer around torch.compiler.save_cache_artifacts and load_cache_artifacts (torch 2.7 or newer). The file holds a
record of what the artifacts are good for and a checksum, then the artifacts. The checksum finds damage, not malice:
artifacts are pickles, so whoever can write the file can run code here. Files that others can write are refused.

What the artifacts hold: traced and lowered graphs, on CUDA also the compiled kernels. On a CPU they hold the C++ source
of the kernels but not the machine code, so the C++ compiler runs again after a hit: `CacheUse.compiler_runs` counts it.
A kept folder TORCHINDUCTOR_CACHE_DIR holds both.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import cache_use, machine, private_file
from .cache_use import CacheUse, Counters, hits

__all__ = ["CacheUse", "LoadReport", "SaveReport", "hits", "load", "save"]

MAGIC = b"torch.compile artifacts, file format 1\n"
_FOREIGN = ("torch", "cuda", "triton", "python", "platform", "device", "device_name", "cpu_capability")


@dataclass(frozen=True)
class LoadReport:
    """What became of a file of artifacts. True when they are loaded; that says nothing yet of a hit: see `proof`."""

    path: str
    loaded: bool
    reason: str  # one line
    artifacts: dict[str, int] = field(default_factory=dict)  # number by kind
    already_here: int = 0  # how many of them the cache folder of this machine held before
    record: dict[str, Any] = field(default_factory=dict, repr=False)  # of the process that saved
    notes: tuple[str, ...] = ()
    _proof: Callable[[], CacheUse] = field(default=CacheUse, repr=False, compare=False)

    def __bool__(self) -> bool:
        return self.loaded

    def __str__(self) -> str:
        state = "loaded" if self.loaded else "not loaded, compiling cold"
        return "; ".join((f"{Path(self.path).name}: {state}: {self.reason}", *self.notes))

    def proof(self) -> CacheUse:
        """Hits, misses and bypasses in this process since the load."""
        return self._proof()


@dataclass(frozen=True)
class SaveReport:
    """What was written."""

    path: str
    bytes: int
    artifacts: dict[str, int]
    record: dict[str, Any] = field(repr=False)
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join((f"{Path(self.path).name}: {_counted(self.artifacts)}, {self.bytes:,} bytes", *self.notes))


def save(
    path: str | os.PathLike,
    *,
    device: str | torch.device = "auto",
    dtype: torch.dtype | str | None = None,
    config: Mapping[str, Any] | None = None,
) -> SaveReport | None:
    """Write everything that this process compiled (or took from a cache) to one file. None when that is nothing.

    `device`, `dtype` and `config` (your own flat settings: model, batch size, mode) are recorded, and `load` compares
    them; without `dtype` torch's default is recorded. Missing folders are made for the owner only. The file appears
    complete or not at all. Raises ValueError for a wrong argument, OSError with one line where it cannot be written.
    """
    target, wanted = private_file.checked_path(path), _wanted(device, dtype, config)
    maker = getattr(torch.compiler, "save_cache_artifacts", None)
    made = maker() if maker else None
    if not made:
        return None
    payload, info = made
    kept = {kind: list(keys) for kind, keys in dict(info.artifacts).items()}
    counts = {kind: len(keys) for kind, keys in kept.items()}
    record = _record(wanted) | {"options": _options(), "artifacts": counts, "bytes": len(payload)}
    rest = json.dumps(record).encode() + b"\n" + payload
    private_file.write(target, MAGIC + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
    notes = []
    if left := len(cache_use.loaded - {(kind, key) for kind, keys in kept.items() for key in keys}):
        notes.append(f"{left} loaded artifacts were never hit and are not in this file: warm up everything, then save")
    if problem := private_file.untrusted(target):
        notes.append(f"load will refuse it: {problem}")
    return SaveReport(str(target), len(payload), counts, record, tuple(notes))


def load(
    path: str | os.PathLike,
    *,
    device: str | torch.device = "auto",
    dtype: torch.dtype | str | None = None,
    config: Mapping[str, Any] | None = None,
    allow_untrusted: bool = False,
) -> LoadReport:
    """Hand the artifacts of a file to torch's caches, before the first compiled call. Never fails because of the file.

    Not loaded, with the reason, and everything then compiles cold: no such file; damaged or cut short; of another
    torch, CUDA, Triton, Python, platform or device; saved for another `dtype` or `config` than given here (None: any);
    writable by others (a pickle of theirs would run here), unless `allow_untrusted`. Raises ValueError for a wrong
    argument only.
    """
    target, wanted = private_file.checked_path(path), _wanted(device, dtype, config)

    def cold(reason: str, record: dict | None = None) -> LoadReport:
        return LoadReport(str(target), False, reason, record=record or {}, _proof=Counters().use)

    loader = getattr(torch.compiler, "load_cache_artifacts", None)
    if loader is None:
        return cold(f"torch {torch.__version__} has no load_cache_artifacts; expected 2.7 or newer")
    data, problem = private_file.read(target, allow_untrusted)
    if data is None:
        return cold(problem)
    record, payload = _parsed(data)
    if payload is None:
        return cold(record["problem"])
    if difference := _difference(record, wanted):
        return cold(difference, record)
    _import_compiler()
    here = _keys_in_cache_folder()
    try:
        info = loader(payload)
    except Exception as error:  # pickles of another build, a cache folder that cannot be written, a full disk
        return cold(f"torch could not take it: {type(error).__name__}: {_first_line(error)}", record)
    if info is None:
        return cold("torch could not read it", record)
    keys = {(kind, key) for kind, found in dict(info.artifacts).items() for key in found}
    cache_use.loaded.update(keys)
    counts = {kind: len(found) for kind, found in dict(info.artifacts).items()}
    known = sum(key in here for _, key in keys)
    notes = _option_notes(record)
    if known:
        notes.insert(0, f"{known} of them were in the cache folder before, so a hit proves nothing about this file")
    if getattr(importlib.import_module("torch._inductor.config"), "force_disable_caches", False):
        notes.insert(0, "torch's caches are switched off, so nothing can hit")
    proof = Counters().use
    return LoadReport(str(target), True, _counted(counts), counts, known, record, tuple(notes), proof)


# ---------------------------------------------------------------------------------------------------- the record


def _wanted(device: Any, dtype: Any, config: Any) -> dict[str, Any]:
    """The arguments of save and load, checked; `dtype` and `config` None where nothing was asked for."""
    if dtype is not None:
        name = str(dtype).removeprefix("torch.")
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"dtype={dtype!r} is no dtype of torch; expected for example torch.bfloat16 or 'bfloat16'")
        dtype = name
    if config is not None:
        if not isinstance(config, Mapping):
            raise ValueError(f"config={config!r}; expected a mapping of names to plain values")
        for name, value in config.items():
            if not isinstance(name, str) or not isinstance(value, str | int | float | bool | None):
                raise ValueError(f"config[{name!r}]={value!r}; expected text, a number, a bool or None")
        config = dict(config)
    return {"device": machine.pick_device(device), "dtype": dtype, "config": config}


def _record(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What the artifacts are good for."""
    device = wanted["device"]
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or torch.version.hip,
        "triton": machine._version("triton"),
        "python": platform.python_version().rpartition(".")[0],
        "platform": f"{platform.system()}-{platform.machine()}",
        "device": device.type,
        "device_name": machine._device_name(device),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "dtype": wanted["dtype"] or str(torch.get_default_dtype()).removeprefix("torch."),
        "config": wanted["config"] or {},
    }


def _difference(record: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first thing in which a file is not for here and now, as one line."""
    here = _record(wanted)
    for name in _FOREIGN:
        if record.get(name) != here[name]:
            return f"it was saved with {name} {record.get(name)}, here it is {here[name]}"
    for name in ("dtype", "config"):
        if wanted[name] is not None and record.get(name) != wanted[name]:
            return f"it was saved for {name} {record.get(name)}, asked for is {wanted[name]}"
    return None


def _options() -> dict[str, str]:
    """The options that are part of torch's own cache keys, as text."""
    found: dict[str, str] = {}
    for name in ("inductor", "functorch"):
        with contextlib.suppress(Exception):  # private modules: their absence must not stop a save
            options = importlib.import_module(f"torch._{name}.config").save_config_portable()
            found |= {f"{name}.{key}": re.sub(r" at 0x\w+", "", repr(value)) for key, value in options.items()}
    return found


def _option_notes(record: Mapping[str, Any]) -> list[str]:
    then, now = record.get("options") or {}, _options()
    names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    return [f"options differ from those of the save, expect misses: {', '.join(names[:5])}"] if names else []


def _counted(artifacts: Mapping[str, int]) -> str:
    return f"{sum(artifacts.values())} artifacts ({', '.join(f'{n} {kind}' for kind, n in sorted(artifacts.items()))})"


def _import_compiler() -> None:
    """torch 2.7 knows the kinds of artifacts only after these imports."""
    for name in ("torch._dynamo", "torch._inductor.codecache", "torch._functorch._aot_autograd.autograd_cache"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _keys_in_cache_folder() -> set[str]:
    """Keys of the entries that Inductor's folder on this machine holds already."""
    with contextlib.suppress(Exception):
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        folder = Path(cache_dir())
        return {p.name for pattern in ("fxgraph/*/*", "aotautograd/*", "aotautograd/*/*") for p in folder.glob(pattern)}
    return set()


def _parsed(data: bytes) -> tuple[dict[str, Any], bytes | None]:
    """(record, artifacts), or ({"problem": why}, None)."""
    if not data.startswith(MAGIC):
        whole = "it is empty" if not data else "it is no file of utils.compile_cache, or damaged"
        return {"problem": whole}, None
    digest, _, rest = data[len(MAGIC) :].partition(b"\n")
    if hashlib.sha256(rest).hexdigest().encode() != digest:
        return {"problem": "it is damaged or cut short (its checksum differs)"}, None
    head, _, payload = rest.partition(b"\n")
    try:
        record = json.loads(head)
    except (ValueError, RecursionError):  # no JSON, or nested without end
        record = None
    whole = isinstance(record, dict) and isinstance(record.get("options") or {}, dict)
    return (record, payload) if whole else ({"problem": "its record is damaged"}, None)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]

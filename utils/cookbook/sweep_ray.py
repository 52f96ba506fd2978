"""Sweep points on a Ray cluster (extra `ray`): one GPU each, or one whole CPU node each.

The driver keeps the account: a node executes a point in a temporary folder and sends back the files, which the driver
puts into points/<key>/ as `sweep` does on one machine. So nodes need no shared disk, keys and rows are the same, and
a node that is lost costs the points that ran on it and nothing else. Nodes need this project at the same path.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a task without a GPU does not hide the others

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from .notebooks import ROOT
from .run import Outcome
from .scratch import CACHES
from .sweep_points import Identity, Point, recovered
from .sweep_spec import Spec
from .whole_file import write_whole

LOST = 3  # nodes that a point may lose before it counts as failed: it may be what kills them
LOOK = 2.0  # seconds between two looks at which nodes there are
ANSWER = 120  # seconds in which a new node must say what it is: its workers import first


@dataclass
class Node:
    """A node of the cluster and what runs on it."""

    id: str
    name: str
    gpus: int
    cpus: float
    identity: dict[str, Any] = field(default_factory=dict)
    running: int = 0
    whole: bool = False  # a point has the node for itself


class Cluster:
    """A connected cluster. `identity` is what its nodes are; use `connect` to make one."""

    def __init__(self, spec: Spec, scratch: Path | None):
        self.spec, self.scratch = spec, str(scratch.absolute()) if scratch else None
        self.devices = sorted({str(values.get("device", "auto")) for values in spec.points})
        self.nodes: dict[str, Node] = {}
        self.notes: list[str] = []
        self.refused: set[str] = set()
        self.look()
        if not self.nodes:
            why = f": {self.notes[0]}" if self.notes else ""
            raise ValueError(f"the Ray cluster has no node that can run {spec.recipe.stem}{why}")
        found = {node.name: node.identity for node in self.nodes.values()}
        first = next(iter(found.values()))
        for name, other in found.items():
            if other != first:
                different = next(what for what in first if first[what] != other[what])
                raise ValueError(
                    f"the nodes differ: {different} is {first[different]!r} on {next(iter(found))} and "
                    f"{other[different]!r} on {name}; a sweep needs nodes of one kind"
                )
        self.identity = Identity(
            lambda device: first[f"device {device}"], first["torch"], first[f"code of {spec.recipe.stem}"]
        )

    def look(self) -> None:
        """Take in new nodes, forget dead ones. A node whose code, torch or device differs is left alone, and named."""
        alive = {found["NodeID"]: found for found in ray.nodes() if found["Alive"]}
        for gone in set(self.nodes) - set(alive):
            del self.nodes[gone]
        asked = {}
        for key in set(alive) - set(self.nodes) - self.refused:
            resources = alive[key].get("Resources", {})
            cpus, gpus = resources.get("CPU", 0), int(resources.get("GPU", 0))
            if not cpus and not gpus:
                continue
            name = f"{alive[key].get('NodeManagerHostname', '?')} ({key[:6]})"
            node = Node(key, name, gpus, cpus)
            task = _what_it_is.options(num_cpus=0, scheduling_strategy=_on(node), runtime_env=self.environment())
            asked[key] = node, task.remote(str(self.spec.recipe), self.devices)
        known = next((node.identity for node in self.nodes.values()), None)
        for key, (node, answer) in asked.items():
            try:
                node.identity = ray.get(answer, timeout=ANSWER)
            except GetTimeoutError:
                problem = f"no answer within {ANSWER} s"
            except RayError as error:
                problem = _one_line(error)
            else:
                code = node.identity[f"code of {self.spec.recipe.stem}"]
                different = [what for what, value in node.identity.items() if known and known[what] != value]
                problem = "" if code else f"{self.spec.recipe} is not there: nodes need this project at the same path"
                problem = problem or (f"another {different[0]} than the others" if different else "")
            if problem:
                self.refused.add(key)
                self.notes.append(f"node {node.name} is not used: {problem}")
            else:
                self.nodes[key] = node

    def environment(self) -> dict:
        """Our package, and where `auto` runs, for the workers."""
        passed = ("COOKBOOK_DEVICE", "COOKBOOK_NOTEBOOKS", "COOKBOOK_KERNELS")
        names = {name: os.environ[name] for name in passed if os.environ.get(name)}
        caches = {name: os.environ[name] for name in CACHES if self.scratch and name in os.environ}
        return {"env_vars": {"PYTHONPATH": str(ROOT), **names, **caches}}

    def check(self, points: list[Point]) -> int:
        """How many of these points the cluster runs at once. Raises ValueError when it can never run one."""
        slots = 0
        for wants in {self.wants_gpu(point) for point in points}:
            found = sum((node.gpus if wants else 1) for node in self.nodes.values())
            if not found:
                raise ValueError(f"no node of the Ray cluster has a GPU, and {points[0].label} asks for one")
            slots = max(slots, found)
        for point in points:
            if ":" in str(point.parameters.get("device", "")):
                device = point.parameters["device"]
                raise ValueError(f"device {device!r}: with --engine ray a point sees one GPU; give cuda, cpu or auto")
        return max(1, slots)

    def wants_gpu(self, point: Point) -> bool:
        device = str(point.parameters.get("device", "auto"))
        if device == "auto":
            device = os.environ.get("COOKBOOK_DEVICE") or (
                "cuda" if any(node.gpus for node in self.nodes.values()) else "cpu"
            )
        return device.startswith("cuda")

    def free_node(self, point: Point) -> Node | None:
        """A node on which the point would have its GPU, or the whole node, to itself."""
        for node in self.nodes.values():
            if self.wants_gpu(point):
                free = not node.whole and node.running < node.gpus
            else:
                free = not node.running
            if free:
                return node
        return None

    def run(
        self, points: list[Point], progress, *, retries: int, time_limit: float
    ) -> Iterator[tuple[Point, Outcome, int]]:
        """(point, outcome, tries) of each point as it ends, in the order in which they end."""
        waiting, running, lost = list(points), {}, dict.fromkeys((point.key for point in points), 0)
        for point in points:
            if outcome := recovered(point):
                waiting.remove(point)
                yield point, outcome, 1
        try:
            while waiting or running:
                self.look()
                while self.notes:
                    progress.line(self.notes.pop(0))
                for point in list(waiting):
                    if (node := self.free_node(point)) is None:
                        break
                    waiting.remove(point)
                    running[self.send(point, node, retries, time_limit)] = point, node
                    progress.start(point)
                ready, _ = ray.wait(list(running), num_returns=1, timeout=LOOK) if running else ([], [])
                if not running:
                    _pause()
                for task in ready:
                    point, node = running.pop(task)
                    node.running -= 1
                    node.whole = False
                    result = self.result(task, point)
                    if result is None:
                        lost[point.key] += 1
                        if lost[point.key] < LOST:
                            progress.line(f"{point.label}: its node was lost; another one runs it")
                            waiting.insert(0, point)
                            continue
                        why = f"its node was lost {LOST} times while it ran"
                        result = Outcome(point.job.recipe, "failed", path=point.job.path, why=why), LOST
                    yield point, *result
        except (RayError, ConnectionError) as error:  # its head is gone, and with it what runs
            progress.line(f"the Ray cluster does not answer any more: {_one_line(error)}")
        except KeyboardInterrupt:
            for task in running:
                with contextlib.suppress(RayError):
                    ray.cancel(task, force=True)
            raise

    def send(self, point: Point, node: Node, retries: int, time_limit: float):
        gpu = self.wants_gpu(point)
        node.running += 1
        node.whole = not gpu
        share = {"num_gpus": 1, "num_cpus": 0} if gpu else {"num_cpus": math.floor(node.cpus)}
        task = _run_point.options(**share, max_retries=0, scheduling_strategy=_on(node), runtime_env=self.environment())
        order = {"retries": retries, "time_limit": time_limit, "scratch": self.scratch}
        return task.remote(str(point.job.path), point.job.values, point.key, order)

    def result(self, task, point: Point) -> tuple[Outcome, int] | None:
        """(outcome, tries), the point's files stored; None when the node was lost on the way."""
        try:
            state, rows, seconds, where, why, tries, files = ray.get(task)
        except RayTaskError as error:  # our own code failed on the node: no reason to try it on another
            return Outcome(point.job.recipe, "failed", path=point.job.path, why=_one_line(error)), 1
        except RayError:
            return None
        outcome = Outcome(point.job.recipe, state, rows, seconds, point.job.path, where, why)
        outcome.copy = point.folder / f"{point.job.recipe}.ipynb"
        try:
            for name, data in files.items():
                write_whole(point.folder / name, data)
        except OSError as error:
            outcome.state, outcome.why = "failed", f"{error.strerror or error}: {error.filename or point.folder}"
        return outcome, tries


@contextmanager
def connect(address: str | None, spec: Spec, scratch: Path | None = None) -> Iterator[Cluster]:
    """A cluster: the one at `address`, else one that runs on this machine, else a new one of this machine alone.

    Raises ValueError, one line, when there is none at `address`, or its nodes cannot run the spec.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        options["include_dashboard"] = False
    else:
        options["address"] = address
        if (host := reachable(address)).startswith("127."):
            options["_node_ip_address"] = host  # else Ray looks for this node at the machine's outer address
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        where = f"--address {address}: no Ray cluster answers there" if address else "Ray does not start here"
        raise ValueError(f"{where} ({_one_line(error)})") from None
    try:
        yield Cluster(spec, scratch)
    finally:
        ray.shutdown()


def reachable(address: str) -> str:
    """The host of `address`, where something listens. Raises ValueError: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"--address {address}: expected HOST:PORT, such as 10.0.0.5:6379")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"--address {address}: no Ray cluster answers there ({why})") from None
    return host


@ray.remote(max_retries=0)
def _what_it_is(recipe: str, devices: list[str]) -> dict:
    """Runs on a node: what the keys of its points depend on."""
    from .sweep_points import here

    path = Path(recipe)
    if not path.is_file():
        return {f"code of {path.stem}": None}
    found = here(path)
    about = {f"device {device}": found.device_name(device) for device in devices}
    return {**about, "torch": found.torch, f"code of {path.stem}": found.code}


@ray.remote(max_calls=0)  # a worker that had a GPU point serves the next one: it holds no memory of the GPU
def _run_point(recipe: str, values: dict, key: str, order: dict) -> tuple:
    """Runs on a node: execute a point, return its outcome and its files."""
    from .run import Job
    from .scratch import move
    from .sweep_local import run_tries

    if order["scratch"]:
        move(Path(order["scratch"]))
    _kernels_ahead(recipe)
    folder = Path(tempfile.mkdtemp(prefix="point"))
    try:
        kernels = Path(tempfile.mkdtemp(prefix="k", dir=folder))
        limits = {"retries": order["retries"], "time_limit": order["time_limit"]}
        outcome, tries = run_tries(Job(Path(recipe), values), key, folder, _Silent(), **limits, scratch=kernels)
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome.state, outcome.rows, outcome.seconds, outcome.where, outcome.why, tries, files


@cache
def _kernels_ahead(recipe: str) -> None:
    """From now on, kernels of this worker are forked from a process with the imports done: for its later points."""
    from .fork_kernel import forked_kernels

    kernels = forked_kernels([Path(recipe)], lambda why: None)
    kernels.__enter__()
    atexit.register(kernels.__exit__, None, None, None)


class _Silent:
    def cell(self, done: int) -> None:
        """Cells of a point on another node are not followed."""


def _on(node: Node) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node.id, soft=False)


def _pause() -> None:
    """No node can run a point now: wait before looking again."""
    import time

    time.sleep(LOOK)


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if isinstance(error, RayTaskError) and lines else " ".join(lines))[:300] or type(error).__name__

"""Runs in a fresh process for cold_start: import, load, first call and steady calls of one factory, each timed.

Standard library only, and nothing of this package, so that the import it times is the user's. Reads the order as JSON
from stdin and writes the result as JSON to the file that the order names.
"""

import importlib
import json
import os
import sys
import time
import traceback


def names(order: dict) -> dict:
    """The module (or the source text) as a namespace."""
    if order["source"] is None:
        return vars(importlib.import_module(order["module"]))
    namespace = {"__name__": "cold_start_source"}
    exec(compile(order["source"], "<cold_start source>", "exec"), namespace)
    return namespace


def attribute(namespace: dict, path: str):
    head, *rest = path.split(".")
    if head not in namespace:
        raise AttributeError(f"no {head!r} in the factory's module")
    value = namespace[head]
    for name in rest:
        value = getattr(value, name)
    return value


def wait() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        torch.accelerator.synchronize()


def grad(mode: str):
    import contextlib

    torch = sys.modules.get("torch")
    if torch is None:
        return contextlib.nullcontext()
    return {"inference": torch.inference_mode, "no_grad": torch.no_grad, "enabled": torch.enable_grad}[mode]()


def prepare(order: dict) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(order["seed"])
        if order["num_threads"] is not None:
            torch.set_num_threads(order["num_threads"])


def files(folder: str) -> int:
    return sum(len(found) for _, _, found in os.walk(folder))


def counters() -> dict:
    """Dynamo's and Inductor's counters, flat: graphs compiled, cache hits and misses.

    And "compile.cpp_files": how often the C++ compiler ran; on a CPU a cache hit may still need it, uncounted by torch.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return {}
    found = {f"{group}.{name}": int(n) for group, names in utils.counters.items() for name, n in names.items()}
    found["compile.cpp_files"] = len(getattr(utils, "compilation_time_metrics", {}).get("compile_file", ()))
    return found


def run(order: dict, result: dict, clock=time.perf_counter) -> None:
    """Everything that is timed. `result["stage"]` says how far it came."""
    result["cache_files_before"] = files(order["cache"])

    result["stage"] = "import"
    start = clock()
    namespace = names(order)
    factory = attribute(namespace, order["factory"])
    make_inputs = attribute(namespace, order["make_inputs"]) if order["inputs_here"] else None
    result["import_s"] = clock() - start
    if make_inputs is None and order["make_inputs"] is not None:
        make_inputs = attribute(vars(importlib.import_module(order["inputs_module"])), order["make_inputs"])

    result["stage"] = "load"
    prepare(order)
    wait()
    start = clock()
    fn = factory()
    wait()
    result["load_s"] = clock() - start

    result["stage"] = "make_inputs"
    inputs = tuple(make_inputs()) if make_inputs is not None else ()
    wait()

    with grad(order["grad_mode"]):
        result["stage"] = "first call"
        start = clock()
        fn(*inputs)
        wait()
        result["first_call_s"] = clock() - start

        result["stage"] = "steady calls"
        calls: list[float] = []
        begin = clock()
        while len(calls) < 3 or (clock() - begin < order["steady_time"] and len(calls) < 10_000):
            start = clock()
            fn(*inputs)
            wait()
            calls.append(clock() - start)
    settled = sorted(calls[len(calls) // 3 :])  # the first third still warms up
    result["steady_s"] = settled[len(settled) // 2]
    result["steady_calls"] = len(calls)
    result["counters"] = counters()
    result["cache_files_after"] = files(order["cache"])
    result["stage"] = "done"


def main() -> None:
    order = json.loads(sys.stdin.read())
    result: dict = {"stage": "start"}
    try:
        run(order, result)
    except BaseException as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"
    with open(order["result"], "w") as file:
        json.dump(result, file)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without the seconds that some libraries take to say goodbye


if __name__ == "__main__":
    main()

"""cold_start in real fresh processes (without torch, so that each takes milliseconds), break_even on given numbers."""

import dataclasses
import functools
import importlib
import os
import select
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from timing_fakes import FakeClock

from utils.timing import CallableFailedError, ColdRun, ColdStart, ComparisonRow, break_even, cold_child, cold_start

starting = importlib.import_module("utils.timing.cold_start")  # the package's name of it is the function
QUICK = {"repeats": 1, "steady_time": 0.0}

MODULE = """
import os

def factory():
    assert "torch" not in __import__("sys").modules
    folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert os.environ["TRITON_CACHE_DIR"].startswith(folder)

    def fn(a=0, b=0):
        with open(os.path.join(folder, f"entry {a} {b}"), "w"):
            return a + b

    return fn

def make_inputs():
    return (3, 4)

def broken():
    raise RuntimeError("no weights here")

class Models:
    @staticmethod
    def tiny():
        return factory()
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "cold_example.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "cold_example"
    sys.modules.pop("cold_example", None)


def test_an_importable_factory(module):
    cold = cold_start(f"{module}:factory", make_inputs=f"{module}:make_inputs", **QUICK | {"repeats": 2})
    assert cold.label == "factory" and cold.fresh_cache and len(cold.runs) == 2
    for run in cold.runs:
        assert (run.cache_files_before, run.cache_files_after) == (0, 1)  # an empty folder for each process
    for name in ("import_s", "load_s", "first_call_s", "steady_s", "setup_s"):
        values = [getattr(run, name) for run in cold.runs]
        assert min(values) >= 0 and getattr(cold, name) == pytest.approx(sum(values) / 2)
    assert "torch" not in sys.modules or cold.counters == {}


def test_source_text_as_in_a_notebook():
    source = """
        import os
        SEEN = []
        def factory():
            return lambda a: SEEN.append(a)
        def make_inputs():
            return ("input",)
    """
    assert cold_start(source, **QUICK).runs[0].cache_files_after == 0


def test_functions(module):
    example = importlib.import_module(module)
    assert cold_start(example.factory, example.make_inputs, **QUICK).runs[0].cache_files_after == 1
    assert cold_start(example.Models.tiny, **QUICK).label == "Models.tiny"


def test_a_function_of_a_notebook_is_sent_as_source(tmp_path, monkeypatch):
    text = textwrap.dedent("""
        def build():
            import os
            return lambda: open(os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "x"), "w").close()
    """)
    path = tmp_path / "cell.py"
    path.write_text(text)
    namespace = {"__name__": "__main__"}
    exec(compile(text, str(path), "exec"), namespace)
    assert cold_start(namespace["build"], **QUICK).runs[0].cache_files_after == 1


def test_kept_caches_are_filled_by_a_process_that_does_not_count(module, tmp_path):
    cold = cold_start(f"{module}:factory", fresh_cache=False, **QUICK)
    assert cold.runs[0].cache_files_before == 1 and not cold.fresh_cache
    given = tmp_path / "kept"
    first = cold_start(f"{module}:factory", fresh_cache=False, cache_dir=given, **QUICK)
    again = cold_start(f"{module}:factory", fresh_cache=False, cache_dir=given, **QUICK)
    assert (first.runs[0].cache_files_before, again.runs[0].cache_files_before) == (0, 1)
    assert "kept caches" in str(again) and "empty caches" not in str(again)


def test_environment_of_the_process(module):
    source = "import os\ndef factory():\n    assert os.environ['MORE'] == '1'\n    return lambda: 1"
    assert cold_start(source, env={"MORE": "1"}, **QUICK)
    with pytest.raises(CallableFailedError):
        cold_start(source, **QUICK)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ or "cold_start_" not in os.environ["TORCHINDUCTOR_CACHE_DIR"]


def test_each_second_is_counted_where_it_is_spent(tmp_path, monkeypatch):
    """The child's own code, here, on a simulated clock."""
    clock = FakeClock()
    monkeypatch.setitem(sys.modules, "cold_clock", SimpleNamespace(spend=clock.spend))
    source = """
from cold_clock import spend
spend(3.0)
CALLS = []
def factory():
    spend(0.5)
    def fn(x):
        assert x == "input"
        CALLS.append(1)
        spend(7.0 if len(CALLS) == 1 else 0.9 if len(CALLS) < 5 else 0.01)
    return fn
def make_inputs():
    spend(100.0)
    return ("input",)
"""
    names = {"factory": "factory", "make_inputs": "make_inputs", "inputs_here": True, "module": None}
    settings = {"seed": 0, "num_threads": None, "grad_mode": "inference", "steady_time": 4.0, "cache": str(tmp_path)}
    result = {}
    cold_child.run({"source": source, **names, **settings}, result, clock)
    assert result["stage"] == "done"
    found = [result[name] for name in ("import_s", "load_s", "first_call_s", "steady_s")]
    assert found == pytest.approx([3.0, 0.5, 7.0, 0.01])
    assert result["steady_calls"] == pytest.approx(3 + (4.0 - 3 * 0.9) / 0.01, abs=2)


def test_counters_of_dynamo_are_flat():
    """torch is not imported here: a module of that name stands in for it."""
    source = """
        import collections, sys, types
        def factory():
            utils = types.ModuleType("torch._dynamo.utils")
            utils.counters = {"frames": collections.Counter(total=2), "inductor": {"fxgraph_cache_hit": 1}}
            utils.compilation_time_metrics = {"compile_file": [0.1, 0.2, 0.3]}
            sys.modules["torch._dynamo.utils"] = utils
            return lambda: None
    """
    counters = cold_start(source, **QUICK).counters
    assert counters == {"frames.total": 2, "inductor.fxgraph_cache_hit": 1, "compile.cpp_files": 3}


@pytest.mark.parametrize(
    ("source", "stage", "error"),
    [
        ("import no_such_module\ndef factory(): pass", "import", "ModuleNotFoundError"),
        ("def factory(): raise RuntimeError('no weights')", "load", "RuntimeError: no weights"),
        ("def factory(): return lambda x: x\ndef make_inputs(): return 1 / 0", "make_inputs", "ZeroDivisionError"),
        ("def factory(): return lambda: 1 / 0", "first call", "ZeroDivisionError"),
        ("def factory():\n c = [2, 1]\n return lambda: 1 / (c.pop() and len(c))", "steady calls", "ZeroDivisionError"),
        ("def factory(): raise SystemExit(3)", "load", "SystemExit"),
        ("import os\ndef factory(): os._exit(3)", "start", "without a word"),
    ],
)
def test_a_failing_process_says_where(source, stage, error):
    with pytest.raises(CallableFailedError, match=f"'mine' failed in a fresh process at {stage}: .*{error}"):
        cold_start(source, label="mine", **QUICK)


def test_a_missing_name_and_a_hanging_process(module):
    with pytest.raises(CallableFailedError, match="no 'missing'"):
        cold_start(f"{module}:missing", **QUICK)
    with pytest.raises(CallableFailedError, match=r"more than 0\.3 s"):
        cold_start("import time\ndef factory(): time.sleep(60)", timeout=0.3, **QUICK)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"factory": "no path and no source"}, ValueError, "neither"),
        ({"factory": "x = 1"}, ValueError, "defines no function 'factory'"),
        ({"factory": 3}, TypeError, "factory"),
        ({"factory": lambda: 1}, ValueError, "no name"),
        ({"factory": "m:f", "repeats": 0}, ValueError, "repeats"),
        ({"factory": "m:f", "grad_mode": "x"}, ValueError, "grad_mode"),
        ({"factory": "m:f", "cache_dir": "x"}, ValueError, "fresh_cache=False"),
        ({"factory": "m:f", "make_inputs": "def make_inputs(): return ()"}, ValueError, "make_inputs"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        cold_start(**arguments)


# ------------------------------------------------------------------------------------------- what the process is told


def scripted(monkeypatch, *runs):
    """cold_start without processes: each gives the next of `runs`; returns what each was asked."""
    asked, left = [], list(runs)

    def run(order, label, cache, env, timeout):
        assert Path(cache).is_dir()
        asked.append(SimpleNamespace(order=order, label=label, cache=cache, env=env, timeout=timeout))
        (Path(cache) / f"entry {len(asked)}").touch()
        return left.pop(0)

    monkeypatch.setattr(starting, "_run", run)
    return asked


def run_of(*seconds, found=0):
    return ColdRun(*map(float, seconds), 0, 0, {"found": found})


RUNS = run_of(1, 20, 300, 7, found=1), run_of(3, 10, 100, 5, found=2), run_of(2, 30, 200, 6, found=3)


def test_results_are_medians_and_counters_those_of_the_last_process(monkeypatch):
    asked = scripted(monkeypatch, *RUNS)
    found = cold_start("m:f", env={"A": "1"}, timeout=7.0)
    assert (found.import_s, found.load_s, found.first_call_s, found.steady_s) == (2, 20, 200, 6)
    assert found.setup_s == 226 and found.counters == {"found": 3} and found.runs == RUNS  # 108, 226, 314
    assert found.label == "f" and found.fresh_cache
    assert (
        str(found) == "f: import 2.00 s, load 20.0 s, first call 200 s, then 6.00 s a call (empty caches, median of 3)"
    )
    assert [(a.label, a.env, a.timeout) for a in asked] == [("f", {"A": "1"}, 7.0)] * 3
    expected = {"steady_time": 0.5, "num_threads": None, "grad_mode": "inference", "seed": 0}
    assert all(a.order.items() >= expected.items() for a in asked)
    assert len({a.cache for a in asked}) == 3 and not any(Path(a.cache).exists() for a in asked)


def test_a_kept_folder_is_the_same_for_all_and_filled_first(monkeypatch, tmp_path):
    asked = scripted(monkeypatch, run_of(9, 9, 9, 9, found=9), *RUNS)
    found = cold_start(
        "m:f", fresh_cache=False, label="mine", seed=3, num_threads=2, grad_mode="no_grad", steady_time=2.0
    )
    assert found.runs == RUNS and found.label == "mine" and not found.fresh_cache
    assert str(found).endswith("(kept caches, median of 3)")
    assert len(asked) == 4 and len({a.cache for a in asked}) == 1 and not Path(asked[0].cache).exists()
    expected = {"steady_time": 2.0, "num_threads": 2, "grad_mode": "no_grad", "seed": 3}
    assert all(a.order.items() >= expected.items() and a.timeout == 600.0 and a.env is None for a in asked)
    asked = scripted(monkeypatch, RUNS[0])
    cold_start("m:f", fresh_cache=False, cache_dir=tmp_path / "deep" / "er", repeats=1)
    assert [a.cache for a in asked] == [str(tmp_path / "deep" / "er")] and (tmp_path / "deep" / "er").is_dir()


def of_a_module():
    return len


def inputs_of_a_module():
    return ("x",)


TEXT = "def factory():\n    return len"
INPUTS = "def make_inputs():\n    return ('x',)"
HERE = __name__


@pytest.mark.parametrize(
    ("factory", "make_inputs", "expected"),
    [
        ("m.n:f.g", None, (None, "m.n", "f.g", None, False, None)),
        (" m:f ", "m:g", (None, "m", "f", "g", True, "m")),
        ("m:f", " k:g ", (None, "m", "f", "g", False, "k")),
        (TEXT, None, (TEXT, None, "factory", None, False, None)),
        (f"{TEXT}\n{INPUTS}", None, (f"{TEXT}\n{INPUTS}", None, "factory", "make_inputs", True, None)),
        (TEXT, INPUTS, (f"{TEXT}\n\n{INPUTS}", None, "factory", "make_inputs", True, None)),
        (TEXT, "m:g", (TEXT, None, "factory", "g", False, "m")),
        (textwrap.indent(TEXT, "  "), None, (TEXT, None, "factory", None, False, None)),
        ("factory = len", None, ("factory = len", None, "factory", None, False, None)),
        (of_a_module, inputs_of_a_module, (None, HERE, "of_a_module", "inputs_of_a_module", True, HERE)),
        ("m:f", inputs_of_a_module, (None, "m", "f", "inputs_of_a_module", False, HERE)),
        (TEXT, inputs_of_a_module, (TEXT, None, "factory", "inputs_of_a_module", False, HERE)),
    ],
)
def test_the_order_for_the_process(factory, make_inputs, expected):
    order = starting._order(factory, make_inputs)
    names = ("source", "module", "factory", "make_inputs", "inputs_here", "inputs_module")
    assert order == dict(zip(names, expected, strict=True))


def of_main():
    return len


@pytest.mark.parametrize(
    ("factory", "make_inputs", "message"),
    [
        (
            "no path " * 20,
            None,
            "factory: " + repr(("no path " * 20)[:60]) + " is neither 'package.module:function' nor Python source "
            "(invalid syntax)",
        ),
        ("x = 1", None, "factory: the source text defines no function 'factory'"),
        ("m:f", "x = 1", "make_inputs: the source text defines no function 'make_inputs'"),
        ("m:f", INPUTS, "make_inputs: give it as 'package.module:function', like the factory"),
        (3, None, "factory: expected 'package.module:function', source text or a function, got 3"),
        ("m:f", 4, "make_inputs: expected 'package.module:function', source text or a function, got 4"),
    ],
)
def test_messages_about_what_to_run(factory, make_inputs, message):
    with pytest.raises((ValueError, TypeError)) as caught:
        cold_start(factory, make_inputs)
    assert str(caught.value) == message


def test_functions_that_no_other_process_can_have(monkeypatch):
    with pytest.raises(ValueError) as caught:
        cold_start(lambda: 1)
    assert str(caught.value).endswith("has no name that another process could import; use def at top level")
    assert str(caught.value).startswith("factory: 'test_functions_that_no_other")
    nameless = SimpleNamespace
    with pytest.raises(ValueError, match=r"factory: functools\.partial\(.* has no name"):
        cold_start(functools.partial(nameless))
    monkeypatch.setattr(of_main, "__module__", "__main__")
    assert starting._order(of_main, None)["source"] == "def of_main():\n    return len\n"
    monkeypatch.setattr(starting.inspect, "getsource", lambda fn: (_ for _ in ()).throw(OSError()))
    with pytest.raises(ValueError) as caught:
        cold_start(of_main)
    expected = "factory: no source found for 'of_main'; give it as text or 'package.module:function'"
    assert str(caught.value) == expected
    with pytest.raises(TypeError) as caught:
        cold_start(dict.fromkeys(range(300)))
    assert len(str(caught.value)) == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats: expected 1 or more, got 0"),
        ({"grad_mode": "x"}, "grad_mode: expected one of inference, no_grad, enabled, got 'x'"),
        ({"cache_dir": "x"}, "cache_dir: only with fresh_cache=False; a fresh cache is an empty folder of its own"),
    ],
)
def test_messages_about_options(options, message):
    with pytest.raises(ValueError) as caught:
        cold_start("m:f", **options)
    assert str(caught.value) == message


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")
def test_what_a_process_leaves_running_ends_with_it(tmp_path):
    """Compilers that a factory starts must not go on beside the next measurement."""
    source = f"""
        import subprocess, sys
        def factory():
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
            return lambda: 1
    """
    cold_start(source, **QUICK)
    try:
        ended = os.pidfd_open(int((tmp_path / "pid").read_text()))
    except ProcessLookupError:
        return
    try:
        assert select.select([ended], [], [], 60)[0], "still running"
    finally:
        os.close(ended)


def test_messages_of_a_failed_process():
    with pytest.raises(CallableFailedError) as caught:
        cold_start("def factory(): raise RuntimeError('x' * 999)", **QUICK)
    assert len(str(caught.value)) == 500
    with pytest.raises(CallableFailedError) as caught:
        cold_start("import time\ndef factory(): time.sleep(60)", timeout=0.25, **QUICK)
    assert str(caught.value) == "'factory': the fresh process took more than 0.25 s"
    with pytest.raises(CallableFailedError) as caught:
        cold_start("import os\ndef factory():\n  print('one\\ntwo\\n \\n', flush=True)\n  os._exit(3)", **QUICK)
    assert str(caught.value) == "'factory' failed in a fresh process at start: two"
    with pytest.raises(CallableFailedError) as caught:
        cold_start("import os\ndef factory(): os._exit(3)", **QUICK)
    assert str(caught.value) == "'factory' failed in a fresh process at start: it ended without a word"


# ------------------------------------------------------------------------------------------- inside the process


@pytest.fixture
def inside(monkeypatch, tmp_path):
    """run(source, **order): the child's own code, here, on a simulated clock."""
    clock = FakeClock()
    monkeypatch.setitem(sys.modules, "cold_clock", SimpleNamespace(spend=clock.spend, log=[]))

    def run(source, **order):
        order = {
            "source": "from cold_clock import spend, log\n" + source, "module": None, "factory": "factory",
            "make_inputs": None, "inputs_here": False, "inputs_module": None, "seed": 0, "num_threads": None,
            "grad_mode": "inference", "steady_time": 0.0, "cache": str(tmp_path),
        } | order  # fmt: skip
        result = {}
        cold_child.run(order, result, clock)
        return SimpleNamespace(**result, log=sys.modules["cold_clock"].log)

    run.clock = clock
    return run


STEPS = """
def factory():
    seconds = list(STEPS)
    return lambda: spend(seconds.pop(0) if len(seconds) > 1 else seconds[0])
"""


@pytest.mark.parametrize(
    ("steps", "steady_time", "calls", "steady"),
    [
        ([5, 9, 1, 3], 0.0, 3, 3),  # three calls at least; the first third still warms up
        ([5, 9, 1, 2], 0.0, 3, 2),
        ([5, 9, 9, 4, 1, 2, 3], 28.0, 6, 3),
        ([5, 9, 9, 4, 1, 2, 3, 1], 28.5, 7, 2),
        ([5, 1], 1e9, 10_000, 1),
    ],
)
def test_steady_calls(inside, steps, steady_time, calls, steady):
    found = inside(STEPS.replace("STEPS", repr([float(s) for s in steps])), steady_time=steady_time)
    assert (found.first_call_s, found.steady_calls, found.steady_s) == (5.0, calls, steady)


def test_work_that_is_queued_is_waited_for_where_it_belongs(inside, monkeypatch):
    monkeypatch.setattr(cold_child, "wait", lambda: inside.clock.spend(0.25))
    source = "spend(3.0)\ndef factory():\n    spend(1.0)\n    return lambda x: spend(2.0)\ndef give():\n    return [8]"
    found = inside(source, make_inputs="give", inputs_here=True)
    assert (found.import_s, found.load_s, found.first_call_s, found.steady_s) == (3.0, 1.25, 2.25, 2.25)
    assert found.stage == "done"


def test_inputs_of_another_module_cost_no_import_time(inside, monkeypatch):
    monkeypatch.setitem(sys.modules, "cold_inputs", SimpleNamespace(kinds=SimpleNamespace(give=lambda: ("a", "b"))))
    source = "def factory():\n    return lambda *args: log.append(args)"
    found = inside(source, make_inputs="kinds.give", inputs_module="cold_inputs")
    assert found.log == [("a", "b")] * 4


def test_seed_threads_and_grad_mode_hold_for_the_factory_and_its_calls(inside):
    import torch

    threads = torch.get_num_threads()
    source = """
import torch
def factory():
    log.append((torch.rand(1).item(), torch.get_num_threads(), torch.is_inference_mode_enabled()))
    return lambda: log.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
"""
    try:
        torch.manual_seed(5)
        drawn = torch.rand(1).item()
        for mode, modes in (("inference", (True, False)), ("no_grad", (False, False)), ("enabled", (False, True))):
            found = inside(source, seed=5, num_threads=threads + 1, grad_mode=mode)
            assert found.log == [(drawn, threads + 1, False)] + [modes] * 4
            found.log.clear()
        torch.set_num_threads(threads)
        assert inside(source).log[0][1] == threads  # None: as they are
    finally:
        torch.set_num_threads(threads)


def test_caches_are_counted_below_the_folder_too(inside, tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("x", "a/y", "a/b/z"):
        (tmp_path / name).touch()
    source = f"def factory():\n    return lambda: open({str(tmp_path / 'new')!r}, 'w').close()"
    found = inside(source)
    assert (found.cache_files_before, found.cache_files_after) == (3, 4)


def test_where_it_came_to(inside):
    for source, stage in (
        ("import no_such_module", "import"),
        ("x = 1", "import"),
        ("def factory(): return 1 / 0", "load"),
        ("def factory(): return lambda: 1 / 0", "first call"),
    ):
        result = {}
        order = {"source": source, "factory": "factory", "make_inputs": None, "inputs_here": False, "cache": "none",
                 "seed": 0, "num_threads": None, "grad_mode": "enabled", "steady_time": 0.0}  # fmt: skip
        with pytest.raises((ImportError, AttributeError, ZeroDivisionError)):
            cold_child.run(order, result, FakeClock())
        assert result["stage"] == stage and result["cache_files_before"] == 0


def test_names_of_a_factory():
    namespace = cold_child.names({"source": "def f(): return __name__", "module": None})
    assert namespace["f"]() == "cold_start_source"
    assert namespace["f"].__code__.co_filename == "<cold_start source>"  # for its tracebacks
    assert cold_child.names({"source": None, "module": "math"})["pi"] > 3
    deep = {"a": SimpleNamespace(b=SimpleNamespace(c=1))}
    assert cold_child.attribute(deep, "a.b.c") == 1 and cold_child.attribute(deep, "a") is deep["a"]
    with pytest.raises(AttributeError) as caught:
        cold_child.attribute(deep, "x.y")
    assert str(caught.value) == "no 'x' in the factory's module"


def test_an_accelerator_is_waited_for(monkeypatch):
    waited, there = [], [True]
    accelerator = SimpleNamespace(is_available=lambda: there[0], synchronize=lambda: waited.append(1))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(accelerator=accelerator))
    cold_child.wait()
    there[0] = False
    cold_child.wait()
    monkeypatch.delitem(sys.modules, "torch")
    cold_child.wait()
    assert waited == [1]
    with cold_child.grad("inference"):  # without torch there is nothing to set
        cold_child.prepare({"seed": 0, "num_threads": 1})


def test_counters_without_dynamo_or_without_its_times(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    assert cold_child.counters() == {}
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters={"a": {"b": 2.0}}))
    assert cold_child.counters() == {"a.b": 2, "compile.cpp_files": 0}
    found = SimpleNamespace(counters={}, compilation_time_metrics={"other": [1.0]})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", found)
    assert cold_child.counters() == {"compile.cpp_files": 0}


# ------------------------------------------------------------------------------------------- break-even


def cold(*setups, steady=0.0):
    runs = tuple(ColdRun(0.5, 0.0, s - 0.5 + steady, steady, 0, 0, {}) for s in setups)
    middle = sorted(run.setup_s for run in runs)[len(runs) // 2]
    return ColdStart("c", 0.5, 0.0, 1.0, steady, middle, True, {}, runs)


def row(speedup, low, high, verdict="faster", baseline=1e-3):
    return ComparisonRow("c", "b", verdict, speedup=speedup, ci_low=low, ci_high=high, baseline_median_s=baseline)


def test_setup_is_import_load_and_the_first_call_beyond_a_steady_one():
    assert ColdRun(1.0, 2.0, 3.5, 0.5, 0, 0, {}).setup_s == 6.0
    assert ColdRun(1.0, 2.0, 0.5, 0.6, 0, 0, {}).setup_s == 3.0


def test_break_even():
    found = break_even(cold(10.0), cold(2.0), row(2.0, 2.0, 2.0))
    assert found.calls == found.calls_low == found.calls_high == 16_000  # 8 s at 0.5 ms a call
    assert (found.extra_s, found.saved_s) == pytest.approx((8.0, 5e-4))
    assert str(found) == "pays after 16,000 calls [16,000, 16,000]"


def test_the_interval_comes_from_both():
    found = break_even(cold(9.0, 10.0, 12.0), cold(1.0, 2.0, 2.5), row(2.0, 1.6, 2.5))
    assert found.calls == 16_000
    assert found.calls_low == round((9.0 - 2.5) / (1e-3 * (1 - 1 / 2.5)) + 0.5)
    assert found.calls_high == round((12.0 - 1.0) / (1e-3 * (1 - 1 / 1.6)) + 0.5)
    assert found.calls_low < found.calls < found.calls_high


@pytest.mark.parametrize(
    ("extra", "speedup", "calls", "text"),
    [
        ((8.0, 0.0), (1.1, 0.9, 1.2), (88_000, 48_000, None), "pays after 88,000 calls [48,000, never]"),
        ((8.0, 0.0), (0.9, 0.8, 0.95), (None, None, None), "never pays"),
        ((8.0, 0.0), (0.99, 0.9, 1.25), (None, 40_000, None), "may never pay [40,000, never]"),
        ((1.0, 2.0), (1.5, 1.2, 2.0), (0, 0, 0), "pays after 0 calls [0, 0]"),
        ((5e-4, 0.0), (2.0, 2.0, 2.0), (1, 1, 1), "pays after 1 call [1, 1]"),
        ((1.0, 1.0), (1.0, 1.0, 1.0), (0, 0, 0), "pays after 0 calls"),
    ],
)
def test_never_and_at_once(extra, speedup, calls, text):
    found = break_even(*extra, row(*speedup))
    assert (found.calls, found.calls_low, found.calls_high) == calls
    assert text in str(found)


def test_a_slower_candidate_with_a_cheaper_set_up_is_left_undecided():
    """It is ahead at first and behind later: it never "pays" after a number of calls."""
    found = break_even(1.0, 9.0, row(0.5, 0.5, 0.5))
    assert found.calls is None
    assert str(found) == "starts sooner but is slower: ahead for the first 8,000 calls"


@pytest.mark.parametrize("verdict", ["invalid", "error"])
def test_an_unproven_row_has_no_break_even(verdict):
    with pytest.raises(ValueError, match="no proven speedup"):
        break_even(1.0, 0.0, row(2.0, 1.9, 2.1, verdict))
    with pytest.raises(ValueError, match="interval"):
        break_even(1.0, 0.0, dataclasses.replace(row(2.0, None, None), verdict="inconclusive"))


@pytest.mark.parametrize("setup", [-1.0, float("nan"), float("inf")])
def test_set_up_must_be_seconds(setup):
    with pytest.raises(ValueError, match="cold_candidate"):
        break_even(setup, 0.0, row(2.0, 1.9, 2.1))


def test_ranges_and_words_of_break_even():
    found = break_even(cold(9.0, 10.0, 12.0), cold(1.0, 2.0, 2.5), row(2.0, 1.6, 2.5))
    assert found.extra_range_s == pytest.approx((6.5, 11.0))
    assert found.saved_range_s == pytest.approx((1e-3 * (1 - 1 / 1.6), 1e-3 * (1 - 1 / 2.5)))
    assert str(break_even(8.0, 0.0, row(0.9, 0.8, 0.95))) == "never pays: 8.00 s more set-up and no time saved"
    assert str(break_even(8.0, 0.0, row(1.1, 0.9, 1.2))) == "pays after 88,000 calls [48,000, never]"
    assert str(break_even(8.0, 0.0, row(0.99, 0.9, 1.25))) == "may never pay [40,000, never]"
    assert str(break_even(1.0, 9.0, row(0.5, 0.5, 0.5))) == (
        "starts sooner but is slower: ahead for the first 8,000 calls"
    )
    assert break_even(1.0, 0.0, row(1.0, 1.0, 1.0)).calls is None
    assert break_even(1e-3, 0.0, row(2.0, 2.0, 2.0)).calls == 2  # 0.5 ms saved a call
    assert break_even(1.1e-3, 0.0, row(2.0, 2.0, 2.0)).calls == 3
    with pytest.raises(ValueError) as caught:
        break_even(1.0, 0.0, row(2.0, 1.9, 2.1, "invalid"))
    assert str(caught.value) == ("row: 'c' is 'invalid' and has no proven speedup; expected a row with an interval")
    with pytest.raises(ValueError) as caught:
        break_even(1.0, -2.0, row(2.0, 1.9, 2.1))
    assert str(caught.value) == "cold_baseline: expected seconds of set-up, 0 or more, got -2.0"

"""cold_start in real fresh processes (without torch, so that each takes milliseconds), break_even on given numbers."""

import dataclasses
import os
import sys
import textwrap
from types import SimpleNamespace

import pytest
from timing_fakes import FakeClock

from utils.timing import CallableFailedError, ColdRun, ColdStart, ComparisonRow, break_even, cold_child, cold_start

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
    import importlib

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

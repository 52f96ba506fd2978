"""Recipe 02: its counting backend on the known traps, its recorded rows, and whole runs with papermill."""

import ast
import logging
from types import SimpleNamespace

import pytest
import torch
from recipe_notebook import check_refused, code_cells, run_whole, said, source_of, source_with

from utils.claims import per_place
from utils.machine import has_compiler, missing
from utils.rows import recorded_rows

RECIPE = "02_torch_compile"
ONES = torch.ones


@pytest.fixture(scope="module")
def technique():
    """The names of the cell tagged `technique`."""
    names = {"torch": torch, "SimpleNamespace": SimpleNamespace}
    exec(source_of(RECIPE, "technique"), names)
    return SimpleNamespace(**names)


@pytest.fixture
def survey(technique):
    """Its `survey`, with Dynamo's log silent; nothing stays compiled."""
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield technique.survey
    logger.setLevel(level)
    torch.compiler.reset()


def graphs(seen):
    return 1 + seen.breaks + seen.recompiled


def softmax(x):
    return x.softmax(0)


def times(x, n):
    return x * n


# ---------------------------------------------------------------------------------------------------- known traps


def test_equal_calls_are_one_graph(survey, technique):
    assert technique.one_graph(survey(softmax, [(ONES(4),)] * 3))


def test_number_of_patches_0_and_1_have_graphs_of_their_own(survey, technique):
    assert graphs(survey(softmax, [(ONES(n),) for n in (4, 8, 12, 1, 0, 20)])) == 4
    marked = [(technique.varying(ONES(n)),) for n in (4, 8, 12, 20)]
    assert technique.one_graph(survey(softmax, marked))
    with_0_and_1 = survey(softmax, [(technique.varying(ONES(n)),) for n in (4, 8, 12, 1, 0, 20)])
    assert with_0_and_1.recompiled <= 2 and with_0_and_1.eager == 0


def test_a_python_position_per_token(survey, technique):
    calls = [(ONES(4), n) for n in range(20)]
    assert graphs(survey(times, calls)) == 2
    past = survey(times, calls, dynamic=False)
    limit = torch._dynamo.config.recompile_limit
    assert graphs(past) == limit and past.eager == 20 - limit  # silently eager
    assert technique.one_graph(survey(times, [(ONES(4), torch.tensor(n)) for n in range(20)]))


def test_a_cache_that_grows(survey):
    calls = [(ONES(n),) for n in range(20)]
    assert graphs(survey(softmax, calls)) == 3
    past = survey(softmax, calls, dynamic=False)
    assert graphs(past) == torch._dynamo.config.recompile_limit and past.eager == 12


def test_a_break_is_seen_and_its_calls_are_not_eager(survey):
    def peeking(x):
        return x + 1 if x.sum().item() > 0 else x - 1

    seen = survey(peeking, [(ONES(4),)] * 2)
    assert (seen.breaks, seen.recompiled, seen.eager) == (1, 0, 0)


# ---------------------------------------------------------------------------------------------------- rows


def test_recorded_starts_prove_their_hits():
    starts = {row["case.start"]: row for row in recorded_rows(RECIPE) if row.get("kind") == "start"}
    assert starts.keys() == {"eager", "cold", "warm folder", "artifacts"}
    hits = {name: (row["fxgraph_cache_hit"], row["fxgraph_cache_miss"]) for name, row in starts.items()}
    assert hits == {"eager": (0, 0), "cold": (0, 1), "warm folder": (1, 0), "artifacts": (1, 0)}
    assert (
        starts["artifacts"]["compiler_runs"] > starts["warm folder"]["compiler_runs"]
    )  # the machine code is not in it
    for row in starts.values():
        assert row["provenance"] == "measured" and row["setup_s"] >= row["import_s"] > 0


def test_recorded_models_hold_a_gain_and_a_loss():
    rows = [row for row in recorded_rows(RECIPE) if row.get("verdict")]
    assert all(row["same"] for row in rows)
    assert {"faster", "slower"} <= {row["verdict"] for row in rows}


# ---------------------------------------------------------------------------------------------------- verdicts


@pytest.fixture(scope="module")
def rules():
    """The functions of the cells after `recorded`, without running the cells' other lines."""
    names = {}
    for cell in code_cells(RECIPE):
        tree = ast.parse(cell.source)
        wanted = ("gain_rule", "launch_rule", "start_rule", "pays_after", "ABOUT_ONE")
        kept = [part for part in tree.body if getattr(part, "name", None) in wanted or "ABOUT_ONE" in ast.dump(part)]
        exec(compile(ast.Module(kept, []), "rules", "exec"), names)
    return SimpleNamespace(**names)


def pair(low, verdict, model="block"):
    """A made-up row of compiled against eager."""
    return {"ci_low": low, "speedup": low * 1.1, "verdict": verdict, "case.model": model, "case.tokens": 8}


@pytest.mark.parametrize(
    "verdict, found",
    [
        ("confirmed", [pair(2.1, "faster"), pair(0.99, "equivalent")]),
        ("confirmed", [pair(2.0, "faster"), pair(3.0, "faster")]),
        ("refined", [pair(2.1, "faster"), pair(0.1, "slower")]),  # one kind of model loses
        ("refined", [pair(1.4, "faster"), pair(1.2, "faster")]),  # smaller
        ("refined", [pair(2.5, "faster"), pair(3.1, "faster")]),  # larger
        ("refuted", [pair(1.0, "inconclusive"), pair(0.5, "slower")]),
    ],
)
def test_the_gain_is_judged_as_claims_yaml_says(rules, verdict, found):
    said, evidence = rules.gain_rule(found)
    assert said == verdict
    assert ("no row is faster" in evidence) is (verdict == "refuted")


@pytest.mark.parametrize(
    "verdict, counts",
    [
        ("confirmed", {"eager": 9, "compile": 1, "reduce-overhead": 1}),
        ("refined", {"eager": 9, "compile": 4, "reduce-overhead": 2}),
        ("refuted", {"eager": 9, "compile": 9, "reduce-overhead": 1}),  # compiling alone changes nothing
        ("refuted", {"eager": 9, "compile": 4, "reduce-overhead": 4}),  # and nothing reaches one
    ],
)
def test_launches_are_judged_as_claims_yaml_says(rules, verdict, counts):
    found = [{"case.mode": mode, "launches": n} for mode, n in counts.items()]
    assert rules.launch_rule(found)[0] == verdict
    worse = [*found, {"case.mode": "reduce-overhead", "launches": 50}]  # of another card: the worst one counts
    assert rules.launch_rule(worse)[0] == ("confirmed" if verdict == "confirmed" else "refuted")


@pytest.mark.parametrize(
    "counts",
    [
        {"eager": 0, "compile": 0, "reduce-overhead": 0},  # the profile saw nothing
        {"eager": 9, "compile": 1},
        {"compile": 1, "reduce-overhead": 1},
    ],
)
def test_launches_that_were_not_counted_give_no_verdict(rules, counts):
    found = [{"case.mode": mode, "launches": n} for mode, n in counts.items()]
    assert rules.launch_rule(found)[0] == "not measurable here"


@pytest.mark.parametrize(
    "starts", [{"cold": 5.0, "eager": 1.0}, {"cold": 1.0, "eager": 1.0, "artifacts": 1.0}, {"x": 1.0}]
)
def test_starts_that_are_not_all_there_give_no_verdict(rules, starts):
    counted = {"fxgraph_cache_hit": 2, "fxgraph_cache_miss": 0, "compiler_runs": 0}
    found = [{"case.start": start, "setup_s": seconds, **counted} for start, seconds in starts.items()]
    assert rules.start_rule(found)[0] == "not measurable here"


@pytest.mark.parametrize(
    "given, told",
    [
        ({"width": 0}, "width=0; expected a whole number of at least 1"),
        ({"threads": 0}, "threads=0; expected a whole number of at least 1"),
        ({"tokens": [16, 0]}, r"tokens=\[16, 0\]; expected a list of whole numbers of at least 1"),
        ({"tokens": ["a"]}, r"tokens=\['a'\]; expected a list of whole numbers"),
        ({"tokens": []}, r"tokens=\[\]; expected .*, one or more"),
        ({"min_run_time": 0.0}, "min_run_time=0.0; expected a finite number above 0"),
        ({"min_run_time": float("nan")}, "min_run_time=nan; expected a finite number above 0"),
    ],
)
def test_a_wrong_value_is_refused_in_the_set_up(given, told):
    check_refused(RECIPE, given, told)


@pytest.mark.parametrize(
    "verdict, hits, misses, compiler_runs, setup_s",
    [
        ("confirmed", 2, 0, 0, 2.0),
        ("refined", 2, 0, 0, 2.5),  # all hits, but a seventh of the start is left
        ("refined", 2, 0, 1, 2.0),  # the C++ compiler runs
        ("refined", 2, 1, 0, 2.0),  # not every graph hits
        ("refuted", 0, 2, 3, 11.0),
    ],
)
def test_starts_are_judged_as_claims_yaml_says(rules, verdict, hits, misses, compiler_runs, setup_s):
    file = {"fxgraph_cache_hit": hits, "fxgraph_cache_miss": misses, "compiler_runs": compiler_runs}
    found = [{"case.start": "eager", "setup_s": 1.0}, {"case.start": "cold", "setup_s": 11.0}]
    said, evidence = rules.start_rule([*found, {"case.start": "artifacts", "setup_s": setup_s, **file}])
    assert said == verdict
    if hits:
        assert ("not every graph hits" in evidence) is bool(misses) and f"{(setup_s - 1) / 10:.0%} of" in evidence


def test_break_even_of_both_speeds_of_eager(rules):
    assert rules.pays_after(11.0, 1.0, 0.012, 0.002) == pytest.approx(1000)
    assert rules.pays_after(11.0, 1.0, 0.003, 0.002) == pytest.approx(10_000)
    assert rules.pays_after(11.0, 1.0, 0.002, 0.002) is None
    starts = {row["case.start"]: row for row in recorded_rows(RECIPE) if row.get("kind") == "start"}
    usual = [row for row in recorded_rows(RECIPE) if row.get("verdict") and row["case.model"] == "block"]
    kept = next(row for row in usual if row["case.tokens"] == starts["cold"]["case.tokens"])
    lines = output_of(SimpleNamespace(cells=code_cells(RECIPE)), "begun, timed =").splitlines()
    for name in ("cold", "warm folder", "artifacts"):
        row, eager = starts[name], starts["eager"]
        extra = row["setup_s"] - eager["setup_s"]
        fresh = extra / (eager["steady_s"] - row["steady_s"])
        held = extra / (kept["baseline_median_s"] - kept["median_s"])
        assert any(
            line.startswith(name) and f"fresh {fresh:,.0f} calls, kept {held:,.0f} calls" in line for line in lines
        )


def test_starts_and_pairs_are_of_one_run(technique):
    """A card's rows, another run and another form must not mix with the starts of a machine."""

    def start(name, run, setup, device="cpu"):
        return {"kind": "start", "case.start": name, "run_id": run, "setup_s": setup, "device_name": device}

    def pair(run, label, seconds, model="block"):
        return {"verdict": "faster", "run_id": run, "label": label, "median_s": seconds, "case.tokens": 8} | {
            "case.model": model
        }

    found = [start("eager", "old", 1.0), start("eager", "new", 2.0), start("cold", "new", 9.0)]
    rows = [*found, pair("old", "compile", 1), pair("new", "compile", 2), pair("new", "reduce-overhead", 3)]
    rows += [pair("new", "compile", 4, model="LlamaMLP")]
    names = {"recorded": rows}
    exec(source_with(RECIPE, "def of_newest_run"), names)
    starts, usual = names["of_newest_run"](found)
    assert {name: row["setup_s"] for name, row in starts.items()} == {"eager": 2.0, "cold": 9.0}
    assert {tokens: row["median_s"] for tokens, row in usual.items()} == {8: 2}
    assert names["of_newest_run"]([]) == ({}, {})


def test_c3_judges_every_machine(rules):
    def starts(device, setup, hits):
        counted = {"fxgraph_cache_hit": hits, "fxgraph_cache_miss": 0, "compiler_runs": 0, "device_name": device}
        seconds = {"eager": 1.0, "cold": 11.0, "artifacts": setup}
        return [{"case.start": name, "setup_s": s, **counted} for name, s in seconds.items()]

    rule = per_place(rules.start_rule)
    assert rule(starts("a", 2.0, 2))[0] == rule(starts("a", 2.0, 2) + starts("b", 2.0, 2))[0] == "confirmed"
    assert rule(starts("a", 2.0, 2) + starts("b", 11.0, 0))[0] == "refined"


def output_of(notebook, text):
    return "\n".join(said(cell) for cell in notebook.cells if text in cell.source)


@pytest.mark.skipif(not has_compiler(), reason=missing("compiler"))
def test_a_run_with_other_parameters(tmp_path):
    done, rows = run_whole(RECIPE, tmp_path, tokens=[4, 32], width=64, seed=1, min_run_time=0.05)
    assert {(row["case.model"], row["case.tokens"]) for row in rows if row.get("verdict")} == {
        ("block", 4),
        ("block", 32),
        ("LlamaMLP", 64),
        ("one small product", 8),
    }
    assert not [row["error"] for row in rows if row.get("verdict") in ("error", "invalid")]
    assert all(row["param.width"] == 64 and row["param.seed"] == 1 for row in rows)
    assert "not run: set fresh_process" in output_of(done, "if fresh_process")


def test_without_a_compiler_it_says_so_and_proves_the_rest(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("COOKBOOK_DEVICE", "cpu")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    done, rows = run_whole(RECIPE, tmp_path)
    assert not rows and missing("compiler") in output_of(done, "results[n]")
    assert "same numbers as eager: True" in output_of(done, "special = survey")
    assert "loaded into an empty folder : hit" in output_of(done, "only_products")
    assert "C4  confirmed" in output_of(done, "per_place(start_rule)")


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    _, rows = run_whole(RECIPE, tmp_path, device="cuda", tokens=[64, 8192], width=4096)
    timed = [row for row in rows if row.get("verdict") and row["case.model"] == "block"]
    assert {row["label"] for row in timed} == {"compile", "reduce-overhead", "max-autotune"}
    for row in timed:
        assert row["device"].startswith("cuda") and row["same"] and row["driver"] and row["triton"], row
    launches = {row["case.mode"]: row["launches"] for row in rows if row.get("kind") == "launches"}
    assert launches["eager"] > launches["compile"] >= launches["reduce-overhead"] >= 1

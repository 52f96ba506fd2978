"""Recipe 02: its counting backend on the known traps, its recorded rows, and whole runs with papermill."""

import logging
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch

from utils.machine import has_compiler, missing
from utils.rows import read_rows, recorded_rows

RECIPE = "02_torch_compile"
NOTEBOOK = Path(__file__).parents[1] / "notebooks" / f"{RECIPE}.ipynb"
ONES = torch.ones


@pytest.fixture(scope="module")
def technique():
    """The names of the cell tagged `technique`."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    source = next(cell.source for cell in cells if "technique" in cell.metadata.get("tags", []))
    names = {"torch": torch, "SimpleNamespace": SimpleNamespace}
    exec(source, names)
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


@pytest.fixture
def run(tmp_path):
    """Run the recipe with papermill: the executed notebook and its rows."""

    def run(**parameters):
        papermill = pytest.importorskip("papermill")
        rows = tmp_path / "rows.jsonl"
        given = {"rows": str(rows), **parameters}
        done = papermill.execute_notebook(
            str(NOTEBOOK), str(tmp_path / "out.ipynb"), parameters=given, progress_bar=False
        )
        return done, read_rows(rows) if rows.exists() else []

    return run


def output_of(notebook, text):
    return "\n".join(
        output.get("text", "") for cell in notebook.cells if text in cell.source for output in cell.get("outputs", [])
    )


@pytest.mark.skipif(not has_compiler(), reason=missing("compiler"))
def test_a_run_with_other_parameters(run):
    done, rows = run(tokens=[4, 32], width=64, seed=1, min_run_time=0.05)
    assert {(row["case.model"], row["case.tokens"]) for row in rows if row.get("verdict")} == {
        ("block", 4),
        ("block", 32),
        ("LlamaMLP", 64),
        ("one small product", 8),
    }
    assert not [row["error"] for row in rows if row.get("verdict") in ("error", "invalid")]
    assert all(row["param.width"] == 64 and row["param.seed"] == 1 for row in rows)
    assert "not run: set fresh_process" in output_of(done, "if fresh_process")


def test_without_a_compiler_it_says_so_and_proves_the_rest(run, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("COOKBOOK_DEVICE", "cpu")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    done, rows = run()
    assert not rows and missing("compiler") in output_of(done, "results[n]")
    assert "same numbers as eager: True" in output_of(done, "special = survey")
    assert "loaded into an empty folder : hit" in output_of(done, "only_products")
    assert "C4  confirmed" in output_of(done, "start_rule, ")


@pytest.mark.gpu
def test_on_a_gpu(run):
    _, rows = run(device="cuda", tokens=[64, 8192], width=4096)
    timed = [row for row in rows if row.get("verdict") and row["case.model"] == "block"]
    assert {row["label"] for row in timed} == {"compile", "reduce-overhead", "max-autotune"}
    for row in timed:
        assert row["device"].startswith("cuda") and row["same"] and row["driver"] and row["triton"], row
    launches = {row["case.mode"]: row["launches"] for row in rows if row.get("kind") == "launches"}
    assert launches["eager"] > launches["compile"] >= launches["reduce-overhead"] >= 1

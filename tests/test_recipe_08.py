"""Recipe 08: its technique away from the notebook, its recorded rows, and whole runs."""

from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch
import torch.nn.functional as F

from utils.models import gpt
from utils.rows import read_rows, recorded_rows

RECIPE = "08_kv_cache"
NOTEBOOK = Path(__file__).parents[1] / "notebooks" / f"{RECIPE}.ipynb"
CLAIMS = {f"K{number}" for number in range(2, 8)}


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def cell_with(text: str) -> str:
    """The source of the code cell that holds `text`."""
    return next(cell.source for cell in code_cells(nbformat.read(NOTEBOOK, as_version=4)) if text in cell.source)


@pytest.fixture(autouse=True, scope="module")
def one_thread_without_gradients():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def recipe():
    names = {"torch": torch, "F": F}
    exec(cell_with("def turn(").partition("\n\n\n")[0], names)
    for text in ("def offer(", "def write_without_cache", "def new_cache"):
        exec(cell_with(text), names)
    return SimpleNamespace(**{name: value for name, value in names.items() if callable(value)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_technique_agrees_with_the_library(recipe, dtype):
    model = gpt.load("tiny", dtype=dtype, seed=4)
    text = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(2))
    ours, theirs = recipe.new_cache(model, 2, 12), gpt.new_cache(model, 2, 12)
    loose = {"rtol": 0.05, "atol": 0.1} if dtype == torch.bfloat16 else {}
    for part in (text[:, :5], text[:, 5:9]):
        torch.testing.assert_close(recipe.prefill(model, part, ours), gpt.prefill(model, part, theirs), **loose)
    for at in (9, 10, 11):
        expected = gpt.decode_step(model, text[:, at], theirs)
        torch.testing.assert_close(recipe.decode_step(model, text[:, at], ours), expected, **loose)
    for i, kv in enumerate(theirs.kv):
        torch.testing.assert_close(torch.stack((ours["keys"][i], ours["values"][i])), kv, **loose)


def test_a_full_cache_is_an_error_and_stays_as_it_is(recipe):
    model = gpt.load("tiny")
    cache = recipe.new_cache(model, 1, 3)
    recipe.prefill(model, torch.tensor([[1, 2, 3]]), cache)
    before = [kept.clone() for kept in (*cache["keys"], *cache["values"], cache["filled"])]
    with pytest.raises(ValueError, match="4 tokens do not fit into 3 slots"):
        recipe.decode_step(model, torch.tensor([4]), cache)
    assert all(map(torch.equal, before, (*cache["keys"], *cache["values"], cache["filled"])))


def test_the_model_of_the_memory_pool_follows_its_rules():
    import bisect

    names = {"bisect": bisect, "MiB": 2**20}
    exec(cell_with("class Pool"), names)
    pool, mebi = names["Pool"](), 2**20
    small = pool.ask(3 * mebi)
    assert pool.taken == 20 * mebi and pool.free == [(17 * mebi, 1, 3 * mebi)]  # 20 MiB, and the rest split off
    other = pool.ask(17 * mebi - 100)
    assert pool.taken == 20 * mebi and other == (17 * mebi, 1, 3 * mebi)  # fits; less than 1 MiB is not split off
    large = pool.ask(11 * mebi)
    assert pool.taken == 32 * mebi and large[0] == 12 * mebi - 0  # in steps of 2 MiB; what is left is 1 MiB, not more
    pool.give_back(*small)
    pool.give_back(*other)
    assert pool.free == [(20 * mebi, 1, 0)]  # neighbours join
    assert pool.ask(20 * mebi + 1)[1] == 3 and pool.taken == 54 * mebi  # a little too large for every free block


def test_recorded_rows_hold_the_tables_of_the_source():
    rows = [row for row in recorded_rows(RECIPE) if row["provenance"] == "reported"]
    assert all(row["source"] == "003_d1bfa8a9c4385dfc.txt" and row["recipe"] == RECIPE for row in rows)
    pairs = {(row["claim"], row["case.tokens"]): row for row in rows if row["kind"] == "generation"}
    assert {tokens for claim, tokens in pairs if claim == "K4"} == {512, 1024, 2048, 4096}
    assert {tokens for claim, tokens in pairs if claim == "K5"} == {512, 1024, 2048, 4096, 8192, 16384}
    ratio = {key: row["baseline_median_s"] / row["median_s"] for key, row in pairs.items() if row["baseline_median_s"]}
    said = {("K4", 512): 6.9, ("K4", 1024): 15.6, ("K5", 512): 1.2, ("K5", 1024): 1.2, ("K5", 2048): 1.8}
    assert {key: round(value, 1) for key, value in ratio.items()} == said | {("K5", 4096): 42.2}


def claims_of(text: str) -> dict[str, str]:
    """Verdict by claim, from the lines that the cell `claims` prints."""
    return {line[:4].strip(): line[4:25].strip() for line in text.splitlines() if line[:4].strip() in CLAIMS}


def test_other_parameters_give_complete_rows(tmp_path, capsys, monkeypatch):
    """Every code cell, in this process: a kernel of its own would only cost time. The compiled step runs in nbval."""
    monkeypatch.setattr("utils.machine.has_compiler", lambda: False)
    given = {"size": "tiny", "new_tokens": 9, "prompt_tokens": 5, "seed": 1, "step_position": 40, "replicates": 2}
    given |= {"min_run_time": 0.01, "rows": str(tmp_path / "rows.jsonl")}
    names, shown = {"__name__": "recipe_08"}, ""  # code that looks at a function asks for its module
    for cell in code_cells(nbformat.read(NOTEBOOK, as_version=4)):
        exec(cell.source, names)
        if "parameters" in cell.metadata.get("tags", []):
            assert given.keys() <= names.keys()
            names |= given
        if "measure_peaks" in names:  # the limit does not matter here, and takes seconds
            names["measure_peaks"] = lambda *a, **k: SimpleNamespace(gemm_flops_per_s=1e15, read_bytes_per_s=1e15)
        shown = capsys.readouterr().out if "claims" in cell.metadata.get("tags", []) else shown
    assert claims_of(shown).keys() == CLAIMS
    rows = read_rows(given["rows"])
    assert {row["case.kind"] for row in rows} == {"generation", "step", "one token", "long cache"}
    for row in rows:
        assert row["verdict"] not in ("error", "invalid"), row
        assert row["provenance"] == "measured" and row["same"] and row["code_hash"]
        assert row["param.size"] == "tiny" and row["param.new_tokens"] == 9 and row["param.seed"] == 1


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    papermill = pytest.importorskip("papermill")
    rows = str(tmp_path / "rows.jsonl")
    given = {"device": "cuda", "size": "full", "new_tokens": 256, "rows": rows}
    done = papermill.execute_notebook(str(NOTEBOOK), str(tmp_path / "out.ipynb"), parameters=given, progress_bar=False)
    cell = next(cell for cell in code_cells(done) if "claims" in cell.metadata.get("tags", []))
    assert claims_of("".join(output.text for output in cell.outputs))["K2"] == "confirmed"
    launches = {row["label"]: row for row in read_rows(rows) if row["case.kind"] == "launches"}
    assert {"compiled", "compiled, CUDA graph"} == launches.keys()
    for row in launches.values():
        assert row["device"].startswith("cuda") and row["same"] and row["verdict"] not in ("error", "invalid")

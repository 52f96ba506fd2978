"""Recipe 08: its technique away from the notebook, its recorded rows, and whole runs."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from recipe_notebook import claims_in, claims_of, run_here, run_whole, source_with

from utils.models import gpt
from utils.rows import read_rows, recorded_rows

RECIPE = "08_kv_cache"
CLAIMS = {f"K{number}" for number in range(2, 8)}


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
    exec(source_with(RECIPE, "def turn(").partition("\n\n\n")[0], names)
    for text in ("def offer(", "def write_without_cache", "def new_cache"):
        exec(source_with(RECIPE, text), names)
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
    exec(source_with(RECIPE, "class Pool"), names)
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


def test_other_parameters_give_complete_rows(tmp_path, capsys, monkeypatch):
    """The compiled step runs in nbval."""
    monkeypatch.setattr("utils.machine.has_compiler", lambda: False)
    given = {"size": "tiny", "new_tokens": 9, "prompt_tokens": 5, "seed": 1, "step_position": 40, "replicates": 2}
    given |= {"min_run_time": 0.01, "rows": str(tmp_path / "rows.jsonl")}
    shown = run_here(RECIPE, capsys, **given)
    assert claims_of(shown["claims"]).keys() == CLAIMS
    rows = read_rows(given["rows"])
    assert {row["case.kind"] for row in rows} == {"generation", "step", "one token", "long cache"}
    for row in rows:
        assert row["verdict"] not in ("error", "invalid"), row
        assert row["provenance"] == "measured" and row["same"] and row["code_hash"]
        assert row["param.size"] == "tiny" and row["param.new_tokens"] == 9 and row["param.seed"] == 1


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    done, rows = run_whole(RECIPE, tmp_path, device="cuda", size="full", new_tokens=256)
    assert claims_in(done)["K2"] == "confirmed"
    launches = {row["label"]: row for row in rows if row["case.kind"] == "launches"}
    assert {"compiled", "compiled, CUDA graph"} == launches.keys()
    for row in launches.values():
        assert row["device"].startswith("cuda") and row["same"] and row["verdict"] not in ("error", "invalid")

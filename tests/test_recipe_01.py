"""Recipe 01: its technique away from the notebook, its recorded rows, and whole runs with papermill."""

import copy

import pytest
import torch
from recipe_notebook import claims_in, run_whole, source_with
from torch import nn

from utils.dynamic_range import audit
from utils.rows import recorded_rows

RECIPE = "01_bf16_fp16"
CLAIMS = {f"P{number}" for number in range(1, 11)}


@pytest.fixture(scope="module")
def technique():
    names = {"torch": torch, "copy": copy}
    exec(source_with(RECIPE, "def to_sixteen"), names)
    return names


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.1, 1 / 3]), persistent=False)
        self.register_buffer("steps", torch.arange(3))


def test_the_technique_keeps_tables_and_halves_the_rest(technique):
    model = nn.Sequential(Rotary(), Rotary())
    small = technique["to_sixteen"](model)
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}  # a copy was cast
    for module in small:
        assert torch.equal(module.inv_freq, model[0].inv_freq) and module.inv_freq.dtype is torch.float32
        assert module.steps.dtype is torch.int64 and "inv_freq" not in module.state_dict()
    assert technique["to_sixteen"](model, torch.float16, keep=())[0].inv_freq.dtype is torch.float16


def test_the_last_product_tells_near_words_apart(technique):
    hidden = torch.tensor([[[1.0, 1.0]]], dtype=torch.bfloat16)
    words = torch.tensor([[20.0, 0.0], [20.0, 0.0625]], dtype=torch.bfloat16)
    assert (hidden[:, -1] @ words.T).argmax(-1).item() == 0
    assert technique["next_token"](hidden, words).item() == 1


def test_tf32_by_hand_rounds_to_ten_fraction_bits():
    names = {"torch": torch}
    exec(source_with(RECIPE, "def to_tf32").partition("\n\n\n")[0], names)
    x = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 2**-12, -1 - 2**-11, 3.0e38, 0.0, 2**-126])
    expected = [1.0, 1 + 2**-10, 1 + 2**-10, 1.0, -1 - 2**-10]
    assert names["to_tf32"](x)[:5].tolist() == expected
    assert names["to_tf32"](x)[6:].tolist() == [0.0, 2**-126]
    wide = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert ((names["to_tf32"](wide) - wide).abs() <= wide.abs() * 2**-11).all()


def test_the_idea_in_the_notebook_agrees_with_the_library():
    from torch.utils._python_dispatch import TorchDispatchMode

    names = {"torch": torch, "TorchDispatchMode": TorchDispatchMode}
    exec(source_with(RECIPE, "class FirstTooLarge").partition("\n\n\n")[0], names)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Softmax(-1))
    with torch.no_grad():
        model[0].weight.fill_(100.0), model[1].weight.fill_(200.0)
        with names["FirstTooLarge"](model) as watch:
            model(torch.ones(1, 4))
    first = audit(model, torch.ones(1, 4), dtype="fp16").first
    assert watch.found == (first.path, first.op) == ("1", "mm")


def test_recorded_rows_are_complete_and_say_where_they_come_from():
    rows = recorded_rows(RECIPE)
    reported = [row for row in rows if row["provenance"] == "reported"]
    assert all(row["recipe"] == RECIPE and row["source"].startswith("github.com/") for row in reported)
    assert {row["dtype"] for row in reported if row["kind"] == "fault"} == {"float16", "bfloat16"}
    pairs = [row for row in reported if row["kind"] == "pair"]
    assert len(pairs) >= 3 and all(row["baseline_median_s"] > row["median_s"] for row in pairs)


def test_a_run_with_other_parameters(tmp_path):
    done, rows = run_whole(RECIPE, tmp_path, length=128, side=64, patience=0.0, seed=1)
    assert claims_in(done).keys() == CLAIMS
    assert {(row["baseline_label"], row["label"], row["case.side"]) for row in rows} == {
        ("float32", "bfloat16", 64),
        ("float32", "float16", 32),  # no patience: the guard stops at once
        ("bfloat16", "float16", 32),
    }
    for row in rows:
        assert row["provenance"] == "measured" and row["same"] and not row["error"], row
        assert row["param.side"] == 64 and row["param.seed"] == 1
    assert sum(row.get("headline", False) for row in rows) == 1


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    done, rows = run_whole(RECIPE, tmp_path, device="cuda", side=4096, length=1024)
    assert claims_in(done).keys() == CLAIMS
    big = {row["label"]: row for row in rows if row["case.side"] == 4096 and row["baseline_label"] == "float32"}
    assert {"TF32", "bfloat16"} <= big.keys()
    for row in rows:
        assert row["device"].startswith("cuda") and row["same"] and row["driver"] and not row["error"], row

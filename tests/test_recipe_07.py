"""Recipe 07: its technique away from the notebook, its recorded rows, and whole runs with papermill."""

import math

import pytest
import torch
import torch.nn.functional as F
from recipe_notebook import claims_in, claims_of, run_here, run_whole, source_of

from utils.equivalence import check_equivalence
from utils.models.qwen3_vl import grid_of, patch_embed, patch_inputs
from utils.rows import read_rows, recorded_rows

RECIPE = "07_conv3d_to_linear"


@pytest.fixture(scope="module")
def as_linear():
    """The function of the cell tagged `technique`."""
    names = {"torch": torch, "F": F}
    exec(source_of(RECIPE, "technique"), names)
    return names["as_linear"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("patches", [4, 64])
def test_the_technique_gives_the_same_answer(as_linear, dtype, patches):
    pixels, _ = patch_inputs(grid_of(patches), dtype=dtype, seed=1)
    exact = patch_embed("tiny", dtype=dtype, seed=2).double()(pixels.double())
    slow = patch_embed("tiny", dtype=dtype, seed=2)(pixels)
    fast = as_linear(patch_embed("tiny", dtype=dtype, seed=2))(pixels)
    assert check_equivalence(fast, slow, reference=exact)


def test_it_takes_what_the_class_takes(as_linear):
    layer = patch_embed("tiny", seed=2)
    for x in (torch.randn(1, 1536), torch.randn(0, 1536), torch.randn(3, 3, 2, 16, 16), torch.randn(2, 1536).double()):
        expected = layer(x)
        assert check_equivalence(as_linear(patch_embed("tiny", seed=2))(x), expected, rtol=1e-5, atol=1e-5)


def test_it_follows_the_weight(as_linear):
    layer = as_linear(patch_embed("tiny", seed=2))
    pixels, _ = patch_inputs((1, 2, 2))
    with torch.no_grad():
        layer.proj.weight.mul_(2)
    changed = layer(pixels)
    layer.load_state_dict(patch_embed("tiny", seed=3).state_dict())
    assert not check_equivalence(layer(pixels), changed)
    assert check_equivalence(layer(pixels), patch_embed("tiny", seed=3)(pixels), rtol=1e-5, atol=1e-5)
    assert layer.to(torch.bfloat16)(pixels).dtype is torch.bfloat16


def test_recorded_rows_are_complete_and_say_where_they_come_from():
    rows = recorded_rows(RECIPE)
    reported = [row for row in rows if row["provenance"] == "reported"]
    assert all(row["recipe"] == RECIPE for row in rows)
    assert all(
        row["source"] == "000_3cf81397441141ed.txt" or row["source"].startswith("github.com/") for row in reported
    )
    pairs = [row for row in reported if row["kind"] == "pair"]
    ratios = [
        row["baseline_median_s"] / row["median_s"] for row in pairs if row["baseline_median_s"] and row["median_s"]
    ]
    assert min(ratios) < 1 < max(ratios)  # the card where the convolution wins is among them
    assert math.isclose(max(ratios), 31605.43 / 0.04)
    for row in pairs:
        if row["device_name"] == "NVIDIA H20":
            assert 10.7 < row["baseline_median_s"] / row["median_s"] < 18.3


@pytest.fixture
def as_it_was(monkeypatch):
    """Undo what the recipe leaves in a process: fusion that stays on, and the TF32 switch."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
    yield
    from transformers import monkey_patching

    monkey_patching.unregister_patch_mapping(["Qwen3VLVisionPatchEmbed"])


def test_other_parameters_give_complete_rows(tmp_path, capsys, as_it_was):
    given = {"size": "tiny", "tower": "tiny", "dtype": "bfloat16", "patches": 16, "seed": 1, "min_run_time": 0.01}
    given |= {"rows": str(tmp_path / "rows.jsonl")}
    shown = run_here(RECIPE, capsys, **given)
    assert claims_of(shown["claims"]).keys() >= {"Q1", "Q2", "Q3", "Q4", "Q8", "Q9"}
    rows = read_rows(given["rows"])
    assert not [row["error"] or row["same_reason"] for row in rows if row["verdict"] in ("error", "invalid")]
    labels = {"linear", "transformers", "one by one", "mean", "cut and multiply"}
    assert {row["label"] for row in rows} == labels
    assert {row["case.patches"] for row in rows if "case.patches" in row} == {1, 16, 256}
    for row in rows:
        assert row["provenance"] == "measured" and row["same"] and row["code_hash"]
        assert row["param.size"] == "tiny" and row["param.dtype"] == "bfloat16" and row["param.seed"] == 1


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    given = {"device": "cuda", "tower": "8b", "dtype": "bfloat16", "patches": 1568}
    done, rows = run_whole(RECIPE, tmp_path, **given)
    assert claims_in(done)["Q1"] == "confirmed"
    timed = {row["label"]: row for row in rows if row.get("verdict")}
    assert {"linear", "transformers", "one by one"} <= timed.keys()
    for row in timed.values():
        assert row["device"].startswith("cuda") and row["same"] and row["driver"] and row["cudnn"]
        assert row["share_of_limit"] is None or 0 < row["share_of_limit"] < 1.15
    assert timed["linear"]["param.patches"] == 1568

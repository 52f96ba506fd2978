"""Recipe 07: its technique away from the notebook, its recorded rows, and whole runs with papermill."""

import math
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch
import torch.nn.functional as F

from utils.equivalence import check_equivalence
from utils.models.qwen3_vl import grid_of, patch_embed, patch_inputs
from utils.rows import read_rows, recorded_rows

RECIPE = "07_conv3d_to_linear"
NOTEBOOK = Path(__file__).parents[1] / "notebooks" / f"{RECIPE}.ipynb"


@pytest.fixture(scope="module")
def as_linear():
    """The function of the cell tagged `technique`."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    source = next(cell.source for cell in cells if "technique" in cell.metadata.get("tags", []))
    names = {"torch": torch, "F": F}
    exec(source, names)
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


def claims_of(text: str) -> dict[str, str]:
    """Verdict by claim, from the lines that the cell `claims` prints."""
    return {line[:4].strip(): line[4:25].strip() for line in text.splitlines()}


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture
def as_it_was(monkeypatch):
    """Undo what the recipe leaves in a process: fusion that stays on, and the TF32 switch."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", torch.backends.cudnn.allow_tf32)
    yield
    from transformers import monkey_patching

    monkey_patching.unregister_patch_mapping(["Qwen3VLVisionPatchEmbed"])


def test_other_parameters_give_complete_rows(tmp_path, capsys, as_it_was):
    """Every code cell, in this process: a kernel of its own would only cost time."""
    given = {"size": "tiny", "tower": "tiny", "dtype": "bfloat16", "patches": 16, "seed": 1, "min_run_time": 0.01}
    given |= {"rows": str(tmp_path / "rows.jsonl")}
    names, shown = {}, ""
    for cell in code_cells(nbformat.read(NOTEBOOK, as_version=4)):
        exec(cell.source, names)
        if "parameters" in cell.metadata.get("tags", []):
            assert given.keys() <= names.keys()
            names |= given
        if "measure_peaks" in names:  # the limit does not matter here, and takes seconds
            names["measure_peaks"] = lambda *a, **k: SimpleNamespace(gemm_flops_per_s=1e15, read_bytes_per_s=1e15)
        shown = capsys.readouterr().out if "claims" in cell.metadata.get("tags", []) else shown
    assert claims_of(shown).keys() >= {"Q1", "Q2", "Q3", "Q4", "Q8", "Q9"}
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
    papermill = pytest.importorskip("papermill")
    rows = str(tmp_path / "rows.jsonl")
    given = {"device": "cuda", "tower": "8b", "dtype": "bfloat16", "patches": 1568, "rows": rows}
    done = papermill.execute_notebook(str(NOTEBOOK), str(tmp_path / "out.ipynb"), parameters=given, progress_bar=False)
    cell = next(cell for cell in code_cells(done) if "claims" in cell.metadata.get("tags", []))
    assert claims_of("".join(output.text for output in cell.outputs))["Q1"] == "confirmed"
    timed = {row["label"]: row for row in read_rows(rows) if row.get("verdict")}
    assert {"linear", "transformers", "one by one"} <= timed.keys()
    for row in timed.values():
        assert row["device"].startswith("cuda") and row["same"] and row["driver"] and row["cudnn"]
        assert row["share_of_limit"] is None or 0 < row["share_of_limit"] < 1.15
    assert timed["linear"]["param.patches"] == 1568

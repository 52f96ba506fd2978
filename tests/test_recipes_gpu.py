"""Whole recipes on a CUDA device, by papermill: the checks inside them hold, and a row of the card is written.

Recipes with more to say about a card have a test of their own beside their other tests.
"""

from pathlib import Path

import pytest
import yaml

from utils.rows import read_rows

ROOT = Path(__file__).parents[1]
RECIPES = ["00_measuring", "03_sdpa", "04_channels_last", "05_cudnn_benchmark", "06_cuda_graph", "11_reading_notes"]
PRESET = yaml.safe_load((ROOT / "data" / "presets" / "gpu.yaml").read_text())


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gpu_preset_names_the_card(recipe):
    assert PRESET[recipe]["device"] == "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_on_a_gpu(recipe, tmp_path):
    papermill = pytest.importorskip("papermill")
    rows = tmp_path / "rows.jsonl"
    papermill.execute_notebook(
        str(ROOT / "notebooks" / f"{recipe}.ipynb"),
        str(tmp_path / "out.ipynb"),
        parameters={"device": "cuda", "rows": str(rows)},
        cwd=str(ROOT / "notebooks"),
        progress_bar=False,
    )
    found = read_rows(rows)
    assert found, "no row was written"
    assert all(row["device"].startswith("cuda") and row["driver"] for row in found)
    assert not [row["label"] for row in found if row.get("verdict") == "invalid"]

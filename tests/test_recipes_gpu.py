"""Whole recipes on a CUDA device, by papermill: the checks inside them hold, and a row of the card is written.

Recipes with more to say about a card have a test of their own beside their other tests.
"""

from pathlib import Path

import pytest
import yaml
from recipe_notebook import run_whole

ROOT = Path(__file__).parents[1]
RECIPES = ["00_measuring", "03_sdpa", "04_channels_last", "05_cudnn_benchmark", "06_cuda_graph", "11_reading_notes"]
PRESET = yaml.safe_load((ROOT / "data" / "presets" / "gpu.yaml").read_text())


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gpu_preset_names_the_card(recipe):
    assert PRESET[recipe]["device"] == "cuda"


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_on_a_gpu(recipe, tmp_path):
    _, found = run_whole(recipe, tmp_path, device="cuda")
    assert found, "no row was written"
    assert all(row["device"].startswith("cuda") and row["driver"] for row in found)
    assert not [row["label"] for row in found if row.get("verdict") == "invalid"]

"""The SkyPilot task, read by SkyPilot's own loader. Opt-in: SkyPilot is large and no dependency of ours."""

from pathlib import Path

import pytest
import yaml

TASK = Path(__file__).resolve().parents[1] / "data" / "sweeps" / "rented.sky.yaml"


def test_skypilot_accepts_the_task():
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed: pip install skypilot")
    task = sky.Task.from_yaml(str(TASK))
    assert task.num_nodes == 2 and len(task.resources) == 3 and all(found.use_spot for found in task.resources)
    assert list(task.storage_mounts) == ["/results"]
    wrong = yaml.safe_load(TASK.read_text())
    wrong["resources"]["accelerator"] = wrong["resources"].pop("accelerators")
    with pytest.raises(Exception, match="accelerator"):  # the loader does look
        sky.Task.from_yaml_config(wrong)


def test_the_task_starts_a_sweep_that_exists():
    from utils.cookbook.sweep_command import ENGINES
    from utils.cookbook.sweep_spec import find_spec

    task = yaml.safe_load(TASK.read_text())
    assert find_spec(task["envs"]["SPEC"]).is_file()
    assert "./cookbook sweep" in task["run"] and "--engine ray" in task["run"] and "ray" in ENGINES
    assert task["workdir"] == "." and task["num_nodes"] > 1

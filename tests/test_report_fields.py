"""Which fields a row of a recipe can have: all that rows have, and no misspelt one."""

import dataclasses
import json

import pytest
from toy_recipes import toy

from utils.cookbook.notebooks import find_recipes
from utils.cookbook.report_fields import STANDARD, fields_of
from utils.cookbook.table import RESULTS
from utils.machine import machine_record
from utils.timing.results import ComparisonRow

CELL = """
made = measured(recipe, globals(), case={"length": 1}, kernels=2)
made["kind"] = "step"
made |= {f"{name}_bytes": 3 for name in "ab"}
print(f"{name} of {made}", f"{made:.2f}", f"{made}x")
"""


@pytest.fixture
def fields(tmp_path):
    path = toy(tmp_path, "01_toy", ("", CELL), ("", "%matplotlib inline"))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "01_toy.jsonl").write_text(json.dumps({"param.gone": 1, "from_a_helper": 2}) + "\n")
    return fields_of(path, tmp_path / "results")


@pytest.mark.parametrize(
    "name",
    ["speedup", "case.length", "kernels", "kind", "case.kind", "a_bytes", "param.seed", "param.gone", "from_a_helper"],
)
def test_what_a_recipe_writes_is_known(fields, name):
    assert name in fields


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("speed_up", "speedup"),
        ("case.lenght", "case.length"),
        ("case.kidn", "case.kind"),
        ("param.sede", "param.seed"),
        ("param.kernels", None),
        ("kernel", "kernels"),
        ("foo.seed", None),
    ],
)
def test_a_misspelt_name_is_unknown_and_the_nearest_is_of_its_kind(fields, name, nearest):
    assert name not in fields and (nearest is None or fields.nearest(name) == nearest)


def test_the_standard_fields_are_those_that_are_written():
    kept = {field.name for field in dataclasses.fields(ComparisonRow)} - {"equivalence", "samples"}
    assert kept | set(machine_record("cpu")) <= set(STANDARD)


def test_fields_of_committed_rows_are_found_in_the_code_of_their_recipe(tmp_path):
    for path in find_recipes():
        known, file = fields_of(path, tmp_path), RESULTS / f"{path.stem}.jsonl"
        rows = map(json.loads, file.read_text().splitlines() if file.exists() else [])
        names = {name for row in rows if row["provenance"] == "measured" for name in row}
        assert {name for name in names if name not in known and not name.startswith("param.")} == set()

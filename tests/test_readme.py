import json

import pytest
from toy_recipes import write_notebook

from utils.cookbook.cli import ROOT
from utils.cookbook.notebooks import find_recipes
from utils.cookbook.readme import BEGIN, END, renew


@pytest.fixture
def project(tmp_path):
    (tmp_path / "README.md").write_text(f"# Top\n\n{BEGIN}\nold\n{END}\n\nbottom\n")
    claims = "Q1  confirmed            equal in float64\nQ2  confirmed            same\nQ4  refuted              no\n"
    path = write_notebook(tmp_path / "07_x.ipynb", ("claims", ""), outputs={"claims": claims}, why="one | product")
    row = {"provenance": "measured", "verdict": "faster", "same": True}
    rows = [
        row | {"device": "cpu", "device_name": "Some Processor", "speedup": 3.214},
        row | {"device": "cuda:0", "device_name": "NVIDIA H200", "speedup": 118.4},
        row | {"device": "cuda:0", "device_name": "NVIDIA H200", "speedup": 50.0, "headline": True},
        {"provenance": "reported", "speedup": 700.0, "verdict": "faster"},
    ]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "07_x.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return tmp_path, [path, write_notebook(tmp_path / "08_y.ipynb", ("claims", ""))]


def test_the_table_holds_every_device_and_the_verdicts(project):
    folder, notebooks = project
    assert renew(folder / "README.md", notebooks, results=folder / "results")
    text = (folder / "README.md").read_text()
    assert text.startswith("# Top\n") and text.endswith("\n\nbottom\n") and "old" not in text
    assert (
        "| [07_x](notebooks/07_x.ipynb) | one \\| product | 3.21x on CPU<br>50.0x on H200 | yes<br>yes "
        "| faster<br>faster | confirmed: Q1 Q2; refuted: Q4 |" in text
    )
    assert "| [08_y](notebooks/08_y.ipynb) | — | — | — | — | — |" in text
    assert not renew(folder / "README.md", notebooks, results=folder / "results")


def test_a_stale_table_is_seen_without_writing(project):
    folder, notebooks = project
    before = (folder / "README.md").read_text()
    assert renew(folder / "README.md", notebooks, write=False, results=folder / "results")
    assert (folder / "README.md").read_text() == before


def test_a_readme_without_the_marks_is_named(tmp_path):
    (tmp_path / "README.md").write_text("# Top\n")
    with pytest.raises(ValueError, match=r"README.md has no results table: expected the lines <!-- results"):
        renew(tmp_path / "README.md", [])


def test_the_table_of_our_own_readme_is_fresh():
    if not (ROOT / "README.md").exists():
        pytest.skip("no README.md yet")
    assert not renew(ROOT / "README.md", find_recipes(), write=False), "stale: ./cookbook readme"

import json
import re
import shutil
import subprocess
import sys

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


def test_utils_can_be_taken_along_as_the_readme_says(tmp_path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = re.search(r"^```\n(cp -r cookbook/utils .*?)^```$", text, re.DOTALL | re.MULTILINE)[1]
    shutil.copytree(ROOT / "utils", tmp_path / "cookbook" / "utils", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "LICENSE", tmp_path / "cookbook")
    (tmp_path / "my_package").mkdir()
    subprocess.run(["bash", "-e", "-c", lines], cwd=tmp_path, check=True)
    shutil.rmtree(tmp_path / "cookbook")
    taken = [path.stem for path in (tmp_path / "my_package" / "speed").glob("*.py")]
    assert {"equivalence", "linearize", "prescribe"} <= set(taken) and "claims" not in taken
    code = "\n".join(
        [
            *(f"import my_package.speed.{name}" for name in [*taken, "timing"] if name != "__init__"),
            "import sys",
            "from my_package.speed.prescribe_steps import PACKAGE",
            "print(PACKAGE, sorted({'utils', 'transformers', 'diffusers', 'yaml', 'pandas'} & set(sys.modules)))",
        ]
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True,
                          env={"PYTHONPATH": str(tmp_path)})  # fmt: skip
    assert done.stdout.strip() == "my_package.speed []", done.stderr

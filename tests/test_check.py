"""Every refusal of the structure check: a recipe in order, one thing broken, one message that says what to do."""

import json

import pytest
from toy_recipe import CELLS, NAME, TITLE, TRY, add_hashes, recipe, save

from utils.claims import Claim
from utils.cookbook.check import check
from utils.cookbook.check_code import allowed_modules, code_problems
from utils.cookbook.check_prose import clock_numbers

CLAIMS = {
    "Q2": Claim("Q2", "6,272 patches: 31,605 ms against 0.04 ms", "source", NAME, "rule", ("2-4x",)),
    "K1": Claim("K1", "a claim of another recipe", "source", "03_sdpa", "rule"),
}


def problems(tmp_path, nb, name=NAME):
    return check(save(nb, tmp_path, name), claims=CLAIMS)


def with_source(tag, source, shown=None):
    """The toy recipe with another cell in the place of the one tagged `tag`."""
    cells = [
        (name, source, old if shown is None else shown) if name == tag else (name, text, old)
        for name, text, old in CELLS
    ]
    return recipe(cells)


def with_text(old, new):
    assert any(old in text for name, text, _ in CELLS if name == "md")
    return recipe([(name, text.replace(old, new) if name == "md" else text, shown) for name, text, shown in CELLS])


def test_a_recipe_in_order_has_no_problems(tmp_path):
    assert problems(tmp_path, recipe()) == []


@pytest.mark.parametrize("tag", [name for name, *_ in CELLS if name not in ("md", "")])
def test_a_missing_cell_is_named(tmp_path, tag):
    found = problems(tmp_path, recipe([cell for cell in CELLS if cell[0] != tag]))
    assert f"no cell is tagged `{tag}`" in found


def test_a_missing_set_up_cell(tmp_path):
    found = problems(tmp_path, recipe([cell for cell in CELLS if cell[0] != ""]))
    assert "no set-up cell without a tag between `parameters` and `machine`" in found


def test_cells_out_of_order(tmp_path):
    cells = list(CELLS)
    cells[7], cells[8] = cells[8], cells[7]
    assert any("`technique` comes after `check`" in text for text in problems(tmp_path, recipe(cells)))


def test_two_technique_cells(tmp_path):
    cells = [*CELLS[:8], CELLS[7], *CELLS[8:]]
    assert "2 cells are tagged `technique`; expected one" in problems(tmp_path, recipe(cells))


def test_recorded_outside_evidence(tmp_path):
    cells = [cell for cell in CELLS if cell[1] != "## Evidence"]
    cells.insert(-1, ("md", "## Evidence", ""))
    assert "`recorded` must come after the heading Evidence" in problems(tmp_path, recipe(cells))


@pytest.mark.parametrize(
    ("tag", "source", "message"),
    [
        ("baseline", "\n".join(["x = 1"] * 26), "26 lines; at most 25"),
        ("technique", "\n".join(["x = 1"] * 41), "41 lines; at most 40"),
        ("baseline", "x = (", "is not Python"),
        ("baseline", "import time", "`time` reads a clock; use utils.timing"),
        ("baseline", "from time import perf_counter as now", "`time.perf_counter` reads a clock"),
        ("baseline", "import datetime as d\nd.datetime.now()", "`datetime.datetime.now` reads a clock"),
        ("baseline", "from datetime import datetime\ndatetime.now()", "`datetime.datetime.now` reads a clock"),
        ("baseline", "import torch\ntorch.utils.benchmark.Timer('x')", "`torch.utils.benchmark.Timer` reads a clock"),
        ("baseline", "from torch.utils import benchmark", "`torch.utils.benchmark` reads a clock"),
        ("baseline", "import torch\ne = torch.cuda.Event(enable_timing=True)", "`enable_timing` reads a clock"),
        ("baseline", "%timeit sum(numbers)", "`%timeit` reads a clock"),
        ("baseline", "%%time\nsum(numbers)", "`%%time` reads a clock"),
        ("baseline", "import utils.cookbook.check", "a notebook uses anything of utils except utils.cookbook"),
        ("baseline", "from utils import cookbook", "a notebook uses anything of utils except utils.cookbook"),
        ("baseline", "import tensorflow", "imports tensorflow; allowed are utils"),
        ("baseline", "sum(numbers);", "ends with `;`"),
        ("baseline", "clear_output()", "`clear_output` is not followed by nbval"),
        ("baseline", "# NBVAL_IGNORE_OUTPUT\nx = 1", "an NBVAL comment changes the comparison"),
        ("control", "assert fast == slow\nprint(1)", "assert that the check fails with the edit"),
        ("control", "assert not wrong == slow\nprint(1)", "assert that the check passes when the edit is undone"),
        ("control", "assert not wrong == slow\nassert fast == slow", "print what failed and what passed"),
    ],
)
def test_code_that_is_refused(tmp_path, tag, source, message):
    assert any(message in text for text in problems(tmp_path, with_source(tag, source)))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.arange(3)\ntime = 1\nprint(time)",
        "import datetime\nprint(datetime.timedelta(days=1))",
        "from utils.timing import measure",
        "import torch\nevent = torch.cuda.Event()",
        'print("import time; %timeit")',
        "assert check(wrong).rule == 'different'",
    ],
)
def test_code_that_is_fine(source):
    assert code_problems(source) == []


def test_the_dependencies_may_be_imported():
    assert {"torch", "transformers", "yaml", "utils", "math"} <= allowed_modules()


STANDARD = CELLS[2][1]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("n: int = 3  # how many numbers", "n = 3  # how many", "write one `name: type = literal  # help` a line"),
        ("n: int = 3  # how many numbers", "n: int = 3", "one line with a `# help` comment"),
        ("n: int = 3", "n: int = 2 + len('a')", "must be a literal"),
        ("n: int = 3", "n: int = 3.5", "the default is float, the type says int"),
        ("n: int = 3", "n: complex = 3", "expected int, float, str, bool or list"),
        ("how many numbers", "how many, n = 3 is small", "papermill does not see the parameter n"),
        ("seed: int = 0", "seed: int = 1", "seed is 1 by default; expected 0"),
        ('rows: str = ""  # file for result rows, none when empty', "", "`rows: str = ''` is missing"),
    ],
)
def test_parameters_that_are_refused(tmp_path, old, new, message):
    assert old in STANDARD
    found = problems(tmp_path, with_source("parameters", STANDARD.replace(old, new)))
    assert any(message in text for text in found)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# Adding once\n", "Adding once\n", "the first cell must start with `# Title`"),
        ("**Cost** At most 60 s on two cores.", "", "the first cell lacks a line `**Cost** …`"),
        ("## Learn", "#### Learn", 'heading "Learn" jumps from level 1 to 4'),
        ("## Learn", "# Learn", "2 headings of level 1"),
        ("## Learn", "## Begin", 'no heading starts with "Learn"'),
        ("## Next\n", "## Later\n", 'no heading starts with "Next"'),
        ("### Try it", "### Exercises", 'no heading starts with "Try it"'),
        ("<details><summary>Answer</summary>\n\n6\n</details>", "6", "has 2 folded answers"),
        ("papermill notebooks/42_toy.ipynb", "papermill other.ipynb", "lacks the command `papermill"),
        ("-p n 5", "-p lenght 5", "sets `-p lenght`, which the notebook does not declare"),
        ("```python", "```", "lacks a broken cell to repair"),
        ("(42_toy.ipynb)", "(43_gone.ipynb)", "link to 43_gone.ipynb: there is no such file"),
        ("(42_toy.ipynb)", "(/etc/passwd)", "link to /etc/passwd: there is no such file"),
        ("Python.", "Python. It runs 3.2x faster.", 'clock number "3.2x" in the text'),
        ("enough (Q2)", "enough (Q2) and takes 31,606 ms", '"31,606 ms" is not a figure of Q2'),
    ],
)
def test_text_that_is_refused(tmp_path, old, new, message):
    assert any(message in text for text in problems(tmp_path, with_text(old, new)))


@pytest.mark.parametrize(
    "text",
    [
        "It takes 3 s.",
        "It takes 0.4s.",
        "from 12 to 3 ms",
        "about 40 µs a call",
        "reads 48.2 GB/s here",
        "reaches 2.1 TFLOP/s",
        "120 tokens per second",
        "19.5 clips per minute",
        "twice as fast, 2.1x",
        "3–11× faster",
        "a speed-up of 4x",
        "12 % faster",
        "- a list\n- it is 3 times faster",
        "| a | 3 ms |",
        "The source says so (Q2). Here it is 31,605 ms.",
        "K1 says 31,605 ms.",
    ],
)
def test_clock_numbers_of_ours(text):
    assert clock_numbers(text, CLAIMS)


@pytest.mark.parametrize(
    "text",
    [
        "a 3x3 convolution, 2×2 pixels, 3 channels",
        "8x fewer bytes, which should be faster",
        "the bits 0s and 1s",
        "an H200 with 141 GB",
        "60 GFLOPs of work",
        "`3 ms` in code, and $t = 3 s$",
        "```\n3 ms\n```",
        "The source says 31,605 ms against 0.04 ms (Q2).",
        "It claims 2–4x faster (Q2).",
        "The data sheet says 4.8 TB/s.",
        "**Cost** At most 60 s on two cores.",
        "in 90 % of the cases",
        "[a page](http://example.org/3s/4%20ms)",
    ],
)
def test_numbers_that_are_not(text):
    assert clock_numbers(text, CLAIMS) == []


def test_a_cost_line_promises_a_limit_only():
    assert clock_numbers("**Cost** It takes 12 s.", CLAIMS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(execution_count=None), "has no execution count"),
        (lambda c: c.update(execution_count=9), "has the count 9; counts run 1, 2, 3"),
        (lambda c: c.update(outputs=[]), "shows nothing"),
        (lambda c: c.outputs[0].update(name="stderr"), "stores stderr"),
        (
            lambda c: c.outputs[0].update(text="see /" + "root/demo/x.py\n"),
            "shows a path of a machine (/" + "root/demo)",
        ),
        (lambda c: c.outputs[0].update(text="C:\\Users\\me\n"), "shows a path of a machine"),
        (lambda c: c.outputs[0].update(text="<object at 0x7f12ab34cd56>\n"), "shows a memory address"),
        (lambda c: c.metadata.tags.append("nbval-skip"), "tag nbval-skip is unknown"),
        (lambda c: c.metadata.tags.append("nbval-ignore-output"), "only machine, measure and limits may be"),
        (lambda c: c.metadata.update(papermill={}), "metadata is not clean (papermill)"),
        (lambda c: c.metadata.tags.append("cost"), "more than one tag of the anatomy"),
    ],
)
def test_stored_cells_that_are_refused(tmp_path, change, message):
    nb = recipe()
    change(next(cell for cell in nb.cells if cell.metadata.get("tags") == ["check"]))
    assert any(message in text for text in problems(tmp_path, nb))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            {"output_type": "error", "ename": "ValueError", "evalue": "", "traceback": []},
            "stores an error (ValueError)",
        ),
        ({"output_type": "display_data", "metadata": {}, "data": {"image/svg+xml": "<svg/>"}}, "stores an SVG"),
        (
            {"output_type": "display_data", "metadata": {}, "data": {"application/vnd.jupyter.widget-view+json": {}}},
            "stores a widget",
        ),
        ({"output_type": "stream", "name": "stdout", "text": "a picture\n"}, "shows no picture"),
    ],
)
def test_stored_outputs_that_are_refused(tmp_path, output, message):
    path = save(recipe(), tmp_path)
    raw = json.loads(path.read_text())
    next(cell for cell in raw["cells"] if cell["metadata"].get("tags") == ["figure"])["outputs"] = [output]
    path.write_text(json.dumps(raw))
    assert any(message in text for text in check(path, claims=CLAIMS))


def test_a_host_name_in_an_output(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "gpu-box-7")
    found = problems(tmp_path, with_source("check", "print(1)", "ran on gpu-box-7\n"))
    assert any("shows this machine's host name" in text for text in found)
    assert problems(tmp_path, with_source("check", "print(1)", "ran on gpu-box-70\n")) == []


def test_a_stripped_notebook_is_refused(tmp_path):
    nb = recipe()
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    expected = ["its outputs are not stored, so nothing would be compared: refresh the notebook"]
    assert problems(tmp_path, nb) == expected


def test_the_reason_in_the_results_table_is_short(tmp_path):
    nb = recipe()
    nb.metadata["cookbook"] = {"why": "one buffer instead of two"}
    assert problems(tmp_path, nb) == []
    nb.metadata["cookbook"] = {"why": "one buffer " * 4}
    assert any("at most 40 characters" in text for text in problems(tmp_path, nb))


def test_a_stale_hash_is_refused(tmp_path):
    nb = recipe()
    nb.cells[3].source += "\nnumbers.reverse()"
    found = problems(tmp_path, nb)
    assert found == [
        "cell [3], tag `machine`: its stored output is of older code: refresh the notebook",
        "cell [10], tag `measure`: its stored output is of older code: refresh the notebook",
    ]


def test_prose_does_not_make_a_hash_stale(tmp_path):
    assert problems(tmp_path, with_text("A toy.", "Another toy.")) == []


def test_a_live_cell_must_not_be_compared(tmp_path):
    nb = recipe()
    cell = next(cell for cell in nb.cells if "measure" in cell.metadata.get("tags", []))
    cell.metadata.tags.remove("nbval-ignore-output")
    assert any("its output is live; tag it nbval-ignore-output" in text for text in problems(tmp_path, nb))


def test_limits_may_be_live(tmp_path):
    nb = recipe()
    next(cell for cell in nb.cells if cell.metadata.get("tags") == ["limits"]).metadata.tags.append(
        "nbval-ignore-output"
    )
    add_hashes(nb)
    assert problems(tmp_path, nb) == []


def test_a_large_file_is_refused(tmp_path):
    found = problems(tmp_path, with_source("check", "print(1)", "x" * 200_001))
    assert any("at most 200,000" in text for text in found)


@pytest.mark.parametrize("name", ["toy", "4_toy", "42-toy", "42_Toy", "42_toy_"])
def test_a_wrong_name_is_refused(tmp_path, name):
    assert f"name {name}.ipynb: expected NN_snake_case.ipynb" in problems(tmp_path, recipe(), name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("print('Q7')", "`claims`: Q7 is not in data/claims.yaml"),
        ("print('Q2', 'K1')", "`claims`: K1 belongs to 03_sdpa"),
        ("print('none')", "`claims`: Q2 of data/claims.yaml is not settled"),
    ],
)
def test_claims_that_are_refused(tmp_path, source, message):
    assert any(message in text for text in problems(tmp_path, with_source("claims", source)))


def test_a_file_that_is_no_notebook(tmp_path):
    path = tmp_path / "42_toy.ipynb"
    path.write_text("{")
    [text] = check(path, claims=CLAIMS)
    assert "not a notebook" in text


def test_the_toy_has_all_that_these_tests_break():
    assert "Claim" in TITLE and TRY.count("<details>") == 3

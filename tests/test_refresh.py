"""Stored outputs come from refresh: stable to the byte, clean, and never half written."""

import base64
import io
import json
import os

import pytest
from toy_recipe import code_notebook, edit

from utils.cookbook.check import file_problems, stored_problems
from utils.cookbook.notebooks import code_cells, load
from utils.cookbook.refresh import RefreshError, normalised, refresh, same_picture

LIVE = ["measure", "nbval-ignore-output"]
DRAW = """
import base64, io
from PIL import Image
from IPython.display import display
picture = io.BytesIO()
Image.new("RGB", (4, 4), "red").save(picture, "png")
display({"text/plain": "figure: red", "image/png": base64.b64encode(picture.getvalue()).decode()}, raw=True)
"""


def shown(path):
    return [
        [output.get("text", output.get("data", {}).get("text/plain")) for output in c.outputs]
        for c in code_cells(load(path))
    ]


def test_refreshing_twice_changes_no_byte(tmp_path):
    path = code_notebook(
        tmp_path,
        "a",
        ("n: int = 3  # help", "", ["parameters"]),
        "import os\nprint('one')\nn + 1",
        ("import random\nrandom.random()", "", LIVE),
        DRAW,
        "print('two'); display('three'); print('four')",
        "print(os.environ['COOKBOOK_DEVICE'], os.path.basename(os.getcwd()))",
    )
    first = refresh(path)
    text, made = path.read_bytes(), os.stat(path)
    again = refresh(path)
    assert path.read_bytes() == text
    assert os.stat(path).st_ino == made.st_ino and os.stat(path).st_mtime_ns == made.st_mtime_ns  # not written at all
    assert (first.changed, again.changed) == (True, False)
    assert (first.renewed, again.kept) == (["cell [3], tag `measure`"], ["cell [3], tag `measure`"])
    assert str(again).endswith("a.ipynb: unchanged")
    assert shown(path)[1] == ["one\n", "4"]
    assert shown(path)[4:] == [["two\nfour\n", "'three'"], [f"cpu {tmp_path.name}\n"]]
    before = shown(path)
    nb = load(path)
    path = path.rename(tmp_path / "42_a.ipynb")
    assert file_problems(path, nb) == []
    assert [problem for number in range(1, 7) for problem in stored_problems(nb, number)] == []

    refresh(path, measure=True)
    assert [a == b for a, b in zip(shown(path), before, strict=True)] == [True, True, False, True, True, True]


def test_a_live_output_is_renewed_when_code_before_it_changed_and_only_then(tmp_path):
    path = code_notebook(tmp_path, "a", "x = 1", ("import os\nos.urandom(8).hex()", "", LIVE), "x")
    refresh(path)
    before = shown(path)[1]
    edit(path, lambda raw: raw["cells"][2].update(source="x + 1"))
    assert refresh(path).changed
    assert shown(path)[1] == before
    edit(path, lambda raw: raw["cells"][0].update(source="x = 2"))
    assert refresh(path).renewed == ["cell [2], tag `measure`"]
    assert shown(path)[1] != before
    assert shown(path)[2] == ["3"]


def test_metadata_is_cleaned_and_counts_restart(tmp_path):
    path = code_notebook(tmp_path, "a", "1 + 1", ("2", "", ["check"]))

    def dirty(raw):
        raw["metadata"] = {
            "cookbook": {"why": "less work"},
            "papermill": {"x": 1},
            "jupytext": {},
            "kernelspec": {"name": "conda-gone", "display_name": "x"},
        }
        raw["cells"][0]["metadata"] = {"papermill": {"duration": 1}, "collapsed": True, "tags": []}
        raw["cells"][0]["execution_count"] = 77

    edit(path, dirty)
    refresh(path)
    raw = json.loads(path.read_text())
    assert raw["metadata"] == {
        "cookbook": {"why": "less work"},
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    assert [cell["metadata"] for cell in raw["cells"]] == [{}, {"tags": ["check"]}]
    assert [cell["execution_count"] for cell in raw["cells"]] == [1, 2]
    assert raw["cells"][0]["outputs"][0]["execution_count"] == 1


def test_a_failing_cell_leaves_the_notebook_as_it_was(tmp_path):
    path = code_notebook(tmp_path, "a", "x = 1", ("def f(a):\n    return a / 0\nf(x)", "", ["check"]), "x")
    before = path.read_bytes()
    with pytest.raises(RefreshError) as error:
        refresh(path)
    lines = str(error.value).splitlines()
    assert lines[0].endswith("a.ipynb, cell [2], tag `check`: ZeroDivisionError: division by zero")
    assert "----> 3 f(x)" in lines
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.ipynb"]


def test_a_dead_kernel_is_an_error_that_names_the_cell(tmp_path):
    path = code_notebook(tmp_path, "a", "import os", "os.kill(os.getpid(), 9)")
    with pytest.raises(RefreshError, match=r"a\.ipynb, cell \[2\], `os\.kill.*: Kernel died"):
        refresh(path)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"output_type": "stream", "name": "stderr", "text": "careful\n"}, "writes to stderr; .*: careful"),
        ({"output_type": "stream", "name": "stdout", "text": " 5%\r 9%"}, "draws a progress bar"),
        ({"output_type": "stream", "name": "stderr", "text": " 5%\r 9%"}, "draws a progress bar"),
        ({"output_type": "display_data", "data": {"application/vnd.jupyter.widget-view+json": {}}}, "shows a widget"),
        ({"output_type": "display_data", "data": {"image/svg+xml": "<svg/>"}}, "shows an SVG"),
    ],
)
def test_what_must_not_be_stored_is_refused(output, message):
    from nbformat import from_dict

    with pytest.raises(RefreshError, match=f"here: {message}"):
        normalised([from_dict(output)], [], "here")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import warnings\nwarnings.warn('old name')", "writes to stderr; .*UserWarning: old name"),
        ("print('5 %', end='\\r')\nprint('9 %')", "draws a progress bar"),
    ],
)
def test_a_cell_that_shows_such_a_thing_stops_the_refresh(tmp_path, source, message):
    path = code_notebook(tmp_path, "a", source)
    before = path.read_bytes()
    with pytest.raises(RefreshError, match=rf"cell \[1\].*{message}"):
        refresh(path)
    assert path.read_bytes() == before


def picture(colour, **info):
    from PIL import Image, PngImagePlugin

    text = PngImagePlugin.PngInfo()
    for name, value in info.items():
        text.add_text(name, value)
    file = io.BytesIO()
    Image.new("RGB", (3, 3), colour).save(file, "png", pnginfo=text)
    return base64.b64encode(file.getvalue()).decode()


def test_a_stored_picture_stays_when_only_its_metadata_changed():
    from nbformat import from_dict

    old, same, other = picture("red"), picture("red", Software="newer"), picture("blue")
    assert old != same and same_picture(old, same) and not same_picture(old, other) and not same_picture("x", old)

    def image(data):
        return from_dict({"output_type": "display_data", "data": {"image/png": data}, "metadata": {}})

    assert normalised([image(same)], [image(old)], "")[0].data["image/png"] == old
    assert normalised([image(other)], [image(old)], "")[0].data["image/png"] == other


def test_a_file_that_is_no_notebook(tmp_path):
    (tmp_path / "a.ipynb").write_text("{")
    with pytest.raises(ValueError, match="not a notebook"):
        refresh(tmp_path / "a.ipynb")

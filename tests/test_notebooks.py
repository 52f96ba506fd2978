import json

import pytest
from toy_recipe import code_notebook, recipe, save

from utils.cookbook.notebooks import (
    cells_by_tag,
    code_cells,
    compared,
    find_recipes,
    label,
    load,
    output_text,
    prefix_hash,
    resolve,
    short_name,
    stored_and_came,
)


@pytest.fixture
def folder(tmp_path):
    for name in ("00_measuring", "03_sdpa", "07_conv3d_to_linear", "07b_other", "notes"):
        save(recipe(), tmp_path, name)
    (tmp_path / "20_caption_service.ipynb").write_text("{}")
    return tmp_path


def test_recipes_are_found_by_name_in_order(folder):
    assert [path.stem for path in find_recipes(folder)] == [
        "00_measuring",
        "03_sdpa",
        "07_conv3d_to_linear",
        "20_caption_service",
    ]


@pytest.mark.parametrize("name", ["7", "07", "07_conv", "07_conv3d_to_linear", "07_conv3d_to_linear.ipynb"])
def test_a_recipe_by_number_prefix_or_name(folder, name):
    assert resolve(name, folder).stem == "07_conv3d_to_linear"


def test_a_recipe_by_path(folder):
    assert resolve(folder / "notes.ipynb") == folder / "notes.ipynb"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("03_spda", "no recipe '03_spda'; nearest: 03_sdpa"),
        ("sdpa", "no recipe 'sdpa'; nearest: 03_sdpa"),
        ("31", "no recipe '31'; there are: 00_measuring, 03_sdpa"),
        ("0", "00_measuring"),
        ("", "no recipe ''"),
        ("gone.ipynb", "no recipe 'gone.ipynb'"),
        ("99_snap", "no recipe '99_snap'; there are: 00_measuring, 03_sdpa"),
    ],
)
def test_a_wrong_name_names_the_nearest(folder, name, message):
    if message == "00_measuring":
        assert resolve(name, folder).stem == message
        return
    with pytest.raises(ValueError) as error:
        resolve(name, folder)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_prefix_of_two_recipes_is_refused(folder):
    save(recipe(), folder, "07_conv3d_again")
    with pytest.raises(ValueError, match="'07' is not one recipe: 07_conv3d_again, 07_conv3d_to_linear"):
        resolve("07", folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"nbformat": 3, "cells": []}', '{"nbformat": 4, "cells": [{}]}'])
def test_what_is_no_notebook_is_an_error_of_one_line(tmp_path, text):
    path = tmp_path / "x.ipynb"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"x\.ipynb: not a") as error:
        load(path)
    assert "\n" not in str(error.value)


def test_missing_ids_depend_on_tag_and_place_only(tmp_path):
    path = code_notebook(tmp_path, "a", ("x = 1", "", ["check"]), "y = 1", ("z = 1", "", ["check"]))
    raw = json.loads(path.read_text())
    for cell in raw["cells"]:
        del cell["id"]
    raw["nbformat_minor"] = 4
    path.write_text(json.dumps(raw))
    ids = [cell.id for cell in load(path).cells]
    assert ids == ["check", "cell-01", "check-02"]
    assert ids == [cell.id for cell in load(path).cells]


def test_ids_that_are_there_stay(tmp_path):
    path = save(recipe(), tmp_path)
    assert [cell.id for cell in load(path).cells] == [f"cell-{i}" for i in range(18)]


def test_cells_by_tag_and_labels(tmp_path):
    nb = load(save(recipe(), tmp_path))
    assert cells_by_tag(nb)["technique"].source == "fast = sum(numbers)"
    assert list(cells_by_tag(tmp_path / "42_toy.ipynb"))[:2] == ["parameters", "machine"]
    assert label(nb, 6) == "cell [6], tag `technique`"
    assert label(nb, 2) == "cell [2], `numbers = list(range(n))`"
    assert [compared(cell) for cell in code_cells(nb)[:4]] == [True, True, False, True]


def test_a_hash_depends_on_the_code_up_to_its_cell_only():
    nb = recipe()
    before = [prefix_hash(nb, number) for number in (1, 2, 3)]
    code_cells(nb)[1].source += "\n# more"
    nb.cells[0].source += " text"
    after = [prefix_hash(nb, number) for number in (1, 2, 3)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, False]


def stream(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": text}


def test_output_as_text():
    value = {"output_type": "execute_result", "data": {"text/plain": "4", "image/png": "…"}}
    error = {"output_type": "error", "ename": "KeyError", "evalue": "'a'"}
    assert output_text([stream("a\nb\n"), value, error, stream("\x1b[31mred\x1b[0m", "stderr")]) == (
        "a\nb\n4\nKeyError: 'a'\n[stderr] red"
    )


def test_only_lines_that_differ_are_told():
    assert stored_and_came([stream("a\nb\nc\n")], [stream("a\nB\nc\n")]) == "stored: b\ncame:   B"
    assert stored_and_came([], [stream("a\n")]) == "stored: nothing\ncame:   a"
    assert stored_and_came([stream("a\n")], []) == "stored: a\ncame:   nothing"
    picture = {"output_type": "display_data", "data": {"image/png": ""}}
    assert stored_and_came([picture], []) == "stored: 1 outputs (image/png)\ncame:   0 outputs (nothing)"


def test_a_long_difference_is_cut():
    text = stored_and_came([stream("")], [stream("\n".join(map(str, range(50))))])
    assert len(text.splitlines()) == 21
    assert text.endswith("… and 31 more lines")


def test_short_names(folder):
    from utils.cookbook.notebooks import NOTEBOOKS

    assert short_name(NOTEBOOKS / "07_conv3d_to_linear.ipynb") == "07"
    assert short_name(folder / "07_conv3d_to_linear.ipynb").endswith("07_conv3d_to_linear.ipynb")

import pytest
from toy_recipe import recipe, save

from utils.cookbook.check import check
from utils.cookbook.new import new
from utils.cookbook.notebooks import cells_by_tag, load, output_text
from utils.cookbook.refresh import RefreshError, refresh


def test_a_new_recipe_runs_and_passes_the_check(tmp_path):
    path = new("91_my_way", tmp_path)
    assert path == tmp_path / "91_my_way.ipynb"
    assert check(path) == []
    shown = {name: output_text(cell.outputs) for name, cell in cells_by_tag(path).items() if cell.cell_type == "code"}
    assert shown["check"] == "same result: True"
    assert shown["control"] == "second call, edited: different\nsecond call, undone: same"
    assert "in place" in shown["measure"]
    assert [line.split()[-1] for line in shown["cost"].splitlines()[2:]] == ["1.0", "1.0"]
    text = "\n".join(cell.source for cell in load(path).cells)
    assert "NUMBER" not in text and "NAME" not in text.replace("NAME VALUE", "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("42_other", "recipe number 42 is taken by .*42_toy.ipynb; the next free one is 01"),
        ("42_toy", "recipe number 42 is taken by"),
        ("My Way", "recipe name 'My Way'; expected NN_snake_case, for example 01_my_way"),
        ("7_Fast", "for example 01_fast"),
        ("43-fast-path", "for example 43_fast_path"),
        ("", "expected NN_snake_case, for example 01_name"),
        ("../43_x", "expected NN_snake_case"),
    ],
)
def test_a_bad_or_taken_name_is_refused_and_nothing_is_written(tmp_path, name, message):
    save(recipe(), tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        new(name, tmp_path)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["42_toy.ipynb"]


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"there is no such folder to write 43_x\.ipynb to"):
        new("43_x", tmp_path / "gone")


def test_a_template_that_does_not_run_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("utils.cookbook.new.cells", lambda name: [("", "1 / 0")])
    with pytest.raises(RefreshError, match="ZeroDivisionError"):
        new("43_x", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_name_may_end_in_ipynb(tmp_path, monkeypatch):
    monkeypatch.setattr("utils.cookbook.new.cells", lambda name: [("", "1 + 1")])
    assert refresh(new("43_x.ipynb", tmp_path)).changed is False

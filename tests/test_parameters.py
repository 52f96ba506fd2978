import math

import pytest
from toy_recipes import PARAMETERS, toy, write_notebook

from utils.cookbook.parameters import Parameter, convert, declared, papermill_misses, resolved, validate


def notebook(tmp_path, source):
    return write_notebook(tmp_path / "01_x.ipynb", ("parameters", source))


def test_declared_reads_name_type_default_and_help(tmp_path):
    found = declared(toy(tmp_path))
    assert list(found) == ["device", "seed", "rows", "rate", "fast", "sizes"]
    assert found["rate"] == Parameter("rate", "float", 0.5, "a share # of one")
    assert found["sizes"] == Parameter("sizes", "list[int]", [1, 2], "the points")


def test_declared_takes_the_type_of_the_default_and_a_hash_inside_a_string(tmp_path):
    found = declared(notebook(tmp_path, "colour = '#fff'  # of the line\nshift = -1.5\n"))
    assert found["colour"] == Parameter("colour", "str", "#fff", "of the line")
    assert found["shift"] == Parameter("shift", "float", -1.5, "")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("seed: int = two()", "not a literal"),
        ("import os", "expected name: type = literal"),
        ("seed: int =", "line 1 of the parameters cell"),
        ("seed: int", "expected name: type = literal"),
    ],
)
def test_declared_refuses_a_cell_that_is_not_literals(tmp_path, source, said):
    with pytest.raises(ValueError, match=said):
        declared(notebook(tmp_path, source))


def test_declared_needs_one_parameters_cell_and_a_notebook(tmp_path):
    with pytest.raises(ValueError, match=r"01_x.ipynb: 0 cells tagged 'parameters'"):
        declared(write_notebook(tmp_path / "01_x.ipynb", ("", "a = 1")))
    (tmp_path / "02_x.ipynb").write_text("{}")
    with pytest.raises(ValueError, match="not a notebook"):
        declared(tmp_path / "02_x.ipynb")


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("16", "int", 16),
        ("-1", "int", -1),
        ("1e-3", "float", 0.001),
        (2, "float", 2.0),
        ("16", "str", "16"),
        *[(text, "bool", True) for text in ("true", "Yes", "1", "on", True, 1)],
        *[(text, "bool", False) for text in ("false", "NO", "0", "off", False, 0)],
        ("[1, 2]", "list[int]", [1, 2]),
        ("[1, 2]", "list[float]", [1.0, 2.0]),
        ('["a", "b"]', "list", ["a", "b"]),
        ([3], "list[int]", [3]),
        (["inf"], "list", ["inf"]),
        ("nan", "str", "nan"),
    ],
)
def test_convert_gives_real_types(value, kind, expected):
    found = convert(value, kind)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("three", "int"),
        ("1.5", "int"),
        (1.5, "int"),
        (True, "int"),
        ("fast", "float"),
        (True, "float"),
        ("maybe", "bool"),
        ("", "bool"),
        (1.0, "bool"),
        (3, "str"),
        (False, "str"),
        ("1, 2", "list[int]"),
        ("[1, two]", "list[int]"),
        ("[1, 2", "list"),
        (None, "int"),
        *[(value, "float") for value in ("nan", "-inf", "1e999", math.nan, math.inf)],
        ("[1, .inf]", "list[float]"),
        ([math.nan], "list"),
        ({"a": [math.inf]}, "dict[str, list]"),
        (math.nan, "Rate"),  # an annotation that is not known here
    ],
)
def test_convert_refuses_what_is_not_of_the_type(value, kind):
    with pytest.raises(ValueError):
        convert(value, kind)


def test_validate_names_the_wrong_parameter_and_the_nearest(tmp_path):
    path = toy(tmp_path)
    with pytest.raises(ValueError, match=r"01_toy has no parameter 'sede'; nearest: seed; there are: device, fast"):
        validate(path, {"sede": "1"})
    with pytest.raises(ValueError, match=r"p.yaml: 01_toy: parameter 'seed' is int, got 'three' \(for example 0\)"):
        validate(path, {"rate": "1", "seed": "three"}, where="p.yaml")
    with pytest.raises(ValueError, match=r"parameter 'rate' is float, and finite, got 'nan' \(for example 0.5\)"):
        validate(path, {"rate": "nan"})
    assert validate(path, {"seed": "3", "fast": "no"}) == {"seed": 3, "fast": False}


def test_resolved_keeps_the_other_defaults(tmp_path):
    assert resolved(toy(tmp_path), {"seed": 7})["seed"] == 7
    assert resolved(toy(tmp_path), {})["sizes"] == [1, 2]


def test_papermill_misses_a_second_equals_sign(tmp_path):
    assert papermill_misses(toy(tmp_path)) == []
    path = notebook(tmp_path, PARAMETERS + 'url: str = "x?a=1"\n')
    assert papermill_misses(path) == ["url"]

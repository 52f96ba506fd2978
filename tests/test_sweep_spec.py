"""Specs of sweeps: what they mean, and that every mistake names its line before anything runs."""

from types import SimpleNamespace

import pytest
from toy_recipes import toy

from utils.cookbook.notebooks import resolve
from utils.cookbook.sweep_spec import SWEEPS, load_spec
from utils.cookbook.sweep_table import rows_of

SHIPPED = sorted(path for path in SWEEPS.glob("*.yaml") if not path.name.endswith(".sky.yaml"))


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load a spec given as text, for a toy recipe."""
    toy(tmp_path / "nb", "01_toy", ("", "case = {'kind': 'step'}"))
    monkeypatch.chdir(tmp_path)

    def load(text: str, preset: str | None = None):
        (tmp_path / "s.yaml").write_text(text)
        return load_spec("s.yaml", lambda name: resolve(name, tmp_path / "nb"), preset)

    return load


def test_grid_and_points_on_top_of_parameters_and_preset(load, tmp_path):
    (tmp_path / "mine.yaml").write_text("01_toy: {rate: 0.25, fast: false, rows: there.jsonl}\n")
    spec = load(
        "recipe: 1\npreset: mine.yaml\nparameters: {fast: yes}\n"
        "grid:\n  seed: [1, 2]\n  sizes: [[1], [2, 3]]\npoints:\n  - {seed: 7, rate: 1}\n"
        "retries: 2\ntime_limit: 1.5\ndisk_gb: 4\nshow: {case.kind: step}\n"
    )
    same = {"rate": 0.25, "fast": True}
    assert spec.points == [
        same | {"seed": 1, "sizes": [1]},
        same | {"seed": 1, "sizes": [2, 3]},
        same | {"seed": 2, "sizes": [1]},
        same | {"seed": 2, "sizes": [2, 3]},
        same | {"seed": 7, "rate": 1.0},
    ]
    assert spec.varying == ["seed", "sizes", "rate"]
    assert (spec.name, spec.recipe.name, spec.preset) == ("s", "01_toy.ipynb", "mine.yaml")
    assert (spec.retries, spec.time_limit, spec.disk_gb, spec.show) == (2, 1.5, 4, {"case.kind": "step"})
    (tmp_path / "other.yaml").write_text("01_toy: {rate: 0.75}\n")
    assert load("recipe: 1\npreset: mine.yaml\ngrid: {seed: [1]}\n", "other.yaml").points == [{"rate": 0.75, "seed": 1}]


def test_nothing_is_retried_unless_the_spec_says_so(load):
    spec = load("recipe: 01_toy\ngrid: {seed: [1]}\n")
    assert (spec.retries, spec.time_limit, spec.preset) == (0, 3600, None)


WRONG = [
    ("", "line 1: the file is empty"),
    ("- 1", "line 1: the sweep: expected recipe, grid, points …, got [1]"),
    ("recipe: 1\ngird: {seed: [1]}", "line 2: no key 'gird'; nearest: grid; there are: disk_gb, grid"),
    ("grid: {seed: [1]}", "line 1: no recipe: expected a line such as recipe: 07"),
    ("recipe: 01_tyo\ngrid: {seed: [1]}", "line 1: no recipe '01_tyo'; nearest: 01_toy"),
    ("recipe: [1]\ngrid: {seed: [1]}", "line 1: recipe: expected its number, name or path"),
    ("recipe: 1", "line 1: nothing to run: expected a grid, or a list of points"),
    ("recipe: 1\ngrid:\n  seed: [1]\n  sede: [1]", "line 4: 01_toy has no parameter 'sede'; nearest: seed; there are"),
    ("recipe: 1\npoints:\n  - seed: 1\n  - {sede: 1}", "line 4: 01_toy has no parameter 'sede'; nearest: seed"),
    ("recipe: 1\nparameters: {sede: 1}\ngrid: {seed: [1]}", "line 2: 01_toy has no parameter 'sede'"),
    ("recipe: 1\ngrid:\n  seed:\n    - 1\n    - two", "line 5: 01_toy: parameter 'seed' is int, got 'two' (for"),
    (
        "recipe: 1\ngrid:\n  sizes: [1, 2]",
        "line 3: 01_toy: parameter 'sizes' is list[int], got 1 (for example [1, 2]); a grid of",
    ),
    ("recipe: 1\ngrid:\n  rate: [.nan, 1]", "line 3: 01_toy: parameter 'rate' is float, and finite, got nan"),
    ("recipe: 1\npoints:\n- {rate: inf}", "line 3: 01_toy: parameter 'rate' is float, and finite, got 'inf'"),
    ("recipe: 1\npoints:\n  - {seed: 1.5}", "line 3: 01_toy: parameter 'seed' is int, got 1.5"),
    (
        "recipe: 1\nparameters: {fast: maybe}\ngrid: {seed: [1]}",
        "line 2: 01_toy: parameter 'fast' is bool, got 'maybe'",
    ),
    ("recipe: 1\ngrid: {}", "line 2: grid is empty: expected parameters with lists of values"),
    ("recipe: 1\ngrid:", "line 2: grid: expected parameters with lists of values, got nothing"),
    ("recipe: 1\ngrid:\n  seed: []", "line 3: grid: seed has no values: the grid is empty"),
    ("recipe: 1\ngrid:\n  seed: 3", "line 3: grid: seed: expected a list of values, got 3"),
    ("recipe: 1\npoints: []", "line 2: points is empty"),
    ("recipe: 1\npoints:\n  seed: 1", "line 3: points: expected a list of points, got {'seed': 1}"),
    ("recipe: 1\npoints:\n  - 3", "line 3: points: expected parameters of the recipe (name: value), got 3"),
    ("recipe: 1\ngrid:\n  seed:\n  - 1\n  - 2\n  - 1", "line 6: grid: seed: 1 is there twice"),
    ("recipe: 1\ngrid:\n  rate:\n  - 1\n  - 1.0", "line 5: grid: rate: 1.0 is there twice"),
    ("recipe: 1\ngrid:\n  seed: [1]\n  seed: [2]", "line 4: grid: 'seed' is there twice, first in line 3"),
    ("recipe: 1\ngrid: {seed: [1]}\ngrid: {seed: [2]}", "line 3: the sweep: 'grid' is there twice, first in line 2"),
    ("recipe: 1\ngrid:\n  seed: [1, 2]\npoints:\n- {seed: 2}", "line 5: the same point as in line 3; take one away"),
    ("recipe: 1\npoints:\n- {fast: yes}\n- {seed: 0}", "line 4: the same point as in line 3"),  # both the defaults
    ("recipe: 1\nparameters: {seed: 1}\ngrid:\n  seed: [1]", "line 4: grid: 'seed' is in parameters as well"),
    ("recipe: 1\ngrid:\n  rows: [x]", "line 3: rows is not for a spec"),
    ("recipe: 1\npreset: gup\ngrid: {seed: [1]}", "line 2: no preset 'gup', and no such file; nearest: gpu"),
    ("recipe: 1\npreset: 3\ngrid: {seed: [1]}", "line 2: preset: expected cpu, gpu or a file, got 3"),
    ("recipe: 1\ngrid: {seed: [1]}\nretries: -1", "line 3: retries: expected a whole number, 0 or more, got -1"),
    ("recipe: 1\ngrid: {seed: [1]}\nretries: 1.5", "line 3: retries: expected a whole number"),
    ("recipe: 1\ngrid: {seed: [1]}\nretries: yes", "line 3: retries: expected a whole number, 0 or more, got True"),
    ("recipe: 1\ngrid: {seed: [1]}\ntime_limit: 0", "line 3: time_limit: expected a number, above 0, got 0"),
    ("recipe: 1\ngrid: {seed: [1]}\ntime_limit: .inf", "line 3: time_limit: expected a number"),
    (
        "recipe: 1\ngrid: {seed: [1]}\ntime_limit: 10 min",
        "line 3: time_limit: expected a number, above 0, got '10 min'",
    ),
    ("recipe: 1\ngrid: {seed: [1]}\nshow: {label: [1]}", "line 3: show: label: expected one value, got [1]"),
    (
        "recipe: 1\ngrid: {seed: [1]}\nshow: {labl: fast}",
        "line 3: show: no row of 01_toy has a field 'labl'; nearest: label",
    ),
    ("recipe: 1\ngrid: {seed: [1]}\nshow:\n  param.sede: 1", "line 4: show: no row of 01_toy has a field 'param.sede'"),
    ("recipe: 1\ngrid: {seed: [1]\nretries: 1", "line 3: not YAML: "),
    ("recipe: 1\ngrid:\n  seed: [!!python/name:os.system x]", "line 3: not a plain value: could not determine"),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_a_mistake_names_its_line(load, text, said):
    with pytest.raises(ValueError) as caught:
        load(text + "\n")
    message = str(caught.value)
    assert message.startswith(f"s.yaml, {said}") and "\n" not in message, message


def test_a_spec_is_found_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_spec("sdpa", resolve).recipe.stem == "03_sdpa"
    with pytest.raises(ValueError, match=r"^no sweep 'spda', and no such file; nearest: sdpa; there are: "):
        load_spec("spda", resolve)
    with pytest.raises(ValueError, match=r"a SkyPilot task, not a sweep; start it with: sky launch"):
        load_spec(str(SWEEPS / "rented.sky.yaml"), resolve)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match=r"^mine is a folder, not a sweep; expected a .yaml file, or a name of data"):
        load_spec("mine", resolve)
    (tmp_path / "mine" / "a.yaml").touch()
    with pytest.raises(ValueError, match=r"^mine is a folder, not a sweep; expected a file in it, such as a.yaml$"):
        load_spec("mine", resolve)


@pytest.mark.parametrize("preset", [None, "cpu", "gpu"])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_spec_fits_its_recipe(path, preset):
    spec = load_spec(str(path), resolve, preset)
    assert len(spec.points) >= 5 and spec.retries == 1 and spec.time_limit < 3600


def test_the_shipped_specs_are_those_that_people_asked_for():
    assert [path.stem for path in SHIPPED] == ["channels_last", "conv3d_to_linear", "cuda_graph", "kv_cache", "sdpa"]


def test_other_layers_of_the_recipe_do_not_stand_for_a_point_of_conv3d_to_linear():
    """Rows of one run of the recipe: the layer that is swept, its losing sizes, and other layers that gain more."""
    spec = load_spec("conv3d_to_linear", resolve)
    rows = [
        {"label": "linear", "case.patches": 64, "case.dtype": "float32", "speedup": 4.0},
        {"label": "linear", "case.patches": 16, "case.dtype": "float32", "speedup": 7.0},
        {"label": "transformers", "case.patches": 64, "case.dtype": "float32", "speedup": 4.1},
        {"label": "mean", "case.map": "80 x 128", "case.dtype": "float32", "speedup": 20.0},
    ]
    point = SimpleNamespace(parameters={"patches": 64, "dtype": "float32"})
    assert rows_of(spec, point, rows) == rows[:1]

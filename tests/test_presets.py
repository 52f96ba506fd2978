import pytest
from toy_recipes import toy

from utils.cookbook.notebooks import find_recipes, resolve
from utils.cookbook.parameters import declared
from utils.cookbook.presets import PRESETS, find_preset, load_preset


@pytest.fixture
def load(tmp_path):
    toy(tmp_path / "nb")

    def load(text):
        file = tmp_path / "mine.yaml"
        file.write_text(text)
        return load_preset(str(file), lambda name: resolve(name, tmp_path / "nb"))

    return load


def test_a_preset_gives_real_types_by_recipe(load):
    assert load("01_toy:\n  seed: 3\n  rate: 1e-3\n") == {"01_toy": {"seed": 3, "rate": 0.001}}
    assert load("01: {sizes: [4]}") == {"01_toy": {"sizes": [4]}}
    assert load("") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("02_toys: {seed: 1}", r"mine.yaml: no recipe '02_toys'; nearest: 01_toy"),
        ("01_toy: {sede: 1}", r"mine.yaml: 01_toy has no parameter 'sede'; nearest: seed"),
        ("01_toy: {seed: three}", r"mine.yaml: 01_toy: parameter 'seed' is int, got 'three'"),
        ("01_toy: {device: no}", r"mine.yaml: 01_toy: parameter 'device' is str, got False"),
        ("01_toy: 3", r"mine.yaml: 01_toy: expected parameters \(name: value\), got 3"),
        ("- 01_toy", r"mine.yaml: expected recipe names with parameters under them, got list"),
        ("01_toy: [", r"mine.yaml: not readable as YAML"),
        ("01_toy: {seed: 1}\n01: {seed: 2}", r"mine.yaml: 1: 01_toy is there twice"),
    ],
)
def test_a_wrong_preset_is_one_line_with_file_and_key(load, text, said):
    with pytest.raises(ValueError, match=said) as caught:
        load(text)
    assert "\n" not in str(caught.value)


def test_a_missing_preset_names_the_shipped_ones():
    with pytest.raises(ValueError, match=r"no preset 'cpus', and no such file; nearest: cpu; there are: cpu, gpu"):
        find_preset("cpus")


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_presets_hold_only_what_exists(path):
    preset = load_preset(path.stem, resolve)
    assert set(preset) <= {recipe.stem for recipe in find_recipes()}
    repeated = [
        f"{name}: {key}"
        for name, given in preset.items()
        for key, value in given.items()
        if value == declared(resolve(name))[key].default
    ]
    assert not repeated, "a preset says where it differs from the defaults"

"""Recipe 04: the rules of its claims on made-up rows, and wrong values refused before any work."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from recipe_notebook import code_cells, said, set_up, source_with

from utils.cookbook.notebooks import tags
from utils.rows import recorded_rows

RECIPE = "04_channels_last"
PRESETS = Path(__file__).parents[1] / "data" / "presets"


def output_of(tag, part=""):
    """The stored text of the cell with this tag and text."""
    (cell,) = [cell for cell in code_cells(RECIPE) if tag in tags(cell) and part in cell.source]
    return said(cell)


@pytest.fixture(scope="module")
def rules():
    scope = {"recorded": []}
    for part in ("def on_a_card", "def on_a_cpu"):
        exec(source_with(RECIPE, part), scope)
    return SimpleNamespace(**scope)


def row(speedup, verdict="faster", model="vae decoder", same=True):
    """A made-up row of channels_last against contiguous."""
    return {"device_name": "card", "case.model": model, "speedup": speedup, "verdict": verdict, "same": same}


# ---------------------------------------------------------------------------------------------------- L2


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(1.4)], "confirmed"),
        ([row(1.1), row(1.3, model="convolution"), row(1.0, "equivalent", "unet")], "confirmed"),
        ([row(1.2)], "refined"),  # below the band
        ([row(2.0)], "refined"),  # above it
        ([row(1.4), row(0.8, "slower", "unet")], "refined"),  # it depends
        ([row(0.9, "slower"), row(1.0, "equivalent", "unet")], "refuted"),
        ([row(0.9, "slower"), row(1.4, model="batch norm")], "refuted"),  # batch norm is no convolution
        ([row(1.4), row(0.5, "slower", "global pooling")], "confirmed"),
        ([row(1.4, "inconclusive")], "not measurable here"),
        ([row(1.4, same=False)], "not measurable here"),
        ([row(None, "error", same=None)], "not measurable here"),
    ],
)
def test_l2_follows_its_rule(rules, rows, expected):
    assert rules.on_a_card(rows)[0] == expected


def test_l2_names_the_losing_rows(rules):
    found = rules.on_a_card([row(1.42), row(0.8, "slower", "unet")])
    assert found == ("refined", "1.42x at best, card; slower: unet")


# ---------------------------------------------------------------------------------------------------- L7, L3


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(0.9, "slower"), row(1.0, "equivalent")], "confirmed"),
        ([row(0.9, "slower"), row(1.2)], "refined"),
        ([row(1.2), row(1.3)], "refuted"),
        ([row(1.2, "inconclusive")], "not measurable here"),
        ([row(1.2, same=False)], "not measurable here"),
        ([row(1.4), row(1.0, "equivalent")], "not measurable here"),  # NCHW wins nowhere, channels_last not throughout
    ],
)
def test_l7_follows_its_rule(rules, rows, expected):
    assert rules.on_a_cpu(rows)[0] == expected


@pytest.mark.parametrize(
    ("cnn", "vit", "language", "expected"),
    [
        (0.99, 0.8, 0.0, "confirmed"),
        (0.99, 0.01, 0.0, "refined"),
        (0.99, 0.8, 0.1, "refined"),
        (0.1, 0.01, 0.0, "refuted"),
        (0.99, 0.8, 0.9, "refuted"),
    ],
)
def test_l3_follows_its_rule(rules, cnn, vit, language, expected):
    assert rules.by_share({"CNN": cnn, "ViT": vit, "language model": language})[0] == expected


def test_l3_prints_the_share_that_was_counted(rules):
    assert "ViT 12.3%" in rules.by_share({"CNN": 0.99, "ViT": 0.123, "language model": 0.0})[1]


# ---------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": "huge"}, "size='huge'; expected one of tiny, small, full; nearest: 'full'"),
        ({"dtype": "float8"}, "dtype='float8'; expected one of float32, bfloat16, float16; nearest: 'float32'"),
        ({"side": 0}, "side=0; expected a whole number of at least 1"),
        ({"batch": -1}, "batch=-1; expected a whole number of at least 1"),
        ({"min_run_time": -1.0}, "min_run_time=-1.0; expected a finite number above 0"),
    ],
)
def test_a_wrong_value_is_refused_in_the_set_up(given, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        set_up(RECIPE, **given)  # which ends before the cell `machine`: nothing ran before
    assert str(caught.value) == message


@pytest.mark.parametrize("preset", [None, "cpu", "gpu"])
def test_the_defaults_and_the_presets_are_taken(preset):
    given = yaml.safe_load((PRESETS / f"{preset}.yaml").read_text()).get(RECIPE, {}) if preset else {}
    scope = set_up(RECIPE, **given | {"device": "cpu"})
    assert scope["kind"] == getattr(torch, scope["dtype"])


# ---------------------------------------------------------------------------------------------------- stored page


def test_what_breaks_is_shown():
    lines = [line.split(":") for line in output_of("limits", "def works").splitlines()]
    assert [(name.strip(), said.strip()) for name, said in lines] == [
        ("x.view(B, -1), contiguous", "works"),
        ("x.view(B, -1), channels_last", "RuntimeError"),
        ("x.reshape(B, -1)", "works"),
        ("Conv3d to channels_last", "RuntimeError"),
        ("Conv3d to channels_last_3d", "works"),
    ]


def test_the_recorded_table_gives_a_size_only_to_what_has_it():
    """The UNet is always the tiny one; it was once shown with the size of the decoder."""
    table = [line.split() for line in output_of("recorded").splitlines()]
    assert sum("unet" in line and "tiny" in line for line in table) == sum(
        row["case.model"] == "unet" for row in recorded_rows("04_channels_last")
    )
    assert not any("unet" in line and "small" in line for line in table)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_network_and_its_inputs_have_the_type_of_the_parameter(dtype):
    """The UNet was once measured in float32 whatever the parameter said, and its row named the parameter."""
    scope = set_up(RECIPE, dtype=dtype, device="cpu")
    scope |= {"last": {"memory_format": torch.channels_last}}
    exec(source_with(RECIPE, "def small_unet"), scope)
    kind = getattr(torch, dtype)
    assert set(scope["others"]) == {"unet", "convolution"}
    for build, inputs in scope["others"].values():
        model, given = build(), inputs(0)
        assert {weight.dtype for weight in model.parameters()} == {kind}
        assert {t.dtype for t in given if t.is_floating_point()} == {kind}
        assert not model.training
        assert not torch.equal(given[0], inputs(1)[0])
        result = scope["converted"](build)()(*given)
        result = result if isinstance(result, torch.Tensor) else result.sample
        assert result.dtype == kind

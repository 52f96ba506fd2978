"""Recipe 10: its technique away from the notebook, the small trained GPT, its recorded rows, and a run on a GPU."""

import json
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from recipe_notebook import check_refused, run_whole, source_of
from safetensors.torch import load_file
from torch import nn

from utils.rows import recorded_rows

RECIPE = "10_weight_only_int8"
ROOT = Path(__file__).parents[1]
SMALL = ROOT / "data" / "small_gpt"


@pytest.fixture(scope="module")
def technique():
    """The names that the cell tagged `technique` defines."""
    names = {"torch": torch, "F": F, "nn": nn}
    exec(source_of(RECIPE, "technique"), names)
    return names


def matrix(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_no_weight_is_further_than_half_a_step_of_its_own_row(technique):
    weight = matrix(24, 64)
    weight[3] *= 1000  # an outlier row must not matter to the others
    q, scale = technique["quantize"](weight)
    assert q.dtype is torch.int8 and q.shape == weight.shape and scale.shape == (24,)
    assert (q.abs().amax(1) == 127).all()
    assert ((q * scale[:, None] - weight).abs() <= 0.501 * scale[:, None]).all()


def test_a_row_of_zeros_stays_zero(technique):
    weight = matrix(4, 8)
    weight[2] = 0
    q, scale = technique["quantize"](weight)
    assert (scale > 0).all() and not q[2].any()  # 0 / 0 has no integer
    y = technique["plain_product"](matrix(3, 8), q, scale)
    assert torch.isfinite(y).all() and not y[:, 2].any()


@pytest.mark.parametrize("shape", [(64,), (1, 64), (5, 64), (2, 3, 64)])
@pytest.mark.parametrize("form", ["plain_product", "packed_product"])
def test_both_products_take_what_a_linear_takes(technique, form, shape):
    linear = nn.Linear(64, 96, bias=False).requires_grad_(False)
    linear.weight.copy_(matrix(96, 64, seed=1) / 8)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    found = technique["Int8Linear"](linear, product=technique[form])(x)
    expected = linear(x)
    assert found.shape == expected.shape and found.dtype == x.dtype
    assert (found - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("inputs", [8, 33, 40, 72, 300])
@pytest.mark.parametrize("tokens", [1, 3, 256])
def test_widths_that_the_packed_kernel_cannot_read_are_right_too(technique, inputs, tokens):
    """The kernel takes 16 inputs at a time: for others it gave huge values, or read outside of the weights."""
    weight, x = matrix(48, inputs, seed=1), matrix(tokens, inputs, seed=2)
    found = technique["packed_product"](x, *technique["quantize"](weight))
    expected = x @ weight.T
    assert (found - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_have_no_step_outside_of_a_byte(technique, dtype):
    linear = nn.Linear(64, 512, bias=False, dtype=dtype).requires_grad_(False)
    linear.weight.copy_(matrix(512, 64))
    linear.weight[3] *= 1e-4  # its step is below the smallest float16
    q, scale = technique["quantize"](linear.weight)
    assert q.min() >= -127 and q[3].abs().max() == 127 and scale.dtype is torch.float32
    layer = technique["Int8Linear"](linear)
    x = 100 * matrix(5, 64, seed=1).to(dtype)  # a sum of steps passes the largest float16
    found, expected = layer(x), x.double() @ linear.weight.double().T
    assert layer.weight.dtype is dtype and found.dtype is dtype
    assert (found.double() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize(
    "given, told",
    [
        ({"width": 0}, "width=0; expected a whole number of at least 2"),
        ({"width": -5}, "width=-5; expected a whole number"),
        ({"depth": 0}, "depth=0; expected a whole number of at least 1"),
        ({"batch": 0}, "batch=0; expected a whole number"),
        ({"prefill": 0}, "prefill=0; expected a whole number"),
        ({"small": 0}, "small=0; expected a whole number"),
        ({"threads": 1.0}, "threads=1.0; expected a whole number"),
        ({"min_run_time": 0.0}, "min_run_time=0.0; expected a finite number above 0"),
    ],
)
def test_a_wrong_value_is_refused_in_the_set_up(given, told):
    check_refused(RECIPE, given, told)


def test_a_layer_keeps_one_byte_per_weight(technique):
    layer = technique["Int8Linear"](nn.Linear(64, 96, bias=False))
    assert sum(t.nbytes for t in (*layer.parameters(), *layer.buffers())) == 96 * (64 + 4)
    assert layer.weight.dtype is torch.float32


@pytest.fixture(scope="module")
def training():
    return runpy.run_path(str(SMALL / "train.py"))


def test_the_stored_model_is_what_the_script_describes(training):
    assert all(file.stat().st_size < 300_000 for file in SMALL.glob("*.*"))
    about = json.loads((SMALL / "vocabulary.json").read_text(encoding="utf-8"))
    assert about["letters"] == training["LETTERS"] and about["length"] == training["LENGTH"]
    assert about["config"]["width"] == training["CONFIG"].width
    held_out = (SMALL / "held_out.txt").read_text(encoding="utf-8")
    assert held_out == training["write_text"](training["HELD_OUT_LETTERS"], seed=2)
    model = training["GPT"](training["CONFIG"])
    model.load_state_dict(load_file(SMALL / "weights.safetensors"))
    model.requires_grad_(False)
    assert 1.2 < training["perplexity"](model, training["encode"](held_out)) < 1.4  # untrained: 41 letters, above 40


def test_the_script_trains(training, capsys):
    assert training["train"](steps=3, seed=0, letters=2_000).config == training["CONFIG"]
    first, last = (float(line.split(": ")[1].split()[0]) for line in capsys.readouterr().out.splitlines())
    assert last < first


def test_recorded_rows_say_where_they_come_from():
    rows = recorded_rows(RECIPE)
    reported = [row for row in rows if row["provenance"] == "reported"]
    assert reported and all(row["source"].startswith("github.com/meta-pytorch/gpt-fast") for row in reported)
    for row in rows:
        if row.get("headline"):
            assert row["label"] == "int8" and row["same"] and row["rule"] == "approximate"
            assert row["int8_agreement"] >= 0.99 and row["bfloat16_agreement"] >= 0.99
            assert row["float32_bytes"] > 1.9 * row["bfloat16_bytes"] > 3.6 * row["int8_bytes"]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    _, rows = run_whole(RECIPE, tmp_path, device="cuda", width=8192, depth=8, compiled=True)
    timed = {row["label"]: row for row in rows}
    assert {"bfloat16", "int8"} <= timed.keys()
    for row in timed.values():
        assert row["device"].startswith("cuda") and row["same"] and row["driver"]
        assert 0 < row["share_of_limit"] < 1.15

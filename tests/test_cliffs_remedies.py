"""cliffs: which remedy applies to which arguments, and each form is the same function. No clock."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from utils.cliff_remedies import _made, remedy_for, reproduce, try_out
from utils.linearize import linearize
from utils.op_profile import profile_operations

CPU = torch.device("cpu")


def row_of(model, *inputs, op):
    """The row of `op` when `model` runs."""
    found = profile_operations(lambda: model(*inputs), model, passes=1)
    return max((row for row in found.rows if row.op == op), key=lambda row: row.calls)


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


CONV, MM = "aten::convolution", "aten::mm"
IMAGE = torch.randn(2, 8, 12, 12)
CASES = {
    "a matrix product": (nn.Conv2d(8, 4, 4, 4), [IMAGE], CONV, "linearize"),
    "a matrix product, 3-D": (nn.Conv3d(8, 4, (1, 4, 4), (1, 4, 4)), [IMAGE[:, :, None]], CONV, "linearize"),
    "overlapping": (nn.Conv2d(8, 4, 4, 2), [IMAGE], CONV, None),
    "padded": (nn.Conv2d(8, 4, 4, 4, padding=1), [IMAGE], CONV, None),
    "transposed": (nn.ConvTranspose2d(8, 4, 4, 4), [IMAGE], CONV, None),
    "grouped": (nn.Conv2d(8, 8, 3, padding=1, groups=4), [IMAGE], CONV, "channels_last"),
    "depthwise": (nn.Conv2d(8, 8, 3, padding=1, groups=8), [IMAGE], CONV, "channels_last"),
    "the whole map": (nn.AvgPool2d(12), [IMAGE], "aten::avg_pool2d", "mean"),
    "the whole map, 3-D": (nn.AvgPool3d((3, 12, 12)), [torch.randn(2, 4, 3, 12, 12)], "aten::avg_pool3d", "mean"),
    "a part of the map": (nn.AvgPool2d(6), [IMAGE], "aten::avg_pool2d", None),
    "float64": (Call(torch.mm), [torch.randn(8, 8).double()] * 2, MM, "float32"),
    "float64, elementwise": (Call(torch.exp), [torch.randn(8, 8).double()], "aten::exp", "float32"),
    "float16": (Call(torch.mm), [torch.randn(8, 8).half()] * 2, MM, "float32"),
    "bfloat16": (Call(torch.mm), [torch.randn(8, 8).bfloat16()] * 2, MM, "float32"),
    "float32": (Call(torch.mm), [torch.randn(8, 8)] * 2, MM, None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_remedy_and_its_form(name):
    model, inputs, op, expected = CASES[name]
    row = row_of(model.eval(), *inputs, op=op)
    remedy = remedy_for(row, CPU)
    assert (remedy and remedy.name) == expected
    if expected is None:
        return
    arguments = [_made(argument, 0, CPU) for argument in row.arguments]
    plain = getattr(torch.ops.aten, op.removeprefix("aten::"))(*arguments)
    other = remedy.form(*arguments)
    assert other.dtype == plain.dtype and other.shape == plain.shape
    tolerance = 2e-2 if plain.dtype in (torch.float16, torch.bfloat16) else 1e-4
    torch.testing.assert_close(other, plain, rtol=tolerance, atol=tolerance)


def test_what_linearize_leaves_alone_gets_other_words():
    class Mine(nn.Conv2d):
        pass

    model, op = Mine(8, 4, 4, 4), CONV
    assert "linearize(model)" not in remedy_for(row_of(model, IMAGE, op=op), CPU).text
    functional = Call(lambda x: torch.nn.functional.conv2d(x, torch.ones(4, 8, 4, 4), stride=4))
    assert "F.linear" in remedy_for(row_of(functional, IMAGE, op=op), CPU).text
    done = nn.Conv2d(8, 4, 4, 4)
    linearize(done)
    assert {row.op for row in profile_operations(lambda: done(IMAGE), done, passes=1).rows} & {CONV} == set()


def test_reproductions_have_the_same_shape_stride_and_type():
    x = torch.empty(2, 8, 12, 12, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    made = _made((tuple(x.shape), x.stride(), x.dtype), 0, CPU)
    assert made.shape == x.shape and made.stride() == x.stride() and made.dtype == x.dtype
    expanded = _made(((3, 4), (0, 1), torch.float32), 0, CPU)
    assert expanded.shape == (3, 4) and expanded.is_contiguous()
    assert _made([2, 2], 0, CPU) == [2, 2] and _made(None, 0, CPU) is None


def test_a_trial_that_fails_says_so(monkeypatch):
    row = row_of(nn.Conv2d(8, 4, 4, 4), IMAGE, op=CONV)
    remedy = remedy_for(row, CPU)

    def broken(*given, **options):
        raise RuntimeError("no")

    monkeypatch.setattr("utils.timing.compare", broken)
    assert not try_out(row, remedy, CPU).helps and "no" in try_out(row, remedy, CPU).verdict
    row.seconds = 100.0
    assert "too long" in try_out(row, remedy, CPU).verdict


def test_an_operation_that_cannot_be_called_alone_is_not(monkeypatch):
    def compare(baseline, candidates, *, make_inputs, **options):  # no clock here
        baseline()(*make_inputs(0)), candidates["product"]()(*make_inputs(0))
        return {"product": SimpleNamespace(speedup=3.0)}

    monkeypatch.setattr("utils.timing.compare", compare)
    row = row_of(nn.Conv2d(8, 4, 4, 4), IMAGE, op=CONV)
    assert reproduce(row, CPU, 1e6) == 3.0
    row.keywords = ("dtype",)
    assert reproduce(row, CPU, 1e6) is None
    row.keywords, row.arguments = (), row.arguments[:2]
    assert reproduce(row, CPU, 1e6) is None
    row.seconds = 100.0
    assert reproduce(row, CPU, 1e6) is None

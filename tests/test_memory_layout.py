"""utils.memory_layout: formats by strides, what keeps and what drops channels_last, and that nothing is left behind."""

import pytest
import torch
from torch import nn

from utils.memory_layout import BOTH, CHANNELS_LAST, CONTIGUOUS, OTHER, memory_format, trace


def last(tensor):
    return tensor.to(memory_format=torch.channels_last)


def image(*shape):
    return last(torch.randn(*shape))


class Call(nn.Module):
    """Applies a function between two convolutions."""

    def __init__(self, fn):
        super().__init__()
        self.first, self.fn, self.second = nn.Conv2d(3, 8, 3), fn, nn.Conv2d(8, 4, 3)

    def forward(self, x):
        return self.second(self.fn(self.first(x)))


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.empty(2, 3, 4, 5), CONTIGUOUS),
        (last(torch.empty(2, 3, 4, 5)), CHANNELS_LAST),
        (torch.empty(2, 1, 4, 4), BOTH),
        (torch.empty(2, 1, 4, 4).to(memory_format=torch.channels_last), BOTH),
        (torch.empty(2, 8, 1, 1), BOTH),
        (torch.empty(2, 3, 4, 5).transpose(2, 3), OTHER),
        (last(torch.empty(2, 6, 4, 5))[:, ::2], OTHER),
        (torch.empty(2, 3, 4, 5, 6), CONTIGUOUS),
        (torch.empty(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), CHANNELS_LAST),
    ],
)
def test_a_format_is_read_from_strides_and_size_one_has_no_say(tensor, expected):
    assert memory_format(tensor) == expected


def test_other_ranks_have_no_format():
    with pytest.raises(ValueError, match="3 dimensions"):
        memory_format(torch.empty(2, 3, 4))


def test_a_convolution_of_channels_last_keeps_it():
    report = trace(last(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))), image(2, 3, 16, 16))
    assert [step.change for step in report.steps] == ["kept"] * 3
    assert report.kept and report.copied_bytes == 0
    assert report.steps[0].weight == CHANNELS_LAST and report.steps[1].weight is None


def test_a_plain_model_is_plain_and_not_kept():
    report = trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.randn(2, 3, 16, 16))
    assert [step.change for step in report.steps] == ["plain", "plain"]
    assert not report.kept and not report.lost


def test_instance_norm_loses_it_and_is_named():
    model = last(nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Conv2d(8, 4, 3)))
    report = trace(model, image(2, 3, 16, 16))
    assert [step.module for step in report.lost] == ["InstanceNorm2d"]
    assert not report.kept
    assert "lost" in str(report)


def test_a_contiguous_call_between_modules_is_a_copy_with_its_bytes():
    report = trace(last(Call(lambda x: x.contiguous())), image(2, 3, 16, 16))
    (copy,) = report.copies
    assert (copy.path, copy.source, copy.target) == ("(model)", CHANNELS_LAST, CONTIGUOUS)
    assert copy.nbytes == report.copied_bytes == 2 * 8 * 14 * 14 * 4
    assert not report.kept


@pytest.mark.parametrize("fn", [torch.clone, torch.relu, lambda x: torch.cat([x, x], 1)[:, :8].clone()])
def test_operations_that_keep_it_are_no_copies(fn):
    assert trace(last(Call(fn)), image(2, 3, 16, 16)).copies == []


class Apply(nn.Module):
    """Applies a function, after a module that a 4-D tensor passes."""

    def __init__(self, fn):
        super().__init__()
        self.first, self.fn = nn.Identity(), fn

    def forward(self, x):
        return self.fn(self.first(x))


def copies_of(fn, x):
    return [(copy.source, copy.target, copy.nbytes) for copy in trace(Apply(fn), x).copies]


def test_a_conversion_by_hand_with_permute_is_a_copy():
    to_nhwc = lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # noqa: E731
    x = torch.randn(2, 3, 4, 5)
    assert copies_of(to_nhwc, x) == [(CONTIGUOUS, CHANNELS_LAST, x.nbytes)]
    assert copies_of(to_nhwc, last(x)) == []  # it is NHWC already: `contiguous` does nothing
    volume = torch.randn(2, 3, 4, 5, 6)
    by_hand = lambda v: v.permute(0, 2, 3, 4, 1).clone(memory_format=torch.contiguous_format)  # noqa: E731
    assert copies_of(by_hand, volume) == [(CONTIGUOUS, CHANNELS_LAST, volume.nbytes)]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
        lambda x: x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]),
        lambda x: x.movedim(1, -1).flatten(0, 2),
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.clone(memory_format=torch.channels_last),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_copy_is_seen_in_every_grad_mode(fn, mode):
    with mode():
        x = torch.randn(2, 3, 4, 5)
        assert copies_of(fn, x) == [(CONTIGUOUS, CHANNELS_LAST, x.nbytes)]
        report = trace(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True)), x)
        assert [step.change for step in report.steps] == ["plain", "plain"] and report.copies == []


def test_a_conversion_by_hand_back_is_a_copy():
    def to_nchw(x):  # x holds NHWC numbers; they are written into NCHW memory
        return torch.empty(2, 3, 4, 5).permute(0, 2, 3, 1).copy_(x)

    x = torch.randn(2, 4, 5, 3)
    assert copies_of(to_nchw, x) == [(CHANNELS_LAST, CONTIGUOUS, x.nbytes)]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.transpose(1, 2).contiguous(),  # heads before tokens, as in attention
        lambda x: x.transpose(2, 3).contiguous(),  # a transposed matrix in each head
        lambda x: x[:, ::2].contiguous(),  # fewer numbers, not another order
    ],
)
def test_other_copies_change_no_format(fn):
    assert copies_of(fn, torch.randn(2, 4, 6, 5)) == []


@pytest.mark.parametrize(("shape", "seen"), [((2, 1, 6, 5), 0), ((2, 4, 1, 5), 0), ((2, 4, 5, 1), 1)])
def test_sizes_of_one_in_a_conversion_by_hand(shape, seen):
    """One channel is no copy, height 1 written as NHWC says nothing (see the docstring), width 1 is seen."""
    assert len(copies_of(lambda x: x.permute(0, 2, 3, 1).contiguous(), torch.randn(shape))) == seen


def test_one_channel_is_unclear_and_blames_nobody():
    report = trace(last(nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 1, 3))), image(2, 1, 16, 16))
    assert [step.change for step in report.steps] == ["unclear", "unclear"]
    assert not report.lost


def test_volumes_are_traced_as_well():
    model = nn.Sequential(nn.ReLU(), nn.Hardtanh())
    report = trace(model, torch.randn(1, 3, 5, 5, 5).to(memory_format=torch.channels_last_3d))
    assert [step.change for step in report.steps] == ["kept", "kept"]


def test_tuples_and_keywords_are_looked_into():
    class Pair(nn.Module):
        def forward(self, *, images):
            return {"a": images, "b": (images.mean((2, 3)),)}

    report = trace(Pair(), images=image(1, 3, 4, 4))
    assert report.steps[0].change == "kept"


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_nothing_is_left_behind_also_after_an_error():
    model = last(Call(lambda x: x))
    trace(model, image(2, 3, 16, 16))
    assert hooks(model) == 0

    def fail(x):
        raise RuntimeError("in the middle")

    broken = Call(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        trace(broken, image(2, 3, 16, 16))
    assert hooks(broken) == 0
    torch.relu(torch.ones(1))  # no dispatch mode is active: this would fail in a broken one


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (nn.Conv2d(3, 4, 3), (), "no tensor among the inputs"),
        (nn.Linear(4, 4), (torch.randn(2, 4),), "no module got or returned"),
        (nn.Conv2d(3, 4, 3, device="meta"), (torch.randn(1, 3, 8, 8),), "several devices"),
    ],
)
def test_wrong_arguments_are_named(model, inputs, message):
    with pytest.raises(ValueError, match=message):
        trace(model, *inputs)


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (
            nn.Conv2d(3, 4, 3),
            image(1, 4, 8, 8),
            r"\(model\) \(Conv2d\) got a tensor \(1, 4, 8, 8\); expected in_channels=3",
        ),
        (nn.Conv2d(3, 4, 3), torch.randn(8, 8), r"got a tensor \(8, 8\); expected in_channels=3"),
        (Call(lambda x: x[:, :6]), image(1, 3, 8, 8), r"^second \(Conv2d\) got .* expected in_channels=8"),
        (
            nn.Sequential(nn.GroupNorm(2, 4)),
            image(1, 6, 8, 8),
            r"^0 \(GroupNorm\) got .* num_channels=4 in dimension 1",
        ),
        (nn.BatchNorm2d(4), image(1, 6, 8, 8), "num_features=4"),
        (nn.Sequential(nn.ReLU(), nn.Linear(8, 2)), image(1, 6, 8, 9), r"^1 \(Linear\) got .* in_features=8"),
        (nn.Conv2d(3, 4, 3), image(1, 3, 8, 8).double(), r"got torch\.float64; expected torch\.float32, as its weight"),
    ],
)
def test_a_tensor_that_does_not_fit_a_layer_is_named_in_one_line(model, given, message):
    with pytest.raises(ValueError, match=message) as caught:
        trace(model, given)
    assert "\n" not in str(caught.value)
    assert hooks(model) == 0


def test_what_fits_is_not_refused():
    assert trace(nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 3)), image(1, 3, 8, 8)).steps
    half = nn.Sequential(nn.BatchNorm2d(3))  # 16 bits in, float32 weights: torch takes it
    assert trace(half.eval(), image(1, 3, 8, 8).bfloat16()).kept
    with torch.autocast("cpu", torch.bfloat16):
        assert trace(nn.Sequential(nn.Conv2d(3, 4, 3)), image(1, 3, 8, 8).bfloat16()).steps
    unbatched = nn.Sequential(nn.Identity(), nn.Flatten(0, 1), nn.Conv2d(3, 4, 3))  # the last gets [3, H, W]
    assert trace(unbatched, torch.randn(1, 3, 8, 8)).steps


@pytest.mark.parametrize(("given", "words"), [((), {"y": 1}), ((1,), {})])
def test_arguments_that_the_model_does_not_take(given, words):
    x = image(1, 3, 8, 8)
    with pytest.raises(TypeError, match=r"Conv2d: .*; expected the arguments of forward\(") as caught:
        trace(nn.Conv2d(3, 4, 3), x, *given, **words)
    assert "\n" not in str(caught.value)


def test_a_function_is_no_model():
    with pytest.raises(TypeError, match=r"expected an nn\.Module"):
        trace(torch.relu, torch.randn(1, 3, 4, 4))

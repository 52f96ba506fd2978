"""linearize: the rule, argument by argument; and the same function for every form of input."""

import copy

import pytest
import torch
from torch import nn

from utils.linearize import LinearizedConv2d, LinearizedConv3d, linearize, restore, why_not

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


def pair(n=2, *args, dtype=torch.float32, **kwargs):
    """A convolution and its linearized copy."""
    torch.manual_seed(0)
    conv = CONV[n](*(args or (3, 8, 4, 4)), **kwargs).to(dtype)
    twin = copy.deepcopy(conv)
    (rewrite,) = linearize(twin)
    assert rewrite.converted, rewrite
    return conv, twin


def is_same(twin, conv, x):
    """Values, shape, dtype, and strides: a caller's `.view` must go on working."""
    y, expected = twin(x), conv(x)
    torch.testing.assert_close(y, expected)
    assert y.stride() == expected.stride()
    return True


# ---- the rule ------------------------------------------------------------------------------------------------------

CONVERTED = [
    nn.Conv1d(6, 9, 4, 4),
    nn.Conv2d(3, 8, 16, 16, bias=False),
    nn.Conv2d(3, 8, 4, 4, padding="valid"),
    nn.Conv2d(3, 8, (2, 4), (2, 4), padding=(0, 0)),
    nn.Conv2d(3, 8, 1, padding="same"),  # a kernel of 1 pads nothing
    nn.Conv2d(3, 8, 1, dilation=3),  # and has nothing to spread
    nn.Conv3d(3, 8, (1, 4, 4), (1, 4, 4), dilation=(5, 1, 1)),
    nn.Conv3d(3, 8, [2, 4, 4], [2, 4, 4]),  # lists in a configuration
    nn.Conv3d(65, 16, 1),
    nn.Conv2d(3, 8, 4, 4, dtype=torch.bfloat16),
    nn.Conv2d(3, 8, 4, 4, dtype=torch.complex64),
    nn.Conv2d(3, 8, 4, 4, device="meta"),
]

LEFT_ALONE = [
    (nn.Conv2d(3, 8, 4, 2), "overlap"),
    (nn.Conv2d(3, 8, 2, 4), "leave gaps"),
    (nn.Conv2d(3, 8, (4, 4), (4, 2)), "overlap"),
    (nn.Conv2d(1, 8, 16, 10), "overlap"),
    (nn.Conv3d(3, 8, (2, 4, 4)), "overlap"),  # a product only where the input is as large as the kernel
    (nn.Conv2d(3, 8, 4, 4, padding=1), "padding 1x1"),
    (nn.Conv2d(3, 8, 4, 4, padding=(0, 1)), "padding 0x1"),
    (nn.Conv2d(3, 8, 3, padding="same"), "overlap"),
    (nn.Conv2d(3, 8, 4, 4, dilation=2), "dilation 2x2"),
    (nn.Conv3d(3, 8, (1, 4, 4), (1, 4, 4), dilation=(1, 1, 2)), "dilation 1x1x2"),
    (nn.Conv2d(4, 8, 4, 4, groups=2), "groups=2"),
    (nn.Conv2d(4, 4, 4, 4, groups=4), "groups=4"),
    (nn.Conv2d(3, 8, 4, 4, padding_mode="reflect"), "padding_mode='reflect'"),
    (nn.ConvTranspose1d(3, 8, 4, 4), "transposed"),
    (nn.ConvTranspose2d(3, 8, 4, 4), "transposed"),
    (nn.ConvTranspose3d(3, 8, 4, 4), "transposed"),
    (nn.LazyConv2d(8, 4, 4), "lazy"),
    (nn.LazyConvTranspose2d(8, 4, 4), "lazy"),
]


@pytest.mark.parametrize("conv", CONVERTED, ids=str)
def test_converted(conv):
    conv = copy.deepcopy(conv)
    (rewrite,) = linearize(conv)
    assert rewrite.converted and rewrite.path == "" and rewrite.kind in ("Conv1d", "Conv2d", "Conv3d")
    assert type(conv).__name__ == "Linearized" + rewrite.kind


@pytest.mark.parametrize("conv, reason", LEFT_ALONE, ids=lambda v: str(v)[:60])
def test_left_alone_with_the_reason(conv, reason):
    kind = type(conv)
    (rewrite,) = linearize(conv)
    assert not rewrite.converted and reason in rewrite.reason
    assert type(conv) is kind and why_not(conv) == rewrite.reason


def test_a_subclass_is_left_alone():
    class Padded(nn.Conv2d):
        def forward(self, x):
            return super().forward(nn.functional.pad(x, (1, 1, 1, 1)))

    (rewrite,) = linearize(Padded(3, 8, 4, 4))
    assert "Padded is a subclass of nn.Conv2d" in rewrite.reason


@pytest.mark.parametrize("name", ["forward", "_conv_forward"])
def test_a_forward_replaced_on_the_instance_is_left_alone(name):
    conv = nn.Conv2d(3, 8, 4, 4)
    setattr(conv, name, lambda *args: "mine")
    (rewrite,) = linearize(conv)
    assert f"{name} was replaced" in rewrite.reason and conv(torch.zeros(1, 3, 4, 4)) == "mine"


def test_parametrized_is_left_alone():
    conv = torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 4, 4))
    (rewrite,) = linearize(conv)
    assert "parametrized (weight)" in rewrite.reason


def test_a_weight_that_is_not_there_is_left_alone():
    conv = nn.Conv2d(3, 8, 4, 4)
    conv.weight.data = torch.empty(0)  # as sharding leaves it between calls
    (rewrite,) = linearize(conv)
    assert "empty" in rewrite.reason


def test_a_weight_of_another_shape_is_left_alone():
    conv = nn.Conv2d(3, 8, 4, 4)
    conv.weight = nn.Parameter(torch.randn(8, 3, 2, 2))  # now the patches leave gaps
    assert "shape (8, 3, 2, 2)" in linearize(conv)[0].reason


def test_integer_and_wrapped_weights_are_left_alone():
    from torch.testing._internal.two_tensor import TwoTensor

    whole = nn.Conv2d(3, 8, 4, 4)
    whole.weight = nn.Parameter(torch.ones(8, 3, 4, 4, dtype=torch.int8), requires_grad=False)
    wrapped = nn.Conv2d(3, 8, 4, 4)
    wrapped.weight = nn.Parameter(TwoTensor(torch.randn(8, 3, 4, 4), torch.randn(8, 3, 4, 4)))
    assert "int8" in why_not(whole) and "TwoTensor" in why_not(wrapped)


def test_a_foreign_module_with_the_arguments_of_a_convolution_is_looked_at():
    class Quantized(nn.Module):
        in_channels, out_channels, kernel_size, stride = 3, 8, (4, 4), (4, 4)

    (rewrite,) = linearize(nn.Sequential(Quantized(), nn.Linear(3, 8), nn.MaxPool2d(2)))
    assert rewrite.path == "0" and "Quantized is not an nn.Conv1d" in rewrite.reason


def test_wrong_arguments():
    with pytest.raises(TypeError, match="model is list"):
        linearize([nn.Conv2d(3, 8, 4, 4)])
    conv = nn.Conv2d(3, 8, 4, 4)
    with pytest.raises(ValueError, match="keep='best'"):
        linearize(conv, inputs=torch.zeros(1, 3, 4, 4), keep="best")
    with pytest.raises(ValueError, match="keep='faster' needs inputs"):
        linearize(conv, keep="faster")
    with pytest.raises(ValueError, match="min_run_time needs inputs"):
        linearize(conv, min_run_time=0.1)
    assert type(conv) is nn.Conv2d


# ---- the same function for every input -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("size", [4, 8, 9, 11, 15], ids=lambda s: f"size{s}")
@pytest.mark.parametrize("batch", [(), (0,), (1,), (5,)], ids=lambda b: f"batch{b}")
def test_batches_and_sizes(n, size, batch):
    conv, twin = pair(n)
    assert is_same(twin, conv, torch.randn(*batch, 3, *[size] * n))


LAYOUTS = {  # what is done to a contiguous input [N, C, *size]
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "cropped": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1)[:, :, 1:9],
    "permuted": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[:1].expand(3, *[-1] * (x.dim() - 1)),
    "flipped": lambda x: x.transpose(-1, 1).contiguous().transpose(-1, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n, weight_last", [(1, False), (2, False), (2, True), (3, False), (3, True)])
def test_layouts(n, weight_last, layout, dtype):
    conv, twin = pair(n, dtype=dtype)
    if weight_last:
        conv, twin = (m.to(memory_format=LAST[n]) for m in (conv, twin))
    assert is_same(twin, conv, LAYOUTS[layout](torch.randn(3, 3, *[10] * n, dtype=dtype)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_half_types(n, dtype):
    conv, twin = pair(n, dtype=dtype)
    x = torch.randn(3, 3, *[10] * n, dtype=dtype)
    assert is_same(twin, conv, x)
    # in which layout a CPU without instructions for half types answers is not part of the promise
    torch.testing.assert_close(twin(LAYOUTS["channels_last"](x)), conv(LAYOUTS["channels_last"](x)))


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (2, 1, 8, 8), (2, 3, 4, 4), (2, 3, 8, 4)])
def test_layouts_that_are_ambiguous(shape):
    conv, twin = pair(2, shape[1], 8, 4, 4)
    assert is_same(twin, conv, torch.randn(shape).to(memory_format=torch.channels_last))
    assert is_same(twin, conv, torch.randn(shape))


def test_pointwise_and_one_output():
    conv, twin = pair(3, 65, 16, 1)
    assert is_same(twin, conv, torch.randn(1, 65, 4, 6, 6))
    conv, twin = pair(2, 3, 1, 4, 4)
    assert is_same(twin, conv, torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_complex_numbers():
    conv, twin = pair(2, dtype=torch.complex64)
    torch.testing.assert_close(twin(x := torch.randn(2, 3, 9, 8, dtype=torch.complex64)), conv(x))


@pytest.mark.parametrize(
    "bad",
    [
        torch.randn(2, 4, 8, 8),  # channels
        torch.randn(2, 3, 3, 8),  # smaller than the kernel
        torch.randn(2, 3, 0, 8),
        torch.randn(8, 8),  # too few dimensions
        torch.randn(1, 2, 3, 8, 8),
        torch.randn(2, 3, 8, 8, dtype=torch.float64),
        torch.ones(2, 3, 8, 8, dtype=torch.int64),
        torch.randn(2, 3, 8, 8).to_sparse(),
        "an image",
    ],
    ids=lambda v: str(getattr(v, "shape", v)),
)
def test_what_the_convolution_refuses_is_refused(bad):
    conv, twin = pair(2)
    with pytest.raises(Exception) as expected:
        conv(bad)
    with pytest.raises(type(expected.value)):
        twin(bad)


def test_autocast():
    conv, twin = pair(3, 3, 8, (2, 4, 4), (2, 4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert is_same(twin, conv, x := torch.randn(5, 3, 2, 4, 4)) and twin(x).dtype == torch.bfloat16


def test_meta_tensors_and_fake_tensors():
    from torch._subclasses import FakeTensorMode

    conv = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), device="meta")
    assert linearize(conv)[0].converted
    assert conv(torch.empty(5, 3, 2, 8, 8, device="meta")).shape == (5, 8, 1, 2, 2)
    with FakeTensorMode():
        twin = nn.Conv2d(3, 8, 4, 4)
        linearize(twin)
        assert twin(torch.empty(5, 3, 9, 8)).shape == (5, 8, 2, 2)


def test_it_computes_a_matrix_product():
    """The proof that the technique is used, and not the fallback."""
    from torch.utils.flop_counter import FlopCounterMode

    conv, twin = pair(3, 3, 8, (2, 4, 4), (2, 4, 4))
    x = torch.randn(5, 3, 2, 4, 4)
    counts = []
    for module in (conv, twin):
        with FlopCounterMode(display=False) as counter:
            module(x)
        counts.append({str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()})
    assert list(counts[0]) == ["aten.convolution"] and list(counts[1]) == ["aten.addmm"]
    assert sum(counts[0].values()) == sum(counts[1].values()) == 2 * 5 * 96 * 8


def test_a_linearized_class_built_by_hand_is_still_any_convolution():
    """Adapters build their low-rank convolutions from `type(base_layer)`."""
    torch.manual_seed(0)
    odd = LinearizedConv2d(4, 8, 3, stride=2, padding=1, groups=2, padding_mode="circular")
    plain = copy.deepcopy(odd)
    restore(plain)
    assert type(plain) is nn.Conv2d and torch.equal(odd(x := torch.randn(2, 4, 9, 9)), plain(x))
    assert isinstance(odd, nn.Conv2d) and not isinstance(odd, LinearizedConv3d)

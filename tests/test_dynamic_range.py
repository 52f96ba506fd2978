"""The range audit: against really running in 16 bits, against formulas, and what it leaves behind."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from utils.dynamic_range import audit

FP16, BF16 = torch.float16, torch.bfloat16


def finite(tensors) -> bool:
    """No inf or NaN among those that are 16 bits wide."""
    halves = [t for t in tensors if isinstance(t, torch.Tensor) and t.dtype in (FP16, BF16)]
    return all(bool(t.isfinite().all()) for t in halves)


class Reality(TorchDispatchMode):
    """The first operation of a real 16-bit run that makes inf or NaN out of finite numbers: (module path, op)."""

    def __init__(self, model):
        super().__init__()
        self.names, self.stack, self.first = {id(m): name for name, m in model.named_modules()}, [""], None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = finite(tree_leaves((args, kwargs)))
        out = func(*args, **(kwargs or {}))
        if self.first is None and before and not finite(tree_leaves(out)):
            self.first = (self.stack[-1], func.overloadpacket.__name__)
        return out


def really(model, *inputs, dtype):
    """(where the first inf or NaN comes from, output) of the model cast to `dtype`."""
    model = copy.deepcopy(model).to(dtype)
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    mode = Reality(model)

    def leave(*_):
        mode.stack.pop()

    for module in model.modules():
        module.register_forward_pre_hook(lambda m, _: mode.stack.append(mode.names[id(m)]))
        module.register_forward_hook(leave)
    with torch.no_grad(), mode:
        out = model(*inputs)
    return mode.first, out


def t5_feed_forward():
    """T5's class with an activation of 66,246: just above the limit of float16."""
    from transformers import T5Config
    from transformers.models.t5.modeling_t5 import T5LayerFF

    layer = T5LayerFF(T5Config(d_model=4, d_ff=8, dropout_rate=0.0)).eval()
    with torch.no_grad():
        layer.DenseReluDense.wi.weight.fill_(8.0)
        layer.DenseReluDense.wo.weight.fill_(66246.39 / (8 * 32))
    return layer, (torch.ones(1, 2, 4),)


class Residual(nn.Module):
    def forward(self, x, branch):
        return F.layer_norm(x + branch, x.shape[-1:])


class Eager(nn.Module):
    def forward(self, q, k, v):
        scores = q @ k.transpose(-2, -1)  # [B, H, L, S]
        return (scores * q.shape[-1] ** -0.5).softmax(-1) @ v


class Fused(nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Norm(nn.Module):
    """The mean of squares, in the format of the input or in float32."""

    def __init__(self, wide):
        super().__init__()
        self.wide, self.weight = wide, nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = x.float() if self.wide else x
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Rounded(nn.Module):
    def forward(self, x):
        return (x + x).relu().sqrt()


def attention_inputs(value=60.0):
    return tuple(torch.full((1, 1, 4, 64), value) for _ in range(3))


REAL = {
    "T5 feed-forward": (*t5_feed_forward(), ("DenseReluDense.wo", "mm")),
    "residual sum": (Residual(), (torch.full((1, 4), 4e4), torch.full((1, 4), 4e4)), ("", "add")),
    "eager attention": (Eager(), attention_inputs(), ("", "bmm")),
    "fused attention": (Fused(), attention_inputs(), None),
    "narrow norm": (Norm(False), (torch.full((1, 4), 300.0),), ("", "pow")),
    "wide norm": (Norm(True), (torch.full((1, 4), 300.0),), None),
    "rounds down": (Rounded(), (torch.tensor([32759.0]),), None),  # 32,752 + 32,752 = 65,504
    "rounds up": (Rounded(), (torch.tensor([32760.0]),), ("", "add")),  # 65,520 is inf
}


@pytest.mark.parametrize("name", REAL)
def test_the_first_offender_is_the_real_one(name):
    model, inputs, expected = REAL[name]
    real, _ = really(model, *inputs, dtype=FP16)
    report = audit(model, *inputs, dtype=FP16)
    assert real == expected
    assert (report.first and (report.first.path, report.first.op)) == expected
    assert bool(report) is (real is None)
    assert audit(model, *inputs, dtype=BF16)


def test_value_and_margin_of_t5():
    model, inputs = t5_feed_forward()
    report = audit(model, *inputs, dtype="fp16")
    assert report.first.value == pytest.approx(66246.39, rel=1e-5)
    assert report.first.limit == 65504 and report.first.count == report.first.total == 8
    assert report.first.margin == pytest.approx(math.log2(66246.39 / 65504), abs=1e-4)
    assert report.headroom < 0 and report.peak_at.startswith("DenseReluDense.wo") is False  # the residual adds 1
    assert "self.wo(hidden_states)" in report.first.code
    assert [found.path for found in report.overflows] == ["DenseReluDense.wo"]  # the sum after it only inherits
    assert [(found.path, found.inherited) for found in report.of("overflow")] == [
        ("DenseReluDense.wo", False),
        ("", True),
    ]


def test_an_overflow_in_place_is_one_cause():
    def doubled(x):
        y = x.clone()
        y.mul_(2)
        return y + 1

    report = audit(doubled, torch.tensor([4e4]), dtype=FP16)
    assert [(f.op, f.inherited) for f in report.of("overflow")] == [("mul_", False), ("add", True)]


def test_another_half_format_inside_is_not_judged():
    report = audit(lambda x: (x.to(BF16) * 10).float().sum(), torch.tensor([4e4]), dtype=FP16)
    assert report and report.peak == 4e4


def test_score_bound_inside_the_fused_kernel():
    report = audit(Fused(), *attention_inputs(), dtype=FP16)
    assert report and [found.kind for found in report.of("fused")] == ["fused"]
    assert report.of("fused")[0].value == pytest.approx(60 * 60 * 64, rel=1e-4)
    assert not audit(Fused(), *attention_inputs(10.0), dtype=FP16).of("fused")


@pytest.mark.parametrize("hide", [lambda x: x.clamp(-100, 100), lambda x: torch.nan_to_num(x), lambda x: 1 / x])
def test_an_output_that_hides_it(hide):
    class Hidden(nn.Module):
        def forward(self, x):
            return hide(x * 2)

    x = torch.tensor([4e4, 1.0])
    real, out = really(Hidden(), x, dtype=FP16)
    assert finite([out])
    report = audit(Hidden(), x, dtype=FP16)
    assert real == ("", "mul") == (report.first.path, report.first.op)
    assert report.first.value == 8e4


def test_transformers_clamp_hides_it_and_takes_the_branch_of_float16():
    from transformers import T5Config, T5EncoderModel

    config = T5Config(d_model=16, d_ff=32, num_heads=2, d_kv=8, num_layers=2, vocab_size=20, dropout_rate=0.0)
    torch.manual_seed(0)
    model = T5EncoderModel(config).eval()
    with torch.no_grad():
        model.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(5e4)
        model.encoder.block[0].layer[1].DenseReluDense.wi.weight.mul_(50)
    ids = torch.arange(6)[None]
    real, out = really(model, ids, dtype=FP16)
    report = audit(model, ids, dtype=FP16)
    assert real == (report.first.path, report.first.op) == ("encoder.block.0.layer.1.DenseReluDense.wo", "mm")
    assert finite([out.last_hidden_state])  # nothing to see at the end
    assert not [found for found in report.overflows if found.path == "encoder.final_layer_norm"]


@pytest.mark.parametrize("kind", ["llama", "unet"])
def test_real_classes_without_a_fault(kind):
    torch.manual_seed(0)
    if kind == "llama":
        from transformers import LlamaConfig, LlamaModel

        config = LlamaConfig(
            hidden_size=32, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=20
        )
        model, inputs = LlamaModel(config).eval(), (torch.arange(6)[None],)
        model(*inputs)  # its first call may fill caches of its own
    else:
        from diffusers import UNet2DModel

        model = UNet2DModel(
            sample_size=8, block_out_channels=(8,), layers_per_block=1, norm_num_groups=4, attention_head_dim=4,
            down_block_types=("AttnDownBlock2D",), up_block_types=("AttnUpBlock2D",),
        ).eval()  # fmt: skip
        inputs = (torch.randn(1, 3, 8, 8), torch.tensor([999.0]))
    for dtype in (FP16, BF16):
        report = audit(model, *inputs, dtype=dtype)
        assert report and report.operations > 30 and report.headroom > 3
        steps = [found.note for found in report.of("integers") if found.path == "input 1"]
        assert steps == (["input: 999 becomes 1000"] if kind == "unet" and dtype is BF16 else [])
        if kind == "llama":
            assert [found.path for found in report.of("rounded")] == ["rotary_emb"]
            assert not audit(model, *inputs, dtype=dtype, keep=["*inv_freq"]).of("rounded")


def test_underflow_and_subnormal_by_count():
    x = torch.tensor([2.0**-14, 2.0**-15, 2.0**-24, 2.0**-25, 2.0**-25 * 1.01, 0.0])
    report = audit(lambda x: x * 1, x, dtype=FP16)
    under = [found for found in report.underflows if found.op == "mul"]
    assert [(found.count, found.value, found.limit) for found in under] == [(1, 2.0**-25, 2.0**-24)]
    assert (x.half() == 0).sum() == 2  # the zero itself and one underflow
    assert under[0].margin == 1
    assert not audit(lambda x: x * 1, x[:3], dtype=FP16).underflows
    assert [f.count for f in audit(lambda x: x * 1, x[:3], dtype=FP16).of("subnormal") if f.op == "mul"] == [2]
    assert not audit(lambda x: x * 1, x, dtype=BF16).of("underflow", "subnormal")


def test_limits_of_both_formats_are_those_of_rounding():
    for dtype in (FP16, BF16):
        info = torch.finfo(dtype)
        for value in torch.tensor([info.max, info.max * (1 + info.eps / 4), info.max * (1 + info.eps / 2)]):
            assert bool(audit(lambda x: x.view(1), value, dtype=dtype)) is bool(value.to(dtype).isfinite())
    assert not audit(lambda x: x * 1, torch.tensor([torch.finfo(torch.float32).max]), dtype=BF16)
    assert not audit(lambda x: x * x, torch.tensor([3e19]), dtype=BF16)  # float32 does not hold 9e38 either


def test_weights_and_inputs_are_judged_by_their_cast():
    layer = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[7e4, 1e-9]]))
    report = audit(layer, torch.tensor([[1e-3, 1e5]]), dtype=FP16)
    assert [(f.kind, f.path, f.op) for f in report.findings[:3]] == [
        ("overflow", "weight", "cast"),
        ("underflow", "weight", "cast"),
        ("overflow", "input 0", "cast"),
    ]
    assert report.first.order == -1


def test_masks_are_no_overflow_but_two_of_them_are():
    def masked(scores, fill):
        mask = torch.full_like(scores, fill).triu(1)
        return (scores + mask).softmax(-1)

    scores = torch.full((3, 3), -10.0)
    assert audit(masked, scores, -math.inf, dtype=FP16)
    assert audit(masked, scores, torch.finfo(FP16).min, dtype=FP16)  # 65504 + 10 rounds back
    assert not audit(masked, scores * 2, torch.finfo(FP16).min, dtype=FP16)  # 65504 + 20 does not
    assert not audit(masked, scores, -1e9, dtype=FP16)


def test_a_divisor_that_becomes_zero():
    report = audit(lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12), torch.zeros(1, 4), dtype=FP16)
    assert (report.first.kind, report.first.op) == ("zero divisor", "div")
    x = torch.zeros(1, 4, dtype=FP16)
    assert (x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12)).isnan().all()
    assert audit(lambda x: x / x.norm(dim=-1, keepdim=True).clamp_min(1e-12), torch.zeros(1, 4), dtype=BF16)


def test_integers_that_the_format_cannot_hold():
    positions = torch.arange(300)
    notes = [f.note for f in audit(lambda x, p: x * p, torch.ones(300), positions, dtype=BF16).of("integers")]
    assert notes == ["integer: 299 becomes 300"]
    assert not audit(lambda x, p: x * p, torch.ones(300), positions, dtype=FP16).of("integers")
    assert (
        audit(lambda x: torch.arange(2051, dtype=x.dtype) * x, torch.ones(1), dtype=FP16).of("integers")[0].count == 1
    )
    assert not audit(lambda x, ids: F.embedding(ids, x), torch.ones(300, 2), positions, dtype=BF16).precision
    found = audit(lambda x, t: x * t, torch.ones(1), torch.tensor([998.39]), dtype=BF16).of("integers")
    assert found[0].note.endswith("becomes 1000")


@pytest.mark.parametrize(
    "table, exact",
    [
        (lambda x: torch.arange(2050.0, 2053.0, dtype=x.dtype), "2051 becomes 2052"),
        (lambda x: torch.arange(1.0, 2053.0, 2.0, dtype=x.dtype, device=x.device), "2051 becomes 2052"),
        (lambda x: torch.linspace(2049, 2051, 3, dtype=x.dtype), "2051 becomes 2052"),
        (lambda x: torch.linspace(x.sum() * 2049, 2051, 3, dtype=x.dtype), "2051 becomes 2052"),
        (lambda x: torch.arange(0.0, 2.0, dtype=x.dtype), None),
    ],
)
def test_tables_made_inside_from_any_ends(table, exact):
    notes = [found.note for found in audit(lambda x: table(x) * x, torch.ones(1), dtype=FP16).of("integers")]
    assert notes == ([] if exact is None else [f"table: {exact}"])
    values = table(torch.ones(1, dtype=FP16)).tolist()
    assert (2051.0 in values, 2052.0 in values) == (False, exact is not None)


def test_float64_constants_and_mixed_products_are_said():
    constant = torch.ones(4, dtype=torch.float64)
    assert [f.kind for f in audit(lambda x: x + constant, torch.ones(4), dtype=BF16).precision] == ["float64"]
    layer = nn.Linear(4, 4)
    layer.scale = torch.ones(4)  # an attribute: `.to()` does not cast it
    layer.forward = lambda x: F.linear(x * layer.scale, layer.weight)
    report = audit(layer, torch.ones(1, 4), dtype=BF16)
    assert [f.kind for f in report.precision] == ["dtype error"]
    with pytest.raises(RuntimeError, match="dtype"):
        layer.to(BF16)(torch.ones(1, 4, dtype=BF16))


def test_autocast_judges_what_autocast_casts():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 4, bias=False)
            nn.init.constant_(self.up.weight, 1e4)
            self.far = nn.Parameter(torch.tensor(1e6))  # no operation that autocast casts

        def forward(self, x):
            return self.up(x).float() + self.far

    assert audit(Two(), torch.ones(1, 4), dtype=FP16, autocast=True)  # 4e4 in the product; the sum is in float32
    cast = audit(Two(), torch.full((1, 4), 2.0), dtype=FP16, autocast=True)
    assert (cast.first.path, cast.first.op) == ("up", "mm")
    with torch.autocast("cpu", BF16):  # around the call: switched off, `model.to(dtype)` is what is asked
        assert not audit(Two(), torch.full((1, 4), 2.0), dtype=FP16)


def test_multi_head_attention_shows_its_scores():
    layer = nn.TransformerEncoderLayer(64, 1, 64, batch_first=True).eval()
    with torch.no_grad():
        layer.self_attn.in_proj_weight[:128].mul_(200)  # query and key
    report = audit(layer, torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0)), dtype=FP16)
    assert [(found.path, found.note[:10]) for found in report.of("fused")] == [("self_attn", "raw scores")]


def test_lstm_in_place_and_views_run():
    assert audit(nn.LSTM(4, 4), torch.randn(3, 1, 4), dtype=FP16).operations

    def views(x):
        y = x.clone()
        y[:, 0] *= 1e5
        y.unsqueeze_(0)
        return y.squeeze(0).T.contiguous() + torch.zeros(1, dtype=x.dtype)

    x = torch.ones(2, 3)
    report = audit(views, x, dtype=FP16)
    assert (report.first.op, report.first.value) == ("mul_", 1e5)
    assert torch.equal(x, torch.ones(2, 3))


def test_fresh_memory_is_no_result():
    def scores(q, k):
        return torch.baddbmm(torch.empty(1, 2, 2, dtype=q.dtype), q, k, beta=0, alpha=0.1)

    for _ in range(3):
        junk = [torch.full((1, 2, 2), 1e30) for _ in range(50)]  # freed memory that is used again
        del junk
        assert audit(scores, torch.ones(1, 2, 2), torch.ones(1, 2, 2), dtype=FP16).headroom > 15


def test_inputs_and_models_of_other_formats():
    model, x = Residual(), torch.full((1, 4), 4e4)
    for value in (x, x.half(), x.double()):
        assert audit(model, value, value, dtype=FP16).first.value == pytest.approx(8e4)
    layer = t5_feed_forward()[0].double()
    report = audit(layer, torch.ones(1, 2, 4, dtype=torch.float64), dtype=FP16)
    assert report.first.path == "DenseReluDense.wo" and "float64" in {found.kind for found in report.precision}


def test_a_method_of_a_model_and_values_read_in_python():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(2, 2, bias=False)
            nn.init.constant_(self.up.weight, 4e4)

        def generate(self, x):
            y = self.up(x)
            return y * 2 if y[0, 0].item() > 1 and bool((y > 0).all()) else y

    model = Reads()
    report = audit(model.generate, torch.ones(1, 2), dtype=FP16)
    assert (report.first.path, report.first.op) == ("up", "mm") and [f.op for f in report.of("overflow")] == [
        "mm",
        "mul",
    ]
    assert "nothing looked at" in str(audit(lambda ids: ids + 1, torch.arange(2), dtype=FP16))


def test_inference_mode_inside_the_model():
    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 4, bias=False)
            nn.init.constant_(self.up.weight, 1e5 / 4)

        @torch.inference_mode()
        def forward(self, x):
            return self.up(x)

    assert audit(Inside(), torch.ones(1, 4), dtype=FP16).first.op == "mm"


class Untidy(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout()
        self.last = None

    def forward(self, x, fail=False):
        self.last = self.drop(self.norm(x))
        self.extra = x
        x.add_(1)
        if fail:
            raise KeyError("inside")
        return self.last


@pytest.mark.parametrize("fail", [False, True])
def test_nothing_is_left_behind(fail):
    model, x = Untidy().train(), torch.randn(8, 4)
    before, weight, state, x_before = (
        copy.deepcopy(model.state_dict()),
        model.norm.weight,
        torch.get_rng_state(),
        x.clone(),
    )
    hooks = torch.nn.modules.module
    if fail:
        with pytest.raises(KeyError, match="inside"):
            audit(model, x, dtype=FP16, fail=True)
    else:
        audit(model, x, dtype=FP16)
    assert not hooks._global_forward_hooks and not hooks._global_forward_pre_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert model.norm.weight is weight and model.last is None and not hasattr(model, "extra")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(x, x_before)
    assert model.training and type(model(x.clone())) is torch.Tensor


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    audit(model, torch.ones(1, 4), dtype=FP16)
    assert model[1].weight is model[0].weight and isinstance(model[0].weight, nn.Parameter)


def test_float32_that_is_not_finite_itself():
    report = audit(lambda x: x / x + 1, torch.zeros(2), dtype=FP16)
    assert [(found.kind, found.op) for found in report.findings] == [("not finite", "div")]
    report = audit(lambda x: x * x + 1, torch.full((2,), 1e20), dtype=BF16)
    assert [(found.kind, found.op) for found in report.findings if found.order >= 0] == [("overflow", "mul")]


def test_it_prints():
    model, inputs = t5_feed_forward()
    text = str(audit(model, *inputs, dtype=FP16))
    assert "first: overflow at DenseReluDense.wo, mm: 66246.4 against 65504, 2^+0.02" in text
    assert "nothing leaves the range" in str(audit(lambda x: x + 1, torch.ones(2), dtype=FP16))


def wrong(call, error, text):
    with pytest.raises(error, match=text) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:.*jit.script:DeprecationWarning")
def test_errors_say_what_is_wrong():
    layer, x = nn.Linear(4, 4), torch.ones(1, 4)
    wrong(lambda: audit(layer, x, dtype="float61"), ValueError, r"dtype='float61'.*nearest: 'float16'")
    wrong(lambda: audit(layer, x, dtype=torch.float32), ValueError, "expected torch.float16 or torch.bfloat16")
    wrong(lambda: audit(layer, dtype=FP16), ValueError, "inputs: none given")
    wrong(lambda: audit(layer, torch.ones(0, 4), dtype=FP16), ValueError, r"input 0 is empty, of shape \[0, 4\]")
    wrong(lambda: audit(torch.jit.script(layer), x, dtype=FP16), TypeError, "TorchScript")
    wrong(lambda: audit(3, x, dtype=FP16), TypeError, "model is a int")
    wrong(lambda: audit(layer, x.to("meta"), dtype=FP16), ValueError, "several devices: weight on cpu, input 0 on meta")
    wrong(lambda: audit(nn.Linear(4, 4, device="meta"), x.to("meta"), dtype=FP16), ValueError, "weight is on the meta")
    wrong(lambda: audit(nn.Linear(4, 4).half(), x, dtype=FP16), ValueError, "weight is float16 already")
    wrong(lambda: audit(layer, x, dtype=FP16, keep=["wieght"]), ValueError, "nearest: 'weight'")
    for keep in ("weight", 5, [3]):
        wrong(lambda keep=keep: audit(layer, x, dtype=FP16, keep=keep), TypeError, "expected a list of patterns")


@pytest.mark.parametrize("nothing", [(), [], None, "abc", {}, [None, "abc"]])
def test_what_holds_no_value_is_no_input(nothing):
    wrong(lambda: audit(nn.Linear(4, 4), nothing, dtype=FP16), ValueError, "inputs: none given")
    wrong(lambda: audit(nn.Linear(4, 4), input=nothing, dtype=FP16), ValueError, "inputs: none given")


def test_inputs_and_weights_that_are_not_finite_are_refused():
    layer, bad = nn.Linear(4, 4), torch.ones(2, 4)
    bad[1, 2] = math.nan
    wrong(lambda: audit(layer, bad, dtype=BF16), ValueError, "input 0 holds NaN: 1 of 8 values")
    bad[1, 2] = math.inf
    wrong(lambda: audit(layer, bad, dtype=BF16), ValueError, "input 0 holds inf: 1 of 8 values")
    layer.weight.data[0] = math.inf
    wrong(lambda: audit(layer, torch.ones(2, 4), dtype=BF16), ValueError, "weight holds inf: 4 of 16 values")


def test_complex_inputs_that_are_not_finite_are_refused():
    for bad, what in ((math.nan, "NaN"), (math.inf, "inf")):
        table = torch.tensor([1 + 1j, complex(0, bad)])
        wrong(
            lambda table=table: audit(torch.mul, torch.ones(2), table, dtype=BF16), ValueError, f"input 1 holds {what}"
        )


def test_eight_bits_are_refused():
    eight = torch.ones(4).to(torch.float8_e5m2)
    wrong(
        lambda: audit(nn.Linear(4, 4), eight, dtype=BF16),
        ValueError,
        "input 0 is float8_e5m2; expected at least 16 bits",
    )


def test_minus_infinity_in_a_mask_is_said_and_is_no_overflow():
    mask = torch.full((3, 3), -math.inf).triu(1)
    report = audit(lambda scores, mask: (scores + mask).softmax(-1), torch.ones(3, 3), mask, dtype=FP16)
    assert report and report.peak == 1
    assert [(f.path, f.op, f.count, f.total) for f in report.of("not finite")] == [("input 1", "cast", 3, 9)]
    assert "nothing leaves the range" not in str(report)


def test_sparse_tensors_are_refused():
    sparse = torch.eye(4).to_sparse()
    wrong(lambda: audit(nn.Linear(4, 4), sparse, dtype=FP16), ValueError, "input 0 is sparse_coo; expected a dense")
    layer = nn.Linear(4, 4)
    layer.register_buffer("table", sparse)
    wrong(lambda: audit(layer, torch.ones(4), dtype=FP16), ValueError, "table is sparse_coo; expected a dense")


@pytest.mark.parametrize("value, kinds", [(1e5, ["overflow"]), (-math.inf, ["not finite"]), (1e4, [])])
def test_a_constant_written_in_16_bits(value, kinds):
    for made in (lambda x: x.new_tensor(value) + x, lambda x: torch.tensor(value, dtype=x.dtype) + x):
        real = made(torch.ones(2, dtype=FP16)).isfinite().all()
        report = audit(made, torch.ones(2), dtype=FP16)
        assert [found.kind for found in report.findings] == kinds
        assert bool(real) is (kinds == []) and bool(report) is (kinds != ["overflow"])


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_a_complex_table_loses_its_imaginary_part():
    layer = nn.Linear(4, 4)
    layer.register_buffer("freqs_cis", torch.polar(torch.ones(3), torch.tensor([0.0, 1.0, 2.0])))
    found = audit(layer, torch.ones(1, 4), dtype=BF16).precision
    assert [(f.kind, f.path, f.count, f.total) for f in found] == [("complex", "freqs_cis", 2, 3)]
    for how in ({"keep": ["freqs_cis"]}, {"autocast": True}):
        assert not audit(layer, torch.ones(1, 4), dtype=BF16, **how).precision
    assert layer.freqs_cis.is_complex() and not copy.deepcopy(layer).to(BF16).freqs_cis.is_complex()


@pytest.mark.gpu
def test_on_a_gpu():
    for name, (model, inputs, expected) in REAL.items():
        model, inputs = copy.deepcopy(model).cuda(), [x.cuda() for x in inputs]
        report = audit(model, *inputs, dtype=FP16)
        assert (report.first and (report.first.path, report.first.op)) == expected, name


TINY = torch.tensor([1e-5, 2e-5])
HALF = torch.full((4,), 0.5)


@pytest.mark.parametrize(
    "fn, x",
    [
        (lambda x: x / (x.var(unbiased=False) + 1e-8).sqrt(), HALF),
        (lambda x: (x - x.mean()) / (x.square().mean() + 1e-8).sqrt(), TINY),
        (lambda x: (x - x.mean()) / (x.square().mean(-1, keepdim=True) + 1e-8) ** 0.5, TINY),
        (lambda x: x / (x * 1e-8).sqrt().sqrt()[None], HALF),
        (lambda x: x / (x * 1e-8).sqrt_(), HALF),
        (lambda x: (x * 1e-8).sqrt().log(), HALF),
    ],
)
def test_the_root_of_a_number_that_became_zero_is_no_divisor(fn, x):
    """A norm with an eps below the smallest FP16 number: it is gone before the root."""
    assert fn(x).isfinite().all() and not fn(x.half()).isfinite().all()
    assert audit(fn, x, dtype="float16").first.kind == "zero divisor"


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x / ((x * 1e-8).sqrt() + 1e-3),  # what is added after the root stays
        lambda x: x / (x * 1e-2).sqrt(),
        lambda x: x / (x * 1e-3).square().sqrt(),
    ],
)
def test_a_root_that_stays_is_a_divisor(fn):
    assert fn(HALF.half()).isfinite().all() and audit(fn, HALF, dtype="float16")

"""cliffs: what the profile counts, in whatever form a model is called, and that it leaves nothing behind. No clock."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from utils import cliffs, op_profile
from utils.op_profile import OUTSIDE, PYTHON, profile_operations

X = torch.randn(6, 16)


def row(found, path, op):
    (match,) = [r for r in found.rows if r.path == path and r.op == "aten::" + op]
    return match


def profiled(model, *inputs, **kwargs):
    return profile_operations(lambda: model(*inputs, **kwargs), model, passes=2)


def hooks_of(model):
    names = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_forward_hooks_with_kwargs")
    return [len(getattr(m, name)) for m in model.modules() for name in names]


@pytest.fixture(autouse=True)
def no_trials(monkeypatch):
    """The limits of an imaginary machine, and no measurement of remedies: no clock in these tests."""
    from utils.cost import MachinePeaks

    peaks = MachinePeaks(1e11, 1e10, 1e10, 2**28, "float32", 2, "a machine", "cpu", 1024, "id")
    monkeypatch.setattr(cliffs, "measure_peaks", lambda *given: peaks)
    monkeypatch.setattr(cliffs, "try_out", None)
    monkeypatch.setattr(cliffs, "reproduce", None)


FIRST, SECOND = ("0", "aten::addmm"), ("1", "aten::addmm")


@pytest.mark.parametrize(
    "passes, taken, seconds",
    [
        ([(0.01, 0.02), (0.01, 0.02), (0.01, 0.02)], 3, [(0.01, 0.01), (0.02, 0.02)]),
        ([(9.00, 0.02), (0.01, 0.02), (0.01, 0.02)], 3, [(0.01, 0.01), (0.02, 0.02)]),  # a pause in the first pass
        ([(9.00, 0.02), (0.01, 9.00), (0.01, 0.02)], 3, [(0.01, 0.01), (0.02, 0.02)]),  # two pauses, two lines
        ([(9.00, 0.02), (7.00, 0.02), (0.01, 0.02)], 3, [(0.01, 7.00), (0.02, 0.02)]),  # the same line twice: it shows
        ([(3.00, 0.02), (3.10, 0.02)], 2, [(3.00, 3.10), (0.02, 0.02)]),  # long, and both agree
        ([(3.00, 0.02), (3.00, 0.90), (3.00, 0.02)], 3, [(3.00, 3.00), (0.02, 0.02)]),  # long, and a line does not
        ([(3.00, 3.00), (9.00, 9.00), (3.00, 3.00)], 3, [(3.00, 3.00), (3.00, 3.00)]),
    ],
)
def test_a_pause_of_the_machine_is_in_no_line(monkeypatch, passes, taken, seconds):
    """Made-up times of two lines in each pass; a long call is timed again until two passes agree."""
    left = iter(passes)

    def timed(call, hooks, names, device):
        call()
        first, second = next(left)
        return first + second, {FIRST: (first, 1), SECOND: (second, 1)}

    monkeypatch.setattr(op_profile, "_timed_pass", timed)
    found = profile_operations(lambda: model(X), model := nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    lines = {(r.path, r.op): (r.seconds, r.again) for r in found.rows}
    assert [lines[FIRST], lines[SECOND]] == seconds and list(left) == passes[taken:]
    assert found.total_s == sum(fastest for fastest, _ in seconds)


def test_flops_and_bytes_by_module():
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    found = profiled(model, X)
    assert row(found, "0", "addmm").flops == 2 * 6 * 16 * 32 and row(found, "2", "addmm").flops == 2 * 6 * 32 * 8
    assert row(found, "0", "addmm").bytes == 4 * (32 + 6 * 16 + 16 * 32 + 6 * 32)
    assert row(found, "1", "relu").bytes == 4 * 2 * 6 * 32 and row(found, "1", "relu").module is model[1]
    assert row(found, "2", "t").bytes == 0  # a view moves nothing
    assert found.outermost_calls == 1 and found.module_calls == {"": 1, "0": 1, "1": 1, "2": 1}
    assert all(r.seconds > 0 for r in found.rows if r.op in ("aten::addmm", "aten::relu"))


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_compound_operations_are_seen_through(context):
    model = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.Upsample(scale_factor=2, mode="bilinear")).eval()
    with context():
        found = profiled(model, torch.randn(2, 3, 16, 16))
    assert row(found, "0", "convolution").flops == 2 * 2 * 8 * 48 * 16
    norm = max((r for r in found.rows if r.path == "1" and r.op != PYTHON), key=lambda r: r.bytes)
    assert "batch_norm" in norm.op and norm.seconds > 0 and norm.bytes > 0
    assert row(found, "2", "upsample_bilinear2d").bytes == 4 * 2 * 8 * (16 + 64)


def test_attention_is_counted():
    class Attention(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q)

    found = profiled(Attention(), torch.randn(2, 4, 32, 16))
    assert sum(r.flops for r in found.rows) == 2 * 2 * 2 * 4 * 32 * 32 * 16


def test_a_weight_counts_once_in_a_call_of_the_model():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return torch.stack([self.linear(part) for part in x])

    model = Loop()
    found = profiled(model, torch.randn(40, 2, 16))
    product = row(found, "linear", "addmm")
    assert product.calls == 40 and product.kinds == 1 and found.module_calls["linear"] == 40
    assert product.bytes == 4 * (16 + 16 * 16) + 40 * 4 * (2 * 2 * 16)


def test_rows_that_are_read_are_counted_and_not_the_table():
    found = profiled(nn.Embedding(10_000, 16), torch.arange(6))
    assert row(found, "", "embedding").bytes == 2 * 4 * 6 * 16


@dataclass
class Answer:
    hidden: torch.Tensor
    parts: tuple


class Outputs(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.linear, self.form = nn.Linear(16, 16), form

    def forward(self, x, *, scale=1.0):
        y = self.linear(x) * scale
        forms = {"tuple": (y, (y,)), "dict": {"y": y, "n": None}, "dataclass": Answer(y, (y,)), "none": None}
        return forms[self.form]


@pytest.mark.parametrize("form", ["tuple", "dict", "dataclass", "none"])
@pytest.mark.parametrize("context", [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_outputs_of_any_form_inference_mode_and_autocast(form, context):
    model = Outputs(form)
    with context():
        report = cliffs.find(model, X, scale=2.0)
    assert any(r.path == "linear" and r.flops == 2 * 6 * 16 * 16 for r in report.rows)
    assert not any(hooks_of(model)) and str(report)


def test_autocast_is_seen_in_the_types():
    with torch.autocast("cpu", torch.bfloat16):
        report = cliffs.find(nn.Sequential(nn.Linear(16, 16)), X)
    assert next(r for r in report.rows if r.flops).dtype == torch.bfloat16


def test_generate():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    found = profile_operations(
        lambda: model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=5, do_sample=False), model, passes=1
    )
    assert found.outermost_calls == 5 and found.module_calls["model.layers.1.mlp"] == 5
    assert row(found, "lm_head", "mm").calls == 5 and any(r.path == OUTSIDE for r in found.rows)
    report = cliffs.find(model.generate, torch.ones(1, 3, dtype=torch.long), max_new_tokens=3, do_sample=False)
    assert any(r.path == "model.layers.*.mlp.down_proj" for r in report.rows) and not any(hooks_of(model))


def test_shared_modules_and_a_root_without_children():
    shared = nn.Linear(16, 16)
    found = profiled(nn.Sequential(shared, nn.ReLU(), shared), X)
    assert row(found, "0", "addmm").calls == 2
    assert row(profiled(shared, X), "", "addmm").flops == 2 * 6 * 16 * 16


class Fails(nn.Module):
    """Fails in an inner module: always, or only when the profiler runs."""

    def __init__(self, calls):
        super().__init__()
        self.linear, self.inner, self.left = nn.Linear(16, 16), nn.Identity(), calls
        self.inner.register_forward_hook(self.count)

    def count(self, *given):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("the model failed")

    def forward(self, x):
        return self.inner(self.linear(x))


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_no_hook_is_left_after_an_error(calls):
    model = Fails(calls)
    before = hooks_of(model)
    with pytest.raises(RuntimeError, match="the model failed"):
        cliffs.find(model, X)
    assert hooks_of(model) == before and sum(before) == 1
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    with torch.profiler.profile() as later:
        nn.Linear(16, 16)(X)
    assert not any(event.name.startswith("op_profile") for event in later.events())


def test_an_error_that_the_model_catches_does_not_confuse_the_rows():
    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(16, 4)

        def forward(self, x):
            try:
                return self.first(x)
            except RuntimeError:
                return self.second(x)

    found = profiled(Catches(), X)
    assert row(found, "second", "addmm").flops == 2 * 6 * 16 * 4
    assert not any(r.path == "first" and r.flops for r in found.rows)


def test_existing_hooks_and_training_mode_stay():
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5)).train()
    seen = []
    model[0].register_forward_hook(lambda *given: seen.append(1))
    cliffs.find(model, X)
    assert len(seen) == 4 and model.training and len(model[0]._forward_hooks) == 1


@pytest.mark.parametrize("bad", [nn.functional.relu, "model", lambda x: x], ids=["function", "text", "lambda"])
def test_what_is_no_model(bad):
    with pytest.raises(TypeError, match="expected an nn"):
        cliffs.find(bad, X)


def test_a_compiled_model_is_refused():
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(ValueError, match="compiled"):
        cliffs.find(torch.compile(model, backend="eager"), X)
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled"):
        cliffs.find(model, X)


def test_a_loop_over_tokens_and_a_python_row_end_to_end():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Linear(16, 16)

        def forward(self, x):
            return [self.cell(part) for part in x.split(1)]

    report = cliffs.find(Loop(), torch.randn(300, 16))
    (suspect,) = report.suspects
    assert suspect.row.op == "(a loop)" and suspect.row.path == "" and "300 times" in suspect.remedy
    assert any(r.op == PYTHON for r in report.rows)

"""linearize: everything around a module that users rely on stays as it was."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.prune import l1_unstructured

from utils.linearize import LinearizedConv2d, LinearizedConv3d, Rewrite, linearize, restore


class Model(nn.Module):
    """A patch embedding, a tied twin of it, an overlapping convolution, and a head."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.same_module = self.patch
        self.same_weight = nn.Conv2d(3, 8, 4, 4)
        self.same_weight.weight = self.patch.weight
        self.mix = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(8, 5)

    def forward(self, x):  # [N, 3, H, W] -> [N, 5]
        return self.head(self.mix(self.patch(x) + self.same_module(x) + self.same_weight(x)).mean((2, 3)))


@pytest.fixture
def models():
    torch.manual_seed(0)
    model = Model()
    return model, copy.deepcopy(model)


X = torch.linspace(-1, 1, 2 * 3 * 9 * 8).reshape(2, 3, 9, 8)


def test_one_rewrite_per_convolution(models):
    model, twin = models
    rewrites = linearize(twin)
    assert [(r.path, r.converted) for r in rewrites] == [("patch", True), ("same_weight", True), ("mix.0", False)]
    assert str(rewrites[0]) == "patch [Conv2d] converted: stride equals kernel, no padding"
    assert str(Rewrite("", "Conv2d", False, "lazy")) == "(the model) [Conv2d] left alone: lazy"
    torch.testing.assert_close(twin(X), model(X))


def test_restore_gives_back_exactly_what_was_there(models):
    _, twin = models
    before = {path: (type(m), dict(vars(m)), list(m.parameters())) for path, m in twin.named_modules()}
    linearize(twin)
    assert restore(twin) == ["patch", "same_weight"]
    for path, module in twin.named_modules():
        kind, state, parameters = before[path]
        assert type(module) is kind and vars(module) == state
        assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    assert restore(twin) == []


def test_running_it_twice(models):
    model, twin = models
    linearize(twin)
    again = linearize(twin)
    assert [r.converted for r in again] == [True, True, False] and "already" in again[0].reason
    assert [r.kind for r in again] == ["Conv2d"] * 3 and type(twin.patch) is LinearizedConv2d
    torch.testing.assert_close(twin(X), model(X))


def test_state_dict_and_old_checkpoints(models):
    model, twin = models
    linearize(twin)
    old, new = model.state_dict(), twin.state_dict()
    assert list(old) == list(new) and all(torch.equal(old[k], new[k]) for k in old)
    changed = {k: v + 1 for k, v in old.items()}
    for assign in (False, True):
        fresh = copy.deepcopy(twin)
        fresh.load_state_dict(changed, strict=True, assign=assign)
        model.load_state_dict(changed)
        torch.testing.assert_close(fresh(X), model(X))


def test_tied_weights_stay_tied(models):
    _, twin = models
    linearize(twin)
    assert twin.same_module is twin.patch and twin.same_weight.weight is twin.patch.weight
    with torch.no_grad():
        twin.patch.weight.zero_()
    assert torch.equal(twin.same_weight(X), twin.same_weight.bias.reshape(1, 8, 1, 1).expand(2, 8, 2, 2))


def test_hooks_fire_once(models):
    model, twin = models
    seen = []
    for module in (twin.patch, model.patch):
        module.register_forward_pre_hook(lambda m, a: seen.append(("pre", a[0].shape)))
        module.register_forward_hook(lambda m, a, y: seen.append(("post", y.shape)))
        module.register_full_backward_hook(lambda m, g, h: seen.append(("back", h[0].shape)))
    linearize(twin)
    model.patch(X.clone().requires_grad_()).sum().backward()
    expected, seen[:] = list(seen), []
    twin.patch(X.clone().requires_grad_()).sum().backward()
    assert seen == expected and len(seen) == 3


def test_training_and_gradients(models):
    model, twin = models
    linearize(twin)
    for m in (model, twin):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            m(X).square().sum().backward()
            optimizer.step()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q, p, msg=name)
        torch.testing.assert_close(q.grad, p.grad, msg=name)
    assert twin.patch.weight.grad.shape == (8, 3, 4, 4)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_first_and_second_derivatives(n):
    conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][n - 1](2, 3, 2, 2, dtype=torch.float64)
    linearize(conv)
    x = torch.randn(2, 2, *[5, 4, 4][:n], dtype=torch.float64, requires_grad=True)  # 5: one element is left over

    def call(x, weight, bias):
        return torch.func.functional_call(conv, {"weight": weight, "bias": bias}, (x,))

    arguments = (x, conv.weight, conv.bias)
    assert torch.autograd.gradcheck(call, arguments) and torch.autograd.gradgradcheck(call, arguments)


def test_later_changes_count(models):
    model, twin = models
    linearize(twin)
    for m in (model, twin):
        m.patch.weight.data.mul_(2)
        m.patch.bias = None
    torch.testing.assert_close(twin(X), model(X))
    for m in (model, twin):  # a new patch size, as position-resizing code does it
        torch.manual_seed(1)
        m.patch.weight = nn.Parameter(torch.randn(8, 3, 2, 2))
        m.patch.stride = m.patch.kernel_size = (2, 2)
    torch.testing.assert_close(twin.patch(X), model.patch(X))
    for m in (model, twin):  # no longer a matrix product: the convolution answers
        m.patch.padding, m.patch.dilation, m.patch.stride = (1, 0), (1, 2), (1, 2)
    torch.testing.assert_close(twin.patch(X), model.patch(X))


def test_dtype_device_and_layout_moves(models):
    model, twin = models
    linearize(twin)
    for move in (
        lambda m: m.to(torch.float64),
        lambda m: m.to(memory_format=torch.channels_last),
        lambda m: m.bfloat16(),
        lambda m: m.float(),
    ):
        model, twin = move(model), move(twin)
        x = X.to(model.patch.weight.dtype)
        torch.testing.assert_close(twin(x), model(x))
        assert twin.patch.weight.stride() == model.patch.weight.stride()
    assert twin.to("meta").patch(X.to("meta")).shape == (2, 8, 2, 2)


def test_deepcopy_pickle_and_save(models):
    model, twin = models
    linearize(twin)
    buffer = io.BytesIO()
    torch.save(twin, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin)), torch.load(buffer, weights_only=False)):
        assert type(copied.patch) is LinearizedConv2d and copied.same_module is copied.patch
        torch.testing.assert_close(copied(X), model(X))
        restore(copied)
        assert type(copied.patch) is nn.Conv2d


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("wrap", [torch.nn.utils.weight_norm, lambda m: l1_unstructured(m, "weight", 0.5)])
def test_weight_norm_and_pruning_by_hooks_are_followed(wrap):
    def build():
        torch.manual_seed(0)
        return wrap(nn.Conv2d(3, 8, 4, 4))

    conv, twin = build(), build()
    assert linearize(twin)[0].converted
    for m in (conv, twin):
        next(p for n, p in m.named_parameters() if n in ("weight_g", "weight_orig")).data.add_(1)
    torch.testing.assert_close(twin(X), conv(X))


def test_parametrized_or_wrapped_afterwards(models):
    model, twin = models
    linearize(twin)
    for m in (model.patch, twin.patch):
        torch.nn.utils.parametrizations.weight_norm(m)
        m.parametrizations.weight.original0.data.mul_(2)
    torch.testing.assert_close(twin(X), model(X))
    restore(twin)
    assert type(twin.patch).__name__ == "ParametrizedConv2d" and type(twin.patch).__bases__ == (nn.Conv2d,)
    torch.testing.assert_close(twin(X), model(X))
    torch.nn.utils.parametrize.remove_parametrizations(twin.patch, "weight")
    assert type(twin.patch) is nn.Conv2d


class LowRank(nn.Module):
    """An adapter as libraries build it: from the type and the arguments of its base layer."""

    def __init__(self, base_layer, rank=2):
        super().__init__()
        kind = type(base_layer)
        self.base_layer = base_layer
        self.down = kind(base_layer.in_channels, rank, base_layer.kernel_size, base_layer.stride, bias=False)
        self.up = kind(rank, base_layer.out_channels, 1, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))

    def merge(self):
        up, down = self.up.weight[:, :, 0, 0], self.down.weight
        self.base_layer.weight.data += torch.einsum("or,rchw->ochw", up, down)
        self.up.weight.data.zero_()


@pytest.mark.parametrize("first", ["adapter", "linearize"])
def test_adapters(models, first):
    model, twin = models
    if first == "linearize":
        linearize(twin)
    for m in (model, twin):
        torch.manual_seed(2)
        m.patch = LowRank(m.patch)
    if first == "adapter":
        assert [r.path for r in linearize(twin) if r.converted][:3] == ["patch.base_layer", "patch.down", "patch.up"]
    torch.testing.assert_close(twin(X), model(X))
    for m in (model, twin):
        m.patch.merge()
    torch.testing.assert_close(twin(X), model(X))
    restore(twin)
    assert {type(m) for m in twin.patch.children()} == {nn.Conv2d}


def test_replaced_on_the_instance_afterwards(models):
    """Offloading libraries keep the bound forward of the class and wrap it."""
    model, twin = models
    linearize(twin)
    inner = twin.patch.forward
    twin.patch.forward = lambda x: inner(x) * 2
    torch.testing.assert_close(twin.patch(X), model.patch(X) * 2)


# ---- compile, export, trace ----------------------------------------------------------------------------------------


def compiled_graphs(module, shapes, dynamic):
    """Outputs, and how many graphs were compiled for them."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    call = torch.compile(module, backend=backend, dynamic=dynamic, fullgraph=True)
    return [call(torch.ones(shape)) for shape in shapes], len(graphs), graphs


@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_needs_no_more_graphs_than_the_convolution(dynamic):
    conv = nn.Conv2d(3, 8, 4, 4)
    twin = copy.deepcopy(conv)
    linearize(twin)
    shapes = [(n, 3, h, w) for n, h, w in [(2, 8, 8), (3, 16, 9), (5, 33, 17), (1, 8, 12), (4, 63, 31), (1, 18, 19)]]
    expected, least, _ = compiled_graphs(conv, shapes, dynamic)
    outputs, count, graphs = compiled_graphs(twin, shapes, dynamic)
    torch.testing.assert_close(outputs, expected)
    assert count <= least and all("conv" not in graph.code and "linear" in graph.code for graph in graphs)


def test_compiled_before_the_rewrite(models):
    model, twin = models
    torch._dynamo.reset()
    call = torch.compile(twin, backend="eager")
    call(X)
    assert [r.path for r in linearize(call) if r.converted] == ["_orig_mod.patch", "_orig_mod.same_weight"]
    torch.testing.assert_close(call(X), model(X))
    restore(call)
    torch.testing.assert_close(call(X), model(X))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    conv = nn.Conv2d(3, 8, 4, 4)
    twin = copy.deepcopy(conv)
    linearize(twin)
    auto = torch.export.Dim.AUTO

    def operations(dims):
        program = torch.export.export(twin, (torch.ones(2, 3, 10, 13),), dynamic_shapes=(dims,), strict=strict)
        return program.module(), {str(node.target) for node in program.graph.nodes if node.op == "call_function"}

    _, fixed = operations(None)
    batch, found = operations({0: auto})
    assert "aten.linear.default" in fixed & found and not {n for n in fixed | found if "conv" in n}
    torch.testing.assert_close(batch(x := torch.randn(7, 3, 10, 13)), conv(x))
    free, found = operations({0: auto, 2: auto, 3: auto})  # the convolution is recorded: it needs no guards on sizes
    assert found == {"aten.conv2d.default"}
    torch.testing.assert_close(free(x := torch.randn(3, 3, 8, 21)), conv(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_script_trace_and_symbolic_trace(models):
    model, twin = models
    linearize(twin)
    x = torch.randn(3, 3, 17, 12)
    for made in (torch.jit.script(twin), torch.jit.trace(twin, X), torch.fx.symbolic_trace(twin)):
        torch.testing.assert_close(made(x), model(x))


def test_functional_transforms(models):
    model, twin = models
    linearize(twin)
    stacked = {k: torch.stack([v, v * 2]) for k, v in model.named_parameters()}
    outputs = [torch.func.vmap(lambda p, m=m: torch.func.functional_call(m, p, (X,)))(stacked) for m in (twin, model)]
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(torch.func.vmap(twin.patch)(X), torch.func.vmap(model.patch)(X))


# ---- with example inputs -------------------------------------------------------------------------------------------


class Row:
    def __init__(self, verdict, speedup=1.0):
        self.verdict, self.speedup, self.ci_low, self.ci_high, self.error = verdict, speedup, 0.9, 1.1, "it broke"


@pytest.fixture
def verdicts(monkeypatch):
    """Stand in for the clock: what `compare` says of each input shape."""
    said, asked = {}, []

    def compare(baseline, candidates, *, make_inputs, **options):
        (x,) = make_inputs(0)
        asked.append((tuple(x.shape), options))
        with torch.no_grad():
            torch.testing.assert_close(candidates["linear"]()(x), baseline()(x))
        return {"linear": said.get(tuple(x.shape), Row("faster", 2.0))}

    monkeypatch.setattr("utils.timing.compare", compare, raising=False)
    return said, asked


@pytest.mark.parametrize("inputs", [X, (X,), [X], {"x": X}], ids=lambda v: type(v).__name__)
def test_each_rewrite_is_measured_on_the_inputs_that_reach_it(models, verdicts, inputs):
    _, twin = models
    rewrites = linearize(twin, inputs=inputs, min_run_time=0.25)
    assert [len(r.measured) for r in rewrites] == [1, 1, 0] and [r.converted for r in rewrites] == [True, True, False]
    assert [shape for shape, _ in verdicts[1]] == [(2, 3, 9, 8)] * 2
    assert all(options["min_run_time"] == 0.25 for _, options in verdicts[1])


@pytest.mark.parametrize(
    "row, stays, reason",
    [
        (Row("faster", 2.0), True, "stride equals kernel"),
        (Row("equivalent", 1.01), False, "measured equivalent: 1.01x (0.90 to 1.10)"),
        (Row("slower", 0.5), False, "measured slower: 0.50x"),
        (Row("inconclusive", 1.1), False, "measured inconclusive"),
        (Row("error", None), False, "measured error: it broke"),
    ],
    ids=lambda v: getattr(v, "verdict", str(v)),
)
def test_keep_faster(models, verdicts, row, stays, reason):
    _, twin = models
    verdicts[0][2, 3, 9, 8] = row
    rewrites = linearize(twin, inputs=X, keep="faster")
    assert rewrites[0].converted is stays and reason in rewrites[0].reason
    assert type(twin.patch) is (LinearizedConv2d if stays else nn.Conv2d)


def test_keep_faster_needs_no_shape_that_is_slower(verdicts):
    conv = nn.Conv2d(3, 8, 4, 4)
    model = nn.Module()
    model.conv, model.unused = conv, nn.Conv3d(3, 8, 2, 2)
    model.forward = lambda a, b: (conv(a), conv(b), conv(a))
    a, b = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 16, 16)
    kept, unused = linearize(model, inputs=(a, b), keep="faster")
    assert kept.converted and len(kept.measured) == 2
    assert not unused.converted and "do not reach it" in unused.reason
    verdicts[0][2, 3, 16, 16] = Row("slower", 0.5)
    again, _ = linearize(model, inputs=(a, b), keep="faster")
    assert not again.converted and type(conv) is nn.Conv2d


def test_no_hook_is_left_behind_when_the_model_fails(models, verdicts):
    _, twin = models
    with pytest.raises(RuntimeError):
        linearize(twin, inputs=torch.randn(2, 4, 8, 8))
    assert not twin.patch._forward_pre_hooks and type(twin.patch) is nn.Conv2d


def test_a_linearized_3d_class_knows_its_base():
    conv = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4))
    linearize(conv)
    assert type(conv) is LinearizedConv3d and isinstance(conv, nn.Conv3d) and "LinearizedConv3d(3, 8" in repr(conv)

"""State that is put back, and what is looked at in inputs, outputs and functions."""

import dataclasses
import functools
import gc
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from utils.timing import InputMutationError, MetaTensorError, MixedDeviceError, builders, guards, measure
from utils.timing.errors import BenchmarkError, CallableFailedError, EagerFallbackError
from utils.timing.measure import check_options, failed, guarded, resolution_warning

# ------------------------------------------------------------------------------------------- state


def test_random_state_of_cuda_is_put_back_once_it_is_initialised(monkeypatch):
    """There is no GPU here: torch's functions are replaced, the calls that reach them are looked at."""
    states = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["state of CUDA"])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", states.append)
    guards.set_rng_state(guards.rng_state())
    assert states == [["state of CUDA"]]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    guards.set_rng_state(guards.rng_state())
    assert len(states) == 1


def draws():
    return torch.rand(1).item(), np.random.rand(), random.random()


def test_one_seed_for_all_generators(monkeypatch):
    before = guards.rng_state()
    try:
        guards.seed_all(3)
        first = draws()
        guards.seed_all(4)
        assert all(a != b for a, b in zip(first, draws(), strict=True))
        guards.seed_all(3)
        assert draws() == first
        np.random.seed(3), random.seed(3), torch.manual_seed(3)
        assert draws() == first
        guards.seed_all(2**32 + 3)  # numpy takes 32 bits
        np_draw = np.random.rand()
        np.random.seed(3)
        assert np.random.rand() == np_draw
        every = []
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch, "manual_seed", every.append)
        guards.seed_all(7)
        assert every == [7]  # where there is an accelerator, every device
    finally:
        guards.set_rng_state(before)


def test_threads_are_yielded_and_put_back():
    threads = torch.get_num_threads()
    with guards.preserved_state(threads + 1) as used:
        assert used == torch.get_num_threads() == threads + 1
    assert torch.get_num_threads() == threads
    with guards.preserved_state(None) as used:
        assert used == threads


@pytest.mark.parametrize("collecting", [True, False])
def test_the_garbage_collector_is_put_back(collecting):
    frozen = gc.get_freeze_count()
    (gc.enable if collecting else gc.disable)()
    try:
        with pytest.raises(KeyError), guards.preserved_state(None):
            assert gc.get_freeze_count() > 0
            (gc.disable if collecting else gc.enable)()
            raise KeyError
        assert gc.isenabled() is collecting
        assert bool(gc.get_freeze_count()) is bool(frozen)
    finally:
        gc.enable()


# ------------------------------------------------------------------------------------------- values


@dataclasses.dataclass(frozen=True)
class Out:
    a: torch.Tensor
    b: object = None


def test_tensors_in_order():
    found = guards.tensors([torch.zeros(1), {"x": Out(torch.zeros(2), [torch.zeros(3)])}, 4, None, Out])
    assert [t.numel() for t in found] == [1, 2, 3]


def test_float64_copies_only_floating_values():
    tree = guards.to_float64([torch.ones(2), torch.tensor([1]), Out(torch.ones(1, dtype=torch.float16), "x")])
    assert tree[0].dtype == torch.float64 and tree[1].dtype == torch.int64
    assert tree[2].a.dtype == torch.float64 and tree[2].b == "x"


def test_copies_do_not_share_memory_or_gradients():
    original = torch.ones(2, requires_grad=True)
    copied = guards.cloned((original,))[0]
    assert copied.data_ptr() != original.data_ptr() and not copied.requires_grad
    assert guards.cloned(Out) is Out  # a class is no value


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 2]), True),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), False),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), True),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, float("nan")]), False),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 2.0]), False),
        (torch.tensor([complex("nan")]), torch.tensor([complex("nan")]), True),
        (torch.tensor([1 + 2j]), torch.tensor([1 - 2j]), False),
        (torch.ones(2), torch.ones(2, 1), False),
        (torch.ones(2), torch.ones(2).double(), False),
        ([torch.ones(1), torch.ones(2)], [torch.ones(2), torch.ones(1)], False),
        ([torch.ones(1)], [torch.ones(1), torch.ones(1)], False),
    ],
)
def test_same_values_are_the_same_bits_in_the_same_order(a, b, same):
    assert guards.same_values(a, b) is same


def test_changed_inputs_are_named_and_restored():
    x = torch.arange(3.0)
    before = guards.cloned((x,))
    guards.check_unchanged((x,), before, "f")
    x.add_(1)
    with pytest.raises(InputMutationError) as caught:
        guards.check_unchanged((x,), before, "f")
    assert str(caught.value) == "'f' changes its inputs, so every call does other work; clone them inside"
    guards.restore((x,), before)
    assert x.tolist() == [0, 1, 2]
    leaf = torch.ones(2, requires_grad=True)
    guards.restore((leaf,), (torch.zeros(2),))  # as after a call under grad_mode="enabled"
    assert leaf.tolist() == [0, 0]


def test_new_non_finite_values_are_counted_over_all_tensors():
    nan, inf = float("nan"), float("inf")
    good, bad = torch.tensor([1.0, nan, 2.0, 3.0]), torch.tensor([nan, nan, inf, 3.0])
    assert guards.count_new_nonfinite(bad, good) == 2
    assert guards.count_new_nonfinite([bad, bad], [good, good]) == 4
    assert guards.count_new_nonfinite(good, bad) == 0
    assert guards.count_new_nonfinite(bad[:3], good) == 0  # another shape is another finding
    assert guards.count_new_nonfinite([bad], [good, good]) == 2
    assert guards.count_new_nonfinite(torch.tensor([complex(nan, 0)]), torch.tensor([1j])) == 1
    assert guards.count_new_nonfinite(torch.tensor([1]), torch.tensor([2])) == 0


# ------------------------------------------------------------------------------------------- devices


def elsewhere(name="cuda:0", shape=(3,)):
    """A tensor that says it is on another device: only the attribute is looked at."""
    return torch.ones(shape).as_subclass(type("T", (torch.Tensor,), {"device": torch.device(name)}))


def test_the_device_of_the_inputs():
    assert guards.check_devices((), "latency") == "cpu"
    assert guards.check_devices((torch.ones(2),), "latency") == "cpu"
    assert guards.check_devices((elsewhere(),), "latency") == "cuda"
    assert guards.check_devices((elsewhere(),), "device") == "cuda"
    assert guards.check_devices((torch.tensor(1.0), elsewhere()), "device") == "cuda"  # a scalar goes anywhere
    assert guards.check_devices((), "latency", [elsewhere()]) == "cuda"
    assert guards.check_devices((elsewhere(shape=()),), "latency") == "cuda"
    with pytest.raises(MixedDeviceError) as caught:
        guards.check_devices((elsewhere(),), "latency", [torch.ones(2)])
    assert str(caught.value) == "tensors on several devices: cpu, cuda:0; expected one"
    with pytest.raises(MixedDeviceError, match="cuda:0, cuda:1"):
        guards.check_devices((elsewhere(), elsewhere("cuda:1")), "latency")
    with pytest.raises(MixedDeviceError) as caught:
        guards.check_devices((torch.ones(2),), "device")
    expected = "mode='device' times CUDA events, but the inputs are on 'cpu'; use mode='latency'"
    assert str(caught.value) == expected


def test_tensors_without_data_are_refused():
    with FakeTensorMode():
        fake = torch.empty(2, 3)
    for empty in (torch.empty(2, 3, device="meta"), fake):
        with pytest.raises(MetaTensorError) as caught:
            guards.check_real([torch.ones(1), empty], "the output of 'f'")
        expected = "the output of 'f' is a meta or fake tensor of shape (2, 3); it holds no data"
        assert str(caught.value) == expected
    with pytest.raises(MetaTensorError, match=r"^an input is"):
        guards.check_devices((torch.empty(2, device="meta"),), "latency")
    guards.check_real([torch.ones(1)], "x")


# ------------------------------------------------------------------------------------------- what a call reaches

NET = nn.Linear(2, 2)


def names_a_global(x):
    return NET(x)


class Holder:
    def __init__(self):
        self.net = nn.ReLU()

    def __call__(self, x):
        return x

    def method(self, x):
        return self.net(x)


def test_modules_behind_wrappers_are_found():
    relu = nn.ReLU()

    @functools.wraps(relu.forward)
    def wrapped(x):
        return x

    def closure(x):
        return relu(x)

    def deep(x):
        return closure(x)

    for fn in (
        relu,
        relu.forward,
        closure,
        deep,
        wrapped,
        functools.partial(relu),
        functools.partial(lambda f, x: f(x), relu),
        functools.partial(functools.partial(closure)),
    ):
        assert [type(m) for m in guards.modules(fn)] == [nn.ReLU], fn
    assert guards.modules(names_a_global) == [NET]
    assert guards.modules(lambda x: x) == [] == guards.modules(torch.relu)
    holder = Holder()
    assert holder in guards.reachable_callables(holder.method)


def test_a_closure_that_is_not_filled_yet_and_one_that_calls_itself():
    def outer():
        def fn(x):
            return later(x)

        found = guards.reachable_callables(fn)
        later = fn
        return found, fn

    found, fn = outer()
    assert found == [fn]
    assert guards.reachable_callables(fn) == [fn]


def test_the_search_has_an_end():
    fn = len
    for _ in range(400):
        fn = functools.partial(fn)
        fn = (lambda inner: lambda: inner())(fn)
    assert len(guards.reachable_callables(fn)) == 200


def test_tensors_of_a_module_are_parameters_and_buffers():
    found = guards.module_tensors(nn.BatchNorm1d(3))
    assert sorted(t.numel() for t in found) == [1, 3, 3, 3, 3]
    assert guards.module_tensors(lambda: NET) == []


def test_what_a_reader_should_know_of_the_inputs():
    train = "train_mode: a module is in training mode; call .eval() for inference"
    grad = "grad_enabled: gradients are recorded; inference does not do that"
    constant = "constant_input: an input holds one value only; power, clocks and shortcuts depend on values"
    net = nn.Linear(2, 2)
    assert guards.input_warnings(net, (torch.ones(16),), "enabled") == [train, grad, constant]
    assert guards.input_warnings(net.eval(), (torch.rand(16),), "inference") == []
    assert guards.input_warnings(net, (torch.rand(16), torch.zeros(4, 4)), "no_grad") == [constant]


@pytest.mark.parametrize(
    ("values", "constant"),
    [
        (torch.ones(16), True),
        (torch.zeros(4, 4), True),
        (torch.ones(15), False),  # few values are equal by chance
        (torch.cat([torch.ones(15), torch.zeros(1)]), False),
        (torch.cat([torch.zeros(1), torch.ones(15)]), False),
        (torch.ones(16, dtype=torch.int64), False),  # token ids, masks
        (torch.ones(0), False),
    ],
)
def test_constant_inputs(values, constant):
    assert guards.is_constant(values) is constant


# ------------------------------------------------------------------------------------------- errors and options


def test_any_failure_is_one_line_with_the_moment():
    def fail(error):
        raise error

    with pytest.raises(CallableFailedError) as caught:
        guarded(lambda: fail(KeyError("first\nsecond")), "f", "call 1")
    assert str(caught.value) == "'f' failed at call 1: KeyError: 'first\\nsecond'"
    with pytest.raises(CallableFailedError) as caught:
        guarded(lambda: fail(RuntimeError("\n first\nsecond")), "f", "warm-up")
    assert str(caught.value) == "'f' failed at warm-up: RuntimeError: first"
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(CallableFailedError) as caught:
        guarded(lambda: fail(RuntimeError()), "f", "call 1")
    assert str(caught.value) == "'f' failed at call 1: RuntimeError: "
    with pytest.raises(CallableFailedError) as caught:
        guarded(lambda: fail(RuntimeError("x" * 999)), "f", "call 1")
    assert len(str(caught.value)) == 300
    ours = BenchmarkError("ours")
    with pytest.raises(BenchmarkError) as caught:
        guarded(lambda: fail(ours), "f", "call 1")
    assert caught.value is ours
    assert guarded(lambda: 5, "f", "call 1") == 5


def test_dynamo_s_limit_is_called_a_fallback():
    limit = type("FailOnRecompileLimitHit", (Exception,), {})
    found = failed("f", "call 1", limit("long"))
    assert isinstance(found, EagerFallbackError)
    assert str(found) == "'f' reached Dynamo's recompile limit at call 1: from here it would run eager"


GOOD = {
    "mode": "latency",
    "cache": "hot",
    "num_threads": None,
    "grad_mode": "inference",
    "confidence": 0.95,
    "min_run_time": 0.5,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "x"}, "mode: expected one of latency, throughput, device, got 'x'"),
        ({"cache": "x"}, "cache: expected one of hot, cold, got 'x'"),
        ({"grad_mode": "x"}, "grad_mode: expected one of inference, no_grad, enabled, got 'x'"),
        ({"num_threads": 0}, "num_threads: expected 1 or more, got 0"),
        ({"confidence": 0}, "confidence: expected a number between 0 and 1, got 0"),
        ({"confidence": 1}, "confidence: expected a number between 0 and 1, got 1"),
        ({"min_run_time": 0}, "min_run_time: expected seconds above 0, got 0"),
        ({"num_threads": 1}, None),
        ({"min_run_time": 0.5, "mode": "device", "cache": "cold", "grad_mode": "enabled"}, None),
    ],
)
def test_options_are_checked_one_by_one(change, message):
    if message is None:
        check_options(**GOOD | change)
        return
    with pytest.raises(ValueError) as caught:
        check_options(**GOOD | change)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_samples": 5}, "min_samples: expected 6 or more, got 5"),
        ({"max_run_time": 0.4}, "max_run_time: expected min_run_time (0.5) or more, got 0.4"),
    ],
)
def test_options_of_measure(change, message):
    with pytest.raises(ValueError) as caught:
        measure(lambda: 1, **change)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("typical", "calls", "mode", "warned"),
    [
        (2.9e-5, 1, "latency", True),
        (3.1e-5, 1, "latency", False),
        (2.9e-6, 10, "latency", True),
        (3.1e-6, 10, "latency", False),
        (1.9e-5, 1, "device", True),
        (2.1e-5, 1, "device", False),
        (1.9e-5, 100, "device", True),
    ],
)
def test_samples_that_the_clock_cannot_resolve(typical, calls, mode, warned):
    found = resolution_warning([typical, typical, 1.0], calls, mode)
    device = "below_resolution: CUDA events are too coarse below 20 µs a call"
    other = "below_resolution: reading the clock takes more than 1 % of a sample"
    assert found == ((device if mode == "device" else other) if warned else None)


# ------------------------------------------------------------------------------------------- builders


@pytest.mark.parametrize(
    ("baseline", "candidates", "message"),
    [
        (list, [1], "candidates: expected a mapping of label to builder, got list"),
        (list, {}, "candidates: expected at least one, got none"),
        (list, {3: list}, "candidates: expected non-empty strings as labels, got 3"),
        (list, {"": list}, "candidates: expected non-empty strings as labels, got ''"),
        (list, {"b": list}, "candidates: 'b' is also the label of the baseline; expected another label"),
        (
            NET,
            {"c": list},
            "'b' is a module; expected a builder, a function without arguments that returns the function to time: "
            "`lambda: make_module()`, or fixed(module)",
        ),
        (
            list,
            {"c": 3},
            "'c' is int; expected a builder, a function without arguments that returns the function to time",
        ),
        (
            list,
            {"c": lambda x: x},
            "'c' needs arguments; expected a builder, a function without arguments that returns the function to time, "
            "or fixed(fn)",
        ),
    ],
)
def test_what_is_no_set_of_builders(baseline, candidates, message):
    with pytest.raises((TypeError, ValueError)) as caught:
        builders.check_builders(baseline, candidates, "b")
    assert str(caught.value) == message


def test_builders_without_a_signature_and_with_defaults_are_taken():
    builders.check_builders(int, {"c": dict, "d": lambda x=1, *args, **kwargs: x, "e": builders.fixed(len)}, "b")
    with pytest.raises(TypeError) as caught:
        builders.fixed(3)
    assert str(caught.value) == "fixed: expected a function, got int"

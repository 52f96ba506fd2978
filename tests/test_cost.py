import dataclasses
import functools
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from utils import cost, flop_count
from utils.cost import MachinePeaks, count_flops, measure_peaks, peak_memory, roofline

MLP = nn.Sequential(
    nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Dropout(), nn.Linear(1024, 256), nn.Softmax(-1)
).eval()
X = torch.zeros(8, 256)

# ------------------------------------------------------------------------------------------------ FLOPs


@torch.library.custom_op("cookbook_tests::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_an_mlp_is_counted_exactly_and_what_is_not_counted_is_named():
    found = count_flops(MLP, X)
    assert found.total == 2 * 8 * 256 * 1024 * 2 == 8_388_608
    assert found.by_op == {"addmm": found.total}
    assert found.by_module["Sequential.0"] == found.by_module["Sequential.4"] == found.total // 2
    assert found.uncounted == ["_softmax", "gelu", "native_layer_norm"]
    assert str(found).startswith("8,388,608 FLOP (addmm 8,388,608); not counted: _softmax, ")


def test_inference_mode_counts_the_same():
    plain = count_flops(MLP, X)
    with torch.inference_mode():
        assert count_flops(MLP, X) == plain


@pytest.mark.parametrize("mask", [None, torch.ones(16, 24, dtype=torch.bool)])
def test_attention_on_the_cpu_is_not_free(mask):
    q, k = torch.randn(2, 4, 16, 8), torch.randn(2, 4, 24, 8)
    found = count_flops(nn.functional.scaled_dot_product_attention, q, k, k, attn_mask=mask)
    assert found.total == 2 * 2 * (2 * 4 * 16 * 24 * 8)
    assert not [name for name in found.uncounted if "attention" in name]


def test_attention_of_a_backend_that_brings_its_own_is_not_free():
    """No released backend has this kernel; on meta tensors the operator runs without one."""
    q, k = torch.zeros(2, 4, 16, 8, device="meta"), torch.zeros(2, 4, 24, 8, device="meta")
    found = count_flops(torch.ops.aten._scaled_dot_product_fused_attention_overrideable, q, k, k)
    assert found.total == 2 * 2 * (2 * 4 * 16 * 24 * 8) and found.uncounted == []


def test_a_convolution_and_its_linear_form_cost_the_same():
    conv = nn.Conv3d(3, 8, (2, 4, 4), (2, 4, 4), bias=False)
    patches = torch.zeros(5, 96)
    as_conv = count_flops(conv, patches.view(5, 3, 2, 4, 4)).total
    assert as_conv == count_flops(nn.functional.linear, patches, conv.weight.flatten(1)).total == 2 * 5 * 96 * 8


def test_custom_operations_are_named_and_moving_data_is_not():
    def work(x):
        y = torch.cat([x.T.reshape(-1), x.flatten()]).clone()[:10]
        return torch.where(y > 0, y, torch.zeros_like(y)).to(torch.float64).expand(2, 10)

    assert count_flops(double, X).uncounted == ["cookbook_tests.double"]
    assert count_flops(double, X).total == 0
    assert count_flops(work, X).uncounted == ["gt"]
    assert count_flops(torch.copysign, X, X).uncounted == ["copysign"]  # not a kind of copy
    assert count_flops(lambda x: x.index_add(0, torch.tensor([0]), x[:1]), X).uncounted == ["index_add"]


def test_modules_are_counted_at_every_depth():
    deep = nn.Sequential(nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4, bias=False)))))
    found = count_flops(deep, torch.zeros(2, 4))
    assert found.by_module == dict.fromkeys(["Sequential" + ".0" * depth for depth in range(5)], 64)
    assert found.by_op == {"mm": 64} and found.uncounted == []
    assert str(found) == "64 FLOP (mm 64); not counted: none"
    assert str(count_flops(torch.neg, X)) == "0 FLOP (nothing counted); not counted: neg"


def test_arguments_reach_the_function_that_is_counted():
    assert count_flops(lambda a, *, b: a @ b, torch.zeros(2, 3), b=torch.zeros(3, 4)).total == 2 * 2 * 3 * 4


@pytest.mark.parametrize(("deep", "found"), [(3, True), (4, False)])
def test_how_far_a_call_is_followed(deep, found):
    end = torch.zeros(1)

    def wrap(inner):
        return lambda: inner

    fn = wrap(end)
    for _ in range(deep):
        fn = wrap(fn)
    assert any(item is end for item in flop_count.reachable(fn)) is found


def test_what_a_call_reaches():
    tensor, module = torch.zeros(1), nn.Sequential(nn.ReLU())

    def named():
        return GLOBAL

    for root in ([tensor], {"a": (tensor,)}, functools.partial(len, tensor), functools.partial(len, a=tensor)):
        assert any(item is tensor for item in flop_count.reachable(root)), root
    GLOBAL.clear()
    GLOBAL.append(tensor)
    assert any(item is tensor for item in flop_count.reachable(named))
    GLOBAL.clear()
    assert list(flop_count.reachable(module)) == [module, module[0]]
    assert any(item is module for item in flop_count.reachable(module.forward))
    assert list(flop_count.reachable(module, module)) == [module, module[0]]
    assert list(flop_count.reachable(3, "x", int)) == []
    empty = (lambda: (lambda: later, None)[0])()  # noqa: F821
    assert empty in list(flop_count.reachable(empty))
    made = {"there": module}
    exec("def without_module(): return there", made)  # its __module__ is None
    assert any(item is module for item in flop_count.reachable(made["without_module"]))


class Runs:
    """A backend of torch.compile that counts how often its graph runs."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        def run(*args):
            self.count += 1
            return graph(*args)

        return run


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).relu()


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    runs = Runs()
    layer = nn.Linear(4, 4)
    module = torch.compile(layer, backend=runs)
    function = torch.compile(lambda x: x + 1, backend=runs)
    in_place = nn.Sequential(Block())
    in_place[0].compile(backend=runs)
    yield SimpleNamespace(runs=runs, layer=layer, module=module, function=function, in_place=in_place)
    torch._dynamo.reset()


GLOBAL = []


def closure(fn):
    def call(x):
        return fn(x)

    return call


@pytest.mark.parametrize(
    "wrap",
    [
        lambda c: c.module,
        lambda c: c.function,
        lambda c: c.in_place,
        lambda c: nn.Sequential(c.module),
        lambda c: functools.partial(c.module),
        lambda c: c.module.forward,
        lambda c: closure(c.module),
        lambda c: closure(closure(c.function)),
        lambda c: (GLOBAL.clear(), GLOBAL.append(c.module), lambda x: GLOBAL[0](x))[-1],
        lambda c: functools.partial(lambda fn, x: fn(x), c.function),
    ],
    ids=["module", "function", "in place", "inside", "partial", "method", "closure", "deep", "global", "argument"],
)
def test_compiled_code_is_refused_and_stays_compiled(compiled, wrap):
    x, fn = torch.zeros(2, 4), wrap(compiled)
    with torch.no_grad():
        fn(x)
        with pytest.raises(ValueError, match="which counting would undo; expected the eager function"):
            count_flops(fn, x)
        before = compiled.runs.count
        fn(x)
    assert before >= 1 and compiled.runs.count == before + 1


def test_compiled_code_is_named(compiled):
    for fn, name, inner in (
        (compiled.module, "OptimizedModule", "OptimizedModule"),
        (closure(compiled.module), "closure.<locals>.call", "OptimizedModule"),
        (nn.Sequential(compiled.module), "Sequential", "OptimizedModule"),
        (compiled.in_place, "Sequential", "Block"),
    ):
        with pytest.raises(ValueError) as caught:
            count_flops(fn, torch.zeros(2, 4))
        assert str(caught.value) == (
            f"fn={name} runs compiled code ({inner}), which counting would undo; "
            "expected the eager function that was compiled"
        )
    with pytest.raises(ValueError, match="runs compiled code"):
        count_flops(lambda fn: fn, compiled.module)
    with pytest.raises(ValueError, match="runs compiled code"):
        count_flops(lambda *, inner: inner, inner=compiled.function)


def test_the_eager_original_of_compiled_code_is_counted(compiled):
    assert count_flops(compiled.layer, torch.zeros(2, 4)).total == 2 * 2 * 4 * 4


# ------------------------------------------------------------------------------------------------ memory

MIB = 2**20


def three_times_64():
    a = torch.ones(16 * MIB)
    b = a + 1
    return a + b


def test_three_tensors_of_64_mib():
    found = peak_memory(three_times_64)
    assert abs(found.peak_bytes - 192 * MIB) <= MIB
    assert found.output_bytes == 64 * MIB and found.device == "cpu"


def test_memory_that_is_freed_before_the_peak_does_not_count():
    def one_after_the_other():
        for _ in range(4):
            torch.ones(MIB)
        return torch.ones(2)

    found = peak_memory(one_after_the_other)
    assert abs(found.peak_bytes - 4 * MIB) < 4096
    assert found.output_bytes == 8


def test_inputs_and_weights_are_not_counted():
    x, layer = torch.ones(8 * MIB), nn.Linear(512, 512)
    assert peak_memory(torch.neg, x).peak_bytes == pytest.approx(32 * MIB, abs=4096)
    assert peak_memory(lambda: x.neg_()).peak_bytes < 4096
    with torch.no_grad():
        assert peak_memory(layer, torch.ones(4, 512)).peak_bytes < 64 * 1024


def test_the_same_output_counts_once():
    def twice():
        y = torch.ones(MIB)
        return {"a": y, "b": [y, 3, None]}

    assert peak_memory(twice).output_bytes == 4 * MIB


def test_other_devices_are_refused(monkeypatch):
    monkeypatch.setattr(cost, "pick_device", torch.device)
    with pytest.raises(ValueError, match="device='mps'; expected cpu or cuda"):
        peak_memory(three_times_64, device="mps")


def test_the_profiler_writes_nothing():
    code = "import torch; from utils.cost import peak_memory; peak_memory(torch.ones, 8)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_on_cuda_the_peak_is_taken_above_the_start_and_after_a_first_call(monkeypatch):
    calls, state = [], {"allocated": 100, "peak": 5000, "reserved": 200, "peak_reserved": 7000}

    def fn(*args, **kwargs):
        calls.append(("call", args, kwargs))
        state["peak"] = max(state["peak"], state["allocated"] + 192)
        state["peak_reserved"] = max(state["peak_reserved"], state["reserved"] + 256)
        return torch.ones(4)

    def reset(device):
        calls.append(("reset", device.index))
        state.update(peak=state["allocated"], peak_reserved=state["reserved"])

    def reads(name):
        return lambda device: state[name] if device == torch.device("cuda:1") else 0

    fake = {
        "synchronize": lambda device: calls.append(("sync", device.index)),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": reset,
        "memory_allocated": reads("allocated"),
        "memory_reserved": reads("reserved"),
        "max_memory_allocated": reads("peak"),
        "max_memory_reserved": reads("peak_reserved"),
    }
    for name, replacement in fake.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(cost, "pick_device", torch.device)
    found = peak_memory(fn, 3, device="cuda:1", size=4)
    assert (found.peak_bytes, found.reserved_bytes, found.output_bytes, found.device) == (192, 256, 16, "cuda:1")
    call = ("call", (3,), {"size": 4})
    assert calls == [call, ("sync", 1), ("reset", 1), call, ("sync", 1)]


def elsewhere(name="cuda:0"):
    """A tensor that says it is on another device: only the attribute is looked at."""
    return torch.ones(3).as_subclass(type("T", (torch.Tensor,), {"device": torch.device(name)}))


def neither(*args, **kwargs):
    """Holds no tensor itself."""


@pytest.mark.parametrize("place", ["argument", "keyword", "nested", "closure", "buffer", "inner buffer", "parameter"])
def test_the_device_is_that_of_the_tensors_that_a_call_reaches(monkeypatch, place):
    there, seen = elsewhere(), []
    monkeypatch.setattr(cost, "_cuda_peak", lambda *found: (seen.append(found), "peak")[1])
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    if "buffer" in place:
        (module[1] if place == "inner buffer" else module).register_buffer("there", there)
    if place == "parameter":
        monkeypatch.setattr(module[0], "parameters", lambda recurse: [there])
    args = {"argument": (there, 1), "nested": ([torch.ones(1), {"a": there}],)}.get(place, ())
    kwargs = {"keyword": {"x": there}}.get(place, {})
    called = module if "buffer" in place or place == "parameter" else neither
    if place == "closure":
        called = lambda: there  # noqa: E731
    assert peak_memory(called, *args, **kwargs) == "peak"
    assert len(seen) == 1 and seen[0][0] is called and seen[0][2] == kwargs
    assert len(seen[0][1]) == len(args) and seen[0][3] == torch.device("cuda:0")


def test_the_device_that_is_given_counts(monkeypatch):
    seen = []
    monkeypatch.setattr(cost, "pick_device", lambda device: (seen.append(device), torch.device("cpu"))[1])
    found = peak_memory(torch.ones, 1024, device="cpu")
    assert seen == ["cpu"] and found.peak_bytes >= 4096 and found.device == "cpu" and found.reserved_bytes is None
    assert str(found).endswith("B above the start, output 4,096 B, cpu") and str(found).startswith("peak 4,")


def test_outputs_of_other_layouts_and_views_have_a_size():
    assert peak_memory(lambda: torch.eye(4).to_sparse()).output_bytes == 4 * 16
    assert peak_memory(lambda: [torch.ones(8), torch.ones(8).double()]).output_bytes == 32 + 64

    def views():
        y = torch.ones(8)
        return y, y[:4], y.view(2, 4)

    assert peak_memory(views).output_bytes == 32 + 16  # the same memory and size once


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_three_tensors_of_64_mib_on_cuda():
    x = torch.ones(16 * MIB, device="cuda")
    found = peak_memory(lambda x, *, far: (x + 1) + (x + far), x, far=2)
    assert found.device.startswith("cuda") and abs(found.peak_bytes - 192 * MIB) <= MIB


# ------------------------------------------------------------------------------------------------ limits


class Machine:
    """Stands for utils.timing.measure: 100 GFLOP/s a thread, 50 GB/s; records what was measured."""

    def __init__(self, flops=100e9):
        self.flops, self.seen, self.busy = flops, [], False

    def __call__(self, fn, *, num_threads, **options):
        name = fn.func.__name__
        if name == "mm":
            edge = fn.args[0].shape[0]
            seconds = 2 * edge**3 / (self.flops * num_threads)
            self.seen.append((name, edge, num_threads, str(fn.args[0].dtype)))
        else:
            moved = fn.args[0].numel() * fn.args[0].element_size()
            seconds = moved / (50e9 if name == "sum" else 20e9)
            self.seen.append((name, moved, num_threads, str(fn.args[0].dtype)))
        seconds *= 50 if self.busy and num_threads > 1 else 1
        if name != "mm" or edge == 128:
            fn()  # it can be called; larger float16 products take minutes on some machines
        return SimpleNamespace(min_s=seconds, median_s=10 * seconds)


@pytest.fixture
def fake(monkeypatch, tmp_path):
    import utils.timing

    machine = Machine()
    monkeypatch.setattr(utils.timing, "measure", machine)
    monkeypatch.setenv("COOKBOOK_CACHE", str(tmp_path / "cache"))
    return machine


SMALL = {"device": "cpu", "buffer_bytes": 2**16}


def test_limits_are_rates_of_the_fastest_sample(fake):
    found = measure_peaks(**SMALL, dtype=torch.bfloat16, num_threads=3)
    assert found.gemm_flops_per_s == pytest.approx(300e9) and found.dtype == "bfloat16" and found.num_threads == 3
    assert found.read_bytes_per_s == pytest.approx(50e9)
    assert found.copy_bytes_per_s == pytest.approx(40e9)  # read and written
    assert found.memory_bytes_per_s == found.read_bytes_per_s
    assert (found.buffer_bytes, found.device) == (2**16, "cpu") and found.gemm_size == 1024
    assert "a buffer of 0 MiB" in str(found) and "300 GFLOP/s (bfloat16 products of 1024)" in str(found)
    assert {entry for entry in fake.seen if entry[0] != "mm"} == {  # float32: the memory's limit, not a conversion's
        (name, 2**16, threads, "torch.float32") for name in ("sum", "copy_") for threads in (1, 3)
    }


def test_a_machine_on_which_threads_wait_for_each_other_still_has_a_limit(fake):
    fake.busy = True
    found = measure_peaks(**SMALL, num_threads=2)
    assert found.gemm_flops_per_s == pytest.approx(100e9) and found.gemm_size == 128
    assert found.read_bytes_per_s == pytest.approx(50e9) and found.copy_bytes_per_s == pytest.approx(40e9)


@pytest.mark.parametrize(
    ("flops", "largest"), [(1e6, 128), (0.26e9, 128), (4e9, 256), (90e9, 1024), (1e12, 1536), (2e12, 3072)]
)
def test_products_stay_short_on_slow_machines(fake, flops, largest):
    fake.flops = flops
    measure_peaks(**SMALL, dtype=torch.float16, num_threads=1)
    edges = [edge for name, edge, *_ in fake.seen if name == "mm"]
    assert max(edges) == largest
    assert fake.seen[0] == ("mm", 128, 1, "torch.float16")
    assert flops < 1e7 or all(2 * edge**3 / flops <= 0.05 for edge in edges)


def test_limits_are_measured_once_for_each_environment_type_threads_and_buffer(fake, monkeypatch):
    def measured_again(**options):
        before = len(fake.seen)
        measure_peaks(**SMALL | options)
        return {"products" if name == "mm" else "memory" for name, *_ in fake.seen[before:]}

    both = {"products", "memory"}
    assert measured_again() == both and measured_again() == set()
    assert measured_again(refresh=True) == both and measured_again() == set()
    assert measured_again(dtype=torch.bfloat16) == {"products"}  # the memory is the same for every type
    assert measured_again(buffer_bytes=2**17) == {"memory"}
    assert measured_again(num_threads=7) == both
    assert measured_again(dtype=torch.bfloat16) == set() == measured_again()
    record = cost.machine_record("cpu") | {"env_id": "another"}
    monkeypatch.setattr(cost, "machine_record", lambda device: record)
    assert measured_again() == both


def test_a_limit_names_the_machine(fake):
    found = measure_peaks(**SMALL)
    record = cost.machine_record("cpu")
    assert (found.device_name, found.env_id) == (record["device_name"], record["env_id"])
    assert found.num_threads == torch.get_num_threads() and found.dtype == "float32"
    shown = MachinePeaks(123.4e9, 45.67e9, 89e9, 3 * 2**20, "float32", 2, "a CPU", "cpu", 1536, "e")
    assert str(shown) == (
        "a CPU, 2 threads: 123 GFLOP/s (float32 products of 1536), read 45.7 GB/s, copy 89.0 GB/s (a buffer of 3 MiB)"
    )
    assert shown.memory_bytes_per_s == 89e9


@pytest.mark.parametrize(("device", "size"), [("cpu", 2**27), ("cuda:0", 2**30)])
def test_a_buffer_is_larger_than_the_caches(fake, monkeypatch, device, size):
    seen = []
    monkeypatch.setattr(cost, "pick_device", lambda given: (seen.append(given), torch.device(device))[1])
    record = cost.machine_record("cpu")
    monkeypatch.setattr(cost, "machine_record", lambda where: record | {"device_name": f"name of {where}"})
    monkeypatch.setattr(cost, "_gemm_rate", lambda *given: (seen.append(given), (1e9, 64))[1])
    monkeypatch.setattr(cost, "_memory_rates", lambda *given: (seen.append(given), (2e9, 3e9))[1])
    found = measure_peaks(num_threads=3)
    where = torch.device(device)
    assert seen[0] == "auto"
    assert seen[1:3] == [(where, torch.float32, 3), (where, size, 3)]
    assert (found.buffer_bytes, found.device, found.gemm_size) == (size, device, 64)
    assert found.device_name == f"name of {device}"
    assert (found.gemm_flops_per_s, found.read_bytes_per_s, found.copy_bytes_per_s) == (1e9, 2e9, 3e9)
    assert measure_peaks(device, buffer_bytes=4096).buffer_bytes == 4096 and seen[3] == device


@pytest.mark.parametrize(("device", "mode", "warmup"), [("cpu", "latency", 0.05), ("cuda:0", "throughput", None)])
def test_how_a_limit_is_timed(monkeypatch, device, mode, warmup):
    import utils.timing

    seen = []
    monkeypatch.setattr(
        utils.timing, "measure", lambda fn, **options: (seen.append((fn, options)), SimpleNamespace(min_s=7.0))[1]
    )
    assert cost._seconds(len, torch.device(device), 3, 0.2) == 7.0
    expected = {"mode": mode, "num_threads": 3, "min_run_time": 0.2, "max_run_time": 1.0, "warmup_time": warmup}
    assert seen == [(len, expected | {"allow_nondeterministic": True})]


class Values:
    """Stands for random values: a product of 8192 would take a gigabyte."""

    def __init__(self, count, device):
        self.count, self.device, self.dtype = count, device, torch.float32

    def to(self, dtype):
        self.dtype = dtype
        return self

    def view(self, *shape):
        assert math.prod(shape) == self.count
        self.shape = shape
        return self


@pytest.mark.parametrize(
    ("device", "threads", "flops", "measured"),
    [
        ("cpu", 1, 1e12, [(128, 1), (1536, 1), (512, 1)]),
        ("cpu", 4, 1e12, [(128, 1), (3072, 4), (1024, 4)]),  # four threads may be two cores
        ("cpu", 3, 1e12, [(128, 1), (1536, 3), (512, 3)]),
        ("cpu", 2, 1e6, [(128, 1), (128, 2)]),  # nothing fits
        ("cuda:0", 4, 1e12, [(1024, 1), (2048, 4)]),
        ("cuda:0", 2, 1e15, [(1024, 1), (8192, 2), (2048, 2)]),
    ],
)
def test_products_of_up_to_three_sizes(monkeypatch, device, threads, flops, measured):
    seen, where = [], torch.device(device)

    def seconds(fn, on, n, least):
        values = [*fn.args, fn.keywords["out"]]
        assert fn.func is torch.mm and len({id(v) for v in values}) == 3 and (on, least) == (where, 0.1)
        assert {(v.shape, v.device, v.dtype) for v in values} == {(values[0].shape, where, torch.bfloat16)}
        edge = values[0].shape[0]
        seen.append((edge, n))
        return 2 * edge**3 / flops / (3 if len(seen) == 2 else 2 if len(seen) == 3 else 1)

    monkeypatch.setattr(cost, "_noise", Values)
    monkeypatch.setattr(cost, "_seconds", seconds)
    rate, best = cost._gemm_rate(where, torch.bfloat16, threads)
    assert seen == measured
    assert best == measured[1][0] and rate == pytest.approx(3 * flops)


@pytest.mark.parametrize(("device", "tried"), [("cpu", {1, 3}), ("cuda:0", {3})])
def test_memory_is_read_and_copied(monkeypatch, device, tried):
    seen = []

    def seconds(fn, where, threads, least):
        assert where == torch.device(device) and least == 0.2
        seen.append((fn.func.__name__, threads))
        reading = fn.func.__name__ == "sum"
        assert fn.args[0].numel() == 1000 and fn.args[0].dtype == torch.float32
        return 4000 / ((5e9 if reading else 3e9) * (2 if threads == 3 else 1))

    monkeypatch.setattr(cost, "_noise", lambda count, where: torch.ones(count))
    monkeypatch.setattr(cost, "_seconds", seconds)
    assert cost._memory_rates(torch.device(device), 4000, 3) == pytest.approx((10e9, 12e9))
    assert set(seen) == {(name, n) for name in ("sum", "copy_") for n in tried} and len(seen) == 2 * len(tried)


def test_tf32_is_another_limit_than_ieee_float32(fake):
    first = torch.get_float32_matmul_precision()
    try:
        measure_peaks(**SMALL)
        count = len(fake.seen)
        torch.set_float32_matmul_precision("high")
        measure_peaks(**SMALL)
        assert len(fake.seen) > count
    finally:
        torch.set_float32_matmul_precision(first)


@pytest.mark.parametrize(
    "damage", ["", "{", "3", "[1]", "[1, 2, 3]", "[1, null]", "[0, 1]", "[1, Infinity]", "[-1, 1]", '["a", "b"]']
)
def test_a_damaged_cache_is_measured_again(fake, tmp_path, damage):
    folder = tmp_path / "cache"
    found = measure_peaks(**SMALL)
    names = sorted(path.name for path in folder.iterdir())
    for file in folder.iterdir():
        file.write_text(damage)
    count = len(fake.seen)
    assert measure_peaks(**SMALL) == found and len(fake.seen) == 2 * count
    assert measure_peaks(**SMALL) == found and len(fake.seen) == 2 * count
    assert sorted(path.name for path in folder.iterdir()) == names and len(names) == 2


def test_without_a_writable_folder_limits_are_measured_and_not_kept(fake, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setenv("COOKBOOK_CACHE", str(blocked / "cache"))
    assert measure_peaks(**SMALL).buffer_bytes == 2**16
    assert cost._cache_file("x") is None


def test_a_cache_that_cannot_be_written_leaves_nothing_behind(fake, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError("no space")

    monkeypatch.setattr(cost.os, "replace", full)
    assert measure_peaks(**SMALL).buffer_bytes == 2**16
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setattr(cost.os, "access", lambda folder, mode: mode != cost.os.W_OK)
    assert cost._cache_file("x") is None  # a folder that may only be read


def test_the_cache_lies_beside_the_helpers_or_at_home(tmp_path, monkeypatch):
    monkeypatch.delenv("COOKBOOK_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cost, "__file__", str(tmp_path / "project" / "utils" / "cost.py"))
    assert cost._cache_file("x") == tmp_path / "project" / "build" / "cache" / "x"
    (tmp_path / "locked").touch()  # a file where the folder should be: cannot be written, whoever runs the test
    monkeypatch.setattr(cost, "__file__", str(tmp_path / "locked" / "utils" / "cost.py"))
    assert cost._cache_file("x") == tmp_path / "home" / ".cache" / "inference-acceleration-cookbook" / "x"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int8}, "dtype=torch.int8; expected torch.float16"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"buffer_bytes": 16}, "buffer_bytes=16"),
        ({"device": "cpuu"}, "device='cpuu' is no device"),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(fake, options, message):
    with pytest.raises(ValueError, match=message):
        measure_peaks(**SMALL | options)
    assert not fake.seen


def test_the_real_clock_gives_possible_limits(tmp_path, monkeypatch):
    monkeypatch.setenv("COOKBOOK_CACHE", str(tmp_path))
    seconds = cost._seconds(
        functools.partial(torch.mm, torch.ones(8, 8), torch.ones(8, 8)), torch.device("cpu"), 1, 0.01
    )
    assert 0 < seconds < 1


def test_values_are_the_same_every_time():
    cpu = torch.device("cpu")
    assert torch.equal(cost._noise(100, cpu), cost._noise(100, cpu)) and cost._noise(100, cpu).dtype == torch.float32


def test_values_are_random_and_repeat_beyond_the_first_block():
    values = cost._noise(2**22 + 5, torch.device("cpu"))
    assert values.shape == (2**22 + 5,) and values[:1000].std() > 0.5
    assert torch.equal(values[-5:], values[:5])


# ------------------------------------------------------------------------------------------------ roofline

PEAKS = MachinePeaks(100e9, 40e9, 20e9, 2**28, "float32", 2, "a CPU", "cpu", 1536, "e")


def test_the_higher_floor_is_the_bound():
    compute = roofline(2.0, flops=100e9, bytes_moved=4e9, peaks=PEAKS)
    assert (compute.bound, compute.floor_s, compute.share_of_limit, compute.warning) == ("compute", 1.0, 0.5, None)
    memory = roofline(2.0, flops=1e9, bytes_moved=60e9, peaks=PEAKS)
    assert (memory.bound, memory.floor_s, memory.share_of_limit) == ("memory", 1.5, 0.75)
    assert str(memory) == "75% of the memory limit (at least 1.5 s, took 2 s)"
    faster_copy = dataclasses.replace(PEAKS, copy_bytes_per_s=60e9)
    assert roofline(2.0, flops=0, bytes_moved=60e9, peaks=faster_copy).floor_s == 1.0


@pytest.mark.parametrize(
    ("share", "warning"), [(0.99, None), (1.06, None), (1.14, None), (1.16, "impossible_rate"), (50, "impossible_rate")]
)
def test_only_a_time_well_beyond_the_limit_is_called_impossible(share, warning):
    found = roofline(1 / share, flops=100e9, bytes_moved=0, peaks=PEAKS)
    assert found.warning == warning and ("impossible_rate" in str(found)) is bool(warning)


@pytest.mark.parametrize(
    ("seconds", "flops", "bytes_moved", "message"),
    [
        (0.0, 1, 1, "seconds=0.0; expected a finite number above 0"),
        (math.nan, 1, 1, "seconds=nan; expected a finite number above 0"),
        (math.inf, 1, 1, "seconds=inf; expected a finite number above 0"),
        (1.0, -1, 1, "flops=-1; expected a finite number of at least 0"),
        (1.0, 1, math.inf, "bytes_moved=inf; expected a finite number of at least 0"),
        (1.0, 0, 0, "flops=0 and bytes_moved=0; expected at least one above 0"),
    ],
)
def test_wrong_numbers_are_refused(seconds, flops, bytes_moved, message):
    with pytest.raises(ValueError) as caught:
        roofline(seconds, flops=flops, bytes_moved=bytes_moved, peaks=PEAKS)
    assert str(caught.value) == message


def test_a_time_beyond_the_limit_asks_what_is_wrong():
    assert str(roofline(0.5, flops=100e9, bytes_moved=0, peaks=PEAKS)) == (
        "200% of the compute limit (at least 1 s, took 0.5 s); impossible_rate: faster than the limit; "
        "is the time, the count or the limit wrong (refresh it)?"
    )

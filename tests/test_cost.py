import dataclasses
import functools
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from utils import cost
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

    def fn():
        calls.append("call")
        state["peak"] = max(state["peak"], state["allocated"] + 192)
        state["peak_reserved"] = max(state["peak_reserved"], state["reserved"] + 256)
        return torch.ones(4)

    def reset(device):
        calls.append("reset")
        state.update(peak=state["allocated"], peak_reserved=state["reserved"])

    fake = {
        "synchronize": lambda device: calls.append("sync"),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": reset,
        "memory_allocated": lambda device: state["allocated"],
        "memory_reserved": lambda device: state["reserved"],
        "max_memory_allocated": lambda device: state["peak"],
        "max_memory_reserved": lambda device: state["peak_reserved"],
    }
    for name, replacement in fake.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(cost, "pick_device", torch.device)
    found = peak_memory(fn, device="cuda:0")
    assert (found.peak_bytes, found.reserved_bytes, found.output_bytes, found.device) == (192, 256, 16, "cuda:0")
    assert calls == ["call", "sync", "reset", "call", "sync"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_three_tensors_of_64_mib_on_cuda():
    x = torch.ones(16 * MIB, device="cuda")
    found = peak_memory(lambda: (x + 1) + (x + 2))
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
    "damage", ["", "{", "3", "[1]", "[1, null]", "[0, 1]", "[1, Infinity]", "[-1, 1]", '["a", "b"]']
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
        (0.0, 1, 1, "seconds=0.0"),
        (math.nan, 1, 1, "seconds=nan"),
        (1.0, -1, 1, "flops=-1"),
        (1.0, 1, math.inf, "bytes_moved=inf"),
        (1.0, 0, 0, "flops=0 and bytes_moved=0"),
    ],
)
def test_wrong_numbers_are_refused(seconds, flops, bytes_moved, message):
    with pytest.raises(ValueError, match=message):
        roofline(seconds, flops=flops, bytes_moved=bytes_moved, peaks=PEAKS)
